"""Rules read from Equinox models, whose weights are [out, in]."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import oracle
import pytest
from model_reading import axes_of, check_outer, said
from running import first_update
from shown import report

from muon_optax import MuonDimensionNumbers, MuonWarning, model_rules, muon

KEY = jax.random.key(0)


def params_of(model: Any) -> Any:
    """As `eqx.filter(model, eqx.is_inexact_array)`, of shape structs too."""

    def is_trained(x: Any) -> bool:
        return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)

    return eqx.filter(model, is_trained)


def made(make: Any) -> Any:
    return eqx.filter_eval_shape(make, KEY)


def read(make: Any, *inputs: Any) -> dict[str, Any]:
    model = made(make)
    return said(model_rules(model, *inputs), params_of(model))


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MODULES = {
    "Linear": (
        lambda k: eqx.nn.Linear(4, 6, key=k),
        {"weight": [(1, 4, 6)], "bias": "bias of Linear"},
    ),
    "Linear of scalars": (
        lambda k: eqx.nn.Linear("scalar", 6, key=k),
        {"weight": [(1, 1, 6)], "bias": "bias of Linear"},
    ),
    "Conv": (
        lambda k: eqx.nn.Conv2d(4, 6, (3, 2), key=k),
        {"weight": [(1, 24, 6)], "bias": "bias of Conv2d"},
    ),
    "Conv of grey images": (
        lambda k: eqx.nn.Conv2d(1, 6, 3, use_bias=False, key=k),
        {"weight": [(1, 9, 6)]},
    ),
    "Conv, grouped": (
        lambda k: eqx.nn.Conv1d(4, 6, 3, groups=2, use_bias=False, key=k),
        {"weight": [(2, 6, 3)]},
    ),
    "Conv, depthwise": (
        lambda k: eqx.nn.Conv1d(4, 8, 3, groups=4, use_bias=False, key=k),
        {"weight": "depthwise kernel of Conv1d"},
    ),
    "ConvTranspose": (
        lambda k: eqx.nn.ConvTranspose1d(4, 6, 3, use_bias=False, key=k),
        {"weight": [(1, 12, 6)]},
    ),
    "Embedding": (
        lambda k: eqx.nn.Embedding(9, 4, key=k),
        {"weight": "embedding table of Embedding"},
    ),
    "LSTMCell": (
        lambda k: eqx.nn.LSTMCell(4, 6, key=k),
        {
            "weight_ih": [(4, 4, 6)],
            "weight_hh": [(4, 6, 6)],
            "bias": "fewer than two dims",
        },
    ),
    "GRUCell": (
        lambda k: eqx.nn.GRUCell(4, 6, use_bias=False, key=k),
        {"weight_ih": [(3, 4, 6)], "weight_hh": [(3, 6, 6)]},
    ),
    "LayerNorm": (
        lambda k: eqx.nn.LayerNorm((4, 3)),
        {"weight": "norm of LayerNorm", "bias": "norm of LayerNorm"},
    ),
    "RMSNorm": (
        lambda k: eqx.nn.RMSNorm((4, 3)),
        {"weight": "norm of RMSNorm", "bias": "norm of RMSNorm"},
    ),
    "GroupNorm": (
        lambda k: eqx.nn.GroupNorm(2, 4),
        {"weight": "norm of GroupNorm", "bias": "norm of GroupNorm"},
    ),
    "MultiheadAttention": (
        lambda k: eqx.nn.MultiheadAttention(2, 6, qk_size=4, vo_size=5, key=k),
        {f"{name}_proj/weight": [(1, 6, 8)] for name in ("query", "key")}
        | {"value_proj/weight": [(1, 6, 10)], "output_proj/weight": [(1, 10, 6)]},
    ),
    "WeightNorm": (
        lambda k: eqx.nn.WeightNorm(eqx.nn.Linear(4, 6, use_bias=False, key=k)),
        {"layer/weight": [(1, 4, 6)], "g": "norm of WeightNorm"},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, expected = MODULES[name]
    assert read(make) == expected


ONE_POSITION = {
    "Linear": ((4,), lambda x: x),
    "Conv": ((4, 3, 2), lambda x: x.reshape(-1)),
    "Conv, grouped": ((4, 3), lambda x: x.reshape(2, 6)),
}


@pytest.mark.parametrize("name", ONE_POSITION)
def test_views_by_what_the_layer_computes(name):
    """The oracle of `model_reading`, of the only output of a window."""
    make, _ = MODULES[name]
    shape, taken = ONE_POSITION[name]
    x = oracle.gaussian(*shape).astype(np.float32)

    def loss(model: Any) -> Any:
        y = model(x)
        return (y * oracle.gaussian(*y.shape, seed=1)).sum()

    run = jax.jit(lambda: jax.grad(loss)(params_of(make(KEY))))
    model = made(make)
    view = model_reading.views_of(model_rules(model), params_of(model))["weight"]
    check_outer(view, run().weight, taken(x))


def test_an_mlp_is_scaled_by_its_outputs():
    """Row 5: taken for [in, out], the scales were 1 and 2.83."""
    mlp = made(lambda k: eqx.nn.MLP(4, 8, 64, 2, key=k))
    found = report(params_of(mlp), partition=model_rules(mlp))
    scales = {row.path: row.scales for row in found.rows if row.scales}
    assert scales == {"layers/0/weight": (4.0,), "layers/1/weight": (1.0,)}
    assert {r.path: r.reason for r in found.rows}["layers/2/weight"] == "head: Linear"


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: Any):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 3 * width, key=keys[1])
        self.down = eqx.nn.Linear(3 * width, width, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(x)))


class Transformer(eqx.Module):
    """A ViT of patches: tables of one's own, stacked layers on any axis, and a head in an MLP."""

    patches: eqx.nn.Linear
    places: jax.Array
    layers: Block
    head: eqx.nn.Sequential
    axis: int = eqx.field(static=True)

    def __init__(self, width: int, depth: int, axis: int, key: Any):
        keys = jax.random.split(key, 3)
        self.patches = eqx.nn.Linear(5, width, key=keys[0])
        self.places = jnp.ones((3, width))
        make = eqx.filter_vmap(lambda k: Block(width, k), out_axes=eqx.if_array(axis))
        self.layers = make(jax.random.split(keys[1], depth))
        norm, last = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 10, key=keys[2])
        self.head = eqx.nn.Sequential([norm, last])
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        leading = jax.tree.map(lambda p: jnp.moveaxis(p, self.axis, 0), arrays)
        x = jax.vmap(self.patches)(x) + self.places
        x, _ = jax.lax.scan(lambda c, p: (eqx.combine(p, static)(c), None), x, leading)
        return self.head(x.mean(0))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("depth", [3, 8])
