"""From the options of an optimizer to a schedule."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from muon_optax.orthogonalization.coefficients import (
    EXTENSIBLE,
    SCHEDULES,
    Preconditioning,
    Row,
    Schedule,
    ScheduleName,
    make_schedule,
)

__all__ = ["Coefficients", "resolve_schedule"]

Coefficients = (
    ScheduleName
    | Literal["standard"]
    | Sequence[float]
    | Sequence[Sequence[float]]
    | np.ndarray
    | jax.Array
)


def resolve_schedule(
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    preconditioning: Preconditioning | None = None,
) -> Schedule:
    """Turns the three options of the optimizers into a schedule.

    Args:
      ns_coeffs: a name, one triple that every step uses, or a sequence of triples.
      ns_steps: the number of steps; None means the schedule's own length, five for a triple.
      preconditioning: None means the schedule's own.

    Returns:
      A hashable `Schedule` of plain Python numbers.

    Raises:
      TypeError: `ns_steps` or `ns_coeffs` is of the wrong type, or traced.
      ValueError: An unknown name, a coefficient that is not finite, a row that isn't a triple,
        fewer than one step, or a table whose length differs from `ns_steps`.

    Example:
      >>> resolve_schedule("fast").preconditioning
      'schatten8'
      >>> resolve_schedule((2, -1.5, 0.5), 3).rows
      ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    """
    _check_steps(ns_steps)
    if isinstance(ns_coeffs, str):
        schedule = _named(ns_coeffs, ns_steps)
    else:
        schedule = make_schedule("custom", _rows(ns_coeffs, ns_steps), "given by the caller")
    if ns_steps is not None and len(schedule.rows) != ns_steps:
        raise ValueError(
            f"ns_steps={ns_steps}, but ns_coeffs has {len(schedule.rows)} rows "
            f"({schedule.name}). Leave ns_steps=None, or give as many rows as steps."
        )
    if preconditioning is None:
        return schedule
    if preconditioning not in get_args(Preconditioning):
        raise ValueError(
            f"preconditioning={preconditioning!r}; allowed are {get_args(Preconditioning)}."
        )
    return dataclasses.replace(schedule, preconditioning=preconditioning)


def _check_steps(steps: Any) -> None:
    if steps is None:
        return
    if isinstance(steps, jax.Array):
        raise TypeError(
            f"ns_steps={steps} is a JAX array, but the steps are unrolled, so it must be a static "
            "Python int. Under optax.inject_hyperparams, pass static_args=('ns_steps',)."
        )
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral):
        raise TypeError(f"ns_steps={steps!r} is a {type(steps).__name__}; it must be an int.")
    if steps < 1:
        raise ValueError(f"ns_steps={steps}; it must be at least 1.")


def _named(name: str, steps: int | None) -> Schedule:
    name = "jordan" if name == "standard" else name
    if name not in SCHEDULES:
        allowed = get_args(ScheduleName)
        raise ValueError(f"ns_coeffs={name!r} is no schedule; allowed are {allowed}.")
    if steps is not None and name in EXTENSIBLE:
        return EXTENSIBLE[name](int(steps))
    return SCHEDULES[name]


def _rows(coefficients: Any, steps: int | None) -> tuple[Row, ...]:
    try:
        table = np.asarray(coefficients, np.float64)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"ns_coeffs={coefficients!r}; it must be a name, a triple or a sequence of triples, "
            "of static numbers."
        ) from error
    if table.ndim not in (1, 2) or table.shape[-1] != 3 or not len(table):
        raise ValueError(
            f"ns_coeffs has shape {table.shape}; it must be (3,), or (steps, 3) with steps >= 1."
        )
    if table.ndim == 1:
        table = np.tile(table, (5 if steps is None else int(steps), 1))
    if not np.isfinite(table).all():
        raise ValueError(f"ns_coeffs must be finite, got {table.tolist()}.")
    return tuple((float(a), float(b), float(c)) for a, b, c in table)
