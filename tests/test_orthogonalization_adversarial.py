"""No singular value grows above its schedule's own maximum, on input that is searched for.

`benchmarks/adversarial.py` searches longer, and keeps what it finds in `benchmarks/results`.
"""

import numpy as np
import pytest

from benchmarks import adversarial
from benchmarks.adversarial import ROUNDINGS, bound, own_maximum
from muon_optax.orthogonalization import SCHEDULES, Schedule, resolve_schedule

# As Polar Express publishes it, without a safety factor: a table that a user may give.
BARE = resolve_schedule(
    [
        (8.287212, -23.595887, 17.300387),
        (4.107059, -2.947850, 0.544843),
        (3.948691, -2.908902, 0.551819),
        (3.318420, -2.488488, 0.510049),
        (2.300652, -1.668904, 0.418807),
    ]
)
ALL = [*SCHEDULES.values(), BARE]
HALVES = ("bfloat16", "float16")


def name(schedule: Schedule) -> str:
    return f"{schedule.name}-{len(schedule.rows)}"


def assert_small(values: np.ndarray, schedule: Schedule, rounding: str) -> None:
    assert values.max() / own_maximum(schedule) <= bound(rounding)


@pytest.fixture(scope="module")
def start() -> np.ndarray:
    rng = np.random.default_rng(0)
    kinds = [adversarial.spectra(rng, 16, 32), adversarial.blocks(rng, 250, 16, 32)]
    return np.concatenate(kinds)


# Where matmuls round float32, the Gram iteration asks for some that don't: see
# test_orthogonalization_iterate.
CASES = [(method, rounding) for method in ("standard", "gram") for rounding in ROUNDINGS]
CASES = [case for case in CASES if case[0] == "standard" or "matmuls" not in case[1]]


@pytest.mark.parametrize(("method", "rounding"), CASES)
@pytest.mark.parametrize("schedule", ALL, ids=name)
def test_mutation_finds_no_large_singular_value(schedule, method, rounding, start):
    function = adversarial.compiled(adversarial.iteration(schedule, method, rounding))
    _, values = adversarial.search(function, np.random.default_rng(1), start, rounds=2)
    assert_small(values, schedule, rounding)


@pytest.mark.parametrize("rounding", HALVES)
@pytest.mark.parametrize("method", ["standard on slices", "gram on slices"])
@pytest.mark.parametrize("schedule", [SCHEDULES["turbo"], BARE], ids=name)
def test_nor_on_slices(schedule, method, rounding, start):
    function = adversarial.compiled(adversarial.iteration(schedule, method, rounding))
    assert_small(adversarial.largest(function, start), schedule, rounding)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("schedule", ["turbo", "modded_nanogpt"])
def test_nor_does_gradient_ascent(schedule, method, start):
    function = adversarial.iteration(SCHEDULES[schedule], method, "bfloat16")
    rates = np.geomspace(1e-3, 1e-1, len(start[::20]))
    values = adversarial.ascent(function, start[::20], 8, rates)
    assert_small(values, SCHEDULES[schedule], "bfloat16")


@pytest.mark.parametrize("method", ["gram", "standard on slices"])
@pytest.mark.parametrize("schedule", ["turbo", "modded_nanogpt"])
def test_nor_does_the_reported_input(schedule, method):
    iterated = adversarial.iteration(SCHEDULES[schedule], method, "bfloat16")
    function = adversarial.compiled(iterated)
    for x in adversarial.reported(np.random.default_rng(0)):
        assert_small(adversarial.largest(function, x), SCHEDULES[schedule], "bfloat16")


@pytest.mark.parametrize("schedule", ALL, ids=name)
def test_the_maximum_is_that_of_the_polynomials(schedule):
    assert schedule.maximum == pytest.approx(own_maximum(schedule), rel=1e-5)  # of the grid


@pytest.mark.parametrize("schedule", ALL, ids=name)
def test_the_safety_factor_is_only_where_it_is_needed_and_costs_little(schedule):
    safe, is_unsafe = (
        schedule.with_safety(),
        schedule in (SCHEDULES["cans"], SCHEDULES["turbo"], BARE),
    )
    assert (safe == schedule) == schedule.withstands_rounding == (not is_unsafe)
    assert safe.withstands_rounding
    assert 0.99 * schedule.maximum <= safe.maximum <= 1.01 * schedule.maximum
    ratios = np.divide(schedule.rows, safe.rows)
    np.testing.assert_allclose(ratios, [[ratios[0, 0] ** k for k in (1, 3, 5)]] * len(ratios))
    assert ratios[0, 0] <= 1.011


@pytest.mark.parametrize("rows", [[(1e3, 1e5, 1e9)] * 40, [(0.0, 0.0, 0.0)], [(1e-3, 0.0, 0.0)]])
def test_schedules_that_diverge_or_vanish_stay_as_they_are(rows):
    schedule = resolve_schedule(rows)
    assert schedule.with_safety() == schedule
    assert schedule.maximum == (np.inf if rows[0][0] > 1 else rows[0][0])
