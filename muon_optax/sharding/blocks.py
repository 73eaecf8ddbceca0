"""Leaves whose matrices are cut into blocks, each of which is then a matrix of its own.

Blocks are declared, as in MuonBP's block steps, and don't depend on the mesh. A dim that is cut
becomes two, (blocks, size of a block), and the first of them is a batch dim. Where the mesh axes of
the dim fit into the number of blocks they move to the batch dim, so that each block is whole on a
device and nothing is sent. Where they don't fit, whole matrices are brought together, as in other
steps, and cut there.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import Axes, spec_without
from muon_optax.sharding.placement import on_mesh_of, place
from muon_optax.sharding.specs import LeafSharding
from muon_optax.views.matrix_view import BoundView

__all__ = ["BlockedLeaf", "blocked", "uncut_sides"]

Counts = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BlockedLeaf:
    """A leaf, and the leaf that its blocks make.

    Attributes:
      whole: the leaf.
      leaf: the leaf of blocks, of the same elements in the same order, but with more dims.
    """

    whole: BoundLeaf
    leaf: BoundLeaf

    @property
    def is_whole(self) -> bool:
        """Whether the matrices aren't cut at all."""
        return self.leaf is self.whole

    def split(self, x: jax.Array) -> jax.Array:
        """An array of the leaf as one of its blocks; no element goes to another device."""
        if self.leaf.shape == self.whole.shape:
            return x
        return _reshaped(on_mesh_of(self.whole.sharding, x), self.leaf.sharding)

    def merge(self, x: jax.Array) -> jax.Array:
        """Undoes `split`."""
        if self.leaf.shape == self.whole.shape:
            return x
        sharding = self.whole.sharding
        x = _reshaped(x, sharding)
        return x if sharding.manual else place([x], [sharding])[0]


def uncut_sides(view: BoundView, counts: Counts) -> list[str]:
    """The sides of a leaf's matrices that can't be cut in so many equal parts; empty where all can.

    Example:
      >>> from muon_optax.views.matrix_view import MatrixView, bind_view
      >>> uncut_sides(bind_view(MatrixView(), (6, 8)), (4, 2))
      ['fan-in 6 in 4']
    """
    names = ("fan-in", "fan-out")
    found = [
        f"{name} {size} in {count}"
        for _, *sizes in view.matrices
        for name, size, count in zip(names, sizes, counts, strict=True)
        if size % count
    ]
    return list(dict.fromkeys(found))


