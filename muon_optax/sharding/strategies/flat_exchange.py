"""A round of owners that matrices of different shapes share: their slices are exchanged flat."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies.sharded_matrices import (
    ShardedMatrices,
    all_gather,
    index_along,
    rolled,
)
from muon_optax.sharding.trace_context import as_varying, varying_axes

__all__ = ["FlatExchange"]


@dataclasses.dataclass(frozen=True)
class FlatExchange:
    """Kinds of matrices that are sent to their owners at once, each owner getting one at most.

    Every collective is on one flat array, so that all devices take part in it. It has a row for
    each device, by number: the slice that this owner is sent, padded with zeros to the length of
    the longest. Where a group owns a matrix, each of its devices is sent a part of the slice.
    Owners of one kind follow those of the kind before. Only the work on whole matrices differs
    between devices, and is a branch.

    Attributes:
      kinds: the matrices of each shape, from the first owner on.
    """

    kinds: tuple[ShardedMatrices, ...]

    def receive(self, slices: Sequence[jax.Array]) -> jax.Array:
        """Slices (count, *block) of each kind, of this replica's matrices -> (shards, longest).

        On an owner these are the slices of its matrix; elsewhere zeros.
        """
        parts = [kind.to_parts(x) for kind, x in zip(self.kinds, slices, strict=True)]
        rows = [self._padded(x.reshape(x.shape[0], -1)) for x in parts]
        idle = self._first.shards - sum(x.shape[0] for x in rows)
        by_owner = jnp.pad(jnp.concatenate(rows), [(0, idle), (0, 0)])
        return self._first.swap(rolled(by_owner, self._first_shard))

    def orthogonalize(self, x: jax.Array, orthogonalizer: Orthogonalizer) -> jax.Array:
        """Orthogonalises the matrix of this device, if it has one."""
        function = functools.partial(self._orthogonalized, orthogonalizer)
        return self._by_kind(function, x, when_idle=lambda x: x)

    def send(self, y: jax.Array) -> tuple[jax.Array, ...]:
        """Undoes `receive`: the results (count, *block) of all matrices of each kind."""
        own = list(self._back(y))
        if axes := self._first.leaf.gathered_axes:
            slices = zip(self.kinds, self._of_all(own, axes), strict=True)
            own = [kind.joined(x) for kind, x in slices]
        if self._first.replicas == 1:
            return tuple(own)
        sent = [kind.sent(x) for kind, x in zip(self.kinds, own, strict=True)]
        rows = zip(self.kinds, own, self._of_all(sent, self._first.replica_axes), strict=True)
        return tuple(
            kind.from_replicas(x.reshape(-1, *x.shape[2:]), one.shape[1:]) for kind, one, x in rows
        )

    @property
    def _first(self) -> ShardedMatrices:
        return self.kinds[0]

    @property
    def _first_shard(self) -> int:
        return self._first.first_replica_and_shard[1]

    @property
    def _longest(self) -> int:
        return max(math.prod(kind.part.block) for kind in self.kinds)

    @property
    def _device(self) -> jax.Array | int:
        """This device's number among the owners."""
        device = index_along(self._first.replica_axes) * self._first.shards
        return device + index_along(self._first.leaf.shard_axes)

    @functools.cached_property
    def _kind_of_owner(self) -> np.ndarray:
        """For each device the index in `kinds` of its matrix; without one, the number of kinds."""
        found = np.full(self._first.shards * self._first.replicas, len(self.kinds), np.int32)
        for i, kind in enumerate(self.kinds):
            for member in range(kind.group_size):
                found[np.array(kind.owners) + member] = i
        return found

    def _by_kind(
        self,
        function: Callable[[ShardedMatrices, jax.Array], jax.Array],
        x: jax.Array,
        when_idle: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """A function of the kind of this device's matrix, and of `x`.

        Args:
          function: called once for each kind, in a branch where there are several.
          x: this device's array.
          when_idle: for devices without a matrix; None has them do as those of the last kind.
        """
        of_kinds = [functools.partial(function, kind) for kind in self.kinds]
        branches = of_kinds if when_idle is None else [*of_kinds, when_idle]
        if len(branches) == 1:
            return branches[0](x)
        # shard_map types a result by the axes it varies over, and all branches must have one type.
        typed = varying_axes(x)

        def typed_branch(branch: Callable[[jax.Array], jax.Array]) -> Callable:
            return lambda x: as_varying(branch(x), typed)

        branch_of_owner = np.minimum(self._kind_of_owner, len(branches) - 1)
        index = jnp.asarray(branch_of_owner)[self._device]
        return jax.lax.switch(index, [*map(typed_branch, branches)], x)

    def _padded(self, rows: jax.Array) -> jax.Array:
        missing = self._longest - rows.shape[1]
        return jnp.pad(rows, [(0, 0), (0, missing)]) if missing else rows

    def _orthogonalized(
        self, orthogonalizer: Orthogonalizer, kind: ShardedMatrices, x: jax.Array
    ) -> jax.Array:
        slices = x[:, : math.prod(kind.block)].reshape(kind.shards, 1, *kind.block)
        y = orthogonalizer.whole(kind.assemble(slices), kind.leaf.view)
        return self._padded(kind.disassemble(y).reshape(kind.shards, -1))

    def _back(self, y: jax.Array) -> Iterator[jax.Array]:
        """This device's slices of each kind."""
        rows = rolled(self._first.swap_joined(y), -self._first_shard)
        for kind, own in self._split(rows):
            yield kind.from_parts(own.reshape(-1, *kind.part.block))

    def _split(self, rows: jax.Array) -> Iterator[tuple[ShardedMatrices, jax.Array]]:
        """The rows of each kind, without padding."""
        start = 0
        for kind in self.kinds:
            end = start + kind.per_replica * kind.group_size
            yield kind, rows[start:end, : math.prod(kind.part.block)]
            start = end

    def _of_all(self, parts: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
        """The parts of all devices along mesh axes, (devices, *part), of all kinds at once."""
        joined = all_gather(jnp.concatenate([x.ravel() for x in parts])[None], axes)
        split = jnp.split(joined, np.cumsum([x.size for x in parts])[:-1], axis=1)
        pairs = zip(split, parts, strict=True)
        return [x.reshape(-1, *part.shape) for x, part in pairs]
