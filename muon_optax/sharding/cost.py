"""Bytes, FLOPs and seconds of a strategy on a model of a device.

Bytes are those a device receives; FLOPs are those of the device that does most. There are L
matrices of m x n (m <= n), of b bytes an element and F FLOPs each; N devices shard a matrix, of
which one lacks the part f = (N - 1) / N, and R devices replicate each slice; the Gram iteration
restarts r times:

    strategy     bytes                                          FLOPs
    local        0                                              L F
    gather       L/R mn b f          + L mn/N b (R - 1)/R       L/R F
    all_to_all   L/(N R) 2 mn b f    + L mn/N b (R - 1)/R       L/(N R) F
    gram         (1 + r) L/R m^2 8 f + L mn/N b (R - 1)/R       L/R (products) / N + L/(N R) (steps)

The second term is the same for all that share work: each replica's results, sent to the others.
Gram matrices travel in float32, summed one way and spread the other: 8 bytes an element. Quotients
are rounded up: padding is paid for. Results that end whole on every device (ZeRO-1) cost their
slices' way back N times under all_to_all, and nothing under gather.
"""

import dataclasses
from typing import Literal

import jax

from muon_optax.checks import check_number
from muon_optax.polar import NewtonSchulz

__all__ = ["DEVICES", "Cost", "DeviceModel", "Strategy", "Work", "device_model", "estimate"]

Strategy = Literal["local", "gather", "all_to_all", "gram"]


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """Figures of one accelerator.

    Attributes:
      name: as shown in tables.
      half_flops: FLOP/s of products in half precision.
      single_flops: FLOP/s of products in float32 at default precision.
      bandwidth: bytes/s that a device can receive from its neighbours.
      node_size: devices that are neighbours.
      slow_bandwidth: bytes/s that a device can receive from beyond them.
      latency: seconds for one collective.
      axis_bandwidth: bytes/s for single mesh axes, as pairs, instead of the above.
      overlaps: whether exchanges run under products, and the compiler keeps to the order that this
        takes.

    Raises:
      TypeError: for a figure that is no number.
      ValueError: for a rate that isn't finite and above 0, or a negative latency.

    Example:
      >>> cluster = DeviceModel("mine", 1e15, 5e14, 4e11, node_size=8, slow_bandwidth=5e10)
      >>> sizes = {"replica": 4, "fsdp": 8}  # in the mesh's order
      >>> cluster.bandwidth_over(("fsdp",), sizes), cluster.bandwidth_over(("replica",), sizes)
      (400000000000.0, 50000000000.0)
    """

    name: str
    half_flops: float
    single_flops: float
    bandwidth: float
    node_size: int = 2**20
    slow_bandwidth: float = 25e9
    latency: float = 1e-5
    axis_bandwidth: tuple[tuple[str, float], ...] = ()
    overlaps: bool = True

    def __post_init__(self) -> None:
        rates = {n: getattr(self, n) for n in ("half_flops", "single_flops", "bandwidth")}
        rates |= {"node_size": self.node_size, "slow_bandwidth": self.slow_bandwidth}
        rates |= {f"axis_bandwidth of {axis}": rate for axis, rate in self.axis_bandwidth}
        for name, value in rates.items():
            check_number(name, value)
            if not value:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        check_number("latency", self.latency)

    def rate(self, itemsize: int) -> float:
        """FLOP/s for elements of this size."""
        return self.half_flops if itemsize < 4 else self.single_flops

    def bandwidth_over(self, axes: tuple[str, ...], sizes: dict[str, int]) -> float:
        """Bytes/s for an exchange over mesh axes: that of the slowest one.

        A mesh's last axes are taken to lie within a node, as `jax.make_mesh` lays them.
        """
        given, reach, found = dict(self.axis_bandwidth), 1, [self.bandwidth]
        for axis, size in reversed(sizes.items()):
            reach *= size
            if axis in axes and size > 1:
                own = self.bandwidth if reach <= self.node_size else self.slow_bandwidth
                found.append(given.get(axis, own))
        return min(found)


# Dense peaks and link rates from the vendors' data sheets; a CPU device is a core's share.
DEVICES = {
    "h100": DeviceModel("h100", 989e12, 494e12, 450e9, 8, 50e9),
    "a100": DeviceModel("a100", 312e12, 156e12, 300e9, 8, 25e9),
    "tpu_v4": DeviceModel("tpu_v4", 275e12, 137e12, 300e9),
    "tpu_v5e": DeviceModel("tpu_v5e", 197e12, 98e12, 200e9),
    "tpu_v5p": DeviceModel("tpu_v5p", 459e12, 229e12, 600e9),
    "tpu_v6e": DeviceModel("tpu_v6e", 918e12, 459e12, 448e9),
    "cpu": DeviceModel("cpu", 50e9, 50e9, 5e9, overlaps=False),
}
# Part of what JAX calls a device -> its model. The first match decides: "v5e" comes before "v5".
_KINDS = (
    ("h100", "h100"),
    ("h200", "h100"),
    ("a100", "a100"),
    ("v5 lite", "tpu_v5e"),
    ("v5e", "tpu_v5e"),
    ("v6", "tpu_v6e"),
    ("v5", "tpu_v5p"),
    ("v4", "tpu_v4"),
    ("cpu", "cpu"),
)


