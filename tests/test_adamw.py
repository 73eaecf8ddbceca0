"""The state of AdamW's leaves: optax's, sharded and complex as the parameters are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax.transforms.adamw import adamw_step

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


def step(mu_dtype: Any = None) -> Any:
    return adamw_step(0.1, 0, None, mu_dtype, b1=0.9, b2=0.99, eps=0, eps_root=0, nesterov=False)


def test_state_has_the_values_and_dtypes_of_optax():
    want: Any = optax.scale_by_adam(mu_dtype=jnp.bfloat16).init(PARAMS)
    got = step(jnp.bfloat16).init(PARAMS)[0]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape, g.weak_type) == (w.dtype, w.shape, False)
        np.testing.assert_array_equal(g, w)


def test_moments_are_complex_where_the_parameter_is():
    state = step(jnp.bfloat16).init({"c": jnp.ones(2, jnp.complex64), "r": jnp.ones(2)})[0]
    assert (state.mu["c"].dtype, state.mu["r"].dtype) == (jnp.complex64, jnp.bfloat16)


def test_moments_are_sharded_like_the_parameters_without_a_context():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.device_put(jnp.ones(4), sharding)
    state = jax.jit(step().init)(params)[0]
    assert state.mu.sharding == state.nu.sharding == sharding


def test_masked_and_missing_leaves():
    params = {"a": optax.MaskedNode(), "b": None, "c": jnp.ones(2)}
    want = optax.scale_by_adam().init(params)
    assert jax.tree.structure(step().init(params)[0]) == jax.tree.structure(want)
