"""Parses the text of optimised HLO, as XLA writes it for CPU, GPU and TPU."""

import dataclasses
import math
import re

import numpy as np

__all__ = ["COLLECTIVES", "Groups", "Instruction", "Module", "array_sizes", "parse"]

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
Groups = tuple[tuple[int, ...], ...]

_GEMM_TARGETS = ("matmul", "gemm")  # __onednn$matmul, __cublas$gemm, __cublas$lt$matmul, ...
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>[^ ]*)\))? ?"
    r"\{(?P<axes>.*?)\}"
)
_CALLED = re.compile(r"(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: its name, unique in its computation.
      type: the type of its result.
      opcode: as written, with '-start' and '-done'.
      operands: names of other instructions; for others, what stands in the parentheses.
      attributes: what follows the parentheses.
      is_root: whether it is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def collective(self) -> str | None:
        """The kind of collective that it runs or starts."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        if self.opcode != "custom-call":
            return self.opcode in ("dot", "convolution")
        target = self.attribute(r'custom_call_target="([^"]*)"') or ""
        return any(name in target for name in _GEMM_TARGETS)

    @property
    def called(self) -> list[str]:
        """Computations that run as part of it; the adders of reductions don't count."""
        if self.opcode in ("custom-call", "async-update", "async-done"):
            return []
        if branches := self.attribute(r"branch_computations=\{([^}]*)\}"):
            return [name.strip(" %") for name in branches.split(",")]
        applied = self.attribute(r"to_apply=%?([\w.\-]+)")
        if self.opcode == "call" and applied:
            return [applied]
        return _CALLED.findall(self.attributes)

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, where the compiler knows."""
        found = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None

    @property
    def result_bytes(self) -> int:
        """Bytes of the result; a collective's start has its operands beside it."""
        kind = self.type
        if self.opcode.endswith("-start") and self.collective != "all-reduce":
            kind = _elements(kind)[1]
        return sum(_bytes(*found) for found in _ARRAY.findall(kind))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes, None where nothing matches."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    def groups(self, devices: int) -> Groups:
        """The devices of each group of a collective, out of so many in the program."""
        if pairs := self.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}"):
            return tuple(pair for pair in _lists(pairs) if pair[0] != pair[1])
        if shape := self.attribute(r"replica_groups=\[([\d,]+)\]<="):
            ids = _order(self.attribute(r"replica_groups=\S+?<=(\S+?\]\S*)") or "")
            return tuple(map(tuple, ids.reshape(_ints(shape)).tolist()))
        if found := _MESH_GROUPS.search(self.attributes):
            return _along_axes(
                found["sizes"], found["axes"], _order(found["ids"] or f"[{devices}]")
            )
        listed = self.attribute(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
        if listed is None:
            raise ValueError(f"no replica groups that can be read in {self.attributes[:200]!r}")
        return _lists(listed) or (tuple(range(devices)),)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: the instructions of each computation; operands come before their users.
      entry: the computation to run.
      devices: how many devices run it.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int


def parse(text: str) -> Module:
    """Parses a program.

    Args:
      text: optimised HLO.

    Returns:
      Its computations.

    Raises:
      ValueError: if it has no entry.

    Example:
      >>> module = parse('''HloModule m, num_partitions=8
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
      ... }''')
      >>> module.computations["main"][1].groups(module.devices)
      ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _LINE.match(line):
            current.append(_instruction(found[2], line[found.end() :], bool(found[1])))
    if not entry:
        raise ValueError(f"no ENTRY computation in {text[:200]!r}")
    head = text.split("\n", 1)[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    return Module(computations, entry, math.prod(map(int, counts)))


def array_sizes(kind: str) -> list[int]:
    """The dims of the first array in a type.

    Example:
      >>> array_sizes("(f32[2,3]{1,0}, s8[64]{0})")
      [2, 3]
    """
    found = _ARRAY.search(kind)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 2
    given, attributes = rest[:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", given)) or (given,)
    return Instruction(name, kind, opcode, operands, attributes, is_root)


def _closing(text: str) -> int:
    """The place after the parenthesis that closes the first one."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _elements(kind: str) -> list[str]:
    """The types in a tuple type."""
    depth, parts = 0, [""]
    for sign in kind[1:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def _lists(text: str) -> Groups:
    """'{0,1},{2,3}' -> ((0, 1), (2, 3))."""
    return tuple(tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", text))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _order(text: str) -> np.ndarray:
    """'[2,4]T(1,0)' -> 0 to 7 as two rows, transposed and flattened: 0 4 1 5 2 6 3 7."""
    shape, *axes = re.findall(r"[\[(]([\d,]+)[\])]", text)
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(*map(_ints, axes)).ravel()


def _along_axes(mesh: str, axes: str, devices: np.ndarray) -> Groups:
    """Mesh 'a'=2,'b'=4 and axes 'b' -> ((0, 1, 2, 3), (4, 5, 6, 7)); 'b':(2)2 is a part of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    along = {name: (1, size) for name, size in sizes.items()}
    used = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        along[name] = (int(before), int(size)) if size else along[name]
        used.append(3 * list(sizes).index(name) + 1)
    parts = [(along[name], size) for name, size in sizes.items()]
    shape = [n for (before, mine), size in parts for n in (before, mine, size // before // mine)]
    ids = devices.reshape(shape)
    rest = [i for i in range(ids.ndim) if i not in used]
    count = math.prod(shape[i] for i in used)
    return tuple(map(tuple, ids.transpose(rest + used).reshape(-1, count).tolist()))
