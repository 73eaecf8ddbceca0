"""Best odd quintics by Remez exchange, composed into a Newton–Schulz schedule.

Host side, numpy float64: a schedule is made once, never inside a traced function.
"""

import numpy as np

from muon_optax.orthogonalization.coefficients import Row

__all__ = ["best_quintic", "polar_schedule"]

# On a narrower interval the exchange is ill-conditioned, and its limit, the Padé step, is as good.
_NARROW = 5e-6
_SIGNS = np.array([1.0, -1.0, 1.0, -1.0])
_POWERS = np.array([1, 3, 5])


def polar_schedule(
    lower: float,
    steps: int,
    *,
    cushion: float = 0.02407327424182761,
    safety: float = 1.01,
) -> tuple[Row, ...]:
    """The Polar Express schedule for singular values in ``[lower, 1]``.

    Each step is the odd quintic nearest to 1 on the interval that the steps before it leave, which
    makes their composition the best of its form. Source: arXiv 2505.16932, Algorithm 1.

    Args:
      lower: the smallest singular value to bring near 1, in (0, 1).
      steps: the number of rows, at least 1.
      cushion: an interval is taken to start at this part of its upper end at least, so that small
        singular values do not make the first steps slow.
      safety: the input of each row but the last is divided by this, at least 1: rounding may lift
        a singular value over the interval's upper end, where the next quintic grows fast.

    Returns:
      One ``(a, b, c)`` a step.

    Raises:
      ValueError: An argument is outside its range.

    Example:
      >>> for row in polar_schedule(7e-3, 3)[:2]:
      ...     print("%.6f %.6f %.6f" % row)
      8.006147 -22.346456 16.061475
      3.765908 -2.758248 0.523487
    """
    for name, value, ok in [
        ("lower", lower, 0 < lower < 1),
        ("steps", steps, steps >= 1),
        ("cushion", cushion, 0 <= cushion < 1),
        ("safety", safety, safety >= 1),
    ]:
        if not ok:
            raise ValueError(f"{name}={value!r} is out of range, see polar_schedule's docstring.")
    upper, rows = 1.0, []
    for _ in range(steps):
        row = _centred(best_quintic(max(lower, cushion * upper), upper), lower, upper)
        rows.append(row)
        lower = _value(row, lower)
        upper = 2 - lower
    return (*((a / safety, b / safety**3, c / safety**5) for a, b, c in rows[:-1]), rows[-1])


def best_quintic(lower: float, upper: float) -> Row:
    """The odd quintic nearest to 1 in the maximum norm on ``[lower, upper]``.

    Its error takes its maximum with alternating signs at four points: both ends, and two between
    them, which the exchange moves to where the quintic's derivative vanishes.

    Args:
      lower: positive.
      upper: greater than `lower`.

    Returns:
      ``(a, b, c)`` of ``p(x) = ax + bx³ + cx⁵``.

    Example:
      >>> "%.4f %.4f %.4f" % best_quintic(1.0, 1.0)
      '1.8750 -1.2500 0.3750'
    """
    if upper - lower < _NARROW * upper:
        return (15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5)
    points = np.linspace(lower, upper, 4)
    a = b = c = 0.0
    for _ in range(100):
        system = np.column_stack([points[:, None] ** _POWERS, _SIGNS])
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        squares = np.sort(np.roots([5 * c, 3 * b, a]).real)
        moved = np.array([lower, *np.sqrt(squares), upper])
        if np.allclose(moved, points, rtol=1e-15, atol=0):
            break
        points = moved
    return (float(a), float(b), float(c))


def _centred(row: Row, lower: float, upper: float) -> Row:
    """Scales a quintic so that it errs equally at both ends of ``[lower, upper]``."""
    scale = 2 / (_value(row, lower) + _value(row, upper))
    a, b, c = row
    return (a * scale, b * scale, c * scale)


def _value(row: Row, x: float) -> float:
    a, b, c = row
    return a * x + b * x**3 + c * x**5
