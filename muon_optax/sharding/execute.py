"""How a chunk of matrices is brought together and sent back: one exchange for each strategy.

A device passes a chunk through `pick`, `receive`, `solve` and `send`, which a strategy overrides.
The *shards* of a matrix are the devices that hold its slices; *replicas* are groups of shards that
hold the same slices and share the matrices between them. Slices travel in the leaf's own layout;
only whole matrices are transposed, merged or cut into blocks.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from muon_optax.polar import GramExchange
from muon_optax.reshaping import reshaped
from muon_optax.sharding.buckets import Leaf, Share
from muon_optax.sharding.local import Solver
from muon_optax.sharding.surroundings import varying_axes

__all__ = ["Exchange", "exchange_for"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Matrices that are exchanged at once; without an exchange where they are whole already.

    Attributes:
      share: what the plan says of them.
      leaf: stands for the leaves that they come from.
      count: how many a device has a part of.
    """

    share: Share
    leaf: Leaf
    count: int

    def pick(self, x: jax.Array) -> jax.Array:
        """Slices (count, *block) -> those that this device's replica works on."""
        return x

    def receive(self, x: jax.Array) -> jax.Array:
        """What was picked -> what this device works on."""
        return x

    def solve(self, x: jax.Array, solver: Solver) -> jax.Array:
        """Orthogonalises what was received."""
        return solver.whole(x, self.leaf.view)

    def send(self, y: jax.Array) -> jax.Array:
        """Undoes `receive`."""
        return y

    @property
    def shards(self) -> int:
        """Devices that hold slices of a matrix."""
        return self.leaf.layout.count(self.leaf.shard_axes)

    @property
    def replicas(self) -> int:
        """Devices that hold the same slice and share the work."""
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
        """Whether results go whole to every device."""
        return self.leaf.home is not None

    def swap(self, x: jax.Array) -> jax.Array:
        """(shards, ...) by destination -> (shards, ...) by source."""
        return jax.lax.all_to_all(x, self.leaf.shard_axes, 0, 0) if self.shards > 1 else x

    def swap_joined(self, x: jax.Array) -> jax.Array:
        """The same for (shards * n, ...), from which leaves are cut.

        In this form XLA on CPU cuts each from the part that arrived, without joining the parts, and
        one kernel serves all leaves at the same place of a part. What is received can't have it:
        XLA would give the parts, joined of leaves, layouts that differ, and its verifier refuses.
        """
        if self.shards == 1:
            return x
        return jax.lax.all_to_all(x, self.leaf.shard_axes, 0, 0, tiled=True)

    def assemble(self, parts: jax.Array) -> jax.Array:
        """(shards, count, *block) -> whole matrices (count, *sizes)."""
        names, spec = self.leaf.shard_axes, self._spec
        count, block = parts.shape[1], parts.shape[2:]
        order = [len(names)]
        for i, axes in enumerate(spec):
            order += [*(names.index(a) for a in axes), len(names) + 1 + i]
        sizes = [n * self._count(axes) for n, axes in zip(block, spec, strict=True)]
        grid = parts.reshape(*(self._count((a,)) for a in names), count, *block)
        return reshaped(grid.transpose(order), (count, *sizes))

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
        return reshaped(whole, grid).transpose(order).reshape(self.shards, *block)

    @property
    def _spec(self) -> list[tuple[str, ...]]:
        return [self.leaf.layout.spec[a] for a in self.leaf.view.stack_axes]

    def _count(self, axes: tuple[str, ...]) -> int:
        return self.leaf.layout.count(axes)


