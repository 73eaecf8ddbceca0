"""Parameters of reduced types have unreduced gradients, and get the update of their sums."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import apply_updates
from sharded import FAST, make_mesh
from shown import plan

from muon_optax import muon, scale_by_momentum, scale_by_muon, state_shardings
from muon_optax.sharding.declared import declared_specs
from muon_optax.sharding.specs import read_sharding

SPECS = {"up": P(None, "model"), "embed": P("model")}
RATE, DECAY = 0.1, 0.01


def mesh():
    return make_mesh({"data": 4, "model": 2})


def place(tree: Any, **types: Any) -> Any:
    """Puts a tree on the mesh, `up` and `embed` with types such as `reduced={"data"}`."""
    where = {name: NamedSharding(mesh(), spec.update(**types)) for name, spec in SPECS.items()}
    return jax.device_put(tree, where)


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = NamedSharding(mesh(), P("data"))
    h = jnp.einsum("bv,vd->bd", x, params["embed"], out_sharding=hidden)
    return jnp.sum(jnp.tanh(h @ params["up"]) ** 2)


def model() -> tuple[dict[str, np.ndarray], jax.Array]:
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(16, 32)), "embed": rng.normal(size=(64, 16))}
    x = jax.device_put(rng.normal(size=(8, 64)).astype("float32"), NamedSharding(mesh(), P("data")))
    return {name: p.astype("float32") for name, p in params.items()}, x


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "eager"])
@pytest.mark.parametrize("mu_spec", [None, P("data", "model")])
def test_both_halves_take_unreduced_gradients(jit, mu_spec):
    host, x = model()
    params = place(host, reduced={"data"})
    gradient = jax.jit(jax.grad(loss))
    there = None if mu_spec is None else {"up": NamedSharding(mesh(), mu_spec), "embed": None}
    tx: Any = muon(
        RATE, FAST, weight_decay=DECAY, adam_weight_decay=DECAY, mu_shardings=there, nesterov=False
    )
    adamw: Any = optax.adamw(RATE, weight_decay=DECAY)
    state, ours, grads = jit(tx.init)(params), [], []
    begun = adamw.init(host["embed"])
    for _ in range(2):
        grad = gradient(params, x)
        assert jax.typeof(grad["up"]).sharding.spec.unreduced == {"data"}
        grads.append(jax.device_get(gradient(place(jax.device_get(params)), x)))
        updates, state = jit(tx.update)(grad, state, params)
        old = jax.device_get(params["embed"])
        want, begun = adamw.update(grads[-1]["embed"], begun, old)
        assert reference.relative_error(updates["embed"], want) <= 1e-5
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
        params = apply_updates(params, updates)
        ours.append(updates["up"])
    want = reference.muon(
        host["up"], [g["up"] for g in grads], learning_rate=RATE, rows=FAST, weight_decay=DECAY,
        nesterov=False,
    )  # fmt: skip
    for got, expected in zip(ours, want, strict=True):
        assert reference.relative_error(got, expected) <= 1e-5
    assert not any(jax.typeof(leaf).sharding.spec.reduced for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("piece", [scale_by_muon, scale_by_momentum])
def test_updates_without_parameters_have_the_parameters_type(piece):
    host, x = model()
    params = place(host, reduced={"data"})
    grads = jax.jit(jax.grad(loss))(params, x)
    tx = piece()
    updates, _ = jax.jit(tx.update)(grads, tx.init(params))
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)


def test_what_is_declared_may_have_a_reduced_type():
    host, _ = model()
    params = place(host, reduced={"data"})
    assert declared_specs(params, params) == [
        NamedSharding(mesh(), P("model")),
        NamedSharding(mesh(), P(None, "model")),
    ]
    layout = read_sharding(params["up"])
    assert (layout.spec, layout.free) == (((), ("model",)), ("data",))
    assert plan(params, params).bytes == plan(params).bytes


def test_states_and_plans_of_reduced_types():
    host, _ = model()
    reduced, plain = place(host, reduced={"data"}), place(host)
    tx: Any = muon(RATE, FAST)
    assert state_shardings(tx, reduced) == state_shardings(tx, plain)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), reduced
    )
    abstract = tx.init(structs).inner_states["muon"].inner_state[0].mu["up"]
    assert abstract.sharding == NamedSharding(mesh(), SPECS["up"])
    (*rows, summed) = plan(reduced).rows
    assert tuple(rows) == plan(plain).rows
    assert summed.bytes == 2 * 16 * 16 * 4 * 3 // 4  # an all-reduce of a block over 4 devices
    assert re.search("unreduced over data", summed.reason)


def test_unreduced_gradients_inside_a_shard_map_are_an_error_that_names_them():
    spec = P(None, "model", reduced=frozenset({"data"}))
    shape = jax.ShapeDtypeStruct((16, 32), "float32", sharding=NamedSharding(mesh(), spec))
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh(), P("data")))

    def body(w, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["mlp"]["up"]) ** 2))({"mlp": {"up": w}})
        tx: Any = muon(RATE, FAST, param_shardings=P(None, "model"))
        return tx.update(grads, tx.init(grads))[0]["mlp"]["up"]

    outer = jax.shard_map(body, mesh=mesh(), in_specs=(spec, P("data")), out_specs=spec)
    with pytest.raises(ValueError, match=r"jax.lax.psum(?s:.*)  mlp/up: unreduced over \['data'\]"):
        jax.eval_shape(outer, shape, x)
