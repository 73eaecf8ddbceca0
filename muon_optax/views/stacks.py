"""Which axes of a subtree's leaves `nn.scan`, `nnx.scan` or `nnx.vmap` added.

They put one axis of one size into each leaf below a module, at one place for all of them: the
first (Flax's habit) or the second (MaxText, T5X). Leaves of known rank, as the scales of norms,
tell how many such axes there are; the sizes that all leaves share tell which.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from muon_optax._internal.tree_paths import Segments, path_name
from muon_optax.partition import Shape
from muon_optax.views.weights import is_vector_name, names_of, tokens_of

__all__ = ["Stacked", "find_stacks"]

_DENSE = re.compile(r"Dense_\d+")  # Linen's own name for nn.Dense
_AROUND = 2
_OF_HEADS = {"q", "k", "query", "key", "qk"}  # whose norms may have a scale for each head
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
      stack_places: axes, of those that are left, that may be stacked: the places whose sizes all
        the leaves share that are below the module around the layer's own.
      around: how many modules of several parts are around the leaf, as far as these count.
    """

    segments: Segments
    names: tuple[str, ...]
    shape: Shape
    axes: tuple[int, ...]
    base_rank: int | None
    is_declared: bool
    is_doubtful: bool = False
    stack_places: frozenset[int] = frozenset()
    around: int = 0

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)

    @property
    def excess(self) -> int | None:
        """Number of axes that must have been stacked, where the module tells it."""
        return None if self.base_rank is None else len(self.axes) - self.base_rank

    @property
    def is_unexplained(self) -> bool:
        """Whether this is the scale of a norm that looks stacked, and nothing tells how."""
        is_open = not (self.is_doubtful or self.is_declared)
        return self.base_rank == 1 and bool(self.excess) and is_open

    @property
    def is_single(self) -> bool:
        """Whether this is surely one layer's: there is no kernel of less than two dims."""
        is_kernel = self.names[-1:] == ("kernel",)
        return self.excess == 0 or (is_kernel and len(self.axes) == 2)

    @property
    def is_cut(self) -> bool:
        """Whether so few axes are left that they can't be a kernel's."""
        return self.names[-1:] == ("kernel",) and len(self.axes) < 2

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
    return {leaf.segments: leaf for leaf in _beside_norms(_strip(leaves, 0))}


def _base_rank(names: tuple[str, ...], beside: set[str]) -> int | None:
    """The rank of one layer's leaf: 1 for a norm's, those of kernel and bias for `nn.Dense`'s."""
    last, module = names[-1] if names else "", names[-2] if len(names) > 1 else ""
    if "kernel" in beside:
        is_dense = _DENSE.fullmatch(module) is not None
        return {"kernel": 2, "bias": 1}.get(last) if is_dense else None
    if not _OF_HEADS.isdisjoint(tokens_of(module)):
        return None
    is_norm = not _NORM_TOKENS.isdisjoint(tokens_of(module)) and len(beside) < 3
    is_scale = last == "scale" or (last == "bias" and "scale" in beside)
    is_scale = is_scale and all(map(is_vector_name, beside))
    return 1 if is_scale or (is_norm and last in ("weight", "w", "bias", "b", "gamma")) else None


def _keeps_dims(shape: Shape) -> bool:
    """Whether a leaf has its dims for broadcasting only, as [1, 1, 1, features]."""
    return len(shape) > 2 and set(shape[:-1]) == {1}


def _strip(leaves: Sequence[Stacked], depth: int) -> list[Stacked]:
    """Takes the stacked axes off the leaves below one module, then below each of its parts."""
    count = _number_of_stacks(leaves)
    shared = _shared_axes(leaves)
    if count and shared:
        places = zip(*shared, strict=True)
        bare = [_without(leaf, {*k}) for leaf, k in zip(leaves, places, strict=True)]
        if len(shared) <= count and not any(leaf.is_cut for leaf in bare):
            leaves = bare
        elif any(leaf.base_rank != 1 for leaf in leaves):
            return [dataclasses.replace(leaf, is_doubtful=True) for leaf in leaves]
    parts: dict[str, list[Stacked]] = {}
    for leaf in leaves:
        if len(leaf.names) > depth + 1:
            parts.setdefault(leaf.names[depth], []).append(leaf)
    own = [leaf for leaf in leaves if len(leaf.names) <= depth + 1]
    found = [*own, *(x for part in parts.values() for x in _strip(part, depth + 1))]
    return _with_places(found) if len(parts) > 1 or (parts and own) else found


def _with_places(leaves: Sequence[Stacked]) -> list[Stacked]:
    """Notes the shared places in the leaves below a module of several parts.

    The module around that counts: one block's attention isn't stacked without its norms.
    """
    cores = [leaf.core for leaf in leaves]
    is_single = any(leaf.is_single for leaf in leaves)
    places = range(0 if is_single else min(map(len, cores)))
    shared = frozenset(k for k in places if len({core[k] for core in cores}) == 1)
    return [
        dataclasses.replace(leaf, stack_places=shared, around=leaf.around + 1)
        if leaf.around < _AROUND
        else leaf
        for leaf in leaves
    ]


def _beside_norms(leaves: Sequence[Stacked]) -> list[Stacked]:
    """Notes in leaves beside norms that look stacked which of their first axes may be so."""
    norms: dict[tuple[str, ...], set[Shape]] = {}
    for leaf in leaves:
        if leaf.is_unexplained:
            norms.setdefault(leaf.names[:-2], set()).add(leaf.core)
    found = []
    for leaf in leaves:
        above = [leaf.names[:n] for n in range(len(leaf.names))] if norms else []
        shapes = {shape for module in above for shape in norms.get(module, ())}
        places = {
            k for s in shapes for k, (a, b) in enumerate(zip(s, leaf.core, strict=False)) if a == b
        }
        found.append(dataclasses.replace(leaf, stack_places=leaf.stack_places | places))
    return found


def _number_of_stacks(leaves: Sequence[Stacked]) -> int:
    """How many axes each of the leaves must have too many; 0 where nothing tells it."""
    excesses = [leaf.excess for leaf in leaves if leaf.excess is not None]
    if excesses:
        return max(0, min(excesses))
    return int(bool(leaves) and all(leaf.is_declared for leaf in leaves))


def _shared_axes(leaves: Sequence[Stacked]) -> list[list[int]]:
    """Places, counted from the front and the last one, whose sizes all the leaves share.

    Returns:
      For each place the axis of each leaf.
    """
    cores = [leaf.core for leaf in leaves]
    places = [[k] * len(cores) for k in range(min(map(len, cores), default=0))]
    last = [len(core) - 1 for core in cores]
    if last not in places and min(last, default=-1) >= 0:
        places.append(last)
    return [p for p in places if len({core[k] for core, k in zip(cores, p, strict=True)}) == 1]


def _without(leaf: Stacked, places: set[int]) -> Stacked:
    axes = tuple(axis for k, axis in enumerate(leaf.axes) if k not in places)
    return dataclasses.replace(leaf, axes=axes, is_declared=False)
