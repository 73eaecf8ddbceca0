import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_optax.orthogonalization import (
    SCHEDULES,
    Preconditioning,
    ScheduleName,
    gram_restarts,
    polar_schedule,
    resolve_schedule,
)
from muon_optax.orthogonalization.remez import best_quintic

JORDAN = (3.4445, -4.7750, 2.0315)
PADE = (15 / 8, -10 / 8, 3 / 8)
# The unscaled rows that arXiv 2505.16932 prints, for a lower bound of 1e-3.
POLAR_EXPRESS = [
    (8.287212, -23.595887, 17.300387),
    (4.107059, -2.947850, 0.544843),
    (3.948691, -2.908902, 0.551819),
    (3.318420, -2.488488, 0.510049),
    (2.300652, -1.668904, 0.418807),
    (1.891301, -1.267996, 0.376804),
    (1.875001, -1.250002, 0.375),
]


def test_every_name_resolves_to_a_hashable_schedule_with_a_source():
    for name in get_args(ScheduleName):
        schedule = resolve_schedule(name)
        hash(schedule)
        assert schedule.source
        assert schedule.name == ("jordan" if name == "standard" else name)
    assert set(get_args(ScheduleName)) == {*SCHEDULES, "standard"}


@pytest.mark.parametrize(
    ("name", "steps", "preconditioning", "norm_factor"),
    [
        ("jordan", 5, "frobenius", 1),
        ("dion", 5, "frobenius", 1),
        ("polar_express", 5, "frobenius", 1),
        ("modded_nanogpt", 5, "frobenius", 1.02),
        ("cans", 5, "frobenius", 1),
        ("turbo", 4, "aol", 1),
        ("deepseek_v4", 10, "frobenius", 1),
        ("tight", 5, "schatten8", 1),
        ("fast", 4, "schatten8", 1),
    ],
)
def test_lengths_and_normalisations(name, steps, preconditioning, norm_factor):
    schedule = resolve_schedule(name)
    assert len(schedule.rows) == steps
    assert schedule.preconditioning == preconditioning
    assert schedule.norm_factor == norm_factor


def test_restarts():
    restarts = {name: schedule.restarts for name, schedule in SCHEDULES.items()}
    assert restarts.pop("jordan") == restarts.pop("modded_nanogpt") == (3,)
    assert restarts.pop("cans") == (1, 3)
    assert restarts.pop("deepseek_v4") == (3, 6, 9)
    assert restarts.pop("polar_express") == (3,)
    assert set(restarts.values()) == {(2,)}
    assert resolve_schedule("polar_express", 8).restarts == (3, 5)


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_restarts_lie_within_the_steps(steps):
    for schedule in (resolve_schedule("jordan", steps), resolve_schedule("polar_express", steps)):
        assert all(0 < step < steps for step in schedule.restarts)
    assert gram_restarts([(100.0, 0.0, 0.0)] * steps) == tuple(range(1, steps))


@pytest.mark.parametrize("steps", [None, 1, 5, 8, 12, np.int64(3)])
def test_jordan_and_one_triple_repeat(steps):
    expected = (JORDAN,) * (5 if steps is None else int(steps))
    assert resolve_schedule("jordan", steps).rows == expected
    assert resolve_schedule("standard", steps).rows == expected
    assert resolve_schedule(JORDAN, steps).rows == expected
    assert resolve_schedule(jnp.array([1.0, 2.0, 3.0]), steps).rows == ((1, 2, 3),) * len(expected)


@pytest.mark.parametrize("steps", [3, 7, 10])
def test_polar_express_is_padded_and_never_cycled(steps):
    rows = resolve_schedule("polar_express", steps).rows
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS]
    np.testing.assert_allclose(rows[:7], safe[:steps], rtol=1e-15)
    assert rows[7:] == (PADE,) * (steps - 7)


