"""state_shardings: where the whole state lies, before it exists."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import muon, state_shardings

SPECS = {"w": P("fsdp"), "lm_head": P(None, "fsdp"), "bias": P()}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(request.param,) * 2)


def params_on(mesh) -> dict:
    shapes = {"w": (8, 16), "lm_head": (16, 8), "bias": (8,)}
    return {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, SPECS[name]))
        for name, shape in shapes.items()
    }


def optimizers() -> dict:
    return {
        "alone": muon(0.1),
        "in a chain": optax.chain(optax.clip_by_global_norm(1.0), muon(0.1, mu_dtype="bfloat16")),
        "injected": optax.inject_hyperparams(muon)(learning_rate=0.1),
    }


@pytest.mark.parametrize("name", optimizers())
def test_it_is_where_init_puts_the_state(mesh, name):
    tx, params = optimizers()[name], params_on(mesh)
    state = jax.jit(tx.init)(params)
    shardings = state_shardings(tx, params)
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.ndim == 0 or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_it_places_a_state_and_each_update_keeps_it_there(mesh):
    tx, params = muon(0.1, param_shardings=SPECS), params_on(mesh)
    shardings = state_shardings(tx, params, SPECS)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    _, state = jax.jit(tx.update)(params, state, params)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_shape_structs_and_shardings_are_enough(mesh):
    shapes = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    tx = muon(0.1)
    shardings = state_shardings(tx, shapes, {"w": NamedSharding(mesh, P("fsdp"))})
    mu = shardings.inner_states["muon"].inner_state[0].mu
    assert mu["w"].spec == P("fsdp")


def test_zero_1_momentum_lies_elsewhere(mesh):
    tx, params = muon(0.1), params_on(mesh)
    moved = {"w": P("data"), "lm_head": P(), "bias": P()}
    shardings = state_shardings(tx, params, mu_shardings=moved)
    mu = shardings.inner_states["muon"].inner_state[0].mu
    assert mu["w"].spec == P("data")
    assert shardings.inner_states["adam"].inner_state[0].mu["lm_head"].spec == P(None, "fsdp")


def test_unknown_layouts_are_listed():
    tx = muon(0.1)
    with pytest.raises(ValueError, match=r"(?s)where these leaves lie.*  w: give a NamedSharding"):
        state_shardings(tx, {"w": jnp.ones((4, 4))})
