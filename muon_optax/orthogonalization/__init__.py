"""The mathematics: Newton–Schulz on (..., m, n) arrays, with no pytrees and no mesh."""

from muon_optax.orthogonalization.coefficients import (
    SCHEDULES,
    Preconditioning,
    Row,
    Schedule,
    ScheduleName,
    gram_restarts,
)
from muon_optax.orthogonalization.iterate import GramCollectives
from muon_optax.orthogonalization.orthogonalizer import (
    Method,
    NewtonSchulz,
    PrecisionName,
    newton_schulz,
)
from muon_optax.orthogonalization.remez import polar_schedule
from muon_optax.orthogonalization.resolve import Coefficients, resolve_schedule

__all__ = [
    "SCHEDULES",
    "Coefficients",
    "GramCollectives",
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