@pytest.mark.parametrize("as_table", [tuple, list, np.asarray, jnp.asarray])
def test_a_table_may_be_of_any_kind(as_table):
    table = [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
    schedule = resolve_schedule(as_table(table))
    assert schedule.rows == tuple(table)
    assert all(type(k) is float for row in schedule.rows for k in row)
    assert resolve_schedule(as_table(table), 2) == schedule


def test_preconditioning_is_the_schedules_own_unless_given():
    assert resolve_schedule("tight").preconditioning == "schatten8"
    for kind in get_args(Preconditioning):
        given = resolve_schedule("tight", None, kind)
        assert given == dataclasses.replace(resolve_schedule("tight"), preconditioning=kind)


@pytest.mark.parametrize("coefficients", ["dion", "tight", "fast", ((1, 2, 3), (4, 5, 6))])
def test_another_number_of_rows_than_steps_is_an_error_that_states_both(coefficients):
    rows = len(resolve_schedule(coefficients).rows)
    with pytest.raises(ValueError, match=rf"ns_steps=7, but ns_coeffs has {rows} rows"):
        resolve_schedule(coefficients, 7)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ("3", TypeError, "ns_steps='3' is a str"),
        (True, TypeError, "is a bool"),
        (2.0, TypeError, "is a float"),
        (0, ValueError, "at least 1"),
        (-1, ValueError, "at least 1"),
        (jnp.array(5), TypeError, r"static_args=\('ns_steps',\)"),
    ],
)
def test_steps_out_of_range(steps: Any, error, message):
    for coefficients in ("jordan", "dion", JORDAN):
        with pytest.raises(error, match=message):
            resolve_schedule(coefficients, steps)


def test_traced_steps_say_that_they_must_be_static():
    with pytest.raises(TypeError, match=r"static_args=\('ns_steps',\)"):
        jax.jit(lambda steps: len(resolve_schedule("jordan", steps).rows))(5)


@pytest.mark.parametrize(
    ("coefficients", "error", "message"),
    [
        ("muon", ValueError, "'muon' is no schedule; allowed are .*'polar_express'"),
        ((1.0, 2.0), ValueError, r"shape \(2,\)"),
        (((1.0, 2.0), (3.0, 4.0)), ValueError, r"shape \(2, 2\)"),
        ((), ValueError, r"shape \(0,\)"),
        (np.zeros((0, 3)), ValueError, r"shape \(0, 3\)"),
        (((1, 2, 3), (1, 2)), ValueError, "sequence of triples"),
        ((1.0, np.nan, 2.0), ValueError, "finite"),
        (((1.0, 2.0, 3.0), (1.0, 2.0, np.inf)), ValueError, "finite"),
        (None, ValueError, "shape|triples|finite"),
        (object(), TypeError, "sequence of triples"),
    ],
)
def test_wrong_coefficients(coefficients: Any, error, message):
    with pytest.raises(error, match=message):
        resolve_schedule(coefficients)


def test_traced_coefficients():
    with pytest.raises(TypeError, match="static numbers"):
        jax.jit(lambda rows: len(resolve_schedule(rows).rows))(jnp.ones(3))


def test_unknown_preconditioning():
    wrong: Any = "schatten4"
    with pytest.raises(ValueError, match=r"'schatten4'; allowed are .*'schatten8'"):
        resolve_schedule("jordan", None, wrong)


def test_the_generator_reproduces_polar_express():
    rows = polar_schedule(1e-3, 8, safety=1)
    np.testing.assert_allclose(rows[:7], POLAR_EXPRESS, atol=5.1e-7, rtol=0)
    np.testing.assert_allclose(rows[7], PADE, atol=1e-8)


@pytest.mark.parametrize(("name", "lower"), [("tight", 2e-3), ("fast", 7e-3)])
def test_the_generator_makes_our_own_schedules(name, lower):
    rows = resolve_schedule(name).rows
    np.testing.assert_allclose(rows, polar_schedule(lower, len(rows)), atol=5.1e-7, rtol=0)


@pytest.mark.parametrize(("lower", "upper"), [(1e-3, 1.0), (0.1, 1.9), (0.9, 1.1), (0.98, 1.02)])
def test_the_best_quintic_equioscillates(lower, upper):
    a, b, c = best_quintic(lower, upper)
    x = np.linspace(lower, upper, 20001)
    error = a * x + b * x**3 + c * x**5 - 1
    # Chebyshev: the best of a three-parameter family reaches its error four times, alternating.
    inner = np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1
    turns = error[[0, *inner, -1]]
    np.testing.assert_allclose(turns, np.array([-1, 1, -1, 1]) * np.abs(error).max(), rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lower=0.0, steps=5), "lower=0.0"),
        (dict(lower=1.0, steps=5), "lower=1.0"),
        (dict(lower=1e-3, steps=0), "steps=0"),
        (dict(lower=1e-3, steps=5, cushion=1.0), "cushion=1.0"),
        (dict(lower=1e-3, steps=5, safety=0.9), "safety=0.9"),
    ],
)
def test_the_generators_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        polar_schedule(**arguments)
