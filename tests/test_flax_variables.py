"""Flax's variables are masked as a whole, so that trainers may walk an optimizer's state."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import run
from sharded import make_mesh

from muon_optax import check_state, muon, recipes, state_shardings
from muon_optax.interop import from_optax


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def halves(x):
    """Quick to compile, where the mathematics don't matter."""
    return x / 2


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.relu(self.norm(self.up(self.embed(tokens)))))


def loss_of(model: Any) -> jax.Array:
    return ((model(jnp.arange(10)) - 1) ** 2).mean()


def make_tx(rate: Any = 0.1, **options: Any) -> Any:
    return muon(rate, weight_decay=0.1, orthogonalizer=halves, **options)


def by_path(of: Any) -> Any:
    """A function of the parameters that labels each leaf by its path."""
    return lambda params: jax.tree.map_with_path(
        lambda path, _: of(jax.tree_util.keystr(path)), params
    )


# Transformations as trainers have them, and how many arrays the state has for each parameter.
ADAM = {"embed": 2, "norm": 2, "bias": 2}
FROZEN = {"embed": 0, "norm": 2, "bias": 2}
AROUND: dict[str, tuple[Any, dict[str, int]]] = {
    "nothing": (make_tx, ADAM),
    "chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), make_tx()), ADAM),
    "apply_if_finite": (lambda: optax.apply_if_finite(make_tx(), 2), ADAM),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(lambda rate: make_tx(rate))(rate=0.1),
        ADAM,
    ),
    "a partition of two": (
        lambda: optax.partition(
            {"a": make_tx(), "b": make_tx(0.01)}, by_path(lambda path: "ab"["up" in path])
        ),
        ADAM,
    ),
    "a masked one": (
        lambda: optax.masked(make_tx(), by_path(lambda path: "embed" not in path)),
        FROZEN,
    ),
    "a frozen leaf": (
        lambda: make_tx(
            partition=by_path(
                lambda path: "frozen" if "embed" in path else "muon" if "kernel" in path else "adam"
            )
        ),
        FROZEN,
    ),
    "optax_muon": (
        lambda: recipes.optax_muon(0.1, orthogonalizer=halves),
        {**ADAM, "embed": 1},
    ),
}


@functools.cache
def made(around: str) -> Any:
    """The transformation; its update of a tree without variables is compiled once."""
    return AROUND[around][0]()


def dtypes_of(optimizer: nnx.Optimizer) -> Any:
    """As Tunix's PeftTrainer walks a state."""
    return jax.tree.map(
        lambda variable: variable.get_value().dtype,
        nnx.state(optimizer, nnx.optimizer.OptState),
        is_leaf=is_variable,
    )


def shapes_of(optimizer: nnx.Optimizer) -> list[tuple[int, ...]]:
    """The shapes of the moments in a state."""
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    return sorted(x.get_value().shape for x in variables if x.get_value().ndim)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_each_variable_of_a_state_has_a_value(around, kind):
    counts, tx = AROUND[around][1], made(around)
    model = Model(nnx.Rngs(0))
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = kind(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(loss_of)(model)
        before = dtypes_of(optimizer)
        optimizer.update(*([model] if kind is nnx.Optimizer else []), grads)
        assert dtypes_of(optimizer) == before
        return grads

    before = dtypes_of(optimizer)
    grads = [nnx.to_pure_dict(nnx.state(step(model, optimizer))) for _ in range(2)]
    assert dtypes_of(optimizer) == before
    want = [
        x.shape
        for path, x in jax.tree.leaves_with_path(pure)
        for _ in range(next((n for name, n in counts.items() if name in str(path)), 1))
    ]
    assert shapes_of(optimizer) == sorted(want)
    _, _, params = run(tx, pure, grads, jit=True)  # without variables
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, params)


def test_partition_specs_have_the_structure_of_the_state():
    """As Tunix's PeftTrainer puts a state on a mesh."""
    mesh = make_mesh({"f": 2}, "auto")
    with jax.set_mesh(mesh):
        model = nnx.Dict(
            up=nnx.Param(jnp.ones((4, 6)), out_sharding=("f", None)),
            bias=nnx.Param(jnp.ones(6), out_sharding=("f",)),
        )
        optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    specs = nnx.get_partition_spec(state)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec or P()))

    nnx.update(optimizer, jax.tree.map(put, state, specs))
    halves_of = nnx.as_pure(optimizer.opt_state).inner_states
    moments = [
        halves_of["adam"].inner_state[0].nu["bias"],
        halves_of["muon"].inner_state[0].mu["up"],
    ]
    assert [x.sharding.spec for x in moments] == [P("f"), P("f", None)]


