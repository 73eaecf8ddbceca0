"""The outcome of a parity run: data first, tables second."""

import dataclasses
from typing import Any, Literal, get_args

from muon_optax.inspect.tables import format_table, rich_table
from muon_optax.interop.parity.case import Case

__all__ = ["TOLERANCES", "Mark", "Row", "Tolerances", "Verdict"]

Mark = Literal["PASS", "TORCH", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """Relative errors that are let pass, in the Frobenius norm.

    Attributes:
      update: of a step's change of a parameter. torch's is the difference of rounded parameters.
      momentum: of a momentum buffer, or AdamW's first moment.
      parameter: of a parameter.
      bias: of the mean over leaves and steps of the signed difference of updates, as a part of
        torch's update.
    """

    update: float
    momentum: float
    parameter: float
    bias: float

    def allow(self, update: float, momentum: float, parameter: float) -> bool:
        """Whether these errors are let pass; NaN is not."""
        limits = (self.update, self.momentum, self.parameter)
        return all(e <= most for e, most in zip((update, momentum, parameter), limits, strict=True))


TOLERANCES = {
    "float32": Tolerances(1e-4, 1e-6, 1e-5, 1e-5),
    "float64": Tolerances(1e-10, 1e-11, 1e-11, 1e-11),
    # bfloat16 inside, which rounds each matmul to three digits.
    "bfloat16": Tolerances(4e-2, 1e-6, 4e-2, 5e-3),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf after one step: relative errors, in the Frobenius norm, against torch's.

    Attributes:
      leaf: its path.
      step: the step, from 1.
      update: error of the update.
      momentum: error of the momentum, or AdamW's first moment.
      parameter: error of the parameter after the step.
      torch_off: how far torch's own update is from the exact one; None where torch's is exact but
        for rounding.
      verdict: 'PASS'; 'TORCH' where the update is within tolerance of the exact one, and nearer to
        it than torch's; 'FAIL'.
    """

    leaf: str
    step: int
    update: float
    momentum: float
    parameter: float
    torch_off: float | None
    verdict: Mark


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A case's rows, with the verdict on all of them.

    Attributes:
      case: the case that both sides ran.
      tolerances: the largest differences that pass.
      rows: by leaf, then step.
      bias: the mean signed difference of Muon's updates.
      losses: torch's loss at each step.
    """

    case: Case
    tolerances: Tolerances
    rows: tuple[Row, ...]
    bias: float
    losses: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether every row passed, and there is no bias."""
        return not self.count("FAIL") and abs(self.bias) < self.tolerances.bias

    def count(self, mark: Mark) -> int:
        """Number of rows with a verdict."""
        return sum(row.verdict == mark for row in self.rows)

    def worst(self) -> tuple[Row, ...]:
        """One row a leaf: its largest errors and worst verdict, with the step of the largest."""
        found = []
        for leaf in dict.fromkeys(row.leaf for row in self.rows):
            own = [row for row in self.rows if row.leaf == leaf]
            step = max(own, key=lambda row: row.update).step
            off = max((row.torch_off for row in own if row.torch_off is not None), default=None)
            marks: list[Mark] = [row.verdict for row in own]
            found.append(
                Row(
                    leaf,
                    step,
                    max(row.update for row in own),
                    max(row.momentum for row in own),
                    max(row.parameter for row in own),
                    off,
                    max(marks, key=get_args(Mark).index),
                )
            )
        return tuple(found)

    def to_dict(self, *, worst: bool = False) -> dict[str, Any]:
        """Everything as plain data for JSON: all rows, or the worst of each leaf."""
        chosen = dataclasses.replace(self, rows=self.worst()) if worst else self
        return {**dataclasses.asdict(chosen), "passed": self.passed}

    def table(self, *, worst: bool = False) -> "VerdictTable":
        """The rows to print: all of them, or the worst of each leaf."""
        return VerdictTable(self, self.worst() if worst else self.rows)


@dataclasses.dataclass(frozen=True)
class VerdictTable:
    """Some rows of a verdict, for `print` or rich."""

    verdict: Verdict
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "\n".join((self._title, format_table(_HEADER, self._cells), self._summary))

    def __rich__(self) -> Any:
        return rich_table(self._title, _HEADER, self._cells, self._summary)

    @property
    def _title(self) -> str:
        return self.verdict.case.name

    @property
    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(row) for row in self.rows]

    @property
    def _summary(self) -> str:
        v, allowed = self.verdict, self.verdict.tolerances
        state = "PASS" if v.passed else "FAIL"
        off = f", in {v.count('TORCH')} torch is off by more" if v.count("TORCH") else ""
        return (
            f"{state}: {len(v.rows)} rows, {v.count('FAIL')} failed{off}; bias {v.bias:+.1e}; let "
            f"pass: update {allowed.update:.0e}, momentum {allowed.momentum:.0e}, parameter "
            f"{allowed.parameter:.0e}, bias {allowed.bias:.0e}"
        )


_HEADER = ("leaf", "step", "update", "momentum", "parameter", "torch off", "verdict")


def _cells(row: Row) -> tuple[str, ...]:
    errors = (row.update, row.momentum, row.parameter)
    off = "" if row.torch_off is None else f"{row.torch_off:.1e}"
    return row.leaf, str(row.step), *(f"{e:.1e}" for e in errors), off, row.verdict
