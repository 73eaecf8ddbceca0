"""Shardings that are declared by a function, or by Flax's metadata."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, make_mesh
from shown import plan

from muon_optax import (
    MuonWarning,
    muon,
    orthogonalize,
    scale_by_muon,
    state_shardings,
)
from muon_optax.sharding.metadata import annotations_of
from muon_optax.sharding.options import ShardingOptions

FLAT = {"f": 8}
ROWS, WHOLE = P("f"), P()
HIDDEN = "can't be seen"


def mesh(kind: str = "auto"):
    return make_mesh(FLAT, kind)


def host() -> dict[str, dict[str, np.ndarray]]:
    return {"mlp": {"up": reference.matrix(0, 16, 32), "bias": np.ones(32, np.float32)}}


def by_rank(params: Any) -> Any:
    """A function of the parameters, as trainers write it."""
    return jax.tree.map(lambda x: ROWS if x.ndim == 2 else WHOLE, params)


def placed() -> Any:
    specs = by_rank(host())
    return jax.device_put(host(), jax.tree.map(lambda s: NamedSharding(mesh(), s), specs))


# Functions


def test_a_function_of_the_whole_tree_says_how_parameters_are_sharded():
    seen, params = [], placed()

    def shardings(tree):
        seen.append(jax.tree.map(jnp.shape, tree))
        return by_rank(tree)

    tx: Any = muon(0.1, FAST, param_shardings=shardings)
    assert seen == []  # there are no parameters yet
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)  # no warning
    assert seen == [jax.tree.map(jnp.shape, params)] * 2  # at init, and at the trace
    want = reference.muon(params["mlp"]["up"], [params["mlp"]["up"]], learning_rate=0.1, rows=FAST)
    assert reference.relative_error(updates["mlp"]["up"], want[0]) <= 1e-5
    sharded.assert_sharded(updates["mlp"]["up"], NamedSharding(mesh(), ROWS))


def test_a_function_gets_the_gradients_where_there_are_no_parameters():
    params = placed()
    tx: Any = muon(0.1, FAST, param_shardings=by_rank)
    step = jax.jit(lambda g, s: tx.update(g, s))
    without, _ = step(params, tx.init(params))
    sharded.assert_sharded(without["mlp"]["up"], NamedSharding(mesh(), ROWS))


@pytest.mark.parametrize("make", [scale_by_muon, orthogonalize])
def test_pieces_take_functions(make):
    up = placed()["mlp"]["up"]
    tx = make(FAST, param_shardings=lambda _: ROWS)
    updates, _ = jax.jit(tx.update)(up, tx.init(up))
    assert updates.shape == up.shape


def test_the_momentums_shardings_may_be_a_function():
    whole = jax.device_put(host(), NamedSharding(mesh("explicit"), WHOLE))
    tx: Any = muon(0.1, FAST, mu_shardings=by_rank)
    state = tx.init(whole)
    (mu,) = jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu)
    sharded.assert_sharded(mu, NamedSharding(mesh("explicit"), ROWS))
    found = state_shardings(tx, whole, mu_shardings=by_rank).inner_states["muon"].inner_state[0]
    assert jax.tree.leaves(found.mu) == [NamedSharding(mesh("explicit"), ROWS)]


def test_plans_and_state_shardings_take_functions():
    params = placed()
    named = jax.tree.map(lambda s: NamedSharding(mesh(), s), by_rank(host()))
    assert plan(params, by_rank) == plan(params, named)
    tx = muon(0.1)
    assert state_shardings(tx, params, by_rank) == state_shardings(tx, params, named)


def test_what_a_function_returns_is_checked():
    params = placed()
    wrong: Any = lambda params: {"mlp": "f"}  # noqa: E731
    with pytest.raises(TypeError, match=r"a sharding must be a NamedSharding.*'f'"):
        jax.jit(muon(0.1, param_shardings=wrong).update).lower(
            params, muon(0.1).init(params), params
        )
    with pytest.raises(TypeError, match=r"a sharding must be a NamedSharding.*'f'"):
        muon(0.1, mu_shardings={"mlp": "f"})


class CallableModel(nnx.Module):
    """A model that can be called, given as the tree of its own shardings."""

    def __init__(self):
        self.up = nnx.Param(jax.device_put(np.ones((16, 32)), NamedSharding(mesh(), ROWS)))

    def __call__(self):
        raise AssertionError("a model is a tree, not a function of parameters")


def test_a_model_that_can_be_called_is_a_tree():
    model = CallableModel()
    assert ShardingOptions(model).of(model).params is model


# MaxText's views


class TheirNumbers(NamedTuple):
    """MaxText's own `MuonDimensionNumbers`, as its optimizers/muon.py of August 2026 has it."""

    reduction_axis: Sequence[int] | int = 0
    output_axis: Sequence[int] | int = 1
    sharding: NamedSharding | None = None


