"""Example inputs of a model's call: arrays are traced, everything else is as it was given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

__all__ = ["Inputs", "is_array"]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class Inputs:
    """Positional and keyword arguments of a call.

    Attributes:
      arrays: the arrays and shape structs among them.
    """

    def __init__(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._leaves, self._tree = jax.tree.flatten((tuple(args), dict(options)))
        self.arrays = [leaf for leaf in self._leaves if is_array(leaf)]

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def into(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """Calls a function with these arrays in the arguments' places."""
        left = iter(arrays)
        leaves = [next(left) if is_array(leaf) else leaf for leaf in self._leaves]
        args, options = self._tree.unflatten(leaves)
        return function(*args, **options)
