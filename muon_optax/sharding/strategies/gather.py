"""All-gather: every shard has each matrix whole, and keeps its slice of the result."""

import jax

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices, all_gather

__all__ = ["Gather"]


class Gather(Strategy):
    """Every shard repeats the work, and nothing is sent back.

    For L matrices of m x n with b bytes an element, over N shards: L mn b (N - 1)/N bytes and L F
    FLOPs. It takes one collective and no padding, so it is cheapest for few or tiny matrices.
    """

    name = "gather"

    def received_bytes(self, count: int, workload: Workload) -> int:
        return count * workload.slice_bytes * (workload.shards - 1)

    def gathered_bytes(self, count: int, workload: Workload) -> int:
        return 0

    def flops(self, count: int, workload: Workload) -> int:
        return count * workload.flops

    def collectives(self, count: int, workload: Workload) -> int:
        return 1

    def round_size(self, workload: Workload) -> int:
        return workload.replicas

    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        return "fewer bytes than a round of owners"

    def receive(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        if matrices.shards == 1:
            return x
        return matrices.assemble(all_gather(x[None], matrices.leaf.shard_axes))

    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        results = matrices.results
        if results.shards > 1:
            index = jax.lax.axis_index(results.leaf.shard_axes)
            y = jax.lax.dynamic_index_in_dim(results.disassemble(y), index, keepdims=False)
        return matrices.all(y)
