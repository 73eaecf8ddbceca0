"""Carries a plan out: one shard_map a bucket, one exchange in and one out a chunk.

The momentum mix is formed and rounded on the shards, inside the shard_map: outside, the partitioner
would move the exchange before it and send more. Slices travel in the leaf's own layout; only whole
matrices are transposed, merged or cut into blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_optax.polar import Exchange
from muon_optax.sharding.local import Solver
from muon_optax.sharding.planner import Bucket, Leaf, Share

__all__ = ["Prepare", "run_bucket"]

Prepare = Callable[..., jax.Array]


def run_bucket(
    bucket: Bucket,
    leaves: Sequence[Leaf],
    prepare: Prepare,
    scalars: Any,
    operands: Sequence[tuple[jax.Array, ...]],
    solver: Solver,
) -> list[jax.Array]:
    """Orthogonalises the leaves of one bucket.

    Args:
      bucket: from the planner.
      leaves: the bucket's leaves.
      prepare: elementwise, (scalars, *operands of a leaf) -> what is orthogonalised.
      scalars: a tree of scalars for it.
      operands: for each leaf the same number of arrays, all in the leaf's layout.
      solver: what is done with each matrix.

    Returns:
      The results, in each leaf's layout and dtype.
    """

    def body(scalars, operands):
        mixes = [prepare(scalars, *arrays) for arrays in operands]
        stacks = [
            leaf.view.stack(mix.astype(leaf.dtype)) for leaf, mix in zip(leaves, mixes, strict=True)
        ]
        done: list[jax.Array] = []
        for share, start, count in bucket.chunks:
            x = _take(stacks, start, count)
            if len(done) > 1:  # one chunk is exchanged under another's products, but no more
                x, done[-2] = jax.lax.optimization_barrier((x, done[-2]))
            done.append(_run_chunk(x, share, bucket.leaf, solver))
        starts = [sum(x.shape[0] for x in stacks[:i]) for i in range(len(stacks))]
        return [
            leaf.view.unstack(_take(done, start, stack.shape[0]), (leaf.home or leaf.layout).block)
            for leaf, start, stack in zip(leaves, starts, stacks, strict=True)
        ]

    layout = bucket.leaf.layout
    axes = _axes_to_map(bucket)
    if not axes or layout.mesh is None:
        return body(scalars, operands)
    specs = [leaf.layout.partition_spec for leaf in leaves]
    ends = [(leaf.home or leaf.layout).partition_spec for leaf in leaves]
    return jax.shard_map(
        body,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(), [(spec,) * len(operands[0]) for spec in specs]),
        out_specs=ends,
        axis_names=axes,
    )(scalars, operands)


def _axes_to_map(bucket: Bucket) -> set[str]:
    """Mesh axes to make Manual: all that are known and not Manual yet, if any is needed."""
    layout = bucket.leaf.layout
    shared = {a for share in bucket.shares for a in share.axes}
    # Axes of size 1 count: products of blocks typed with them would be refused.
    typed = {a for axes in layout.type_key for a in axes}
    if not (typed | shared) - set(layout.manual):
        return set()
    return set(layout.known) - set(layout.manual)


def _take(stacks: Sequence[jax.Array], start: int, count: int) -> jax.Array:
    """Matrices `start` to `start + count` of the concatenated stacks."""
    pieces = []
    for stack in stacks:
        low, high = max(start, 0), min(start + count, stack.shape[0])
        if low < high:
            pieces.append(stack if high - low == stack.shape[0] else stack[low:high])
        start -= stack.shape[0]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _run_chunk(x: jax.Array, share: Share, leaf: Leaf, solver: Solver) -> jax.Array:
    """Runs matrices (count, *block) through their share's strategy."""
    group = _Group(leaf, share)
    if share.strategy == "local" or group.shards * group.replicas == 1:
        return solver.whole(x, leaf.view)
    if share.strategy == "all_to_all":
        return _by_owners(x, group, solver)
    return _by_replicas(x, group, solver)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The devices that work together on a chunk."""

    leaf: Leaf
    share: Share

    @property
    def shards(self) -> int:
        return self.leaf.layout.count(self.leaf.shard_axes)

    @property
    def replicas(self) -> int:
        return self.leaf.layout.count(self.share.axes)

    def own(self, x: jax.Array) -> jax.Array:
        """This replica's part of matrices whose number the replicas divide."""
        if self.replicas == 1:
            return x
        count = x.shape[0] // self.replicas
        return jax.lax.dynamic_slice_in_dim(x, _index(self.share.axes) * count, count)

    def all(self, x: jax.Array) -> jax.Array:
        """Undoes `own`: the parts of all replicas."""
        return _gather(x, self.share.axes if self.replicas > 1 else ())

    @property
    def ends_whole(self) -> bool:
        return self.leaf.home is not None

    def swap(self, x: jax.Array) -> jax.Array:
        """(shards, ...) by destination -> (shards, ...) by source."""
        return jax.lax.all_to_all(x, self.leaf.shard_axes, 0, 0) if self.shards > 1 else x

    def assemble(self, parts: jax.Array) -> jax.Array:
        """(shards, count, *block) -> whole matrices (count, *sizes)."""
        names, spec = self.leaf.shard_axes, self._spec
        count, block = parts.shape[1], parts.shape[2:]
        order = [len(names)]
        for i, axes in enumerate(spec):
            order += [*(names.index(a) for a in axes), len(names) + 1 + i]
        sizes = [n * self._count(axes) for n, axes in zip(block, spec, strict=True)]
        grid = parts.reshape(*(self._count((a,)) for a in names), count, *block)
        return grid.transpose(order).reshape(count, *sizes)

    def disassemble(self, whole: jax.Array) -> jax.Array:
        """Undoes `assemble`."""
        names, spec = self.leaf.shard_axes, self._spec
        grid, labels = [whole.shape[0]], [""]
        for n, axes in zip(whole.shape[1:], spec, strict=True):
            grid += [*(self._count((a,)) for a in axes), n // self._count(axes)]
            labels += [*axes, ""]
        rest = [i for i, label in enumerate(labels) if not label]
        order = [*(labels.index(a) for a in names), *rest]
        block = [grid[i] for i in rest]
        return whole.reshape(grid).transpose(order).reshape(self.shards, *block)

    @property
    def _spec(self) -> list[tuple[str, ...]]:
        return [self.leaf.layout.spec[a] for a in self.leaf.view.stack_axes]

    def _count(self, axes: tuple[str, ...]) -> int:
        return self.leaf.layout.count(axes)


def _by_owners(x: jax.Array, group: _Group, solver: Solver) -> jax.Array:
    """all_to_all: each device gathers its own matrices whole and sends the slices back."""
    if x.shape[0] < group.shards * group.replicas:
        return _rest_by_owners(x, group, solver)
    solve = functools.partial(solver.whole, view=group.leaf.view)
    return group.all(_there_and_back(group.own(x), group, solve))


def _rest_by_owners(x: jax.Array, group: _Group, solver: Solver) -> jax.Array:
    """all_to_all for fewer matrices than owners: those that `rest_owners` names have one."""
    count, each = x.shape[0], -(-x.shape[0] // group.replicas)
    replica, shard = divmod(group.share.offset, group.shards)
    x = group.own(jnp.roll(_pad(x, each * group.replicas), replica * each, axis=0))
    x = jnp.roll(_pad(x, group.shards), shard, axis=0)
    turn = (_index(group.share.axes) - replica) % group.replicas
    place = (_index(group.leaf.shard_axes) - shard) % group.shards
    has_one = (place < each) & (turn * each + place < count)

    def solve(whole: jax.Array) -> jax.Array:
        return jax.lax.cond(has_one, lambda y: solver.whole(y, group.leaf.view), lambda y: y, whole)

    x = jnp.roll(_there_and_back(x, group, solve), -shard, axis=0)
    return jnp.roll(group.all(x[:each]), -replica * each, axis=0)[:count]


def _there_and_back(
    x: jax.Array, group: _Group, solve: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Matrices of which a device has slices, through their owners."""
    whole = solve(group.assemble(group.swap(x.reshape(group.shards, -1, *x.shape[1:]))))
    if group.ends_whole:
        return _gather(whole, group.leaf.shard_axes)
    parts = group.swap(group.disassemble(whole))
    return parts.reshape(-1, *parts.shape[2:])


def _by_replicas(x: jax.Array, group: _Group, solver: Solver) -> jax.Array:
    """Gather and gram: all shards of a replica work on each of its matrices."""
    count = x.shape[0]
    x = group.own(_pad(x, -(-count // group.replicas) * group.replicas))
    solve = _solve_slices if group.share.strategy == "gram" else _solve_gathered
    return group.all(solve(x, group, solver))[:count]


def _solve_gathered(x: jax.Array, group: _Group, solver: Solver) -> jax.Array:
    axes = group.leaf.shard_axes
    if group.shards == 1:
        return solver.whole(x, group.leaf.view)
    parts = _gather(x[None], axes)
    whole = solver.whole(group.assemble(parts), group.leaf.view)
    if group.ends_whole:
        return whole
    index = jax.lax.axis_index(axes)
    return jax.lax.dynamic_index_in_dim(group.disassemble(whole), index, keepdims=False)


def _solve_slices(x: jax.Array, group: _Group, solver: Solver) -> jax.Array:
    axes, view, count = group.leaf.shard_axes, group.leaf.view, x.shape[0]
    rounded = -(-count // group.shards) * group.shards  # Gram matrices alone are padded
    block = dataclasses.replace(view, shape=group.leaf.layout.block)
    block = dataclasses.replace(block, block_sizes=(block.fan_out,))
    exchange = Exchange(
        maximum=lambda v: jax.lax.pmax(jax.lax.stop_gradient(v), axes),
        reduce=lambda r: jax.lax.psum_scatter(_pad(r, rounded), axes, tiled=True),
        spread=lambda q: jax.lax.all_gather(q, axes, tiled=True)[:count],
    )
    (matrices,) = block.split_stack(x)
    axis = -1 if view.fan_in <= view.fan_out else -2
    return block.merge_stack([solver.slices(matrices, axis, exchange, axes)])


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's place along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def _gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The blocks of all devices along mesh axes, one after the other: the same on each of them."""
    return jax.lax.all_gather(x, axes, tiled=True, to="invarying") if axes else x


def _pad(x: jax.Array, count: int) -> jax.Array:
    """Zero matrices up to `count`: finite, and never looked at again."""
    return jnp.pad(x, [(0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
