"""All-to-all to owners: each matrix is whole on one device, once, and its slices go back."""

import functools

import jax

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.flat_exchange import FlatExchange
from muon_optax.sharding.strategies.sharded_matrices import (
    ShardedMatrices,
    index_along,
    padded,
    rolled,
)
from muon_optax.sharding.trace_context import as_varying, varying_axes

__all__ = ["AllToAll"]


class AllToAll(Strategy):
    """Each of N shards gathers 1/N of the matrices whole, and sends the slices of the results back.

    For L matrices of m x n with b bytes an element: ceil(L/N) 2 mn b (N - 1)/N bytes and
    ceil(L/N) F FLOPs.

    Results may be sharded over fewer mesh axes, as under ZeRO-1. In full rounds they come in
    their larger slices at once: by an all-to-all along these axes and an all-gather along the
    others, over P devices that shard them mn b/P (N - 1) bytes a round. This all-gather has a row
    of zeros for each owner without a matrix. Where it doesn't take fewer bytes, results come as
    matrices are sharded, and the slices of each are all-gathered.

    Where there are fewer matrices than owners, those that `loads.rest_owners` names get one each,
    and others may get matrices of another shape in the same round.
    """

    name = "all_to_all"
    has_owners = True
    shares_rounds = True

    def is_candidate(self, leaf: BoundLeaf, workload: Workload) -> bool:
        return workload.owners > 1

    def received_bytes(self, count: int, workload: Workload) -> int:
        owned = -(-count // workload.shards)
        return 2 * owned * workload.slice_bytes * (workload.shards - 1)

    def gathered_bytes(self, count: int, workload: Workload) -> int:
        rows = _gathered_rows(count, workload.shards)
        return min(count, rows) * (workload.result_bytes - workload.slice_bytes)

    def flops(self, count: int, workload: Workload) -> int:
        return -(-count // workload.shards) * workload.flops

    def collectives(self, count: int, workload: Workload) -> int:
        # Whole results come at once by an all-gather alone, without an all-to-all before it.
        are_whole = workload.gathered_axes == workload.shard_axes
        is_direct = _gathered_rows(count, workload.shards) < count
        return 2 + bool(workload.gathered_axes) - (are_whole and is_direct)

    def round_size(self, workload: Workload) -> int:
        return workload.owners

    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        if count >= workload.owners:
            return "each matrix whole on one device, once"
        matrices = "matrix" if count == 1 else "matrices"
        return f"{count} {matrices} for {workload.owners} owners, the least busy ones"

    def receive(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        shards = matrices.shards
        _, shard = matrices.first_replica_and_shard
        x = rolled(padded(x, -(-matrices.per_replica // shards) * shards), shard)
        return matrices.assemble(matrices.swap(x.reshape(shards, -1, *x.shape[1:])))

    def orthogonalize(
        self, matrices: ShardedMatrices, x: jax.Array, orthogonalizer: Orthogonalizer
    ) -> jax.Array:
        solve = functools.partial(orthogonalizer.whole, view=matrices.leaf.view)
        if not matrices.skips:
            return solve(x)
        _, shard = matrices.first_replica_and_shard
        shard_offset = (index_along(matrices.leaf.shard_axes) - shard) % matrices.shards
        each = matrices.per_replica
        number = matrices.replica_offset // matrices.repeats * each + shard_offset
        has_one = (shard_offset < each) & (number < matrices.count)
        # shard_map types a result by the axes it varies over, and both branches must have one type.
        # A constant that the iteration may return, as for an empty axis, varies over nothing.
        typed = varying_axes(x)
        return jax.lax.cond(has_one, lambda x: as_varying(solve(x), typed), lambda x: x, x)

    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        each = matrices.per_replica
        _, shard = matrices.first_replica_and_shard
        is_direct = _gathered_rows(each, matrices.shards) < each
        x = matrices.results_of_owners(y) if is_direct else matrices.slices_of_owners(y)
        x = rolled(x, -shard)[:each]
        return matrices.all(x if is_direct else matrices.gathered(x))

    def shared(self, kinds: tuple[ShardedMatrices, ...]) -> FlatExchange:
        return FlatExchange(kinds)


def _gathered_rows(count: int, shards: int) -> int:
    """Results that a device receives in all rounds, if they come in their larger slices at once."""
    return -(-count // shards) * (shards - 1)