def stacked() -> dict[str, np.ndarray]:
    """Two layers, scanned over axis 1 as MaxText's are, and a norm."""
    return {"up": reference.matrix(0, 16, 64).reshape(16, 2, 32), "norm": np.ones(16, np.float32)}


def their_numbers(sharding: NamedSharding | None) -> Any:
    return {"up": TheirNumbers((0,), (-1,), sharding), "norm": None}


@pytest.mark.parametrize("as_function", [False, True])
def test_a_sharding_beside_the_axes_counts_as_declared(as_function):
    where = NamedSharding(mesh(), ROWS)
    numbers = their_numbers(where)
    given = (lambda _: numbers) if as_function else numbers
    tx: Any = muon(0.1, FAST, muon_weight_dimension_numbers=given)
    params = jax.device_put(stacked(), {"up": where, "norm": NamedSharding(mesh(), WHOLE)})
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)  # no warning
    for layer, grad in enumerate(np.moveaxis(stacked()["up"], 1, 0)):
        (want,) = reference.muon(grad, [grad], learning_rate=0.1, rows=FAST)
        assert reference.relative_error(np.asarray(updates["up"])[:, layer], want) < 1e-5
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stacked())
    (row,) = plan(shapes, None, muon_weight_dimension_numbers=given).rows
    (declared,) = plan(
        shapes, {"up": where, "norm": None}, muon_weight_dimension_numbers=given
    ).rows
    assert row == declared
    assert row.spec == "f, -"
    mu = state_shardings(tx, params).inner_states["muon"].inner_state[0].mu["up"]
    assert mu.is_equivalent_to(where, 3)


def test_param_shardings_count_for_more_than_those_of_views():
    where = NamedSharding(mesh(), ROWS)
    columns = {"up": NamedSharding(mesh(), P(None, None, "f")), "norm": None}
    found = ShardingOptions(columns).of(stacked(), their_numbers(where))
    assert found.params is columns


def test_views_without_shardings_leave_it_to_metadata():
    box = nn.Partitioned(jax.ShapeDtypeStruct((16, 32), "float32"), ("f", None), mesh())
    found = ShardingOptions().of({"w": box}, {"w": TheirNumbers()})
    assert found.params == {("w",): NamedSharding(mesh(), P("f", None))}


@pytest.mark.parametrize("piece", [scale_by_muon, orthogonalize])
def test_pieces_read_the_shardings_of_views(piece):
    where = NamedSharding(mesh(), ROWS)
    grads = {"up": jax.device_put(stacked()["up"], where)}
    tx = piece(FAST, weight_dimension_numbers=TheirNumbers((0,), (-1,), where))
    jax.jit(tx.update).lower(grads, tx.init(grads))  # no warning


def test_other_tuples_with_axes_are_no_views():
    class Other(NamedTuple):
        reduction_axis: int = 0
        output_axis: int = 1
        heads: int = 4

    with pytest.raises(ValueError, match="matrix views doesn't match"):
        muon(0.1, muon_weight_dimension_numbers={"w": Other()}).init({"w": np.ones((4, 4))})


# Flax's metadata