class _AllToAll(Exchange):
    """Each device gathers its own matrices whole and sends the slices back.

    Fewer matrices than owners go to those that `rest_owners` names.
    """

    def pick(self, x: jax.Array) -> jax.Array:
        x = _pad(x, self._each * self.replicas)
        return self.own(_rolled(x, self._first[0] * self._each))

    def receive(self, x: jax.Array) -> jax.Array:
        x = _rolled(_pad(x, -(-self._each // self.shards) * self.shards), self._first[1])
        return self.assemble(self.swap(x.reshape(self.shards, -1, *x.shape[1:])))

    def solve(self, x: jax.Array, solver: Solver) -> jax.Array:
        solve = functools.partial(solver.whole, view=self.leaf.view)
        if not self.share.skips:
            return solve(x)
        replica, shard = self._first
        turn = (_index(self.share.axes) - replica) % self.replicas
        place = (_index(self.leaf.shard_axes) - shard) % self.shards
        has_one = (place < self._each) & (turn * self._each + place < self.count)
        typed = varying_axes(x)  # which a constant isn't
        return jax.lax.cond(has_one, lambda x: _varying(solve(x), typed), lambda x: x, x)

    def send(self, y: jax.Array) -> jax.Array:
        if self.ends_whole:
            x = _gather(y, self.leaf.shard_axes)
        else:
            parts = self.disassemble(y)
            x = self.swap_joined(parts.reshape(-1, *parts.shape[2:]))
        replica, shard = self._first
        x = self.all(_rolled(x, -shard)[: self._each])
        return _rolled(x, -replica * self._each)[: self.count]

    @property
    def _each(self) -> int:
        """Matrices of a replica."""
        return -(-self.count // self.replicas)

    @property
    def _first(self) -> tuple[int, int]:
        """Replica and shard of the first owner."""
        return divmod(self.share.offset, self.shards)


class _ByReplicas(Exchange):
    """All shards of a replica work on each of its matrices."""

    def pick(self, x: jax.Array) -> jax.Array:
        return self.own(_pad(x, -(-self.count // self.replicas) * self.replicas))

    def send(self, y: jax.Array) -> jax.Array:
        return self.all(y)[: self.count]


class _Gather(_ByReplicas):
    """Every shard has each matrix whole, and keeps its slice of the result."""

    def receive(self, x: jax.Array) -> jax.Array:
        if self.shards == 1:
            return x
        return self.assemble(_gather(x[None], self.leaf.shard_axes))

    def send(self, y: jax.Array) -> jax.Array:
        if self.shards > 1 and not self.ends_whole:
            index = jax.lax.axis_index(self.leaf.shard_axes)
            y = jax.lax.dynamic_index_in_dim(self.disassemble(y), index, keepdims=False)
        return super().send(y)


class _Gram(_ByReplicas):
    """Every shard keeps its slice; Gram matrices are summed, iterated by owners and spread."""

    def solve(self, x: jax.Array, solver: Solver) -> jax.Array:
        axes, view, count = self.leaf.shard_axes, self.leaf.view, x.shape[0]
        rounded = -(-count // self.shards) * self.shards  # Gram matrices alone are padded
        block = dataclasses.replace(view, shape=self.leaf.layout.block)
        block = dataclasses.replace(block, block_sizes=(block.fan_out,))
        exchange = GramExchange(
            maximum=lambda v: jax.lax.pmax(jax.lax.stop_gradient(v), axes),
            # Of a sum over all axes JAX asks that its type varies over each, or over none.
            reduce=lambda r: jax.lax.psum_scatter(
                _varying(_pad(r, rounded), axes), axes, tiled=True
            ),
            spread=lambda q: jax.lax.all_gather(q, axes, tiled=True)[:count],
        )
        (matrices,) = block.split_stack(x)
        axis = -1 if view.fan_in <= view.fan_out else -2
        return block.merge_stack([solver.slices(matrices, axis, exchange, axes)])


_EXCHANGES = {"local": Exchange, "all_to_all": _AllToAll, "gather": _Gather, "gram": _Gram}


def exchange_for(share: Share, leaf: Leaf, count: int) -> Exchange:
    """The exchange of a chunk of a share."""
    is_alone = leaf.layout.count((*leaf.shard_axes, *share.axes)) == 1
    return _EXCHANGES["local" if is_alone else share.strategy](share, leaf, count)


def _varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` with the type of what differs between the devices along mesh axes."""
    missing = tuple(set(axes) - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's place along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def _gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The blocks of all devices along mesh axes, one after the other: the same on each of them."""
    return jax.lax.all_gather(x, axes, tiled=True, to="invarying") if axes else x


def _pad(x: jax.Array, count: int) -> jax.Array:
    """Zero matrices up to `count`: finite, and never looked at again."""
    if x.shape[0] == count:
        return x
    return jnp.pad(x, [(0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def _rolled(x: jax.Array, by: int) -> jax.Array:
    """Matrices moved on by so many places, the last ones to the front."""
    return jnp.roll(x, by, axis=0) if by else x
