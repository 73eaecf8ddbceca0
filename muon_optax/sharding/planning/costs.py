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
    received_before: int | None = None,
) -> Cost:
    """Cost of `count` matrices under a strategy.

    Args:
      strategy: the strategy.
      count: L, the number of matrices.
      workload: their shape, dtype and sharding.
      device: the device model.
      received_before: where they join others in a round, bytes that a device receives in it without
        them: only the growth of the round is counted, and no latency.

    Returns:
      The cost.
    """
    n, r = workload.shards, workload.replicas
    per_replica = -(-count // r)
    received = strategy.received_bytes(per_replica, workload)
    flops = strategy.flops(per_replica, workload)
    from_replicas = per_replica * workload.result_bytes * (r - 1)
    collectives = strategy.collectives(workload) * (n > 1) + (r > 1)
    if received_before is not None:
        received, collectives = max(0, received - received_before), 0
    sizes = dict(workload.sizes)
    seconds = (
        flops / device.rate(workload.itemsize)
        + received / device.bandwidth_over(workload.shard_axes, sizes)
        + from_replicas / device.bandwidth_over(workload.replica_axes, sizes)
        + device.latency * collectives
    )
    return Cost(received + from_replicas, flops, seconds)