def blocked(leaf: BoundLeaf, counts: Counts) -> BlockedLeaf:
    """The leaf of the blocks of a leaf's matrices.

    Args:
      leaf: the leaf, sharded as it is worked on.
      counts: blocks along the reduction axes and along the output axes of each matrix; they divide.

    Returns:
      The leaf and that of its blocks. Where each block is whole on a device, nothing is sent: also
      where replicas might divide the work.
    """
    if counts == (1, 1) or not math.prod(leaf.view.shape):
        return BlockedLeaf(leaf, leaf)
    view, parts, tiles = leaf.view, dict[int, int](), [1, 1]
    block_sizes, groups = view.block_sizes, view.groups
    for i, (axes, count) in enumerate(
        zip((view.reduction_axes, view.output_axes), counts, strict=True)
    ):
        fused = _fused_parts(view, count) if view.cut == i + 1 else _Parts(count)
        found = _parts_of(leaf.sharding, axes, fused.count)
        if found is None:
            tiles[i] = count
            continue
        parts |= found
        tiles[i] = fused.tiles
        if view.cut == i + 1:
            block_sizes, groups = fused.block_sizes, fused.groups
    new = _split_view(view, parts)
    new = dataclasses.replace(new, block_sizes=block_sizes, groups=groups, tiles=tuple(tiles))
    sharding = _split_sharding(leaf.sharding, parts)
    if not sharding.axes_of(new.stack_axes):
        # Replicas would have to send each other the shared part.
        sharding = dataclasses.replace(sharding, free=())
    return BlockedLeaf(
        leaf,
        dataclasses.replace(
            leaf, view=new, sharding=sharding, strategy="auto", result_sharding=None
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Parts:
    """How the merged axes of one side are cut.

    Attributes:
      count: in how many equal parts, one after the other.
      block_sizes, groups: how matrices are fused in each part, on the side where they are.
      tiles: in how many parts each of these is cut besides.
    """

    count: int
    block_sizes: tuple[int, ...] = ()
    groups: int = 1
    tiles: int = 1


def _fused_parts(view: BoundView, count: int) -> _Parts:
    """The parts of the side along which matrices are fused, if each matrix is cut in `count`."""
    sizes, groups = view.block_sizes, view.groups
    if len(sizes) == 1 or (view.is_even and groups == 1):
        parts = len(sizes) * count
        return _Parts(parts, (sum(sizes) * groups // parts,))
    if groups % count == 0:  # some groups have the same part of each matrix
        return _Parts(count, sizes, groups // count)
    if count % groups == 0:
        return _Parts(groups, sizes, 1, count // groups)
    return _Parts(1, sizes, groups, count)


def _parts_of(sharding: LeafSharding, axes: Sequence[int], count: int) -> dict[int, int] | None:
    """In how many parts each axis is cut, so that merged they are cut in `count`.

    Returns:
      The numbers by axis; None where no cut of the axes does it, or a mesh axis would be in two.
    """
    found = {}
    for axis in axes:
        size = sharding.shape[axis]
        if size % count and count % size:
            return None
        found[axis] = min(size, count)
        count //= found[axis]
        if _divided(sharding, axis, found[axis]) is None:
            return None
    return {axis: parts for axis, parts in found.items() if parts > 1}


def _divided(sharding: LeafSharding, dim: int, parts: int) -> tuple[Axes, Axes] | None:
    """The mesh axes of a dim's parts, and those inside a part; None where one is in both."""
    axes, left = sharding.type_key[dim], parts
    for i, axis in enumerate(axes):
        size = sharding.count((axis,))
        if left == 1 and size > 1:
            return axes[:i], axes[i:]
        if left % size:
            return None
        left //= size
    return axes, ()


def _split_view(view: BoundView, parts: dict[int, int]) -> BoundView:
    """The view of the same leaf with dims that are split in (parts, rest), the parts as batch."""
    shape: list[int] = []
    place_of: list[int] = []
    batch: list[int] = []
    for axis, size in enumerate(view.shape):
        if axis in parts:
            batch.append(len(shape))
            shape.append(parts[axis])
        place_of.append(len(shape))
        shape.append(size // parts.get(axis, 1))
    return dataclasses.replace(
        view,
        shape=tuple(shape),
        batch_axes=tuple(sorted([*batch, *(place_of[a] for a in view.batch_axes)])),
        reduction_axes=tuple(place_of[a] for a in view.reduction_axes),
        output_axes=tuple(place_of[a] for a in view.output_axes),
    )


def _split_sharding(sharding: LeafSharding, parts: dict[int, int]) -> LeafSharding:
    """The sharding of the same leaf with these dims split."""
    shape: list[int] = []
    dims: list[Axes] = []
    for axis, size in enumerate(sharding.shape):
        outer, inner = (), sharding.type_key[axis]
        if axis in parts:
            divided = _divided(sharding, axis, parts[axis])
            assert divided is not None
            outer, inner = divided
            shape.append(parts[axis])
            dims.append(outer)
        shape.append(size // parts.get(axis, 1))
        dims.append(inner)
    if sharding.mesh is None:
        return dataclasses.replace(sharding, shape=tuple(shape))
    sizes = sharding.mesh.shape
    return dataclasses.replace(
        sharding,
        shape=tuple(shape),
        spec=tuple(tuple(a for a in axes if sizes[a] > 1) for axes in dims),
        written=PartitionSpec(*(axes or None for axes in dims)),
    )


def _reshaped(x: jax.Array, sharding: LeafSharding) -> jax.Array:
    """The array with the shape and, on Explicit mesh axes, the type of a leaf so sharded."""
    cuts = sharding.cut_by(sharding.manual) if sharding.mesh is not None else ()
    counts = [sharding.count(axes) for axes in cuts] or [1] * len(sharding.shape)
    sizes = [n // count for n, count in zip(sharding.shape, counts, strict=True)]
    mesh: Any = jax.typeof(x).sharding.mesh
    if not mesh.explicit_axes:
        return x.reshape(sizes)
    spec = spec_without(sharding.written, (*mesh.auto_axes, *mesh.manual_axes))
    return x.reshape(sizes, out_sharding=NamedSharding(mesh, spec))