def device_model(device: str | DeviceModel, kind: str | None = None) -> DeviceModel:
    """The model meant by a name; 'auto' goes by the kind of device, an H100 if that is unknown.

    Args:
      device: a key of `DEVICES`, 'auto', or a model of one's own.
      kind: what JAX calls the devices; None asks for those of this process.

    Returns:
      The model.

    Raises:
      ValueError: for an unknown name.

    Example:
      >>> device_model("auto", "TPU v5 lite").name
      'tpu_v5e'
    """
    if isinstance(device, DeviceModel):
        return device
    if device == "auto":
        kind = (kind or jax.devices()[0].device_kind).lower()
        return DEVICES[next((name for part, name in _KINDS if part in kind), "h100")]
    if device not in DEVICES:
        allowed = ("auto", *DEVICES)
        raise ValueError(f"device must be one of {allowed} or a DeviceModel, got {device!r}")
    return DEVICES[device]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a bucket's cost depends on.

    Attributes:
      rows, columns: m <= n of one (fused) matrix.
      itemsize: bytes of an element in the exchange.
      flops: FLOPs to orthogonalise one matrix.
      shard_axes: mesh axes that shard a matrix.
      share_axes: replicating axes to share work over.
      sizes: size of each mesh axis, as pairs in the mesh's order.
      ends_whole: whether results go whole to every device, instead of back as slices.
    """

    rows: int
    columns: int
    itemsize: int
    flops: int
    shard_axes: tuple[str, ...]
    share_axes: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    ends_whole: bool = False

    def count(self, axes: tuple[str, ...]) -> int:
        """Number of devices along axes."""
        count = 1
        for axis, size in self.sizes:
            count *= size if axis in axes else 1
        return count

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one whole matrix in the exchange."""
        return self.rows * self.columns * self.itemsize

    @property
    def owners(self) -> int:
        """Devices that can each own a matrix."""
        return self.shards * self.replicas

    @property
    def shards(self) -> int:
        """N, the devices that a matrix is sharded over."""
        return self.count(self.shard_axes)

    @property
    def replicas(self) -> int:
        """R, the devices that share work on replicated matrices."""
        return self.count(self.share_axes)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device receives and the busiest one computes.

    Attributes:
      bytes: bytes received.
      flops: FLOPs.
      seconds: time on the device model, exchange and products one after the other.
    """

    bytes: int
    flops: int
    seconds: float


def estimate(
    strategy: Strategy, count: int, work: Work, device: DeviceModel, solver: NewtonSchulz | None
) -> Cost:
    """Cost of `count` matrices under a strategy.

    Args:
      strategy: the strategy.
      count: L, the number of matrices.
      work: what they are.
      device: the device model.
      solver: the Newton-Schulz that runs, needed for 'gram'.

    Returns:
      The cost.
    """
    if strategy == "local":
        flops = count * work.flops
        return Cost(0, flops, flops / device.rate(work.itemsize))
    n, r = work.shards, work.replicas
    per_replica = -(-count // r)
    exchanged, flops = _exchanged_and_flops(strategy, per_replica, work, solver)
    returned = per_replica * _result_bytes(work) * (r - 1)
    sizes = dict(work.sizes)
    collectives = _collectives(strategy, solver) * (n > 1) + (r > 1)
    seconds = (
        flops / device.rate(work.itemsize)
        + exchanged / device.bandwidth_over(work.shard_axes, sizes)
        + returned / device.bandwidth_over(work.share_axes, sizes)
        + device.latency * collectives
    )
    return Cost(exchanged + returned, flops, seconds)


def _collectives(strategy: Strategy, solver: NewtonSchulz | None) -> int:
    """Collectives among the shards, for the latency."""
    if strategy != "gram":
        return {"gather": 1, "all_to_all": 2}[strategy]
    assert solver is not None
    return 2 * solver.schedule.passes + 2  # in and out, the largest entries and the scales


def _exchanged_and_flops(
    strategy: Strategy, count: int, work: Work, solver: NewtonSchulz | None
) -> tuple[int, int]:
    """Bytes that a shard receives from the others, and its FLOPs, for a replica's matrices."""
    n, matrix = work.shards, work.matrix_bytes
    owned = -(-count // n)
    if strategy == "gather":
        return count * matrix * (n - 1) // n, count * work.flops
    if strategy == "all_to_all":
        return owned * (matrix // n + _result_bytes(work)) * (n - 1), owned * work.flops
    assert solver is not None
    passes = solver.schedule.passes
    gram = work.rows**2 * max(4, work.itemsize)
    # Products with X are done on slices, the steps by the owner.
    is_half = work.itemsize < 4
    products, steps = solver.gram_flops(work.rows, work.columns, is_half=is_half)
    return 2 * passes * owned * gram * (n - 1), count * products // n + owned * steps


def _result_bytes(work: Work) -> int:
    """Bytes of a result as it ends on a device."""
    return work.matrix_bytes if work.ends_whole else work.matrix_bytes // work.shards
