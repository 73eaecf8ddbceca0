"""Carries a plan out: chunk after chunk, the collectives of one under the matmuls of another.

All leaves that are mapped over the same mesh axes go through one shard_map, in rounds. In each

    chunk k + 1 is formed and received,
    chunk k is orthogonalised,
    chunk k - 1 is sent back.

The compiler is free to move operations that no data ties, so each round waits for all of the one
before, and within a round one thing waits for another where that saves memory; a device holds no
more than three chunks. Rounds that differ only in where their matrices begin are one loop. The
momentum mix is formed and rounded on the shards, inside the shard_map: outside, the partitioner
would move the collectives before it and send more.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.placement import on_mesh_of
from muon_optax.sharding.planning.buckets import Bucket
from muon_optax.sharding.runtime.barriers import barrier, materialized
from muon_optax.sharding.runtime.buffers import Arrays, Buffers, Elementwise, make_buffers
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.runtime.rounds import AnyChunk, Chunk, Round, chunks_of, rounds_of, runs

__all__ = ["run_buckets"]


def run_buckets(
    buckets: Iterable[Bucket],
    leaves: Sequence[BoundLeaf],
    orthogonalizer: Orthogonalizer,
    elementwise: Elementwise,
    scalars: Any,
    operands: Sequence[Arrays],
    *,
    is_ordered: bool,
) -> list[Arrays]:
    """Orthogonalises leaves.

    Args:
      buckets: from the planner.
      leaves: the leaves that were planned.
      orthogonalizer: how each matrix is orthogonalised.
      elementwise: the operations on shards before any collective, such as the momentum's update.
      scalars: a tree of scalars for `elementwise`, at least one: a chunk is held back by them.
      operands: for each leaf the same number of arrays, all sharded like the leaf.
      is_ordered: whether collectives and matmuls are put in an order; results are then written over
        what they are made of, and rounds can be a loop. XLA on CPU keeps to no order, and without
        barriers finds more to share: .6 of the time to compile 48 layers on 8 devices.

    Returns:
      The arrays that replace the operands: the result, in the leaf's dtype and sharded as results
      are to be, and the arrays that are kept.
    """
    by_mapping: dict[Any, list[Bucket]] = {}
    for bucket in buckets:
        by_mapping.setdefault((bucket.leaf.sharding.mesh, _axes_to_map(bucket)), []).append(bucket)
    found = dict(enumerate(operands))  # a leaf in no bucket is empty
    # No program of a user's function is kept: its closure may be large, traced, or change.
    run = _compiled_over_mesh if orthogonalizer.newton_schulz else _over_mesh
    for (mesh, axes), mapped in by_mapping.items():
        mine = {i: operands[i] for bucket in mapped for i in bucket.members}
        if axes:
            mine = {i: tuple(on_mesh_of(leaves[i].sharding, x) for x in mine[i]) for i in mine}
        pipeline = _Pipeline(tuple(mapped), tuple(leaves), orthogonalizer, elementwise, is_ordered)
        found |= run(pipeline, mesh, axes, scalars, mine)
    return [found[i] for i in range(len(leaves))]


def _over_mesh(
    pipeline: "_Pipeline",
    mesh: Any,
    axes: frozenset[str],
    scalars: Any,
    operands: dict[int, Arrays],
) -> dict[int, Arrays]:
    """Runs the pipeline on all devices, in a shard_map over the axes, if any."""
    run: Any = pipeline
    if axes:
        leaves = {i: pipeline.leaves[i] for i in operands}
        specs = {i: leaf.sharding.partition_spec for i, leaf in leaves.items()}
        ends = {i: (x.result_sharding or x.sharding).partition_spec for i, x in leaves.items()}
        out = {i: (ends[i], *[specs[i]] * (len(operands[i]) - 1)) for i in leaves}
        ins = (PartitionSpec(), specs)
        run = jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=out, axis_names=set(axes))
    return run(scalars, operands)


# One program, and kept, for updates outside of `jit`: JAX would run a shard_map operation by
# operation there, and compile each again in every step.
_compiled_over_mesh = jax.jit(_over_mesh, static_argnums=(0, 1, 2), inline=True)


def _axes_to_map(bucket: Bucket) -> frozenset[str]:
    """Mesh axes to make Manual for the leaves of a bucket, and to divide its work over replicas."""
    divided = {a for work_slice in bucket.slices for a in work_slice.replica_axes}
    return bucket.leaf.sharding.axes_to_map(divided)


@dataclasses.dataclass(frozen=True)
class _State:
    """The arrays that go from round to round.

    Attributes:
      scalars: for `elementwise`.
      received: the chunk that is orthogonalised next; () where there is none.
      orthogonalized: the chunk that is sent back next.
      arrays: of each leaf, as its `Buffers` have them.
      touched: leaves whose arrays were read or written since the last barrier.
    """

    scalars: Any
    received: Any
    orthogonalized: Any
    arrays: Mapping[int, Any]
    touched: frozenset[int] = frozenset()

    def replace(self, **changes: Any) -> "_State":
        return dataclasses.replace(self, **changes)

    def with_arrays(self, leaf: int, arrays: Any) -> "_State":
        """The state with a leaf's arrays replaced, and so touched."""
        return self.replace(arrays={**self.arrays, leaf: arrays}, touched=self.touched | {leaf})

    def arrays_of(self, leaves: Iterable[int]) -> dict[int, Any]:
        return {i: self.arrays[i] for i in sorted(leaves)}


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The program of one device."""

    buckets: tuple[Bucket, ...]
    leaves: tuple[BoundLeaf, ...]
    orthogonalizer: Orthogonalizer
    elementwise: Elementwise
    is_ordered: bool

    def __call__(self, scalars: Any, operands: dict[int, Arrays]) -> dict[int, Arrays]:
        chunks = chunks_of(self.buckets, self.leaves)
        buffers = self._buffers(chunks, operands)
        arrays = {i: buffers[i].start(x) for i, x in operands.items()}
        steps = _Rounds(buffers, self.orthogonalizer, self.is_ordered)
        state = _State(scalars, (), (), arrays)
        for first, *others in runs(rounds_of(chunks)):
            # The first one makes arrays that the others only write to, and settles their types.
            state = steps.round(state, first)
            if self.is_ordered and len(others) > 1:
                state = steps.loop(state, others)
            else:
                for each in others:
                    state = steps.round(state, each)
        return {i: x.finish(state.arrays[i], state.scalars) for i, x in buffers.items()}

    def _buffers(self, chunks: Sequence[AnyChunk], leaves: Iterable[int]) -> dict[int, Buffers]:
        pieces = [piece for chunk in chunks for piece in chunk.pieces]
        cut = {p.leaf for p in pieces if p.count < self.leaves[p.leaf].count}
        return {
            i: make_buffers(
                self.leaves[i], self.elementwise, is_cut=i in cut, is_ordered=self.is_ordered
            )
            for i in leaves
        }


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """Functions from the state before a round to that after it."""

    buffers: Mapping[int, Buffers]
    orthogonalizer: Orthogonalizer
    is_ordered: bool

    def round(self, state: _State, chunks: Round) -> _State:
        """Sends, orthogonalises and receives one chunk each."""
        coming, here, leaving = chunks
        values = (state.scalars, state.received, state.orthogonalized)
        (scalars, received, orthogonalized), state = self._wait(values, state)
        sent: Any = leaving.send(orthogonalized) if leaving else ()
        found: Any = here.orthogonalize(received, self._orthogonalizer_of(here)) if here else ()
        if coming:
            (scalars, sent), state = self._wait((scalars, sent), state)
        else:  # nobody reads the scalars again, and XLA drops unread operands from a barrier
            (found, sent), state = self._wait((found, sent), state)
        state = state.replace(scalars=scalars, received=(), orthogonalized=found)
        if leaving:
            state = self._put(state, leaving, sent)
        return self._receive(state, coming) if coming else state

    def loop(self, state: _State, run: Sequence[Round]) -> _State:
        """The rounds of a run, compiled once."""
        values = (state.scalars, state.received, state.orthogonalized)
        values, state = self._wait(values, state)  # touched arrays may be those of other leaves
        leaves = run[0].leaves

        def round_at(k: jax.Array, carry: Any) -> Any:
            (scalars, received, orthogonalized), arrays = carry
            before = _State(scalars, received, orthogonalized, arrays)
            after = self.round(before, run[0].moved(k))
            values = (after.scalars, after.received, after.orthogonalized)
            return values, after.arrays_of(leaves)

        carry = (values, state.arrays_of(leaves))
        (scalars, received, orthogonalized), arrays = jax.lax.fori_loop(
            0, len(run), round_at, carry
        )
        coming = run[0].coming
        kept = frozenset(p.leaf for p in coming.pieces) if coming else frozenset()
        arrays = {**state.arrays, **arrays}
        return _State(scalars, received, orthogonalized, arrays, touched=kept)

    def _orthogonalizer_of(self, chunk: AnyChunk) -> Orthogonalizer:
        """How the matrices of a chunk are orthogonalised: all at once, if others are on their way.

        XLA hides no collective under a loop.
        """
        if not (self.is_ordered and chunk.strategy.communicates):
            return self.orthogonalizer
        return dataclasses.replace(self.orthogonalizer, batch_elements=None)

    def _wait(self, values: Any, state: _State) -> tuple[Any, _State]:
        """The values, which wait for the arrays touched since the last time."""
        if not self.is_ordered:
            return values, state
        values, arrays = barrier((values, state.arrays_of(state.touched)))
        return values, state.replace(arrays={**state.arrays, **arrays}, touched=frozenset())

    def _receive(self, state: _State, chunk: AnyChunk) -> _State:
        """Forms and receives a chunk.

        The other operands are replaced at once, so that the first one's memory is free before
        results come back. They, and not the scalars alone, wait for the arrays formed of them: XLA
        sees constants through a barrier.
        """
        scalars, state = self._wait(state.scalars, state)
        picked = tuple(self._formed(state, kind, scalars) for kind in chunk.kinds)
        state = state.replace(touched=state.touched | {p.leaf for p in chunk.pieces})
        picked, state = self._wait(picked, state)
        for p in chunk.pieces:
            kept = self.buffers[p.leaf].keep(state.arrays[p.leaf], scalars, p.start, p.count)
            state = state.with_arrays(p.leaf, kept)
        return state.replace(scalars=scalars, received=chunk.receive(picked))

    def _formed(self, state: _State, chunk: Chunk, scalars: Any) -> jax.Array:
        """The part of a chunk that this replica picks."""
        formed = [
            self.buffers[p.leaf].form(state.arrays[p.leaf], scalars, p.start, p.count)
            for p in chunk.pieces
        ]
        if len(formed) == 1:
            return chunk.pick(chunk.pieces[0].transposed(self._materialized(formed[0])))
        joined = [p.transposed(x) for p, x in zip(chunk.pieces, formed, strict=True)]
        # Only after `pick`: before it, each leaf would be formed whole for every replica.
        return self._materialized(chunk.pick(jnp.concatenate(joined)))

    def _put(self, state: _State, chunk: AnyChunk, sent: Sequence[jax.Array]) -> _State:
        """Replaces the first operand of the leaves that a chunk comes from."""
        parts = [
            part
            for kind, results in zip(chunk.kinds, sent, strict=True)
            for part in self._parts(kind, results)
        ]
        for p, part in zip(chunk.pieces, parts, strict=True):
            buffers = self.buffers[p.leaf]
            arrays = buffers.put(state.arrays[p.leaf], part, p.start)
            touched = {p.leaf} if buffers.writes_results else set()
            state = state.replace(
                arrays={**state.arrays, p.leaf: arrays}, touched=state.touched | touched
            )
        return state

    def _parts(self, chunk: Chunk, results: jax.Array) -> list[jax.Array]:
        """The results of each piece."""
        if len(chunk.pieces) == 1:
            return [self._materialized(chunk.pieces[0].transposed(results))]
        ends = np.cumsum([p.count for p in chunk.pieces])
        parts = jnp.split(self._materialized(results), ends[:-1])
        return [p.transposed(x) for p, x in zip(chunk.pieces, parts, strict=True)]

    def _materialized(self, part: jax.Array) -> jax.Array:
        return materialized(part) if self.is_ordered else part
