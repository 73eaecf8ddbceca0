"""The u/w floor and relative updates, beside their formulas in float64."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
import variants_on_meshes as meshes
import variants_oracle as oracle
from running import first_update

from muon_optax.transforms.brakes import radial_brake
from muon_optax.transforms.relative_size import floor_update, relative_update
from muon_optax.transforms.weight_decay import add_cautious_weight_decay

PIECES: dict[str, Any] = {
    "matrix": (floor_update, {"target": 0.9}, lambda: oracle.Floor(0.9, "matrix")),
    "output": (floor_update, {"each": "output"}, lambda: oracle.Floor(0.35, "output")),
    "relative": (relative_update, {}, oracle.Relative),
}


def case(name: str) -> meshes.Case:
    piece, options, of_matrix = PIECES[name]

    def make(views, shardings):
        return piece(weight_dimension_numbers=views, param_shardings=shardings, **options)

    return meshes.Case(make, of_matrix)


def test_the_formula():
    meshes.check_all({name: case(name) for name in PIECES}, "one")


def floored(views: Any, shardings: Any) -> optax.GradientTransformation:
    where = {"weight_dimension_numbers": views, "param_shardings": shardings}
    return optax.chain(
        floor_update(each="output", **where),
        add_cautious_weight_decay(0.1),
        optax.scale(-0.1),
        radial_brake(**where),
    )


def relative(views: Any, shardings: Any) -> optax.GradientTransformation:
    where = {"weight_dimension_numbers": views, "param_shardings": shardings}
    return optax.chain(
        relative_update(**where), optax.scale(-0.1), radial_brake(form="pinned", **where)
    )


CHAINS = {
    floored: lambda: oracle.Chain(
        oracle.Floor(0.35, "output"), oracle.Cautious(lambda _: 0.1), -0.1, oracle.Brake()
    ),
    relative: lambda: oracle.Chain(oracle.Relative(), -0.1, oracle.Brake(form="pinned")),
}


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    """With the pieces that may stand around it."""
    cases = {
        make.__name__: meshes.Case(make, of_matrix, moved=meshes.added)
        for make, of_matrix in CHAINS.items()
    }
    meshes.check_all(cases, kind)


def test_the_floor_acts_on_some_matrices_and_not_on_others():
    ones, eye = np.ones((2, 2), np.float32), np.eye(2, dtype=np.float32)
    weights = {"small": ones, "large": ones, "zero": 0 * ones}
    updates = {"small": np.float32(0.1) * ones, "large": ones, "zero": eye}
    got = first_update(floor_update(0.35), updates, weights, jit=True)
    np.testing.assert_allclose(got["small"], 0.35, rtol=1e-6)
    np.testing.assert_array_equal(got["large"], 1.0)
    np.testing.assert_array_equal(got["zero"], eye)


def test_relative_updates_are_zero_below_the_smallest_norm():
    one = np.ones((1, 1), np.float32)
    first = jax.jit(functools.partial(first_update, relative_update()))
    for w, u in ((1e-16, 1.0), (1.0, 1e-16), (0.0, 1.0), (1.0, 0.0)):
        assert first(np.float32(u) * one, np.float32(w) * one).tolist() == [[0.0]]
    got = first(one, np.float32(1e-14) * one)
    np.testing.assert_allclose(got, [[1e-14]], rtol=1e-6)
