"""Figures of accelerators, by which strategies are compared."""

import dataclasses
import math

import jax
import numpy as np

from muon_optax._internal.checks import check_number

__all__ = ["DEVICES", "DeviceModel", "device_model"]


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """Figures of one accelerator.

    Attributes:
      name: as shown in tables.
      half_flops: FLOP/s of matmuls in half precision.
      single_flops: FLOP/s of matmuls in float32 at default precision.
      bandwidth: bytes/s that a device can receive from its neighbours.
      node_size: devices that are neighbours.
      slow_bandwidth: bytes/s that a device can receive from beyond them.
      latency: seconds for one collective.
      axis_bandwidth: bytes/s for single mesh axes, as pairs, instead of the above.
      overlaps: whether collectives run under matmuls, and the compiler keeps to the order that this
        takes.
      batch_elements: elements of the matrices that are multiplied in one batch, about, where
        nothing is sent; a stack of more goes through a loop, which needs less workspace.

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
    batch_elements: int = 2**24

    def __post_init__(self) -> None:
        rates = {n: getattr(self, n) for n in ("half_flops", "single_flops", "bandwidth")}
        rates |= {"node_size": self.node_size, "slow_bandwidth": self.slow_bandwidth}
        rates |= {"batch_elements": self.batch_elements}
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
        """Bytes/s for a collective over mesh axes: that of the slowest one.

        A mesh's last axes are taken to be within a node, as `jax.make_mesh` lays them.
        """
        given, reach, found = dict(self.axis_bandwidth), 1, [self.bandwidth]
        for axis, size in reversed(sizes.items()):
            reach *= size
            if axis in axes and size > 1:
                own = self.bandwidth if reach <= self.node_size else self.slow_bandwidth
                found.append(given.get(axis, own))
        return min(found)

    def bandwidth_in_groups(
        self, axes: tuple[str, ...], sizes: dict[str, int], group_size: int
    ) -> float:
        """Bytes/s within groups of so many devices that follow one another along mesh axes.

        Example:
          >>> cluster = DeviceModel("mine", 1e15, 5e14, 4e11, node_size=8, slow_bandwidth=5e10)
          >>> sizes = {"fsdp": 16, "tp": 4}
          >>> [cluster.bandwidth_in_groups(("fsdp", "tp"), sizes, n) for n in (8, 16)]
          [400000000000.0, 50000000000.0]
        """
        names = list(sizes)
        numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = [*(a for a in names if a not in axes), *axes]
        grouped = numbers.transpose([names.index(a) for a in order]).reshape(-1, group_size)
        nodes = grouped // self.node_size
        own = self.bandwidth if (nodes == nodes[:, :1]).all() else self.slow_bandwidth
        given, found, inner = dict(self.axis_bandwidth), [], 1
        for axis in reversed(axes):
            if inner < group_size and sizes[axis] > 1:
                found.append(given.get(axis, own))
            inner *= sizes[axis]
        return min(found, default=own)


# Dense peaks and link rates from the vendors' data sheets; a CPU device is a core's share. Batches
# were measured on CPU: one of 32 matrices of 64 x 256 takes 0.63 of the time of as many single
# ones, and a batch dim in front of a large matrix costs 1.3 to 1.5. On accelerators small matmuls
# leave most of the device idle, and 2**24 elements are some 100 MB of workspace.
DEVICES = {
    "h100": DeviceModel("h100", 989e12, 494e12, 450e9, 8, 50e9),
    "a100": DeviceModel("a100", 312e12, 156e12, 300e9, 8, 25e9),
    "tpu_v4": DeviceModel("tpu_v4", 275e12, 137e12, 300e9),
    "tpu_v5e": DeviceModel("tpu_v5e", 197e12, 98e12, 200e9),
    "tpu_v5p": DeviceModel("tpu_v5p", 459e12, 229e12, 600e9),
    "tpu_v6e": DeviceModel("tpu_v6e", 918e12, 459e12, 448e9),
    "cpu": DeviceModel("cpu", 50e9, 50e9, 5e9, overlaps=False, batch_elements=2**18),
}
# Part of JAX's name of a device -> its model. The first match decides: "v5e" comes before "v5".
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
      kind: JAX's name of the devices; None asks for those of this process.

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
