"""Which axes of a subtree's leaves `nn.scan`, `nnx.scan` or `nnx.vmap` added.

They put one axis of one size into each leaf below a module, at one place for all of them: the
first (Flax's habit) or the second (MaxText, T5X). Leaves of known rank, as the scales of norms,
tell how many such axes there are; the sizes that all leaves share tell which.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from muon_optax.rules import Shape
from muon_optax.tree_paths import Segments, path_name
from muon_optax.views.weights import names_of, tokens_of

__all__ = ["Stacked", "find_stacks"]

_DENSE = re.compile(r"Dense_\d+")  # Linen's own name for nn.Dense
_NORM_TOKENS = {"norm", "layernorm", "rmsnorm", "ln", "bn", "gn", "batchnorm", "groupnorm"}


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A leaf and the axes that were found to be stacked.

    Attributes:
      segments: the leaf's path.
      names: the path's names.
      shape: the leaf's shape.
      axes: the axes that are left.
      base_rank: the rank of one layer's leaf, where the module tells it.
      is_declared: whether the user said that it is stacked, not along which axis.
      is_doubtful: whether it is stacked along an axis that nothing tells.
    """

    segments: Segments
    names: tuple[str, ...]
    shape: Shape
    axes: tuple[int, ...]
    base_rank: int | None
    is_declared: bool
    is_doubtful: bool = False

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)

    @property
    def excess(self) -> int | None:
        """Number of axes that must have been stacked, where the module tells it."""
        return None if self.base_rank is None else len(self.axes) - self.base_rank

    @property
    def core(self) -> Shape:
        """The sizes of the axes that are left."""
        return tuple(self.shape[axis] for axis in self.axes)


def find_stacks(
    shapes: Mapping[Segments, Shape], declared: Mapping[Segments, int | None]
) -> dict[Segments, Stacked]:
    """Finds the stacked axes of each leaf.

    Args:
      shapes: shapes of all the floating-point leaves of a tree, by path.
      declared: the leaves that the user declared stacked, with the axis where it was given.

    Returns:
      A record for each leaf.
    """
    modules: dict[tuple[str, ...], set[str]] = {}
    for path in shapes:
        names = names_of(path)
        modules.setdefault(names[:-1], set()).update(names[-1:])
    leaves = []
    for path, shape in shapes.items():
        names, axis = names_of(path), declared.get(path)
        axes = tuple(a for a in range(len(shape)) if axis is None or a != axis % len(shape))
        is_declared = path in declared and axis is None
        base_rank = None if _keeps_dims(shape) else _base_rank(names, modules[names[:-1]])
        leaves.append(Stacked(path, names, shape, axes, base_rank, is_declared))
    return {leaf.segments: leaf for leaf in _strip(leaves, 0)}


def _base_rank(names: tuple[str, ...], beside: set[str]) -> int | None:
    """The rank of one layer's leaf: 1 for a norm's, what `nn.Dense` has for its own."""
    last, module = names[-1] if names else "", names[-2] if len(names) > 1 else ""
    if "kernel" in beside:
        is_dense = _DENSE.fullmatch(module) is not None
        return {"kernel": 2, "bias": 1}.get(last) if is_dense else None
    is_norm = not _NORM_TOKENS.isdisjoint(tokens_of(module)) and len(beside) < 3
    is_scale = last == "scale" or (last == "bias" and "scale" in beside)
    return 1 if is_scale or (is_norm and last in ("weight", "w", "bias", "b", "gamma")) else None


def _keeps_dims(shape: Shape) -> bool:
    """Whether a leaf has its dims for broadcasting only, as [1, 1, 1, features]."""
    return len(shape) > 2 and set(shape[:-1]) == {1}


def _strip(leaves: Sequence[Stacked], depth: int) -> list[Stacked]:
    """Takes the stacked axes off the leaves below one module, then below each of its parts."""
    count = _number_of_stacks(leaves)
    shared = _shared_axes(leaves)
    if count and 0 < len(shared) <= count:
        leaves = [_without(leaf, shared) for leaf in leaves]
    elif count and shared:
        return [dataclasses.replace(leaf, is_doubtful=True) for leaf in leaves]
    parts: dict[str, list[Stacked]] = {}
    done = []
    for leaf in leaves:
        if len(leaf.names) > depth:
            parts.setdefault(leaf.names[depth], []).append(leaf)
        else:
            done.append(leaf)
    return [*done, *(x for part in parts.values() for x in _strip(part, depth + 1))]


def _number_of_stacks(leaves: Sequence[Stacked]) -> int:
    """How many axes each of the leaves must have too many; 0 where nothing tells it."""
    excesses = {leaf.excess for leaf in leaves} - {None}
    if len(excesses) == 1:
        return max(0, *excesses)
    return int(not excesses and all(leaf.is_declared for leaf in leaves))


def _shared_axes(leaves: Sequence[Stacked]) -> tuple[int, ...]:
    """Places whose sizes all the leaves share."""
    cores = [leaf.core for leaf in leaves]
    places = range(min(map(len, cores), default=0))
    return tuple(k for k in places if len({core[k] for core in cores}) == 1)


def _without(leaf: Stacked, places: tuple[int, ...]) -> Stacked:
    axes = tuple(axis for k, axis in enumerate(leaf.axes) if k not in places)
    return dataclasses.replace(leaf, axes=axes, is_declared=False)
