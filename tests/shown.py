"""What is shown of `muon` with some options: `report`, `plan` and `update_stats` by the options."""

from typing import Any

import muon_optax
from muon_optax import ParameterReport, Plan, UpdateStats, muon


def report(params: Any, **options: Any) -> ParameterReport:
    return muon_optax.report(muon(0.02, **options), params)


def plan(params: Any, param_shardings: Any = None, **options: Any) -> Plan:
    return muon_optax.plan(muon(0.02, param_shardings=param_shardings, **options), params)


def update_stats(updates: Any, *, steps: int = 16, **options: Any) -> dict[str, UpdateStats]:
    return muon_optax.update_stats(muon(0.02, **options), updates, steps=steps)
