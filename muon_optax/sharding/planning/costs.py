"""The cost of a strategy on a mesh: bytes, FLOPs, and seconds on a device model.

Bytes are those that a device receives; FLOPs are those of the device that does most. Each strategy
counts its own, beside the collectives that send them. The part that is the same for all is added
here: of L matrices each of R replicas takes L/R, rounded up, and all-gathers the others' results,
L/R (R - 1) times the bytes of a result. Of fewer matrices than replicas, several may take the same
one, and each sends a part of its result.
"""

import dataclasses
from collections.abc import Callable

from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies.base import Strategy

__all__ = ["Cost", "estimate"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that one device receives, and FLOPs of the busiest one.

    Attributes:
      bytes: bytes received.
      flops: FLOPs.
      seconds: time on the device model, collectives and matmuls one after the other.
    """

    bytes: int
    flops: int
    seconds: float


def estimate(
    strategy: Strategy,
    count: int,
    workload: Workload,
    device: DeviceModel,
    padded_before: Workload | None = None,
    repeats: int = 1,
) -> Cost:
    """Cost of `count` matrices under a strategy.

    Args:
      strategy: the strategy.
      count: L, the number of matrices.
      workload: their shape, dtype and sharding.
      device: the device model.
      padded_before: where they join a round, the sizes to which its matrices are padded without
        them. Then only the growth of the bytes that a device receives in the round is counted, and
        no latency. Of FLOPs too only the growth is, where groups work on padded matrices.
      repeats: how many replicas work on each matrix, and send a part of its result.

    Returns:
      The cost.
    """
    n, r = workload.shards, workload.replicas
    per_replica = -(-count // r)
    received = strategy.received_bytes(per_replica, workload)
    gathered = strategy.gathered_bytes(per_replica, workload)
    summed = strategy.summed_bytes(per_replica, workload)
    flops = strategy.flops(per_replica, workload)
    from_replicas = per_replica * workload.result_bytes // repeats * (r - 1)
    collectives = strategy.collectives(per_replica, workload) * (n > 1) + (r > 1)
    if padded_before is not None:
        padded, collectives = strategy.padded_workload(padded_before, workload), 0
        received = _growth(strategy.received_bytes, padded_before, padded)
        summed = _growth(strategy.summed_bytes, padded_before, padded)
        if strategy.group_size > 1:
            flops = _growth(strategy.flops, padded_before, padded)
    sizes = dict(workload.sizes)
    seconds = (
        flops / device.rate(workload.itemsize)
        + received / device.bandwidth_over(workload.shard_axes, sizes)
        + gathered / device.bandwidth_over(workload.gathered_axes, sizes)
        + from_replicas / device.bandwidth_over(workload.replica_axes, sizes)
        + device.latency * collectives
    )
    if summed:
        size = strategy.group_size
        seconds += summed / device.bandwidth_in_groups(workload.shard_axes, sizes, size)
    return Cost(received + gathered + summed + from_replicas, flops, seconds)


def _growth(cost: Callable[[int, Workload], int], before: Workload, after: Workload) -> int:
    """How much more a round costs, by bytes or FLOPs, that is padded to other sizes."""
    return cost(1, after) - cost(1, before)
