"""The accuracy bars: how near to 1 the singular values come, in each dtype and by each method."""

from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
from oracle import gaussian, log_uniform, relative_error, singular_values, spiked

from muon_optax.orthogonalization import SCHEDULES, ScheduleName, newton_schulz, resolve_schedule

M = 96
HALVES = ("bfloat16", "float16")


@cache
def inputs() -> dict[str, np.ndarray]:
    rank_one = np.outer(gaussian(M, seed=1), gaussian(M, seed=2))
    return {
        "gaussian": gaussian(M, M),
        "wide": gaussian(M, 4 * M),
        "kappa 1e2": log_uniform(M, M, 1e2),
        "kappa 3e2": log_uniform(M, M, 3e2),
        "kappa 1e6": log_uniform(M, M, 1e6),
        "rank one": rank_one,
        "half rank": oracle.with_spectrum(np.geomspace(1, 0.05, M // 2), M, M),
    }


def in_float32(x: np.ndarray) -> Any:
    return x.astype(np.float32)


def square(*kinds: str) -> np.ndarray:
    return np.stack([inputs()[kind] for kind in kinds])


def distance(result, x: np.ndarray) -> float:
    """‖O − UVᵀ‖_F / √m."""
    return relative_error(result, oracle.polar_factor(x))


def moved(name: ScheduleName, x: np.ndarray, norm: float, floor: float, **options) -> np.ndarray:
    """The new values along the singular vectors of `x` whose value / norm is at least `floor`."""
    result = np.asarray(newton_schulz(in_float32(x), name, **options), np.float64)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    kept = s / norm >= floor
    return singular_values(u[:, kept].T @ result @ vh[kept].T)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", 0.96, 1.03), ("bfloat16", 0.955, 1.035)]
)
def test_tight_brings_singular_values_near_one(dtype, low, high, method):
    for kind in ("gaussian", "wide", "kappa 1e2", "kappa 3e2"):
        x = inputs()[kind]
        norm = float(np.linalg.norm(singular_values(x), 8))
        values = moved("tight", x, norm, 2e-3, dtype=dtype, method=method)
        assert low <= values.min() <= values.max() <= high, kind


def test_tight_is_near_the_polar_factor_of_a_gaussian():
    x = gaussian(512, 512)
    assert distance(newton_schulz(in_float32(x), "tight"), x) <= 0.055


def test_fast_is_as_near_as_dion_with_a_step_less():
    bars = {
        "gaussian": (gaussian(128, 128), 0.015),
        "wide": (gaussian(128, 512), 0.015),
        "kappa 1e2": (log_uniform(128, 128, 1e2), 0.015),
        "kappa 1e3": (log_uniform(128, 128, 1e3), 0.015),
        "spiked": (spiked(128, 128), 0.04),
    }
    for kind, (x, slack) in bars.items():
        y = in_float32(x)
        fast, dion = (distance(newton_schulz(y, name), x) for name in ("fast", "dion"))
        assert fast <= dion + slack, kind


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_eight_steps_of_polar_express_converge(method):
    for kind in ("gaussian", "kappa 1e2", "kappa 3e2"):
        x = inputs()[kind]
        options = dict(ns_steps=8, method=method, precision="highest")
        values = moved("polar_express", x, float(np.linalg.norm(x)), 1e-3, **options)
        assert np.abs(values - 1).max() <= 1e-5, kind


@pytest.mark.parametrize("name", SCHEDULES)
def test_gram_equals_standard(name):
    bar = 1e-4 if len(resolve_schedule(name).rows) <= 5 else 2e-3
    x = in_float32(square("gaussian", "kappa 1e2", "kappa 1e6"))
    standard, gram = (newton_schulz(x, name, method=method) for method in ("standard", "gram"))
    for each in range(len(x)):
        assert relative_error(gram[each], standard[each]) < bar


@pytest.mark.parametrize(
    ("name", "steps"), [("polar_express", 8), ("polar_express", 12), ("jordan", 8)]
)
def test_gram_equals_standard_in_many_steps(name, steps):
    x = in_float32(square("gaussian", "kappa 1e2", "kappa 1e6"))
    standard, gram = (newton_schulz(x, name, steps, method=m) for m in ("standard", "gram"))
    for each in range(len(x)):
        assert relative_error(gram[each], standard[each]) < 2e-3


@pytest.mark.parametrize(
    ("dtype", "method"),
    [("float32", "gram"), ("float16", "gram"), ("bfloat16", "gram"), ("bfloat16", "standard")],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_singular_value_grows(name, dtype, method):
    x = square("gaussian", "kappa 1e2", "kappa 1e6", "rank one", "half rank")
    result = newton_schulz(in_float32(x), name, dtype=dtype, method=method)
    largest = singular_values(result)[:, 0]
    assert largest.max() <= (1.25 if name == "jordan" else 1.2), largest


def test_a_large_matrix_by_the_halved_gram_method():
    x = in_float32(log_uniform(512, 640, 1e3))
    standard, gram = (newton_schulz(x, "polar_express", method=m) for m in ("standard", "gram"))
    assert relative_error(gram, standard) < 1e-4
