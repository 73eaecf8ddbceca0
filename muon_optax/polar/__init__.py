"""The mathematics: Newton–Schulz on (..., m, n) arrays, with no pytrees and no mesh."""

from muon_optax.polar.coefficients import (
    SCHEDULES,
    Preconditioning,
    Row,
    Schedule,
    ScheduleName,
    gram_restarts,
)
from muon_optax.polar.iterate import GramExchange
from muon_optax.polar.orthogonalizer import Method, NewtonSchulz, PrecisionName, newton_schulz
from muon_optax.polar.remez import polar_schedule
from muon_optax.polar.resolve import Coefficients, resolve_schedule

__all__ = [
    "SCHEDULES",
    "Coefficients",
    "GramExchange",
    "Method",
    "NewtonSchulz",
    "PrecisionName",
    "Preconditioning",
    "Row",
    "Schedule",
    "ScheduleName",
    "gram_restarts",
    "newton_schulz",
    "polar_schedule",
    "resolve_schedule",
]
