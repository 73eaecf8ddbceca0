"""A chunk of matrices as the devices of a mesh hold it, and the collectives on it.

The *shards* of a matrix are the devices that hold its slices; *replicas* are groups of shards that
hold the same slices and divide the matrices between them. Slices are sent in the leaf's own layout;
only whole matrices are transposed, merged or cut into blocks.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muon_optax._internal.reshaping import reshaped
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.loads import rest_owners

__all__ = ["ShardedMatrices", "all_gather", "axis_to_cut", "index_along", "padded", "rolled"]


@dataclasses.dataclass(frozen=True)
class ShardedMatrices:
    """Matrices that are sent at once. All methods run on one device, inside a shard_map.

    Attributes:
      leaf: stands for the leaves that they come from.
      count: how many a device has a slice of.
      replica_axes: mesh axes whose replicas divide the matrices.
      first_owner: where there are fewer matrices than owners, the first of those that get one.
      skips: whether devices without a matrix do nothing; if not, they work on zeros.
      repeats: how many replicas, next to each other, work on the same matrix. Each sends a part of
        the result to all replicas, where else many of them would send zeros.
      group_size: how many neighbouring shards own a matrix together. Each gets a part of every
        slice, cut along the long side, and so 1/group_size of the matrix.
    """

    leaf: BoundLeaf
    count: int
    replica_axes: tuple[str, ...] = ()
    first_owner: int = 0
    skips: bool = False
    repeats: int = 1
    group_size: int = 1

    @property
    def shards(self) -> int:
        """Devices that hold slices of a matrix."""
        return self._devices(self.leaf.shard_axes)

    @property
    def replicas(self) -> int:
        """Devices that hold the same slice and divide the work."""
        return self._devices(self.replica_axes)

    @property
    def per_replica(self) -> int:
        """Matrices that a replica works on, or fewer."""
        return -(-self.count // self.replicas)

    @property
    def block(self) -> tuple[int, ...]:
        """Sizes of a slice."""
        return tuple(self.leaf.sharding.block[a] for a in self.leaf.view.stack_axes)

    @property
    def first_replica_and_shard(self) -> tuple[int, int]:
        """Replica and shard of the first owner."""
        return divmod(self.first_owner, self.shards)

    @property
    def owners(self) -> tuple[int, ...]:
        """The owners of each of fewer matrices than owners: of a group the first device."""
        groups = _Owners(self.shards // self.group_size, self.replicas)
        first = rest_owners(self.first_owner // self.group_size, self.count, groups, self.repeats)
        return tuple((first * self.group_size).tolist())

    @functools.cached_property
    def part(self) -> "ShardedMatrices":
        """The matrices of which the devices of a group each have one: a part of the long side."""
        if self.group_size == 1:
            return self
        leaf, axis = self.leaf, axis_to_cut(self.leaf, self.group_size)
        shape = tuple(n // self.group_size if a == axis else n for a, n in enumerate(leaf.shape))
        view = dataclasses.replace(leaf.view, shape=shape)
        view = dataclasses.replace(view, block_sizes=(view.fan_out,))
        sharding = dataclasses.replace(leaf.sharding, shape=shape)
        return dataclasses.replace(
            self, leaf=dataclasses.replace(leaf, view=view, sharding=sharding), group_size=1
        )

    def to_parts(self, x: jax.Array) -> jax.Array:
        """Slices (count, *block) -> the parts of each (count * group_size, *part.block)."""
        if self.group_size == 1:
            return x
        dim = self._cut_dim
        cut = (self.group_size, x.shape[dim] // self.group_size)
        x = x.reshape(*x.shape[:dim], *cut, *x.shape[dim + 1 :])
        return jnp.moveaxis(x, dim, 1).reshape(-1, *self.part.block)

    def from_parts(self, parts: jax.Array) -> jax.Array:
        """Undoes `to_parts`."""
        if self.group_size == 1:
            return parts
        x = parts.reshape(-1, self.group_size, *parts.shape[1:])
        return jnp.moveaxis(x, 1, self._cut_dim).reshape(-1, *self.block)

    @functools.cached_property
    def results(self) -> "ShardedMatrices":
        """The matrices, sharded as their results are."""
        end = self.leaf.result_sharding
        if end is None:
            return self
        leaf = dataclasses.replace(self.leaf, sharding=end, result_sharding=None)
        return dataclasses.replace(self, leaf=leaf)

    @property
    def replica_offset(self) -> jax.Array | int:
        """How many replicas after the first owner's this device's replica is."""
        index, (first, _) = index_along(self.replica_axes), self.first_replica_and_shard
        return (index - first) % self.replicas if first else index

    def own(self, x: jax.Array) -> jax.Array:
        """This replica's `per_replica` matrices of all, zeros where it has none."""
        if self.replicas == 1:
            return x
        each = self.per_replica
        x = padded(x, -(-self.replicas // self.repeats) * each)
        return jax.lax.dynamic_slice_in_dim(x, self.replica_offset // self.repeats * each, each)

    def all(self, y: jax.Array) -> jax.Array:
        """Undoes `own`: all-gathers the results of all replicas."""
        if self.replicas == 1:
            return y
        return self.from_replicas(all_gather(self.sent(y), self.replica_axes), y.shape[1:])

    def sent(self, y: jax.Array) -> jax.Array:
        """What this replica sends of its results: where others have the same one a part, flat."""
        if self.repeats == 1:
            return y
        parts = reshaped(y, (self.repeats, y.size // self.repeats))
        return jax.lax.dynamic_slice_in_dim(parts, self.replica_offset % self.repeats, 1)

    def from_replicas(self, sent: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What all replicas send, in their order -> the results of all matrices (count, *shape)."""
        first, _ = self.first_replica_and_shard
        rows = rolled(sent, -first * self.per_replica)[: self.count * self.repeats]
        return rows if self.repeats == 1 else reshaped(rows, (self.count, *shape))

    def swap(self, x: jax.Array) -> jax.Array:
        """All-to-all of (shards, ...): by destination -> by source."""
        return jax.lax.all_to_all(x, self.leaf.shard_axes, 0, 0) if self.shards > 1 else x

    def swap_joined(self, x: jax.Array) -> jax.Array:
        """The same for (shards * n, ...), from which leaves are cut."""
        if self.shards == 1:
            return x
        # With tiled=True XLA on CPU cuts each leaf from the part that arrived, without joining the
        # parts, and one kernel serves all leaves at the same place of a part. `swap` can't have
        # it: XLA would give the parts, joined of leaves, layouts that differ, which its verifier
        # refuses.
        return jax.lax.all_to_all(x, self.leaf.shard_axes, 0, 0, tiled=True)

    def slices_of_owners(self, y: jax.Array) -> jax.Array:
        """An owner's whole results (count, *sizes) -> slices of those of all owners, in order."""
        parts = self.disassemble(y)
        return self.swap_joined(parts.reshape(-1, *parts.shape[2:]))

    def results_of_owners(self, y: jax.Array) -> jax.Array:
        """An owner's whole results -> those of all owners, in order, sharded as results are to be.

        An all-to-all along the axes that shard results, and an all-gather along the others.
        """
        outer, inner = self.leaf.gathered_axes, self.results.leaf.shard_axes
        x = all_gather(self.results.slices_of_owners(y), outer)
        if not (outer and inner):
            return x
        axes = (*outer, *inner)
        grid = x.reshape(*(self._devices((a,)) for a in axes), -1, *x.shape[1:])
        order = [axes.index(a) for a in self.leaf.shard_axes]
        return grid.transpose(*order, *range(len(axes), grid.ndim)).reshape(x.shape)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Results (count, *block) as matrices are sharded -> as results are to be."""
        return self.joined(all_gather(x[None], self.leaf.gathered_axes))

    def joined(self, slices: jax.Array) -> jax.Array:
        """The slices of each result, (slices, count, *block) -> (count, *block of the result)."""
        sharding = self.leaf.sharding.without(self.results.leaf.shard_axes)
        leaf = dataclasses.replace(self.leaf, sharding=sharding)
        return dataclasses.replace(self, leaf=leaf).assemble(slices)

    def assemble(self, parts: jax.Array) -> jax.Array:
        """(shards, count, *block) -> whole matrices (count, *sizes)."""
        names, spec = self.leaf.shard_axes, self._spec
        count, block = parts.shape[1], parts.shape[2:]
        order = [len(names)]
        for i, axes in enumerate(spec):
            order += [*(names.index(a) for a in axes), len(names) + 1 + i]
        sizes = [n * self._devices(axes) for n, axes in zip(block, spec, strict=True)]
        grid = parts.reshape(*(self._devices((a,)) for a in names), count, *block)
        return reshaped(grid.transpose(order), (count, *sizes))

    def disassemble(self, whole: jax.Array) -> jax.Array:
        """Undoes `assemble`."""
        names, spec = self.leaf.shard_axes, self._spec
        grid, labels = [whole.shape[0]], [""]
        for n, axes in zip(whole.shape[1:], spec, strict=True):
            grid += [*(self._devices((a,)) for a in axes), n // self._devices(axes)]
            labels += [*axes, ""]
        rest = [i for i, label in enumerate(labels) if not label]
        order = [*(labels.index(a) for a in names), *rest]
        block = [grid[i] for i in rest]
        return reshaped(whole, grid).transpose(order).reshape(self.shards, *block)

    @property
    def _cut_dim(self) -> int:
        """The dim of stacked slices along which these are cut for a group."""
        axis = axis_to_cut(self.leaf, self.group_size)
        assert axis is not None
        return 1 + self.leaf.view.stack_axes.index(axis)

    @property
    def _spec(self) -> list[tuple[str, ...]]:
        return [self.leaf.sharding.spec[a] for a in self.leaf.view.stack_axes]

    def _devices(self, axes: tuple[str, ...]) -> int:
        return self.leaf.sharding.count(axes)


class _Owners(NamedTuple):
    """See `loads.Owners`."""

    shards: int
    replicas: int


def axis_to_cut(leaf: BoundLeaf, parts: int) -> int | None:
    """An axis of the long side of a leaf's matrices that cuts each slice in so many equal parts."""
    view, block = leaf.view, leaf.sharding.block
    long = view.output_axes if view.fan_out >= view.fan_in else view.reduction_axes
    return next((axis for axis in long if block[axis] % parts == 0), None)


def index_along(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's index along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The blocks of all devices along mesh axes, one after the other: the same on each of them."""
    # `to="invarying"` gives the type of a replicated array, which shard_map's out_specs ask for.
    return jax.lax.all_gather(x, axes, tiled=True, to="invarying") if axes else x


def padded(x: jax.Array, count: int) -> jax.Array:
    """Zero matrices added up to `count`: finite, and cut off again before results are used."""
    if x.shape[0] == count:
        return x
    return jnp.pad(x, [(0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def rolled(x: jax.Array, by: int) -> jax.Array:
    """Matrices moved on by so many positions, the last ones to the front."""
    return jnp.roll(x, by, axis=0) if by else x
