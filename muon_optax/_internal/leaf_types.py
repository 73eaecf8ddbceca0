"""Types of leaves: floating point or not, or no array at all."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_optax._internal.tree_paths import Segments, path_name, raise_all, short

__all__ = ["check_arrays", "dtype_of", "is_float_leaf", "kind_of"]


def is_float_leaf(leaf: Any) -> bool:
    """Whether a leaf is floating point, real or complex (not an integer, bool, key or float0)."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, a shape struct or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def check_arrays(leaves: Sequence[tuple[Segments, Any]]) -> None:
    """Raises for leaves that are no arrays, as the functions and strings of an unfiltered model.

    Raises:
      ValueError: naming all of them.
    """
    others = [
        f"{path_name(path)}: got {kind_of(leaf)}" for path, leaf in leaves if not _is_array(leaf)
    ]
    raise_all(
        others, "parameters must be arrays; leave these out (equinox.filter does), or use None:"
    )


def _is_array(leaf: Any) -> bool:
    is_scalar = isinstance(leaf, bool | int | float | complex | np.generic)
    return is_scalar or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def kind_of(leaf: Any) -> str:
    """The type of a leaf, for messages.

    Example:
      >>> kind_of(jnp.ones((2, 3))), kind_of(None), kind_of("text")
      ('float32(2, 3)', 'none', "str 'text'")
    """
    if leaf is None:
        return "none"
    if not _is_array(leaf):
        return f"{type(leaf).__name__} {short(leaf)}"
    dtype = dtype_of(leaf)
    name = "float0" if dtype == jax.dtypes.float0 else dtype
    return f"{name}{jnp.shape(leaf)}"
