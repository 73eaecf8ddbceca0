"""Views of real Flax models, Linen and NNX, told by biases and names, and training with them."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from running import first_update
from shown import report

from muon_optax import MuonDimensionNumbers, MuonWarning, Rule, flax_matrix_views, muon
from muon_optax._internal.tree_paths import leaves_with_segments, path_name
from muon_optax.views.matrix_view import is_view

Axes = tuple[tuple[int, ...], tuple[int, ...]] | None
KEY = jax.random.key(0, impl="unsafe_rbg")  # compiles faster


def views_of(params: Any, **options: Any) -> dict[str, Axes]:
    views = flax_matrix_views(params, **options)
    found = leaves_with_segments(views, lambda x: x is None or is_view(x))
    return {path_name(path): view and tuple(view) for path, view in found}


def shapes(**leaves: tuple[int, ...]) -> Any:
    """A tree of shape structs: 'a__b=(2, 3)' stands for {'a': {'b': ...}}."""
    tree: Any = {}
    for name, shape in leaves.items():
        *above, last = name.split("__")
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), above, tree)
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def normal_like(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)


IN_OUT = ((0,), (1,))
INTO_HEADS = ((0,), (1, 2))
OUT_OF_HEADS = ((0, 1), (2,))
CONV1 = ((0, 1), (2,))
CONV2 = ((0, 1, 2), (3,))


class LinenModel(nn.Module):
    """A layer of every kind that Linen makes kernels for."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 4)(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, qkv_features=8)(x)
        x = nn.LayerNorm()(nn.Conv(8, (1,))(x))
        x = x + nn.Conv(8, (3,), feature_group_count=8, name="depthwise")(x)
        x = nn.Conv(4, (2,), use_bias=False)(x)
        x = nn.DenseGeneral((2, 4))(x)
        x = nn.DenseGeneral(4, axis=(-2, -1))(x)
        return nn.Dense(11, name="lm_head")(nn.gelu(nn.Dense(8)(x)))


TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5)


@pytest.fixture(scope="module")
def linen_params():
    return jax.jit(LinenModel().init)(KEY, TOKENS)["params"]


LINEN_VIEWS = {
    "Conv_0/kernel": CONV1,
    "Conv_1/kernel": CONV1,
    "DenseGeneral_0/kernel": INTO_HEADS,
    "DenseGeneral_1/kernel": OUT_OF_HEADS,
    "Dense_0/kernel": IN_OUT,
    "MultiHeadDotProductAttention_0/key/kernel": INTO_HEADS,
    "MultiHeadDotProductAttention_0/out/kernel": OUT_OF_HEADS,
    "MultiHeadDotProductAttention_0/query/kernel": INTO_HEADS,
    "MultiHeadDotProductAttention_0/value/kernel": INTO_HEADS,
}


def test_linen_layers(linen_params):
    found = views_of(linen_params)
    assert {path: axes for path, axes in found.items() if axes} == LINEN_VIEWS
    assert found["Embed_0/embedding"] is None
    assert found["depthwise/kernel"] is None
    assert found["lm_head/kernel"] is None
    assert found["LayerNorm_0/scale"] is None


def test_linen_containers(linen_params):
    wanted = views_of(linen_params)
    assert views_of(freeze(linen_params)) == wanted
    assert views_of(jax.eval_shape(lambda: linen_params)) == wanted
    assert views_of(jax.tree.map(np.asarray, linen_params)) == wanted
    assert views_of(flatten_dict(linen_params)) == wanted
    assert views_of(flatten_dict(linen_params, sep="/")) == wanted
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, names=(None,) * x.ndim), linen_params)
    assert views_of(boxed) == wanted
    assert set(views_of({"params": linen_params})) == {f"params/{path}" for path in wanted}


