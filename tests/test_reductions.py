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
from running import apply_compiled, apply_updates
from sharded import FAST, assert_sharded, make_mesh
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


def assert_as_declared(tree: Any, where: Any) -> None:
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True):
        assert_sharded(x, sharding)


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
    begun, theirs = adamw.init(host["embed"]), jax.jit(adamw.update)
    for _ in range(2):
        grad = gradient(params, x)
        assert jax.typeof(grad["up"]).sharding.spec.unreduced == {"data"}
        grads.append(jax.device_get(gradient(place(jax.device_get(params)), x)))
        updates, state = jit(tx.update)(grad, state, params)
        old = jax.device_get(params["embed"])
        want, begun = theirs(grads[-1]["embed"], begun, old)
        assert reference.relative_error(updates["embed"], want) <= 1e-5
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
        params = apply_compiled(params, updates)
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


def test_moments_are_sharded_over_the_axes_that_a_type_is_reduced_over():
    host, _ = model()
    reduced = place(host, reduced={"data"})
    tx: Any = muon(RATE, FAST)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), reduced
    )
    wanted = {"up": P(None, ("model", "data")), "embed": P(("model", "data"), None)}
    for found in (tx.init(structs), tx.init(reduced), jax.jit(tx.init)(reduced)):
        halves = [found.inner_states[half].inner_state[0] for half in ("muon", "adam")]
        for x, name in ((halves[0].mu["up"], "up"), (halves[1].nu["embed"], "embed")):
            assert_sharded(x, NamedSharding(mesh(), wanted[name]))
    assert_as_declared(jax.jit(tx.init)(reduced), state_shardings(tx, reduced))


def test_plans_of_reduced_types_have_the_sum():
    host, _ = model()
    reduced, plain = place(host, reduced={"data"}), place(host)
    whole = plan(reduced, shard_moments_over=())
    (*rows, summed) = whole.rows
    assert tuple(rows) == plan(plain).rows
    assert summed.bytes == 2 * 16 * 16 * 4 * 3 // 4  # an all-reduce of a block over 4 devices
    assert re.search("unreduced over data, and are all-reduced", summed.reason)
    (scattered,) = [row for row in plan(reduced).rows if "reduce-scattered" in row.reason]
    assert scattered.bytes == summed.bytes // 2
    assert whole.advice == plan(reduced).advice == ()


def test_unreduced_gradients_inside_a_shard_map_are_summed():
    """As on Explicit axes: the type of the update is its parameter's, and the decay takes that."""
    (host, x), line = model(), make_mesh({"data": 8})
    spec = P(reduced=frozenset({"data"}))
    tx: Any = muon(RATE, FAST, weight_decay=DECAY, nesterov=False, param_shardings=P())

    def total(params, x):
        return jnp.sum(jnp.tanh(x @ params["embed"] @ params["up"]) ** 2)

    def body(params, x):
        updates, _ = tx.update(jax.grad(total)(params, x), tx.init(params), params)
        return apply_updates(params, updates)

    outer = jax.shard_map(body, mesh=line, in_specs=(spec, P("data")), out_specs=spec)
    placed = jax.device_put(host, NamedSharding(line, spec))
    new = jax.jit(outer)(placed, jax.device_put(x, NamedSharding(line, P("data"))))
    grad = jax.jit(jax.grad(total))(host, jax.device_get(x))
    (want,) = reference.muon(
        host["up"], [grad["up"]], learning_rate=RATE, rows=FAST, weight_decay=DECAY, nesterov=False
    )
    assert reference.relative_error(new["up"] - host["up"], want) <= 1e-5
