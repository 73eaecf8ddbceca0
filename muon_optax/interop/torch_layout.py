"""How a parameter tree is written in PyTorch: the names of its leaves and the order of their axes.

torch stores a Linear's weight [out, in], Flax its kernel [in, out]; which leaf is transposed is
said by rules, never guessed from a shape, since a square matrix fits either way.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from muon_optax.interop.tensors import from_torch, to_torch
from muon_optax.partition import Rule, Shape, has_run, words
from muon_optax.tree_paths import Segments, leaves_with_segments, path_name, raise_together

__all__ = [
    "FLAX_LAYOUT",
    "Place",
    "TensorRule",
    "TorchLayout",
    "default_torch_rules",
    "mismatch",
    "read_leaf",
    "write_leaf",
]


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """Says how the leaves whose path, or path and shape, match are written in torch.

    Attributes:
      pattern: as in `Rule`.
      axes: the leaf's axes in the order in which torch has them; None leaves them as they are.
      name: the last name of the key; None keeps the leaf's.

    Example:
      >>> TensorRule("kernel", (1, 0), "weight").matches(("mlp", "kernel"), (16, 64))
      True
    """

    pattern: str | re.Pattern[str] | Callable[[Segments, Shape], bool]
    axes: tuple[int, ...] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        Rule(self.pattern, "muon")  # checks the pattern
        if self.axes is not None and sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"TensorRule axes must be a permutation, got {self.axes}")

    def matches(self, segments: Segments, shape: Shape) -> bool:
        """Whether a leaf at this path, of this shape, falls under the rule."""
        return Rule(self.pattern, "muon").matches(segments, shape)


def _is_kernel(rank: int, *, of: str | None = None) -> Callable[[Segments, Shape], bool]:
    def matches(segments: Segments, shape: Shape) -> bool:
        is_kernel = words(segments)[-1:] == ("kernel",) and len(shape) == rank
        return is_kernel and (of is None or has_run(segments, of))

    return matches


_DEFAULT = (
    TensorRule(_is_kernel(2), (1, 0), "weight"),  # Dense, Linear: [in, out] -> [out, in]
    TensorRule(_is_kernel(3, of="conv*"), (2, 1, 0), "weight"),  # [w, in, out] -> [out, in, w]
    TensorRule(_is_kernel(4, of="conv*"), (3, 2, 0, 1), "weight"),
    TensorRule(_is_kernel(5, of="conv*"), (4, 3, 0, 1, 2), "weight"),
    TensorRule(lambda path, _: words(path)[-1:] == ("embedding",), None, "weight"),
    TensorRule(lambda path, _: words(path)[-1:] == ("scale",), None, "weight"),
)


def default_torch_rules() -> tuple[TensorRule, ...]:
    """The rules for Flax's names: kernels of Dense, Linear and Conv, embeddings and scales.

    Other leaves keep name and axes. A kernel of three or more dims outside a module named conv* has
    no rule and is an error: only its author knows which axes torch merges.

    Returns:
      An ordered tuple, to be put after rules of one's own.

    Example:
      >>> len(default_torch_rules())
      6
    """
    return _DEFAULT


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how one leaf is written.

    Attributes:
      key: its key in a state dict.
      axes: its axes in torch's order; None where they are the same.
    """

    key: str
    axes: tuple[int, ...] | None

    def shape(self, shape: Shape) -> Shape:
        """The shape in torch of a leaf of this shape."""
        return shape if self.axes is None else tuple(shape[a] for a in self.axes)


@dataclasses.dataclass(frozen=True)
class TorchLayout:
    r"""Names and axes of a whole tree in torch.

    Attributes:
      rules: ordered; the first that matches a leaf decides. () leaves all axes and names as they
        are, for a tree that holds torch's own.
      rename: (regular expression, replacement) pairs applied one after the other to the key that
        the path, joined with dots, and the rules give.

    Example:
      >>> layout = TorchLayout(rename=((r"layers_(\d+)", r"layers.\1"),))
      >>> layout.place(("layers_3", "up", "kernel"), (16, 64))
      Place(key='layers.3.up.weight', axes=(1, 0))
    """

    rules: tuple[TensorRule, ...] = _DEFAULT
    rename: tuple[tuple[str, str], ...] = ()

    def place(self, segments: Segments, shape: Shape) -> Place:
        """Where a leaf goes.

        Raises:
          ValueError: if a rule's axes don't fit the shape, or a kernel of more dims has no rule.
        """
        rule = next((r for r in self.rules if r.matches(segments, shape)), None)
        if rule is None and self.rules and len(shape) > 2 and words(segments)[-1] == "kernel":
            raise ValueError(
                f"shape {shape}: no rule says how torch orders the axes of this kernel; give a "
                "TensorRule"
            )
        axes = rule.axes if rule else None
        if axes is not None and len(axes) != len(shape):
            raise ValueError(f"shape {shape}: the rule's axes {axes} are of another rank")
        last = rule.name if rule and rule.name else segments[-1]
        key = ".".join((*segments[:-1], last))
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return Place(key, axes)

    def places(self, tree: Any) -> dict[Segments, Place]:
        """Where each leaf of a tree goes.

        Raises:
          ValueError: listing the leaves without a place, and those that share one.
        """
        found: dict[Segments, Place] = {}
        problems, owners = [], {}
        for path, leaf in leaves_with_segments(tree):
            try:
                found[path] = place = self.place(path, tuple(leaf.shape))
            except ValueError as error:
                problems.append(f"{path_name(path)}: {error}")
                continue
            other = owners.setdefault(place.key, path)
            if other != path:
                problems.append(
                    f"{path_name(path)}: has the key of {path_name(other)}, {place.key}"
                )
        raise_together(problems, "these leaves can't be written in torch:")
        return found


FLAX_LAYOUT = TorchLayout()
"""Flax's names and axes."""


def mismatch(tensor: Any, like: Any, place: Place) -> str | None:
    """What keeps a tensor from being this leaf, or None."""
    want = place.shape(tuple(like.shape))
    got = tuple(getattr(tensor, "shape", ()))
    if got != want:
        return f"has shape {got}, expected {want}"
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if dtype != str(like.dtype):
        return f"has dtype {dtype}, expected {like.dtype}: cast it first if that is meant"
    return None


def read_leaf(tensor: Any, like: Any, place: Place) -> jax.Array:
    """A tensor as the leaf that it was written from, lying where `like` lies."""
    if place.axes is not None:
        tensor = tensor.permute(*np.argsort(place.axes).tolist())
    array = from_torch(tensor)
    sharding = getattr(like, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def write_leaf(leaf: Any, place: Place) -> Any:
    """A leaf as a contiguous tensor in torch's order of axes."""
    tensor = to_torch(leaf)
    return tensor if place.axes is None else tensor.permute(*place.axes).contiguous()