def losses_of_linen(params: Any, tx: Any, apply: Any, target: Any, steps: int = 3) -> list[float]:
    def loss_fn(params):
        logits = apply({"params": params}, TOKENS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    @jax.jit
    def step(train):
        loss, grads = jax.value_and_grad(loss_fn)(train.params)
        return train.apply_gradients(grads=grads), loss

    create = functools.partial(TrainState.create, apply_fn=apply, tx=tx)
    train, losses = jax.jit(lambda params: create(params=params))(params), []
    for _ in range(steps):
        train, loss = step(train)
        losses.append(float(loss))
    chex.assert_trees_all_equal_shapes_and_dtypes(train.params, params)
    return losses


def test_linen_train_state(linen_params):
    tx = muon(0.01, muon_weight_dimension_numbers=flax_matrix_views)
    losses = losses_of_linen(linen_params, tx, LinenModel().apply, TOKENS)
    assert losses[0] > losses[1] > losses[2]


def test_a_state_has_the_leaves_that_the_views_name(linen_params):
    state: Any = muon(0.01, muon_weight_dimension_numbers=flax_matrix_views).init(linen_params)
    in_muon = [path_name(p) for p, _ in leaves_with_segments(state.inner_states["muon"][0][0].mu)]
    assert in_muon == sorted(LINEN_VIEWS)


def test_attention_updates_are_orthogonal_in_the_merged_heads(linen_params):
    tx = muon(1.0, "tight", scale="none", muon_weight_dimension_numbers=flax_matrix_views)
    params: Any = {
        name: linen_params[name] for name in ("MultiHeadDotProductAttention_0", "Conv_1")
    }
    updates = jax.tree.map(np.asarray, first_update(tx, normal_like(params), jit=True))
    attention = updates["MultiHeadDotProductAttention_0"]
    for kernel in (
        attention["query"]["kernel"].reshape(4, 8),
        attention["out"]["kernel"].reshape(8, 4),
        updates["Conv_1"]["kernel"].reshape(16, 4),
    ):
        sigma = np.linalg.svd(np.asarray(kernel, np.float64), compute_uv=False)
        np.testing.assert_allclose(sigma, 1.0, atol=0.05)


# Scanned blocks


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, qkv_features=8, use_bias=False)(y)
        y = nn.gelu(nn.Dense(8)(nn.Conv(4, (2,))(nn.RMSNorm()(x))))
        return x + nn.Dense(4, use_bias=False)(y), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        scan = nn.scan(LinenBlock, {"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="layers")(nn.Embed(11, 4)(tokens), None)
        return nn.Dense(11, name="lm_head")(x)


def shifted(axes: Any) -> Any:
    return tuple(tuple(a + 1 for a in group) for group in axes)


def test_linen_scan_declared_and_trained():
    params = jax.jit(LinenStack().init)(KEY, TOKENS)["params"]
    found = views_of(params, scanned=["layers"])
    assert {path.removeprefix("layers/"): axes for path, axes in found.items() if axes} == {
        "Conv_0/kernel": shifted(CONV1),
        "Dense_0/kernel": shifted(IN_OUT),
        "Dense_1/kernel": shifted(IN_OUT),
        "MultiHeadDotProductAttention_0/key/kernel": shifted(INTO_HEADS),
        "MultiHeadDotProductAttention_0/out/kernel": shifted(OUT_OF_HEADS),
        "MultiHeadDotProductAttention_0/query/kernel": shifted(INTO_HEADS),
        "MultiHeadDotProductAttention_0/value/kernel": shifted(INTO_HEADS),
    }
    views = flax_matrix_views(params, scanned=("layers",))
    tx = muon(0.01, muon_weight_dimension_numbers=views)
    losses = losses_of_linen(params, tx, LinenStack().apply, TOKENS)
    assert losses[0] > losses[1] > losses[2]


def test_each_layer_of_a_scan_is_a_matrix_of_its_own():
    params = normal_like(
        shapes(layers__Dense_0__kernel=(3, 4, 8), layers__query__kernel=(3, 4, 2, 4))
    )
    views = functools.partial(flax_matrix_views, scanned={"layers": 0})
    stack = muon(1.0, muon_weight_dimension_numbers=views)
    one = muon(1.0, muon_weight_dimension_numbers=flax_matrix_views)
    update = jax.jit(lambda g: one.update(g, one.init(g))[0])
    stacked = jax.jit(lambda g: stack.update(g, stack.init(g))[0])(params)
    for i in range(3):
        layer, got = (jax.tree.map(lambda x, i=i: np.asarray(x)[i], t) for t in (params, stacked))
        chex.assert_trees_all_close(got, update(layer), rtol=1e-5, atol=1e-6)


def test_a_scan_is_found_undeclared():
    params: Any = jax.eval_shape(LinenStack().init, KEY, TOKENS)["params"]
    declared = views_of(params, scanned=["layers"])
    assert views_of(params) == declared
    assert declared["layers/Dense_1/kernel"] == shifted(IN_OUT)


# NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, 8, rngs=rngs, decode=False)
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.attention(self.norm(x)))))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tok = nnx.Embed(11, 4, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs)])
        self.mixing = nnx.Conv(4, 4, (2,), rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3,), feature_group_count=4, rngs=rngs)
        self.out_of_two = nnx.LinearGeneral((2, 2), (4,), axis=(-2, -1), rngs=rngs)
        self.lm_head = nnx.Linear(4, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.blocks[0](self.tok(tokens))
        x = self.depthwise(self.mixing(x))
        return self.lm_head(self.out_of_two(x.reshape(*x.shape[:-1], 2, 2)))


NNX_VIEWS = {
    "blocks/0/attention/key/kernel": INTO_HEADS,
    "blocks/0/attention/out/kernel": OUT_OF_HEADS,
    "blocks/0/attention/query/kernel": INTO_HEADS,
    "blocks/0/attention/value/kernel": INTO_HEADS,
    "blocks/0/down/kernel": IN_OUT,
    "blocks/0/up/kernel": IN_OUT,
    "mixing/kernel": CONV1,
    "out_of_two/kernel": OUT_OF_HEADS,
}


def losses_of_nnx(model: Any, tx: Any, steps: int = 3) -> list[float]:
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss_fn(model):
            logits = model(TOKENS)
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


def test_nnx_layers_and_optimizer():
    model = nnx.jit(lambda: NnxModel(nnx.Rngs(KEY)))()
    state = nnx.state(model, nnx.Param)
    found = views_of(state)
    assert {path: axes for path, axes in found.items() if axes} == NNX_VIEWS
    assert found["tok/embedding"] is None
    assert found["depthwise/kernel"] is None
    assert views_of(nnx.as_pure(state)) == found
    assert views_of(nnx.to_pure_dict(state)) == found
    losses = losses_of_nnx(model, muon(0.01, muon_weight_dimension_numbers=flax_matrix_views))
    assert losses[0] > losses[1] > losses[2]


class NnxStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return NnxBlock(rngs)

        self.tok = nnx.Embed(11, 4, rngs=rngs)
        self.layers = make(rngs)
        self.lm_head = nnx.Linear(4, 11, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan
        def through(x, block):
            return block(x), None

        return self.lm_head(through(self.tok(tokens), self.layers)[0])


def test_nnx_scan_and_vmap():
    model = nnx.jit(lambda: NnxStack(nnx.Rngs(KEY)))()
    state = nnx.state(model, nnx.Param)
    found = views_of(state, scanned=["layers"])
    wanted = {p.removeprefix("blocks/0/"): v for p, v in NNX_VIEWS.items() if p.startswith("bl")}
    assert {path.removeprefix("layers/"): axes for path, axes in found.items() if axes} == {
        path: shifted(axes) for path, axes in wanted.items()
    }
    views = flax_matrix_views(state, scanned=["layers"])
    losses = losses_of_nnx(model, muon(0.01, muon_weight_dimension_numbers=views))
    assert losses[0] > losses[1] > losses[2]


# What bias and name tell


@pytest.mark.parametrize(
    ("tree", "path", "axes"),
    [
        # the layer's own name counts, not that of a module above it
        (shapes(value__Conv_0__kernel=(3, 3, 4, 8)), "value/Conv_0/kernel", CONV2),
        (shapes(q__Dense_0__kernel=(4, 8)), "q/Dense_0/kernel", IN_OUT),
        (shapes(conv_net__query__kernel=(4, 2, 8)), "conv_net/query/kernel", INTO_HEADS),
        (shapes(q_proj__kernel=(4, 2, 8)), "q_proj/kernel", INTO_HEADS),
        (shapes(Query__kernel=(4, 2, 8)), "Query/kernel", INTO_HEADS),
        (shapes(attn__wq=(4, 2, 8)), "attn/wq", INTO_HEADS),
        (shapes(attn__wo=(2, 8, 4)), "attn/wo", OUT_OF_HEADS),
        (shapes(kernel=(4, 8)), "kernel", IN_OUT),
        # a fused query, key and value is three matrices
        (shapes(qkv__kernel=(4, 3, 2, 8)), "qkv/kernel", ((0,), (2, 3))),
        (shapes(qkv__kernel=(4, 3, 2, 8), qkv__bias=(3, 2, 8)), "qkv/kernel", ((0,), (2, 3))),
        # convolutions of any name
        (shapes(stem__kernel=(3, 3, 4, 8)), "stem/kernel", CONV2),
        (shapes(stem__kernel=(3, 4, 8), stem__bias=(8,)), "stem/kernel", CONV1),
        (shapes(stem__kernel=(1, 1, 4, 16)), "stem/kernel", CONV2),
        (
            shapes(stem__kernel=(2, 3, 3, 4, 8), stem__bias=(8,)),
            "stem/kernel",
            ((0, 1, 2, 3), (4,)),
        ),
        (shapes(query__kernel=(3, 3, 4, 8), query__bias=(8,)), "query/kernel", CONV2),
        (shapes(depthwise__kernel=(3, 3, 1, 8)), "depthwise/kernel", None),
        # the bias has the output axes
        (shapes(a__kernel=(4, 2, 8), a__bias=(2, 8)), "a/kernel", INTO_HEADS),
        (shapes(a__kernel=(2, 8, 4), a__bias=(4,)), "a/kernel", OUT_OF_HEADS),
        (shapes(a__kernel=(2, 3, 4, 5), a__bias=(4, 5)), "a/kernel", ((0, 1), (2, 3))),
        (shapes(query__kernel=(2, 2, 8), query__bias=(2, 8)), "query/kernel", INTO_HEADS),
    ],
)
def test_axes(tree, path, axes):
    assert views_of(tree)[path] == axes


@pytest.mark.parametrize(
    "tree",
    [
        shapes(a__kernel=(3, 4, 8)),  # DenseGeneral without a bias, or a stack
        shapes(DenseGeneral_0__kernel=(2, 3, 4, 5)),
        shapes(a__kernel=(4, 4, 8), a__bias=(4, 8)),  # a stack, or (4, 8) outputs
        shapes(stem__kernel=(2, 3, 3, 4, 8)),  # a window of three dims, or two of two
        shapes(stem__kernel=(4, 1, 8192)),  # depthwise, or 4 matrices of one row
        shapes(query__kernel=(3, 4, 2, 8)),
        shapes(attn__out__kernel=(3, 2, 8, 4)),
    ],
)
def test_axes_that_nothing_tells_warn_and_get_adamw(tree):
    with pytest.warns(MuonWarning, match="can't tell the axes") as records:
        assert not any(views_of(tree).values())
    assert len(records) == 1


def test_a_scalar_batch_of_scanned_leaves():
    found = views_of(shapes(layers__gate=(3,), layers__b=(3, 4), layers__w=()), scanned="layers")
    assert found == {"layers/b": None, "layers/gate": None, "layers/w": None}


def test_scanned_patterns():
    tree = shapes(
        encoder__layers__a__kernel=(3, 4, 8), decoder__layers__a__kernel=(3, 4, 8), w=(4, 8)
    )
    with pytest.warns(MuonWarning, match="can't tell.*decoder/layers/a/kernel"):
        found = views_of(tree, scanned={"encoder/layers": 0})
    assert found["encoder/layers/a/kernel"] == shifted(IN_OUT)
    found = views_of(tree, scanned={"encoder/*": 0, "decoder": 1})
    assert found["decoder/layers/a/kernel"] == ((0,), (2,))
    assert found["encoder/layers/a/kernel"] == ((1,), (2,))
    with pytest.raises(ValueError, match=r"match nothing among decoder.*\n  'layer'"):
        flax_matrix_views(tree, scanned=["layers", "layer"])
    masked = {**tree, "encoder": optax.MaskedNode()}
    assert views_of(masked, scanned={"encoder": 0, "decoder": 0})["w"] == IN_OUT
    with pytest.raises(ValueError, match=r"counted from 0:\n  decoder.*axis 3 of .*\n  encoder"):
        flax_matrix_views(tree, scanned={"layers": 3})


def test_leaves_without_a_place_in_a_model():
    assert views_of(jnp.zeros((4, 5))) == {"(root)": IN_OUT}
    with pytest.warns(MuonWarning, match=r"\(root\) \(3, 4, 5\)"):
        assert views_of(jnp.zeros((3, 4, 5))) == {"(root)": None}
    assert flax_matrix_views({}) == {}
    assert flax_matrix_views({}, scanned="layers") == {}
    others = {"key": jax.random.key(0), "ids": jnp.zeros((2, 3, 4), jnp.int32), "none": None}
    assert views_of(others) == {"ids": None, "key": None, "none": None}
    with pytest.raises(ValueError, match=r"must be arrays.*\n  act: got"):
        flax_matrix_views({"Dense_0": {"kernel": jnp.ones((4, 4))}, "act": jnp.tanh})


def test_views_that_injection_calls_as_a_schedule():
    shapes = {"kernel": (8, 2, 4), "bias": (2, 4)}
    params = {"query": {name: np.ones(shape, np.float32) for name, shape in shapes.items()}}
    options: Any = {"learning_rate": 1.0, "muon_weight_dimension_numbers": flax_matrix_views}
    with pytest.raises(TypeError, match=r"got int32\(\); .*'muon_weight_dimension_numbers',\)"):
        optax.inject_hyperparams(muon)(**options).init(params)
    tx: Any = optax.inject_hyperparams(muon, "muon_weight_dimension_numbers")(**options)
    update = first_update(tx, params, jit=True)["query"]["kernel"]
    rank_one = 0.696436 / 8  # five jordan steps of 1, spread over 64 equal entries
    np.testing.assert_allclose(update, np.full((8, 2, 4), -rank_one), rtol=1e-5)


def test_views_under_a_mask():
    ones = np.ones((4, 8), np.float32)
    params = {"Dense_0": {"kernel": ones, "bias": ones[0]}, "Dense_1": ones}
    tx = optax.partition(
        {"a": muon(0.1, muon_weight_dimension_numbers=flax_matrix_views), "b": optax.set_to_zero()},
        {"Dense_0": "a", "Dense_1": "b"},
    )
    updates: Any = jax.jit(tx.update)(params, tx.init(params), params)[0]
    np.testing.assert_array_equal(updates["Dense_1"], np.zeros((4, 8)))
    sigma = np.linalg.norm(updates["Dense_0"]["kernel"], 2)
    assert 0.1 * 2**0.5 * 0.6 < sigma < 0.1 * 2**0.5 * 1.25


def test_views_are_what_report_shows(linen_params):
    rows = report(linen_params, muon_weight_dimension_numbers=flax_matrix_views).rows
    by_path = {row.path: row for row in rows}
    assert by_path["MultiHeadDotProductAttention_0/query/kernel"].matrices == ((1, 4, 8),)
    assert by_path["Conv_0/kernel"].matrices == ((1, 4, 8),)
    assert by_path["Conv_0/kernel"].scales == (2**0.5,)
    assert {row.path for row in rows if row.optimizer == "muon"} == set(LINEN_VIEWS)


def test_report_says_why_a_leaf_has_no_view(linen_params):
    rows = report(linen_params, muon_weight_dimension_numbers=flax_matrix_views).rows
    reasons = {row.path: row.reason for row in rows if row.optimizer == "adam"}
    assert reasons["Embed_0/embedding"] == "embedding"
    assert reasons["lm_head/kernel"] == "head"
    assert reasons["depthwise/kernel"] == "depthwise kernel"
    assert reasons["LayerNorm_0/scale"] == reasons["Dense_0/bias"] == "fewer than two dims"
    stack = shapes(layers__bias=(3, 8), layers__scale=(3, 8), a__kernel=(3, 4, 8))
    with pytest.warns(MuonWarning, match="can't tell the axes"):
        views = flax_matrix_views(stack, scanned="layers")
    rows = report(stack, muon_weight_dimension_numbers=views).rows
    assert {row.path: row.reason for row in rows} == {
        "a/kernel": "no matrix view in the given tree",
        "layers/bias": "bias or scale",
        "layers/scale": "bias or scale",
    }


def test_one_input_channel_looks_depthwise_and_may_be_declared():
    params = normal_like(shapes(stem__kernel=(3, 3, 1, 8)))
    with pytest.warns(MuonWarning, match=r"grey images\..*: stem/kernel \(3, 3, 1, 8\)"):
        assert views_of(params) == {"stem/kernel": None}
    assert views_of(params, rules=(Rule("stem", "adam"),)) == {"stem/kernel": None}
    views = functools.partial(flax_matrix_views, rules=(Rule("stem", "muon"),))
    tx: Any = muon(1.0, "tight", scale="none", muon_weight_dimension_numbers=views)
    update = np.reshape(first_update(tx, params, jit=True)["stem"]["kernel"], (9, 8))
    np.testing.assert_allclose(np.linalg.svd(update, compute_uv=False), 1.0, atol=0.05)


def test_views_can_be_changed_by_hand(linen_params):
    views = flax_matrix_views(linen_params)
    views["lm_head"]["kernel"] = MuonDimensionNumbers(0, 1)
    views["Conv_0"]["kernel"] = None
    rows = report(linen_params, muon_weight_dimension_numbers=views).rows
    labels = {row.path: row.optimizer for row in rows}
    assert labels["lm_head/kernel"] == "muon"
    assert labels["Conv_0/kernel"] == "adam"
