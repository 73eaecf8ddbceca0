"""Newton–Schulz schedules by name, each with its source.

A new schedule is an entry of `SCHEDULES` and its name in `ScheduleName`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

__all__ = [
    "EXTENSIBLE",
    "SCHEDULES",
    "Preconditioning",
    "Row",
    "Schedule",
    "ScheduleName",
    "gram_restarts",
    "make_schedule",
]

Row = tuple[float, float, float]
ScheduleName = Literal[
    "jordan",
    "standard",
    "dion",
    "polar_express",
    "modded_nanogpt",
    "cans",
    "turbo",
    "deepseek_v4",
    "tight",
    "fast",
]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten", "schatten8"]

_JORDAN: Row = (3.4445, -4.7750, 2.0315)
# The quintic Padé step: σ = 1 is a fixed point of order three, so more of them only help.
_PADE: Row = (15 / 8, -10 / 8, 3 / 8)
_SAFETY = 1.01
_POLAR_EXPRESS: tuple[Row, ...] = (
    (8.287212, -23.595887, 17.300387),
    (4.107059, -2.947850, 0.544843),
    (3.948691, -2.908902, 0.551819),
    (3.318420, -2.488488, 0.510049),
    (2.300652, -1.668904, 0.418807),
    (1.891301, -1.267996, 0.376804),
    (1.875001, -1.250002, 0.375),
)
# A factor of Q grows by the leading coefficient in each step, and the rounding errors of R by its
# square: up to about here float32 keeps four digits.
_MAX_GROWTH = 45.0
# Rounding a step's factor and its result to bfloat16 changes a singular value by up to about this
# part, where equal entries are all rounded the same way; bfloat16 alone rounds by 2⁻⁸.
_ROUNDING = 0.01
# How far above a schedule's own maximum rounding may carry a singular value.
_ALLOWED_EXCESS = 0.05


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The coefficients of a Newton–Schulz iteration and how its input is normalised.

    Step t is ``X <- aX + (bA + cA²)X`` with ``A = XXᴴ`` and ``(a, b, c) = rows[t]``.

    Attributes:
      name: the schedule's name, or ``'custom'``.
      rows: one ``(a, b, c)`` a step.
      restarts: the Gram method recomputes its Gram matrix after these many steps.
      preconditioning: the norm that the input is divided by, see
        `muon_optax.orthogonalization.normalize`.
      norm_factor: the norm is multiplied by this.
      source: where the coefficients come from.

    Example:
      >>> SCHEDULES["fast"].restarts, SCHEDULES["fast"].preconditioning
      ((2,), 'schatten8')
    """

    name: str
    rows: tuple[Row, ...]
    restarts: tuple[int, ...]
    preconditioning: Preconditioning
    norm_factor: float
    source: str

    @property
    def passes(self) -> int:
        """How often the Gram method touches X: from the start, and from each restart."""
        return len(self.restarts) + 1

    @property
    def maximum(self) -> float:
        """The largest singular value that the schedule gives, in exact arithmetic.

        Example:
          >>> round(SCHEDULES["jordan"].maximum, 3), round(SCHEDULES["fast"].maximum, 3)
          (1.202, 1.039)
        """
        return _largest(self.rows, self.norm_factor, 0.0)

    @property
    def withstands_rounding(self) -> bool:
        """Whether singular values stay within 1.05 times the maximum in half precision.

        Between two steps rounding may lift a singular value over the end of the interval that the
        next quintic was made for, and past that end a quintic grows fast.

        Example:
          >>> SCHEDULES["jordan"].withstands_rounding, SCHEDULES["cans"].withstands_rounding
          (True, False)
        """
        return _largest(self.rows, self.norm_factor, _ROUNDING) <= self._allowed

    @property
    def _allowed(self) -> float:
        return (1 + _ALLOWED_EXCESS) * self.maximum

    def with_safety(self) -> "Schedule":
        """The schedule for half precision: itself if it withstands rounding, else a safer one.

        Each row then takes its input divided by a safety factor, as Polar Express has it: the
        smallest of 1.01, 1.02, ... 1.05 that is enough.

        Example:
          >>> SCHEDULES["turbo"].rows[0]
          (4.6051, -9.6552, 5.6769)
          >>> print("%.4f %.4f %.4f" % SCHEDULES["turbo"].with_safety().rows[0])
          4.5595 -9.3712 5.4014
          >>> SCHEDULES["tight"].with_safety() == SCHEDULES["tight"]
          True
        """
        if self.withstands_rounding:
            return self
        for percent in range(1, 6):
            rows = tuple(_safe(row, 1 + percent / 100) for row in self.rows)
            if _largest(rows, self.norm_factor, _ROUNDING) <= self._allowed:
                return dataclasses.replace(self, rows=rows)
        return self


@functools.lru_cache(maxsize=256)
def _largest(rows: tuple[Row, ...], norm_factor: float, error: float) -> float:
    """The largest singular value after all rows, for input in [0, 1 / norm_factor].

    Args:
      rows: the coefficients of each step.
      norm_factor: of the schedule.
      error: the input and the result of each step may be larger by this part of it.
    """
    upper = (1 + error) / norm_factor
    for row in rows:
        upper = (1 + error) * _largest_of_step(row, upper)
        if not math.isfinite(upper):
            return math.inf
    return upper


