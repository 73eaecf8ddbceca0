"""Wrappers around optax's transformations: dtypes, order and need of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import dtypes, first_update

from muon_optax.transforms.wrappers import in_float32

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


def halved(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_updates_are_formed_in_float32_and_rounded_once(dtype):
    def formed(updates, params):
        assert updates.dtype == params.dtype == jnp.float32
        return 1e-3 * updates + 1e-4 * params

    tx = in_float32(optax.stateless(formed))
    grad, param = jnp.asarray(1.0, dtype), jnp.asarray(3.0, dtype)
    update = first_update(tx, grad, param)
    assert update.dtype == dtype
    np.testing.assert_array_equal(update, jnp.asarray(np.float32(1e-3 + 3e-4), dtype))


def test_wide_leaves_keep_their_width():
    tx = in_float32(optax.scale(2.0))
    with jax.enable_x64(True):
        grad = {"d": jnp.array(1 / 3, jnp.float64), "c": jnp.array(1 + 2j, jnp.complex64)}
        update = first_update(tx, grad)
        assert update["d"].dtype == jnp.float64
        assert float(update["d"]) == 2 / 3
        assert update["c"].dtype == jnp.complex64
        assert complex(update["c"]) == 2 + 4j


def test_a_state_keeps_its_dtypes_and_containers():
    tx = in_float32(optax.scale_by_adam())
    params = halved(PARAMS)
    _, new = jax.eval_shape(tx.update, params, tx.init(params))
    assert jax.tree.structure(new) == jax.tree.structure(tx.init(params))
    assert dtypes(new) == dtypes(tx.init(params))


def test_extra_arguments_get_through():
    def scaled(updates, state, params=None, *, value=1.0, **_):
        return updates * value, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    tx = in_float32(inner)
    update, _ = tx.update(jnp.full(2, 2.0, jnp.bfloat16), optax.EmptyState(), value=3.0)
    np.testing.assert_array_equal(update, [6, 6])