def test_a_stacked_transformer(axis, depth):
    """As deep as wide, too: the layers' norms and other weights tell."""
    model = made(lambda k: Transformer(8, depth, axis, k))
    params = params_of(model)
    for inputs in ((), (floats(3, 5),)):
        rules = model_rules(model, *inputs) if inputs else None
        if rules is None:
            with pytest.warns(MuonWarning, match=r"which get AdamW; .* inputs.*: places \(3, 8\)"):
                rules = model_rules(model)
        found = said(rules, params)
        names = ("query", "key", "value", "output")
        assert {path: m for path, m in found.items() if isinstance(m, list)} == {
            "patches/weight": [(1, 5, 8)],
            **{f"layers/attention/{name}_proj/weight": [(depth, 8, 8)] for name in names},
            "layers/up/weight": [(depth, 8, 24)],
            "layers/down/weight": [(depth, 24, 8)],
        }
        assert found["head/layers/1/weight"] == "head: Linear"
        axes = axes_of(rules, params)
        kept = tuple(a for a in range(3) if a != axis % 3)
        assert axes["layers/up/weight"] == ((axis % 3,), kept[1:], kept[:1])
        assert axes["layers/attention/key_proj/weight"] == ((axis % 3,), kept[1:], kept[:1])


def test_the_hidden_layers_of_a_scanned_mlp():
    model = made(lambda k: eqx.nn.MLP(4, 3, 8, 5, scan=True, key=k))
    found = said(model_rules(model, floats(4)), params_of(model))
    assert found["layers/1/weight"] == [(4, 8, 8)]
    assert found["layers/2/weight"] == "head: Linear"


def test_a_cnn():
    """Equinox's own example: layers in a list, among functions."""

    class Cnn(eqx.Module):
        layers: list

        def __init__(self, key: Any):
            keys = jax.random.split(key, 4)
            self.layers = [
                eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
                eqx.nn.MaxPool2d(kernel_size=2),
                jax.nn.relu,
                jnp.ravel,
                eqx.nn.Linear(12, 16, key=keys[1]),
                jax.nn.sigmoid,
                eqx.nn.Linear(16, 8, key=keys[2]),
                jax.nn.relu,
                eqx.nn.Linear(8, 10, key=keys[3]),
                jax.nn.log_softmax,
            ]

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return x

    for inputs in ((), (floats(1, 6, 6),)):
        found = read(Cnn, *inputs)
        assert {p: m for p, m in found.items() if p.endswith("weight")} == {
            "layers/0/weight": [(1, 16, 3)],
            "layers/4/weight": [(1, 12, 16)],
            "layers/6/weight": [(1, 16, 8)],
            "layers/8/weight": "head: Linear",
        }


def test_tied_weights():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key: Any):
            pair = eqx.nn.Embedding(9, 4, key=key), eqx.nn.Linear(4, 9, use_bias=False, key=key)
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token: jax.Array) -> jax.Array:
            embedding, linear = self.shared()
            return linear(embedding(token))

    found = read(Tied, jax.ShapeDtypeStruct((), jnp.int32))
    assert found == {"shared/pytree/0/weight": "embedding table of Embedding"}


def test_a_part_that_is_trained():
    """A model with None for what is frozen, as `eqx.partition` makes it."""
    model = made(lambda k: eqx.nn.MLP(4, 8, 16, 1, key=k))
    mask = eqx.tree_at(lambda m: m.layers[0].weight, jax.tree.map(lambda _: False, model), True)
    trained, _ = eqx.partition(model, mask)
    (rule,) = model_rules(trained)
    assert rule.view == MuonDimensionNumbers((1,), (0,))


def test_a_step_of_training():
    rules = model_rules(made(lambda k: eqx.nn.MLP(4, 2, 6, 1, use_bias=False, key=k)))

    def step() -> tuple[Any, Any]:
        model = eqx.nn.MLP(4, 2, 6, 1, use_bias=False, key=KEY)
        grads = eqx.filter_grad(lambda m: jnp.square(jax.vmap(m)(jnp.eye(4))).mean())(model)
        updates = first_update(muon(0.02, partition=rules), params_of(grads), params_of(model))
        return updates.layers[0].weight, grads.layers[0].weight

    got, gradient = jax.jit(step)()
    want = -0.02 * 1.5**0.5 * oracle.newton_schulz(gradient)
    assert oracle.relative_error(got, want) < 1e-4
