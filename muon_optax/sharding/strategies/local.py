"""No communication: every device that has a matrix has it whole."""

import jax

from muon_optax.orthogonalization import NewtonSchulz
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices

__all__ = ["Local"]


class Local(Strategy):
    """Each device orthogonalises all matrices that it holds: L matrices cost L F FLOPs, no bytes.

    Replicas repeat each other's work.
    """

    name = "local"
    communicates = False
    copies_held = 1  # results are written over their operands

    def why_impossible(self, leaf: BoundLeaf, newton_schulz: NewtonSchulz | None) -> str | None:
        return "the matrix is sharded" if leaf.shard_axes else None

    def is_candidate(self, leaf: BoundLeaf, workload: Workload) -> bool:
        return workload.owners == 1

    def received_bytes(self, count: int, workload: Workload) -> int:
        return 0

    def flops(self, count: int, workload: Workload) -> int:
        return count * workload.flops

    def collectives(self, count: int, workload: Workload) -> int:
        return 0

    def round_size(self, workload: Workload) -> int:
        return 1

    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        if workload.count(leaf.sharding.free) > 1:
            return "repeating it takes less time than sharing it"
        return "matrices are whole here"

    def pick(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        return x

    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        return y
