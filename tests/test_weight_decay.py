"""Weight decay: its mask, and when it needs parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import first_update

from muon_optax.transforms.weight_decay import decayed_weights

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}

ZEROS = [0, 0.0, np.float32(0), np.float64(0), jnp.zeros(()), jnp.zeros((), jnp.bfloat16)]


@pytest.mark.parametrize("zero", ZEROS)
def test_no_decay_needs_no_parameters(zero):
    tx = decayed_weights(zero, None)
    update, _ = tx.update(PARAMS, tx.init(PARAMS), None)
    assert update is PARAMS


@pytest.mark.parametrize("decay", [0.1, np.float32(0.1), lambda count: 0.1])
def test_decay_needs_parameters(decay):
    tx = decayed_weights(decay, None)
    np.testing.assert_allclose(first_update(tx, PARAMS)["w"], 1.1 * PARAMS["w"], rtol=1e-6)
    with pytest.raises(ValueError, match="you are not passing `params`"):
        tx.update(PARAMS, tx.init(PARAMS), None)


def test_a_traced_decay_is_taken_for_some():
    def decayed(decay):
        return first_update(decayed_weights(decay, None), PARAMS)["b"]

    np.testing.assert_allclose(jax.vmap(decayed)(jnp.array([0.0, 1.0])), [3, 6])


@pytest.mark.parametrize("mask", [None, {"w": True, "b": False}, lambda p: {"w": True, "b": False}])
def test_the_state_does_not_tell_whether_decay_is_zero(mask):
    structures = [
        jax.tree.structure(decayed_weights(decay, mask).init(PARAMS)) for decay in (0.0, 0.1)
    ]
    assert structures[0] == structures[1]
    update = first_update(decayed_weights(0.0, mask), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, update, PARAMS)
