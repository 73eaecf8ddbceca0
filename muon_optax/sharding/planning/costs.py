"""The cost of a strategy on a mesh: bytes, FLOPs, and seconds on a device model.

Bytes are those that a device receives; FLOPs are those of the device that does most. Each strategy
counts its own, beside the collectives that send them. The part that is the same for all is added
here: of L matrices each of R replicas takes L/R, rounded up, and all-gathers the others' results,
L/R (R - 1) times the bytes of a result.
"""

import dataclasses

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
    joins: Workload | None = None,
) -> Cost:
    """Cost of `count` matrices under a strategy.

    Args:
      strategy: the strategy.
      count: L, the number of matrices.
      workload: their shape, dtype and sharding.
      device: the device model.
      joins: where they join others in a round, what that is as large as without them: only the
        growth of what a device receives in it is counted, and no latency; and only the growth of
        the FLOPs, where all devices work on matrices of its sizes.

    Returns:
      The cost.
    """
    n, r = workload.shards, workload.replicas
    per_replica = -(-count // r)
    received = strategy.received_bytes(per_replica, workload)
    summed = strategy.summed_bytes(per_replica, workload)
    flops = strategy.flops(per_replica, workload)
    from_replicas = per_replica * workload.result_bytes * (r - 1)
    collectives = strategy.collectives(workload) * (n > 1) + (r > 1)
    if joins is not None:
        both, collectives = strategy.joined(joins, workload), 0
        received = strategy.received_bytes(1, both) - strategy.received_bytes(1, joins)
        summed = strategy.summed_bytes(1, both) - strategy.summed_bytes(1, joins)
        if strategy.group > 1:
            flops = strategy.flops(1, both) - strategy.flops(1, joins)
    sizes = dict(workload.sizes)
    seconds = (
        flops / device.rate(workload.itemsize)
        + received / device.bandwidth_over(workload.shard_axes, sizes)
        + from_replicas / device.bandwidth_over(workload.replica_axes, sizes)
        + device.latency * collectives
    )
    if summed:
        group = strategy.group
        seconds += summed / device.bandwidth_in_groups(workload.shard_axes, sizes, group)
    return Cost(received + summed + from_replicas, flops, seconds)
