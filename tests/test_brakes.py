"""Radial brakes, beside their formulas in float64."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
import variants_on_meshes as meshes
import variants_oracle as oracle
from running import first_update

from muon_optax.transforms.brakes import radial_brake
from muon_optax.transforms.relative_size import floor_update

FORMS = ("norm", "component", "pinned")
PARTS = ((0.5, 1.0), (0.0, 0.3))


def case(form: Any, outward: float = 0.5, inward: float = 1.0) -> meshes.Case:
    def make(views, shardings):
        return radial_brake(
            outward,
            inward,
            form=form,
            weight_dimension_numbers=views,
            param_shardings=shardings,
        )

    of_matrix = functools.partial(oracle.Brake, outward, inward, form)
    return meshes.Case(make, of_matrix, moved=meshes.added, scale=0.1)


def test_the_formula():
    forms = itertools.product(FORMS, PARTS)
    meshes.check_all({f"{form}, {parts}": case(form, *parts) for form, parts in forms}, "one")


@pytest.mark.parametrize("form", FORMS)
def test_steps_from_and_to_zero(form):
    first = jax.jit(functools.partial(first_update, radial_brake(form=form)))
    one = np.array([[3, 4]], np.float32)
    zero = 0 * one
    want = {"norm": 0.5, "component": 1.0, "pinned": 0.0}[form]  # no component along zero
    np.testing.assert_allclose(first(one, zero), want * one, rtol=1e-6)
    np.testing.assert_allclose(first(-one, one), -one, rtol=1e-6)
    assert first(zero, zero).tolist() == [[0.0, 0.0]]
    np.testing.assert_allclose(first(zero, one), zero, atol=1e-6)


def test_the_order_of_track_3():
    """Its brake stands before the floor, and the radius is pinned after the rate."""
    tx: Any = optax.chain(
        optax.scale(-1.0),
        radial_brake(form="component"),
        floor_update(0.5),
        optax.scale(0.1),
        radial_brake(1.0, 1.0, form="pinned"),
    )
    weights = meshes.arrays(3, {"w": (6, 4)})["w"]
    state, w, update = tx.init(weights), weights.astype(np.float64), jax.jit(tx.update)
    for t in range(10):
        u = meshes.arrays(t, {"w": (6, 4)}, scale=0.1)["w"]
        updates, state = update(u, state, weights)
        weights = weights + np.asarray(updates)
        u = u.astype(np.float64)
        along = np.sum(u * w) / oracle.norm(w) ** 2
        u = u + ((0.5 if along < 0 else 1.0) - 1) * along * w
        u = u * max(1, 0.5 * oracle.norm(w) / oracle.norm(u))
        radius = oracle.norm(w) - 0.1 * np.sum(u * w) / oracle.norm(w)
        w = oracle.unit(w - 0.1 * u) * radius
        assert reference.relative_error(weights, w) <= 1e-5
