"""Leaves of whose matrices only some rows or columns, slices, are orthogonalised.

Where the axis that slices are chosen along is whole on each device, the chosen ones make smaller
matrices, which are planned, sent and orthogonalised like those of any leaf. Where it is sharded,
how many of them a device has depends on the data, while XLA's shapes don't: slices that aren't
chosen become zero there, and matrices of the old size are sent.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_optax._internal.slices import gathered, scattered
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.specs import LeafSharding
from muon_optax.views.matrix_view import BoundView

__all__ = ["Chosen", "SelectedLeaf", "SliceRole", "SlicesOf", "selected"]

Sizes = tuple[int, ...]
SliceRole = Literal["input", "output"]
SlicesOf = Literal["shorter", "output", "input"]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Which slices of a leaf are chosen along one role.

    Attributes:
      places: for each slice its place among the chosen ones, or -1, of the leaf's dims: those of
        the role whole, the other matrix dims 1; where several blocks are fused along these, a last
        dim has an entry for each.
      indices: of the chosen slices along the merged axes of the role, block by block, in the dims
        of `SelectedLeaf.leaf`; None unless that is made of the slices.
    """

    places: jax.Array
    indices: jax.Array | None


@dataclasses.dataclass(frozen=True)
class SelectedLeaf:
    """A leaf, and the leaf that is orthogonalised in its place.

    Attributes:
      whole: the leaf.
      leaf: the leaf of the chosen slices, or of matrices in which all other slices are zero.
      roles: along which role slices of each fused block are chosen.
      counts: how many of each.
      axis: the axis of `leaf` that the slices are along; None where `leaf` isn't made of them.
      is_chosen_everywhere: whether each device chooses the slices of all matrices, not of its own,
        since it gets the results of others.
    """

    whole: BoundLeaf
    leaf: BoundLeaf
    roles: tuple[SliceRole, ...]
    counts: tuple[int, ...]
    axis: int | None = None
    is_chosen_everywhere: bool = False

    @property
    def selects_all(self) -> bool:
        """Whether every slice is chosen."""
        sizes = [
            _size(shape, role) for shape, role in zip(_blocks(self.view), self.roles, strict=True)
        ]
        return tuple(sizes) == self.counts

    @property
    def view(self) -> BoundView:
        """The leaf's view."""
        return self.whole.view

    @property
    def used_roles(self) -> tuple[SliceRole, ...]:
        """The roles along which slices are chosen, each once."""
        return tuple(dict.fromkeys(self.roles))

    def axes(self, role: SliceRole) -> tuple[int, ...]:
        """The leaf's axes of a role, in the order in which they are merged."""
        return self.view.output_axes if role == "output" else self.view.reduction_axes

    def lines(self, scores: jax.Array, role: SliceRole) -> list[tuple[jax.Array, int]]:
        """The scores of slices that compete with each other, and how many of them are chosen.

        Args:
          scores: of the leaf's dims: those of the role whole, the other matrix dims 1; where
            several blocks are fused along these, a last dim has an entry for each.
          role: the role along which they are chosen.

        Returns:
          Scores (..., n) and counts: of all matrices, or of each block that is fused along the
          role.
        """
        axes, order = self.axes(role), self._order(role, scores.ndim)
        x = scores.transpose(order)
        x = x.reshape(*x.shape[: -len(axes)], math.prod(x.shape[-len(axes) :]))
        rivals = self._rivals(role)
        if len(rivals) == 1:
            return [(x, rivals[0])]
        view, lead = self.view, x.shape[:-1]
        x = x.reshape(*lead, view.groups, sum(view.block_sizes))
        parts = jnp.split(x, np.cumsum(view.block_sizes)[:-1], -1)
        return [
            (part.reshape(*lead, view.groups * part.shape[-1]), count)
            for part, count in zip(parts, rivals, strict=True)
        ]

    def choice(
        self, found: Sequence[tuple[jax.Array, jax.Array]], shape: Sizes, role: SliceRole
    ) -> Chosen:
        """Which slices of the leaf are chosen.

        Args:
          found: for each of `lines` the indices of the largest, and the places of all.
          shape: of the scores.
          role: as in `lines`.

        Returns:
          The slices.
        """
        indices, places = self._joined(found)
        order = self._order(role, len(shape))
        places = places.reshape([shape[d] for d in order]).transpose(np.argsort(order))
        if self.axis is None:
            return Chosen(places, None)
        return Chosen(places, jnp.moveaxis(indices, -1, self.axis))

    def _joined(self, found: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
        """Indices and places along a role's merged axes, of those of each block."""
        if len(found) == 1:
            return found[0]
        view = self.view
        all_indices, all_places, start, offset = [], [], 0, 0
        for size, (indices, places) in zip(view.block_sizes, found, strict=True):
            group, rest = indices // size, indices % size
            all_indices.append(group * sum(view.block_sizes) + start + rest)
            places = jnp.where(places >= 0, places + offset, -1)
            all_places.append(places.reshape(*places.shape[:-1], view.groups, size))
            start, offset = start + size, offset + indices.shape[-1]
        joined = jnp.concatenate(all_places, -1)
        return (
            jnp.concatenate(all_indices, -1),
            joined.reshape(*joined.shape[:-2], joined.shape[-2] * joined.shape[-1]),
        )

    def _order(self, role: SliceRole, rank: int) -> Sizes:
        """The dims of scores, those of a role last."""
        axes = self.axes(role)
        return (*(d for d in range(rank) if d not in axes), *axes)

    def _rivals(self, role: SliceRole) -> list[int]:
        """How many slices are chosen of all matrices, or of each block fused along the role."""
        rows = list(zip(self.roles, self.counts, strict=True))
        if len(rows) == 1 or role != _cut_role(self.view):
            return [next(count for own, count in rows if own == role)]
        # A block that has slices along the other role ignores these.
        return [count if own == role else 1 for own, count in rows]

    def gather(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        """An array of `whole`, or a block of one, as one of `leaf`, which is made of slices."""
        assert self.axis is not None
        return gathered(self._merged(x), indices, self.axis)

    def scatter(self, x: jax.Array, places: jax.Array) -> jax.Array:
        """Undoes `gather`, with zeros between; `places` as in `Chosen`."""
        assert self.axis is not None
        sizes = places.shape[self.axis : self.axis + self._merges]
        placed = scattered(x, self._merged(places), self.axis)
        shape = placed.shape
        return placed.reshape(*shape[: self.axis], *sizes, *shape[self.axis + 1 :])

    def _merged(self, x: jax.Array) -> jax.Array:
        """The array with the merged axes of the role as one."""
        assert self.axis is not None
        start, end = self.axis, self.axis + self._merges
        return x.reshape(*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:])

    @property
    def _merges(self) -> int:
        return len(self.axes(self.roles[0]))

    def places_sharding(self, sharding: LeafSharding) -> LeafSharding:
        """How `places` are sharded where the leaf is sharded so: along batch dims alone."""
        axes = self.view.stack_axes
        kept = set(self.axes(self.roles[0]))
        shape = tuple(n if d in kept or d not in axes else 1 for d, n in enumerate(sharding.shape))
        return _with_dims(sharding, shape, [() if d in axes else own for d, own in _dims(sharding)])

    def blocks_of(self, chosen: Chosen, sharding: LeafSharding) -> Chosen:
        """The choice among a device's own matrices, where the leaf is sharded so."""
        if not self.is_chosen_everywhere:
            return chosen
        assert chosen.indices is not None
        found = []
        for array, leaf, at in (
            (chosen.places, self.whole, sharding),
            (chosen.indices, self.leaf, self.sharding(sharding)),
        ):
            found.append(at.without(at.axes_of(leaf.view.stack_axes)).block_of(array))
        return Chosen(*found)

    def sent_to(self, end: LeafSharding) -> "SelectedLeaf":
        """The leaf, where the results of slices are moved to another sharding."""
        here, batch = self.whole.sharding, self.view.batch_axes
        is_moved = any(here.type_key[a] != end.type_key[a] for a in batch)
        return dataclasses.replace(self, is_chosen_everywhere=is_moved)

    def sharding(self, sharding: LeafSharding) -> LeafSharding:
        """How `leaf` is sharded where `whole` is sharded so."""
        if self.axis is None:
            return sharding
        return _of_slices(sharding, self.axes(self.roles[0]), sum(self.counts))

    def end(self, move: LeafSharding | None) -> LeafSharding:
        """How results are sharded once zeros are between the slices that are orthogonalised.

        Args:
          move: how their parameter is sharded, if they still have to be moved there.

        Returns:
          That, where slices alone can be moved, which is less to send.
        """
        own = self.whole.result_sharding or self.whole.sharding
        if self.axis is None or move is None or (move.mesh, move.known) != (own.mesh, own.known):
            return own
        return move if self.is_whole_along_slices(move) else own

    def is_whole_along_slices(self, sharding: LeafSharding) -> bool:
        """Whether no mesh axis shards the axis that slices are chosen along."""
        return not sharding.axes_of([a for role in self.used_roles for a in self.axes(role)])


def selected(leaf: BoundLeaf, fraction: float, each: SlicesOf) -> SelectedLeaf:
    """The leaf that is orthogonalised where a fraction of the slices is.

    Args:
      leaf: the leaf, as it is planned.
      fraction: of each matrix, of which max(1, ceil(fraction * n)) slices are chosen.
      each: 'output' neurons, 'input's, or those along the 'shorter' side (of outputs where both are
        equal).

    Returns:
      The leaf and the one in its place.
    """
    shapes = _blocks(leaf.view)
    roles: tuple[SliceRole, ...] = tuple(_role(shape, each) for shape in shapes)
    sizes = [_size(shape, role) for shape, role in zip(shapes, roles, strict=True)]
    counts = tuple(min(n, max(1, math.ceil(fraction * n))) for n in sizes)
    found = SelectedLeaf(leaf, leaf, roles, counts)
    if found.selects_all:
        return found
    if not _makes_a_leaf(found):
        return dataclasses.replace(found, leaf=_with_zeros(found, shapes))
    role = roles[0]
    axes = found.axes(role)
    result = leaf.result_sharding
    new = dataclasses.replace(
        leaf,
        view=_view_of_slices(leaf.view, axes, counts, is_cut=role == _cut_role(leaf.view)),
        sharding=_of_slices(leaf.sharding, axes, sum(counts)),
        result_sharding=result and _of_slices(result, axes, sum(counts)),
    )
    return dataclasses.replace(found, leaf=new, axis=axes[0])


def _makes_a_leaf(found: SelectedLeaf) -> bool:
    """Whether the chosen slices make a leaf of smaller matrices."""
    role = found.roles[0]
    if len(found.used_roles) > 1 or not found.is_whole_along_slices(found.whole.sharding):
        return False
    # Blocks that are fused along the other side each have places of their own.
    if len(found.counts) > 1 and role != _cut_role(found.view):
        return False
    axes = found.axes(role)
    return axes == tuple(range(axes[0], axes[0] + len(axes)))


def _with_zeros(found: SelectedLeaf, shapes: Sequence[tuple[int, int]]) -> BoundLeaf:
    """The leaf of matrices whose other slices are zero."""
    rows = zip(shapes, found.roles, found.counts, strict=True)
    dense = [(m, count) if role == "output" else (count, n) for (m, n), role, count in rows]
    kept = tuple(dense[: len(found.view.matrices)])  # equal blocks have one entry
    return dataclasses.replace(found.whole, view=dataclasses.replace(found.view, nonzero=kept))


def _blocks(view: BoundView) -> list[tuple[int, int]]:
    """(fan-in, fan-out) of each fused block."""
    shapes = [(m, n) for _, m, n in view.matrices]
    return shapes * len(view.block_sizes) if view.is_even else shapes


def _role(shape: tuple[int, int], each: SlicesOf) -> SliceRole:
    if each != "shorter":
        return each
    fan_in, fan_out = shape
    return "output" if fan_out <= fan_in else "input"


def _size(shape: tuple[int, int], role: SliceRole) -> int:
    return shape[get_args(SliceRole).index(role)]


def _cut_role(view: BoundView) -> SliceRole:
    """The role of the axis that blocks are fused along."""
    return "input" if view.cut == 1 else "output"


def _view_of_slices(
    view: BoundView, axes: tuple[int, ...], counts: tuple[int, ...], *, is_cut: bool
) -> BoundView:
    """The view of a leaf of slices along consecutive axes, which become one."""
    first, gone = axes[0], len(axes) - 1

    def moved(old: tuple[int, ...]) -> tuple[int, ...]:
        if old == axes:
            return (first,)
        return tuple(a if a < first else a - gone for a in old)

    shape = (*view.shape[:first], sum(counts), *view.shape[first + gone + 1 :])
    return dataclasses.replace(
        view,
        shape=shape,
        batch_axes=moved(view.batch_axes),
        reduction_axes=moved(view.reduction_axes),
        output_axes=moved(view.output_axes),
        block_sizes=counts if is_cut else view.block_sizes,
        groups=1 if is_cut else view.groups,
    )


def _of_slices(sharding: LeafSharding, axes: tuple[int, ...], count: int) -> LeafSharding:
    """The sharding of a leaf of slices along consecutive axes, which become one."""
    first, end = axes[0], axes[-1] + 1
    shape = (*sharding.shape[:first], count, *sharding.shape[end:])
    own = [axes for _, axes in _dims(sharding)]
    merged = tuple(a for dim in own[first:end] for a in dim)  # mesh axes of size 1
    return _with_dims(sharding, shape, [*own[:first], merged, *own[end:]])


def _dims(sharding: LeafSharding) -> list[tuple[int, tuple[str, ...]]]:
    return list(enumerate(sharding.type_key))


def _with_dims(
    sharding: LeafSharding, shape: tuple[int, ...], dims: Sequence[tuple[str, ...]]
) -> LeafSharding:
    """The sharding with another shape and other mesh axes on its dims."""
    if sharding.mesh is None:
        return dataclasses.replace(sharding, shape=shape, written=None)
    sizes = sharding.mesh.shape
    return dataclasses.replace(
        sharding,
        shape=shape,
        spec=tuple(tuple(a for a in axes if sizes[a] > 1) for axes in dims),
        written=PartitionSpec(*(axes or None for axes in dims)),
    )