class Linen(nn.Module):
    """A box with names of mesh axes, and one with logical names."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(32, kernel_init=nn.with_partitioning(init, ("f", None)), name="up")(x)
        logical = nn.with_logical_partitioning(init, ("mlp", "embed"))
        return nn.Dense(16, kernel_init=logical, name="down")(x)


class NNX(nnx.Module):
    """Variables with names of mesh axes, and with logical names and rules of their own."""

    def __init__(self, rngs: nnx.Rngs):
        named = {"out_sharding": ("f", None)}
        self.up = nnx.Linear(16, 32, kernel_metadata=named, rngs=rngs)
        rules = {"out_sharding": ("mlp", None), "sharding_rules": (("mlp", "f"),)}
        self.down = nnx.Linear(32, 16, kernel_metadata=rules, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def rules():
    return nn.logical_axis_rules((("mlp", "f"), ("embed", None)))


INPUTS = np.ones((2, 16), np.float32)


@functools.cache
def linen_params() -> Any:
    params = jax.jit(Linen().init)(jax.random.key(0), INPUTS)["params"]
    where = {"kernel": NamedSharding(mesh(), ROWS), "bias": NamedSharding(mesh(), WHOLE)}
    boxes = jax.tree.map(lambda x: where["kernel" if x.ndim == 2 else "bias"], params)
    return jax.device_put(params, boxes)


def check_update(tx: Any, params: Any) -> None:
    """Nothing is left to the partitioner, and updates stay where parameters are."""
    grads = jax.jit(lambda params: jax.tree.map(jnp.sin, params))(params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True)
    for got, grad in pairs:
        if grad.ndim == 2:
            want = reference.muon(grad, [grad], learning_rate=0.1, rows=FAST)[0]
            assert reference.relative_error(got, want) <= 1e-5
            sharded.assert_sharded(got, NamedSharding(mesh(), ROWS))


def test_linens_boxes_say_how_parameters_are_sharded():
    with rules():
        check_update(muon(0.1, FAST), linen_params())
        strategies = {row.strategy for row in plan(linen_params()).rows}
    assert strategies == {"gather"}


@pytest.mark.parametrize("kind", ["mesh", "rules"])
def test_a_boxs_own_mesh_and_rules_count(kind):
    x = np.ones((16, 32), np.float32)
    box: Any = {
        "mesh": nn.Partitioned(x, ("f", None), mesh=mesh()),
        "rules": nn.LogicallyPartitioned(x, ("mlp", None), mesh(), (("mlp", "f"),)),  # pyright: ignore
    }[kind]
    assert annotations_of({"w": box}) == {("w",): NamedSharding(mesh(), P("f", None))}
    assert ShardingOptions().of({"w": box}).params == {("w",): NamedSharding(mesh(), P("f", None))}
    assert annotations_of(box) == {(): NamedSharding(mesh(), P("f", None))}


def test_logical_names_that_no_rule_translates_say_nothing():
    params = linen_params()
    with pytest.warns(MuonWarning, match=rf"{HIDDEN}.*: down/kernel \(32, 16\)$"):
        jax.jit(muon(0.1, FAST).update).lower(params, muon(0.1).init(params), params)


@pytest.mark.parametrize("axes", [("f", None, None), ("nowhere", None), (None, "f")])
def test_metadata_that_does_not_fit_says_nothing(axes):
    whole = jax.device_put(np.ones((16, 12), np.float32), NamedSharding(mesh(), P()))
    params: Any = {"w": nn.Partitioned(whole, axes)}
    with pytest.warns(MuonWarning, match=HIDDEN):
        jax.jit(muon(0.1, FAST).update).lower(params, muon(0.1).init(params), params)


@pytest.mark.parametrize(("axes", "is_read"), [(("x", "y"), True), (("y", None), False)])
def test_on_axes_of_both_kinds_metadata_must_agree_with_the_type(axes, is_read):
    mixed = make_mesh({"x": 2, "y": 4}, {"x": "explicit", "y": "auto"})
    w = jax.device_put(reference.matrix(0, 16, 32), NamedSharding(mixed, P("x", "y")))
    found = []
    box = nn.Partitioned(w, axes)
    jax.eval_shape(lambda tree: found.append(ShardingOptions().of(tree).params), {"w": box})
    assert found == [{("w",): P(*axes)} if is_read else None]
    tx: Any = muon(0.1, FAST)
    updates, _ = jax.jit(tx.update)({"w": box}, tx.init({"w": box}), {"w": box})
    want = reference.muon(w, [w], learning_rate=0.1, rows=FAST)[0]
    assert reference.relative_error(updates["w"].value, want) <= 1e-5


def test_metadata_means_nothing_inside_a_shard_map():
    """There a block may have been gathered already."""
    tx: Any = muon(0.1)
    box = nn.Partitioned(np.ones((16, 32), np.float32), ("f", None))

    def body(x):
        with pytest.raises(ValueError, match="varies over"):
            tx.update({"w": box.replace(value=x)}, tx.init({"w": x}))
        return x

    jax.eval_shape(jax.shard_map(body, mesh=mesh(), in_specs=P("f"), out_specs=P("f")), box.value)


def test_nnx_variables_say_how_parameters_are_sharded():
    with jax.set_mesh(mesh()):
        params = nnx.state(nnx.jit(lambda: NNX(nnx.Rngs(0)))(), nnx.Param)
    check_update(muon(0.1, FAST), params)
    assert {row.strategy for row in plan(params).rows} == {"gather"}


@pytest.mark.parametrize("key", ["sharding", "sharding_names", "out_sharding"])
def test_all_names_that_nnx_had_for_it_count(key):
    class Variable:
        """Stands for a variable of another version of Flax."""

        def get_metadata(self):
            return {key: ("f", None), "mesh": None}

    Variable.__module__, Variable.__name__ = "flax.nnx.variablelib", "Variable"
    assert annotations_of({"w": Variable()}) == {("w",): P("f", None)}


def test_nnx_optimizer_gives_update_bare_arrays_of_which_init_saw_the_variables():
    with jax.set_mesh(mesh()):
        model = nnx.jit(lambda: NNX(nnx.Rngs(0)))()
        optimizer = nnx.Optimizer(model, muon(0.1, FAST), wrt=nnx.Param)
        before = jax.device_get(model.up.kernel[...])

        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(loss)(model, x)
            optimizer.update(model, grads)
            return grads.up.kernel[...]

        grad = step(model, optimizer, np.ones((8, 16), np.float32))
    want = reference.muon(before, [grad], learning_rate=0.1, rows=FAST)[0]
    after = model.up.kernel[...]
    assert reference.relative_error(np.asarray(after) - before, want) <= 1e-4
    sharded.assert_sharded(after, NamedSharding(mesh(), ROWS))


def abstract_linen() -> Any:
    return jax.eval_shape(Linen().init, jax.random.key(0), INPUTS)["params"]


def abstract_nnx() -> Any:
    return nnx.eval_shape(lambda: nnx.state(NNX(nnx.Rngs(0)), nnx.Param))


@pytest.mark.parametrize("make", [abstract_linen, abstract_nnx])
def test_metadata_tells_where_the_state_of_abstract_parameters_is_to_be(make):
    tx: Any = muon(0.1)
    with jax.set_mesh(mesh()), rules():
        params = make()
        found = state_shardings(tx, params)
        strategies = {row.strategy for row in plan(params).rows}
        state = jax.jit(tx.init, out_shardings=found)(
            jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
        )
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert sharding == NamedSharding(mesh(), P("f", None) if x.ndim == 2 else P())
        sharded.assert_sharded(x, sharding)
    assert strategies == {"gather"}


def test_concrete_arrays_count_for_more_than_metadata():
    columns = NamedSharding(mesh(), P(None, "f"))
    params: Any = {
        "w": nn.Partitioned(jax.device_put(np.ones((16, 32), np.float32), columns), ("f", None))
    }
    tx = optax.trace(0.9)
    assert jax.tree.leaves(state_shardings(tx, params)) == [columns]
    updates: Any = muon(0.1, FAST).update(params, muon(0.1).init(params), params)[0]
    sharded.assert_sharded(updates["w"].value, columns)


def test_without_a_mesh_metadata_means_nothing():
    params = jax.jit(Linen().init)(jax.random.key(0), INPUTS)["params"]
    tx = muon(0.1, FAST)
    with rules(), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(tx.update)(params, tx.init(params), params)
        assert {row.strategy for row in plan(params).rows} == {"local"}
    with pytest.raises(ValueError, match="kernel: give a NamedSharding"):
        state_shardings(tx, abstract_linen())