def _largest_of_step(row: Row, upper: float) -> float:
    """The largest absolute value of ``ax + bx³ + cx⁵`` on [0, upper]."""
    a, b, c = row
    # The derivative a + 3bt + 5ct² has its zeros at t = x².
    turns = np.roots(np.trim_zeros([5 * c, 3 * b, a], "f"))
    inside = [t.real**0.5 for t in turns if t.imag == 0 and 0 < t.real < upper * upper]
    return max(float(abs(x * (a + x * x * (b + x * x * c)))) for x in (*inside, upper))


def gram_restarts(rows: Sequence[Row]) -> tuple[int, ...]:
    """Steps after which the Gram method has to restart, to stay as accurate as the standard one.

    Args:
      rows: the coefficients of each step.

    Returns:
      Numbers of steps, increasing, each between 1 and ``len(rows) - 1``.

    Example:
      >>> gram_restarts([(3.4445, -4.7750, 2.0315)] * 5)
      (3,)
    """
    restarts, growth = [], 1.0
    for step, (a, _, _) in enumerate(rows):
        growth *= abs(a)
        if step and growth > _MAX_GROWTH:
            restarts.append(step)
            growth = abs(a)
    return tuple(restarts)


def make_schedule(
    name: str,
    rows: Sequence[Row],
    source: str,
    *,
    preconditioning: Preconditioning = "frobenius",
    norm_factor: float = 1.0,
    restarts: tuple[int, ...] | None = None,
) -> Schedule:
    """A `Schedule`; None for its restarts means those of `gram_restarts`.

    Example:
      >>> make_schedule("one step", [(1.5, -0.5, 0.0)], "Newton").restarts
      ()
    """
    restarts = gram_restarts(rows) if restarts is None else restarts
    return Schedule(name, tuple(rows), restarts, preconditioning, norm_factor, source)


def _safe(row: Row, factor: float = _SAFETY) -> Row:
    """The row whose input is divided by `factor` first."""
    a, b, c = row
    return (a / factor, b / factor**3, c / factor**5)


def _jordan(steps: int = 5) -> Schedule:
    source = "Keller Jordan, kellerjordan.github.io/posts/muon; optax 'standard', torch.optim.Muon"
    return make_schedule("jordan", (_JORDAN,) * steps, source)


def _polar_express(steps: int = 5) -> Schedule:
    rows = tuple(_safe(row) for row in _POLAR_EXPRESS[:steps])
    rows += (_PADE,) * (steps - len(rows))
    source = "Polar Express, arXiv 2505.16932, lower bound 1e-3, safety factor 1.01"
    # Later than by the rule: at κ >= 1e3 the error falls from 1e-4 to 3e-5.
    restarts = tuple(step for step in (3, 5) if step < steps)
    return make_schedule("polar_express", rows, source, restarts=restarts)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _jordan(),
        make_schedule(
            "dion",
            [
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ],
            "Dion, github.com/microsoft/dion; optax 'dion', 'quintic' in other libraries",
        ),
        _polar_express(),
        make_schedule(
            "modded_nanogpt",
            [
                (8.156555, -22.483293, 15.878770),
                (4.042930, -2.808917, 0.500018),
                (3.891668, -2.772484, 0.506065),
                (3.285754, -2.368129, 0.464490),
                (2.346541, -1.709783, 0.423236),
            ],
            "github.com/KellerJordan/modded-nanogpt, which widens Polar Express's safety to 1.02",
            norm_factor=1.02,
            restarts=(3,),
        ),
        make_schedule(
            "cans",
            [
                (8.4703, -25.1081, 18.6293),
                (4.1828, -3.1087, 0.5806),
                (3.9619, -2.9541, 0.5630),
                (3.2866, -2.4647, 0.5074),
                (2.2737, -1.6447, 0.4162),
            ],
            "CANS, arXiv 2506.10935; has no safety factor",
            # As many as by the rule and one more; after 2 and 3 a singular value can grow by 0.46%.
            restarts=(1, 3),
        ),
        make_schedule(
            "turbo",
            [
                (4.6051, -9.6552, 5.6769),
                (4.7505, -6.0861, 2.1790),
                (2.7763, -2.3190, 0.5523),
                (2.4231, -2.2861, 0.8193),
            ],
            "Turbo-Muon, arXiv 2512.04632",
            preconditioning="aol",
        ),
        make_schedule(
            "deepseek_v4",
            (_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
            "DeepSeek-V4, as in github.com/NVIDIA-NeMo/Emerging-Optimizers",
        ),
        make_schedule(
            "tight",
            [
                (8.171302, -22.807432, 16.392801),
                (4.014943, -2.848411, 0.520376),
                (3.693878, -2.707740, 0.517851),
                (2.781278, -2.034970, 0.443312),
                (2.002742, -1.385618, 0.388799),
            ],
            "muon_optax.orthogonalization.remez.polar_schedule(2e-3, 5)",
            preconditioning="schatten8",
        ),
        make_schedule(
            "fast",
            [
                (8.006147, -22.346456, 16.061475),
                (3.765908, -2.758248, 0.523487),
                (2.910872, -2.135275, 0.454326),
                (2.056443, -1.439530, 0.394402),
            ],
            "muon_optax.orthogonalization.remez.polar_schedule(7e-3, 4)",
            preconditioning="schatten8",
        ),
    )
}

# Schedules that are defined for any number of steps.
EXTENSIBLE: dict[str, Callable[[int], Schedule]] = {
    "jordan": _jordan,
    "polar_express": _polar_express,
}
