"""Rules read from what `hk.transform` returns."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import oracle
import pytest
from model_reading import axes_of, check_outer, said
from running import first_update

from muon_optax import model_rules, muon

pytest.importorskip("haiku")
hk: Any = importlib.import_module("haiku")  # not in every environment that is type-checked
KEY = jax.random.key(0)


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def transformed(function: Any) -> Any:
    return hk.without_apply_rng(hk.transform(function))


def read(function: Any, *inputs: Any) -> dict[str, Any]:
    model = hk.transform(function)
    params = jax.eval_shape(model.init, KEY, *inputs)
    return said(model_rules(model, *inputs), params)


MODULES = {
    "Linear": (
        lambda: hk.Linear(6),
        (2, 4),
        {"linear/w": [(1, 4, 6)], "linear/b": "bias of Linear"},
    ),
    "Conv2D": (
        lambda: hk.Conv2D(6, (3, 2), with_bias=False),
        (1, 3, 2, 4),
        {"conv2_d/w": [(1, 24, 6)]},
    ),
    "Conv2D of grey images": (
        lambda: hk.Conv2D(6, 3),
        (1, 3, 3, 1),
        {"conv2_d/w": [(1, 9, 6)], "conv2_d/b": "bias of Conv2D"},
    ),
    "Conv1D, grouped": (
        lambda: hk.Conv1D(6, 3, feature_group_count=2, with_bias=False),
        (1, 3, 4),
        {"conv1_d/w": [(2, 6, 3)]},
    ),
    "Conv1D, depthwise": (
        lambda: hk.Conv1D(4, 3, feature_group_count=4, with_bias=False),
        (1, 3, 4),
        {"conv1_d/w": "depthwise kernel of Conv1D"},
    ),
    "DepthwiseConv1D": (
        lambda: hk.DepthwiseConv1D(2, 3, with_bias=False),
        (1, 3, 4),
        {"depthwise_conv1_d/w": "depthwise kernel of DepthwiseConv1D"},
    ),
    "Conv1DTranspose": (
        lambda: hk.Conv1DTranspose(6, 3, with_bias=False),
        (1, 3, 4),
        {"conv1_d_transpose/w": [(1, 12, 6)]},
    ),
    "LayerNorm": (
        lambda: hk.LayerNorm((-2, -1), True, True),
        (1, 3, 4),
        {f"layer_norm/{name}": "norm of LayerNorm" for name in ("scale", "offset")},
    ),
    "GroupNorm": (
        lambda: lambda x: hk.GroupNorm(2)(x),
        (1, 3, 4),
        {f"group_norm/{name}": "norm of GroupNorm" for name in ("scale", "offset")},
    ),
    "LSTM": (
        lambda: lambda x: hk.dynamic_unroll(hk.LSTM(6), x, hk.LSTM(6).initial_state(2))[0],
        (5, 2, 4),
        {"lstm/linear/w": [(4, 10, 6)], "lstm/linear/b": "bias of Linear"},
    ),
    "GRU": (
        lambda: lambda x: hk.dynamic_unroll(hk.GRU(6), x, hk.GRU(6).initial_state(2))[0],
        (5, 2, 4),
        {"gru/w_i": [(3, 4, 6)], "gru/w_h": [(3, 6, 6)], "gru/b": "bias of GRU"},
    ),
    "attention": (
        lambda: (
            lambda x: hk.MultiHeadAttention(
                2, 4, model_size=6, with_bias=False, w_init=hk.initializers.VarianceScaling()
            )(x, x, x)
        ),
        (3, 6),
        {f"multi_head_attention/{name}/w": [(1, 6, 8)] for name in ("query", "key", "value")}
        | {"multi_head_attention/linear/w": [(1, 8, 6)]},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    """Within a model: its last layer would be a head."""
    make, shape, expected = MODULES[name]

    def model(x: jax.Array) -> jax.Array:
        x = make()(x)
        return hk.Linear(3, with_bias=False, name="result")(x.reshape(-1))

    found = read(model, floats(*shape))
    assert found.pop("result/w") == "head: Linear"
    assert found == expected


ONE_POSITION = {
    "Linear": ((1, 4), lambda x: x),
    "Conv2D": ((1, 3, 2, 4), lambda x: x.reshape(-1)),
    "Conv1DTranspose": ((1, 3, 4), lambda x: x.reshape(-1)),
}


@pytest.mark.parametrize("name", ONE_POSITION)
def test_views_by_what_the_layer_computes(name):
    """The oracle of `model_reading`, of one output of a window."""
    shape, taken = ONE_POSITION[name]
    x = oracle.gaussian(*shape).astype(np.float32)
    layer = transformed(lambda x: MODULES[name][0]()(x))
    params = layer.init(KEY, x)
    (path,) = [f"{module}/w" for module in params]

    def loss(params: Any) -> Any:
        y = layer.apply(params, x)
        y = y[(0, *((n - 1) // 2 for n in y.shape[1:-1]))]
        return (y * oracle.gaussian(*y.shape, seed=1).astype(np.float32)).sum()

    grads = jax.jit(jax.grad(loss))(params)
    within = transformed(lambda x: hk.Linear(2, name="result")(MODULES[name][0]()(x)))
    made = jax.eval_shape(within.init, KEY, x)
    view = model_reading.views_of(model_rules(within, x), made)[path]
    check_outer(view, model_reading.leaves_of(grads)[path], taken(x))


def transformer(ids: jax.Array) -> jax.Array:
    """A table of its own, a stack of square layers, and a head that has no telling name."""
    table = hk.get_parameter("places", (3, 4), init=jnp.zeros)

    def block(x: jax.Array) -> jax.Array:
        y = hk.LayerNorm(-1, True, True)(x)
        return x + hk.Linear(4, name="down")(jax.nn.relu(hk.Linear(4, name="up")(y)))

    x = hk.experimental.layer_stack(4)(block)(hk.Embed(9, 4)(ids) + table)
    return hk.Linear(9)(x)


def test_a_stack_of_square_layers():
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    model = hk.transform(transformer)
    params = jax.eval_shape(model.init, KEY, ids)
    rules = model_rules(model, ids)
    found = said(rules, params)
    stack = "__layer_stack_no_per_layer"
    assert {p: m for p, m in found.items() if isinstance(m, list)} == {
        f"{stack}/{name}/w": [(4, 4, 4)] for name in ("up", "down")
    }
    assert axes_of(rules, params)[f"{stack}/up/w"] == ((0,), (1,), (2,))
    assert found["linear/w"] == "head: Linear"
    assert found["embed/embeddings"] == "embedding table of Embed"
    assert found["~/places"] == "used elementwise in a function"


def test_no_inputs():
    with pytest.raises(TypeError, match="needs example inputs for a Haiku model"):
        model_rules(hk.transform(transformer))


def test_a_model_with_state_and_options():
    def function(x: jax.Array, is_training: bool) -> jax.Array:
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(4, name="hidden")(x), is_training)
        return hk.Linear(3)(jax.nn.relu(x))

    model = hk.transform_with_state(function)
    rules = model_rules(model, floats(2, 4), is_training=True)
    found = {model_reading.path_of(rule): rule.label for rule in rules}
    assert [path for path, label in found.items() if label == "muon"] == ["hidden/w"]


def test_a_step_of_training():
    model = transformed(lambda x: hk.nets.MLP([6, 2], with_bias=False)(x))
    x = jnp.eye(4)
    params = model.init(KEY, x)
    grads = jax.grad(lambda p: jnp.square(model.apply(p, x)).mean())(params)
    tx = muon(0.02, partition=model_rules(model, x))
    got = first_update(tx, grads, params)["mlp/~/linear_0"]["w"]
    want = -0.02 * 1.5**0.5 * oracle.newton_schulz(grads["mlp/~/linear_0"]["w"])
    assert oracle.relative_error(got, want) < 1e-4
