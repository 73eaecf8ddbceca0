"""How much of a program's collectives run under its matmuls, read from the schedule in its HLO.

A device is taken to do one thing after the other in the order of the schedule, matmuls at the rate
of a device model, while one collective at a time goes over the wire. Other work takes no time.
"""

import dataclasses
from collections.abc import Callable

from benchmarks.compiled import Collective, Counter
from benchmarks.hlo import Instruction, Module, parse
from muon_optax.sharding.planning.device_models import DeviceModel

__all__ = ["Overlap", "read_schedule"]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of one device's collectives run under its matmuls.

    Attributes:
      received: bytes received.
      covered: those of collectives that have a matmul between their start and their end.
      exchange_seconds: on the wire.
      exposed_seconds: those of them in which the matmuls wait.
      seconds: of matmuls and waiting.
    """

    received: int
    covered: int
    exchange_seconds: float
    exposed_seconds: float
    seconds: float

    @property
    def share_covered(self) -> float:
        """Share of the bytes with matmuls under them, 1 where nothing is sent."""
        return self.covered / self.received if self.received else 1.0

    @property
    def share_hidden(self) -> float:
        """Share of the time on the wire in which matmuls run, by the device model."""
        return 1 - self.exposed_seconds / self.exchange_seconds if self.received else 1.0


def read_schedule(text: str, device: DeviceModel, itemsize: int = 2) -> Overlap:
    """Reads a scheduled program.

    Args:
      text: optimised HLO with `is_scheduled=true`.
      device: gives the rates; its nodes are runs of so many devices.
      itemsize: bytes of an element in the matmuls.

    Returns:
      What overlaps.

    Raises:
      ValueError: if the program isn't scheduled, or a loop has no known trip count.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the program isn't scheduled: its order says nothing")
    walk = _Walk(parse(text), device, device.rate(itemsize))
    walk.run(walk.module.entry)
    return Overlap(walk.received, walk.covered, walk.exchange, walk.exposed, walk.clock)


@dataclasses.dataclass
class _Walk:
    """Goes through a program in the order of its schedule."""

    module: Module
    device: DeviceModel
    rate: float
    clock: float = 0.0  # when the matmuls so far end
    wire: float = 0.0  # when the collectives so far end
    exchange: float = 0.0
    exposed: float = 0.0
    flops: int = 0
    received: int = 0
    covered: int = 0

    def __post_init__(self) -> None:
        self._counter = Counter(self.module)

    def run(self, name: str) -> None:
        """Runs a computation once."""
        ends: dict[str, Callable[[], None]] = {}
        for i in self.module.computations[name]:
            if i.opcode.endswith("-done") and i.operands[0] in ends:
                ends.pop(i.operands[0])()
            elif collective := self._collective(name, i):
                end = self._start(collective)
                if i.opcode.endswith("-start"):
                    ends[i.name] = end
                else:
                    end()
            else:
                self._work(name, i)

    def _collective(self, name: str, i: Instruction) -> Collective | None:
        """The one that an instruction runs or starts."""
        found = self._counter.one(name, i).collectives
        is_one = i.collective or i.opcode == "async-start"
        return found[0] if is_one and found else None

    def _start(self, collective: Collective) -> Callable[[], None]:
        received, before = collective.received, self.flops
        seconds = received / self._bandwidth(collective)
        end = max(self.clock, self.wire) + seconds
        self.wire, self.exchange = end, self.exchange + seconds
        self.received += received

        def wait() -> None:
            self.covered += received * (self.flops > before)
            self.exposed += max(0.0, end - self.clock)
            self.clock = max(self.clock, end)

        return wait

    def _bandwidth(self, collective: Collective) -> float:
        nodes = [{device // self.device.node_size for device in g} for g in collective.groups]
        is_near = all(len(group) == 1 for group in nodes)
        return self.device.bandwidth if is_near else self.device.slow_bandwidth

    def _work(self, name: str, i: Instruction) -> None:
        total = self._counter.one(name, i)
        if total.collectives:
            times = self._counter.times(i) if i.opcode == "while" else 1
            for _ in range(times):
                for called in i.called:
                    self.run(called)
            return
        self.flops += total.flops
        self.clock += total.flops / self.rate
