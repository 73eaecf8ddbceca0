"""NAMO and NAMO-D, beside their formulas in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
import variants_on_meshes as meshes
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import side_by_side

from muon_optax import MuonDimensionNumbers, scale_by_shape, state_shardings
from muon_optax.transforms.namo import scale_by_namo

orthogonalize = functools.partial(reference.newton_schulz, rows=sharded.ONE_STEP)
OPTIONS: dict[str, dict[str, Any]] = {
    "namo": {},
    "namo_d": {"each": "input"},
    "emerging_optimizers": {"beta2": 0.95, "nesterov": False, "bias_correction": False},
}


def case(name: str) -> meshes.Case:
    options = dict(OPTIONS[name])

    def make(views, shardings):
        return scale_by_namo(
            ns_coeffs=sharded.ONE_STEP,
            weight_dimension_numbers=views,
            param_shardings=shardings,
            **options,
        )

    of_matrix = {k: v for k, v in options.items() if k != "bias_correction"}
    corrected = options.get("bias_correction", True)
    make_oracle = functools.partial(oracle.Namo, orthogonalize, corrected=corrected, **of_matrix)
    return meshes.Case(make, make_oracle)


def test_the_formula():
    meshes.check_all({name: case(name) for name in OPTIONS}, "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    meshes.check_all({name: case(name) for name in ("namo", "namo_d")}, kind)


def decayed(direction, w):
    return 0.2 * np.sqrt(max(direction.shape)) * direction + 0.1 * w


def test_decay_and_scale_are_multiplied_too_if_asked():
    def make(views, shardings, each):
        then: Any = optax.chain(
            scale_by_shape(views, scale="match_rms_adamw", param_shardings=shardings),
            optax.add_decayed_weights(0.1),
        )
        return scale_by_namo(
            ns_coeffs=sharded.ONE_STEP, each=each, then=then, weight_dimension_numbers=views
        )

    cases = {
        each: meshes.Case(
            functools.partial(make, each=each),
            functools.partial(oracle.Namo, orthogonalize, each=each, then=decayed),
        )
        for each in ("matrix", "input")
    }
    meshes.check_all(cases, "one")


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_momentum_may_be_sharded_otherwise(tensor, kind):
    """As in ZeRO-1: the parameters are replicated over data, and the momentum is not."""
    mesh = sharded.make_mesh({"data": 8 // tensor, "tensor": tensor}, kind)
    shapes = {"flat": (16, 6), "stack": (8, 4, 6)}
    views: Any = {"flat": MuonDimensionNumbers(0, 1), "stack": MuonDimensionNumbers(1, 2)}
    where = {name: jax.NamedSharding(mesh, P(None, "tensor")) for name in shapes}
    there = {name: jax.NamedSharding(mesh, P("data", "tensor")) for name in shapes}
    options: dict[str, Any] = {
        "ns_coeffs": sharded.ONE_STEP,
        "weight_dimension_numbers": views,
        "param_shardings": where,
        "mu_shardings": there,
    }
    pieces: dict[str, Any] = {e: scale_by_namo(each=e, **options) for e in ("matrix", "input")}
    params = jax.device_put(meshes.arrays(1, shapes), where)
    shardings = {
        each: state_shardings(tx, params, where, mu_shardings=there) for each, tx in pieces.items()
    }
    matrices = {
        each: {
            k: [oracle.Namo(orthogonalize, each=each) for _ in oracle.matrices(views[k], x)]
            for k, x in params.items()
        }
        for each in pieces
    }
    both, of_both = side_by_side(pieces), dict.fromkeys(pieces, params)
    state, update = jax.jit(both.init)(of_both), jax.jit(both.update)
    for t in range(3):
        grads = meshes.arrays(100 + t, shapes)
        placed = dict.fromkeys(pieces, jax.device_put(grads, where))
        updates, state = update(placed, state, of_both)
        for each, (k, grad) in itertools.product(pieces, grads.items()):
            meshes.check_shardings(state[each], shardings[each])
            got = updates[each][k]
            sharded.assert_sharded(got, where[k])
            pairs = zip(*(oracle.matrices(views[k], x) for x in (grad, got)), strict=True)
            for matrix, (g, x) in zip(matrices[each][k], pairs, strict=True):
                assert reference.relative_error(x, matrix.update(g, None)) <= 1e-5, each


@pytest.mark.parametrize(
    "options",
    [
        {"clamp": 0.0},
        {"clamp": "0.5"},
        {"clamp": None},
        {"each": "output"},
        {"beta2": 1.0},
        {"bias_correction": 1},
        {"momentum": "sum"},  # its factor is that of an average
    ],
)
def test_options_out_of_range(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        scale_by_namo(**options)


def test_gradients_of_zero_change_nothing():
    tx: Any = scale_by_namo(each="input")
    zero = jnp.zeros((4, 6))
    updates, state = tx.update(zero, tx.init(zero), zero)
    np.testing.assert_array_equal(updates, zero)
    np.testing.assert_array_equal(state.nu, 0.0)
