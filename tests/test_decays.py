"""Cautious decay and decay coupled to the learning rate, beside their formulas in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import variants_on_meshes as meshes
import variants_oracle as oracle
from running import first_update

from muon_optax.transforms.weight_decay import add_cautious_weight_decay, coupled_decay


def falling(count):
    return 0.1 * 0.8**count


CASES = {"number": (0.1, lambda _: 0.1), "schedule": (falling, falling)}


def case(name: str) -> meshes.Case:
    decay, of_count = CASES[name]

    def make(views, shardings):
        del views, shardings
        return add_cautious_weight_decay(decay)

    return meshes.Case(make, lambda: oracle.Cautious(of_count))


def test_the_formula():
    meshes.check_all({name: case(name) for name in CASES}, "one")


def test_the_mask_is_of_signs_not_of_products():
    """The product of values that are this small is zero in float32."""
    weights, direction = np.array([[1e-30, 1e-30, 0.0], [-1e-30, 1e-30, 1.0]], np.float32)
    tx: Any = add_cautious_weight_decay(0.5)
    got = first_update(tx, direction, weights, jit=True)
    np.testing.assert_allclose(got, [-1e-30, 1.5e-30, 1.0], rtol=1e-6)


def test_an_update_of_zero_decays():
    tx: Any = add_cautious_weight_decay(0.5)
    got = first_update(tx, np.zeros(2, np.float32), np.array([1, -1], np.float32), jit=True)
    assert got.tolist() == [0.5, -0.5]


def test_complex_weights_decay_where_the_step_is_towards_zero():
    weights, direction = np.array([[1j, 1j], [1 + 1j, 1 - 1j]], np.complex64)
    tx: Any = add_cautious_weight_decay(0.5)
    got = first_update(tx, direction, weights, jit=True)
    assert got.tolist() == [1 + 1.5j, 1 - 1j]


def test_updates_keep_their_dtype_and_round_once():
    weights = np.full(2, 3, jnp.bfloat16)
    tx: Any = add_cautious_weight_decay(0.1)
    got = first_update(tx, np.ones(2, jnp.bfloat16), weights, jit=True)
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == [float(jnp.bfloat16(1.3))] * 2


def test_some_leaves_decay():
    tx: Any = add_cautious_weight_decay(0.5, mask={"w": True, "b": False})
    weights = {"w": np.float32(1), "b": np.float32(1)}
    got = first_update(tx, weights, weights, jit=True)
    assert {k: x.item() for k, x in got.items()} == {"w": 1.5, "b": 1.0}


def test_zero_needs_no_parameters_and_anything_else_does():
    tx: Any = add_cautious_weight_decay(0.0)
    assert tx.update(jnp.ones(2), tx.init(None))[0].tolist() == [1.0, 1.0]
    tx: Any = add_cautious_weight_decay(0.1)
    with pytest.raises(ValueError, match="add_cautious_weight_decay needs the parameters"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_a_checkpoint_of_decoupled_decay_goes_on():
    ours: Any = add_cautious_weight_decay(falling)
    theirs = optax.add_decayed_weights(falling)
    state = theirs.init(jnp.ones(2))
    assert jax.tree.structure(ours.init(jnp.ones(2))) == jax.tree.structure(state)
    _, state = jax.jit(ours.update)(jnp.ones(2), state, jnp.ones(2))
    assert jax.tree.leaves(state) == [1]


@pytest.mark.parametrize("most", [0.02, 1.0])  # AdamC's, and the square of the rate alone
def test_coupled_decay_takes_the_rate_once_more(most):
    rate: Any = optax.linear_schedule(0.02, 0.002, 10)
    tx: Any = optax.chain(
        optax.add_decayed_weights(coupled_decay(0.1, rate, most)),
        optax.scale_by_learning_rate(rate),
    )
    weights = np.float32(2)
    state, want, update = tx.init(weights), 2.0, jax.jit(tx.update)
    for count in range(10):
        updates, state = update(np.float32(1), state, weights)
        weights = weights + np.asarray(updates)
        of_count = float(rate(count))
        want = want - of_count - 0.1 * of_count**2 / most * want
        assert reference.relative_error(weights, want) <= 1e-6


def test_coupled_decay_of_numbers_and_schedules():
    assert coupled_decay(0.1, 0.02, 0.04)(7) == 0.05
    assert coupled_decay(lambda count: count, lambda count: 2 * count, 4.0)(3) == 4.5
    for bad in ((-1.0, 0.1, 1.0), (0.1, 0.1, 0.0), (0.1, 0.1, -1.0)):
        with pytest.raises(ValueError, match="got"):
            coupled_decay(*bad)