def test_a_restored_optimizer_goes_on(tmp_path):
    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss_of)(model))

    def trained(model, optimizer, steps):
        for _ in range(steps):
            step(model, optimizer)

    models, tx = [Model(nnx.Rngs(0)), Model(nnx.Rngs(1))], make_tx()
    first, second = [nnx.Optimizer(model, tx, wrt=nnx.Param) for model in models]
    trained(models[0], first, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = {"model": nnx.state(models[0]), "optimizer": nnx.state(first)}
        checkpointer.save(tmp_path / "step", tree)
        checkpointer.wait_until_finished()
        wanted = {"model": nnx.state(models[1]), "optimizer": nnx.state(second)}
        found = checkpointer.restore(tmp_path / "step", wanted)
    check_state(make_tx(), nnx.state(models[1], nnx.Param), found["optimizer"]["opt_state"])
    nnx.update(models[1], found["model"])
    nnx.update(second, found["optimizer"])
    for model, optimizer in zip(models, (first, second), strict=True):
        trained(model, optimizer, 1)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state((models[0], first))),
        nnx.to_pure_dict(nnx.state((models[1], second))),
    )


def test_from_optax_and_state_shardings_mask_whole_variables():
    mesh = make_mesh({"f": 2})
    params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    tx = recipes.optax_muon(0.1)
    want = jax.eval_shape(tx.init, params)
    found = from_optax(optax.contrib.muon(0.1).init(params), params)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    check_state(tx, params, found)
    rows = jax.tree.map(lambda x: NamedSharding(mesh, P("f")), params)
    shardings = state_shardings(tx, params, rows)
    assert jax.tree.structure(shardings) == jax.tree.structure(want)
    kept = shardings.inner_states["muon"].inner_state[0].mu
    assert {x.spec for x in jax.tree.leaves(kept)} == {P("f")}


def test_a_variable_may_hold_several_leaves():
    """What one half has of a variable leaves the others' leaves masked inside it."""
    pure = {
        "mixed": {"w": jnp.ones((4, 6)), "b": jnp.ones(6), "n": jnp.array(3)},
        "vectors": [jnp.ones(2), jnp.ones(3)],
        "count": jnp.array(2),
        "nothing": None,
        "w": jnp.ones((4, 6)),
    }
    boxed = {name: nnx.Param(x) for name, x in pure.items()}
    tx = make_tx()
    state = tx.init(boxed)
    adam, muons = (state.inner_states[label].inner_state[0].mu for label in ("adam", "muon"))
    masked = optax.MaskedNode()
    assert adam["count"] == muons["count"] == muons["vectors"] == adam["w"] == masked
    assert muons["mixed"].get_value()["b"] == adam["mixed"].get_value()["w"] == masked
    assert adam["mixed"].get_value()["n"] == masked
    update = jax.jit(tx.update)
    updates, new = update(boxed, state, boxed)
    want, _ = update(pure, tx.init(pure), pure)
    assert jax.tree.structure(updates) == jax.tree.structure(boxed)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(updates), jax.tree.leaves(want))


def test_linen_boxes_are_masked_as_a_whole():
    def box(x, *names):
        return nn.Partitioned(x, names=names)

    params = {"kernel": box(jnp.ones((4, 6)), "f", None), "bias": box(jnp.ones(6), "f")}
    state = make_tx().init(params)
    adam, muons = (state.inner_states[label].inner_state[0].mu for label in ("adam", "muon"))
    assert adam["kernel"] == muons["bias"] == optax.MaskedNode()
    specs: Any = nn.get_partition_spec(state)
    assert specs.inner_states["muon"].inner_state[0].mu["kernel"] == P("f", None)
    assert jax.tree.structure(specs) == jax.tree.structure(nn.unbox(state))
    updates, _ = jax.eval_shape(make_tx().update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
