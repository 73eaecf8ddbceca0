"""What a compiled program sends and multiplies, read from its optimised HLO.

`read_program(compiled)` counts collectives and matmuls as often as they run:
loops are multiplied out by their trip counts, and of a conditional's branches the costliest counts.

XLA on CPU widens half-precision exchanges to float32, so bfloat16 bytes must be read from a program
compiled for an accelerator.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks.hlo import Groups, Instruction, Module, array_sizes, parse

__all__ = ["Collective", "Counter", "Program", "Total", "read_program"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute'.
      size: bytes of its result on one device.
      groups: the devices that exchange with each other, by their number in the program.
      times: how often it runs.
    """

    kind: str
    size: int
    groups: Groups
    times: int = 1

    @property
    def group_size(self) -> int:
        """N, the number of devices in the largest group."""
        return max(map(len, self.groups), default=1)

    @property
    def received(self) -> int:
        """Bytes that one device receives each time, where nothing is sent twice.

        Example:
          >>> Collective("all-gather", 800, ((0, 1, 2, 3),)).received
          600
        """
        n = self.group_size
        if self.kind == "collective-permute":
            return self.size if self.groups else 0
        part = {"reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}
        return round(self.size * part.get(self.kind, (n - 1) / n))


@dataclasses.dataclass(frozen=True)
class Program:
    """What one run of a program costs each device.

    Attributes:
      collectives: those that move anything.
      flops: FLOPs of the matmuls, a multiply-add being 2.
      exchanges_between_products: the most collectives on one path of the data with a matmul before
        the first and one after the last. It is 0 where whole matrices are orthogonalised, as all
        exchange then comes before a matrix's first matmul or after its last, but for stacks that
        are written chunk by chunk: data flows from one matrix to the next through those.
      instructions: the number of instructions, a measure of the work of compiling.
    """

    collectives: tuple[Collective, ...]
    flops: int
    exchanges_between_products: int
    instructions: int

    @property
    def received(self) -> int:
        """Bytes that one device receives."""
        return _received(self.collectives)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of collective runs."""
        return self._sums(lambda _: 1)

    @property
    def received_by_kind(self) -> dict[str, int]:
        """Bytes that one device receives through each kind of collective."""
        return self._sums(lambda c: c.received)

    def _sums(self, value: Callable[[Collective], int]) -> dict[str, int]:
        sums: dict[str, int] = collections.Counter()
        for c in self.collectives:
            sums[c.kind] += value(c) * c.times
        return dict(sums)


def read_program(program: jax.stages.Compiled | str) -> Program:
    """Reads a program.

    Args:
      program: what `jit(f).lower(...).compile()` gives, or its optimised HLO.

    Returns:
      What it costs.

    Raises:
      ValueError: if a loop that exchanges or multiplies has no known trip count.

    Example:
      >>> x = jax.numpy.ones((4, 8))
      >>> read_program(jax.jit(lambda x: x @ x.T).lower(x).compile()).flops
      256
    """
    text = program if isinstance(program, str) else program.as_text()
    module = parse(text or "")
    total = Counter(module).count(module.entry)
    flow = _Flow(module)
    flow.run(module.entry, [])
    instructions = sum(map(len, module.computations.values()))
    return Program(total.collectives, total.flops, flow.between, instructions)


@dataclasses.dataclass(frozen=True)
class Total:
    """Collectives and FLOPs of a part of a program."""

    collectives: tuple[Collective, ...] = ()
    flops: int = 0

    def __add__(self, other: "Total") -> "Total":
        return Total(self.collectives + other.collectives, self.flops + other.flops)

    def __mul__(self, times: int) -> "Total":
        repeated = (dataclasses.replace(c, times=c.times * times) for c in self.collectives)
        return Total(tuple(repeated), self.flops * times)


class Counter:
    """Counts what computations cost."""

    def __init__(self, module: Module):
        self._module = module
        self.count = functools.cache(self._count)
        self._types = functools.cache(
            lambda name: {i.name: i.type for i in module.computations[name]}
        )

    def _count(self, name: str) -> Total:
        return sum((self.one(name, i) for i in self._module.computations[name]), Total())

    def one(self, name: str, i: Instruction) -> Total:
        """What one instruction of a computation costs, with all that it calls."""
        if i.collective:
            found = Collective(i.collective, i.result_bytes, i.groups(self._module.devices))
            return Total((found,) if found.received else ())
        if i.is_product:
            types = self._types(name)
            return Total(flops=_product_flops(i, [types[o] for o in i.operands[:2]]))
        return self._calls(i) if i.called else Total()

    def _calls(self, i: Instruction) -> Total:
        inner = [self.count(name) for name in i.called]
        if i.opcode == "conditional":
            most = max(inner, key=lambda total: _received(total.collectives))
            return Total(most.collectives, max(total.flops for total in inner))
        total = sum(inner, Total())
        return total if i.opcode != "while" or total == Total() else total * self.times(i)

    def times(self, loop: Instruction) -> int:
        """How often a loop's body runs; raises ValueError where nothing says it."""
        times = loop.trip_count or self._limit(loop)
        if times is None:
            raise ValueError(f"the loop {loop.name} has no known trip count")
        return times

    def _limit(self, loop: Instruction) -> int | None:
        """What an integer counter is compared with, where the compiler notes no trip count.

        The loops of `jax.lax.scan` and `map` count from zero, one by one.
        """
        condition = self._module.computations[loop.attribute(r"condition=%?([\w.\-]+)") or ""]
        by_name = {i.name: i for i in condition}
        (root,) = (i for i in condition if i.is_root)
        if root.opcode != "compare" or root.attribute("direction=(LT)") is None:
            return None
        counter, limit = (by_name[name] for name in root.operands)
        is_counter = counter.opcode == "get-tuple-element" and counter.type.startswith("s32[]")
        return int(limit.operands[0]) if is_counter and limit.opcode == "constant" else None


def _received(collectives: Sequence[Collective]) -> int:
    return sum(c.received * c.times for c in collectives)


def _product_flops(i: Instruction, operands: Sequence[str]) -> int:
    """2 × the size of the result × the length of the sum."""
    out, left, right = (array_sizes(kind) for kind in (i.type, *operands))
    if i.opcode == "dot":
        dims = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        length = math.prod(left[int(d)] for d in dims.split(",") if d)
    elif i.opcode == "convolution":  # how XLA writes matmuls for TPUs
        labels = i.attribute(r"dim_labels=(\w+)_") or "f"
        length = left[labels.index("f")]
    else:  # B·M·K and B·K·N give B·M·N
        batch = math.prod(out[:-2])
        length = math.isqrt(math.prod(left) * math.prod(right) // (math.prod(out) * batch))
    return 2 * math.prod(out) * length


@dataclasses.dataclass(frozen=True)
class _Way:
    """The way of the data to a value.

    Attributes:
      multiplied: whether there was a matmul.
      pending: collectives since the first matmul.
      between: those of them that another matmul followed.
    """

    multiplied: bool = False
    pending: int = 0
    between: int = 0


class _Flow:
    """Follows the data through computations; the value of a tuple is a list."""

    def __init__(self, module: Module):
        self._module = module
        self.between = 0

    def run(self, name: str, arguments: Sequence[Any]) -> Any:
        """The way to the result of a computation, from those to its parameters."""
        values, result = {}, _Way()
        for i in self._module.computations[name]:
            operands = [values[o] for o in i.operands if o in values]
            value = values[i.name] = self._value(i, operands, arguments)
            self.between = max(self.between, _joined([value]).between)
            result = value if i.is_root else result
        return result

    def _value(self, i: Instruction, operands: list[Any], arguments: Sequence[Any]) -> Any:
        if i.opcode == "parameter":
            index = int(i.operands[0])
            return arguments[index] if index < len(arguments) else _Way()
        if i.opcode == "tuple":
            return operands
        if i.opcode == "get-tuple-element" and isinstance(operands[0], list):
            return operands[0][int(i.attribute(r"index=(\d+)") or 0)]
        if i.opcode in ("opt-barrier", "copy") and len(operands) == 1:
            return operands[0]
        if i.collective:
            way = _joined(operands)
            return dataclasses.replace(way, pending=way.pending + way.multiplied)
        if i.is_product:
            way = _joined(operands)
            return _Way(True, way.pending, max(way.between, way.pending))
        return self._called(i, operands) if i.called else _joined(operands)

    def _called(self, i: Instruction, operands: list[Any]) -> Any:
        if i.opcode == "conditional":
            pairs = zip(i.called, operands[1:], strict=True)
            return functools.reduce(_merged, [self.run(name, [x]) for name, x in pairs])
        if i.opcode != "while":
            return self.run(i.called[0], operands)
        value = operands[0]
        for _ in range(2):  # what one round sends, the next may multiply
            value = _merged(value, self.run(i.called[0], [value]))
        return value


def _ways(value: Any) -> Iterator[_Way]:
    for part in value if isinstance(value, list) else [value]:
        yield from _ways(part) if isinstance(part, list) else [part]


def _joined(values: list[Any]) -> _Way:
    ways = list(_ways(values))
    if not ways:
        return _Way()
    return _Way(
        any(way.multiplied for way in ways),
        max(way.pending for way in ways),
        max(way.between for way in ways),
    )


def _merged(one: Any, other: Any) -> Any:
    """The join of two values of one type."""
    if isinstance(one, list) and isinstance(other, list):
        return [_merged(a, b) for a, b in zip(one, other, strict=True)]
    return _joined([one, other])
