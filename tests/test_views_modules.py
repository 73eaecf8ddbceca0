"""Views of real Flax modules against the axes that the modules themselves sum over."""

import functools
import re
import warnings
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from modules_oracle import Axes, Layer, linen_layers, nnx_layers, stacked

from muon_optax import MuonWarning, flax_matrix_views
from muon_optax._internal.tree_paths import leaves_with_segments, path_name, unnumbered
from muon_optax.views.matrix_view import bind_view, is_view

VMAP: Any = nn.vmap  # its annotations are narrower than what it takes


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


class Outcome(NamedTuple):
    """What became of the kernels of a model, as paths."""

    right: set[str]
    by_heads: set[str]  # one matrix a head, which is right too
    warned: set[str]
    left_out: set[str]  # no view and no warning


def outcome(params: Any, layers: dict[str, Layer]) -> Outcome:
    """Compares the views with the modules' axes; a wrong one fails."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", MuonWarning)
        views = flax_matrix_views(params)
    text = "\n".join(str(record.message) for record in records)
    named = {unnumbered(path) for path in re.findall(r"(\S+) \(", text)}
    shapes = {path_name(path): x.shape for path, x in leaves_with_segments(params)}
    found = leaves_with_segments(views, lambda x: x is None or is_view(x))
    views = {path_name(path): view for path, view in found}
    result = Outcome(set(), set(), set(), set())
    for path, layer in layers.items():
        if views[path] is None:
            (result.warned if unnumbered(path) in named else result.left_out).add(path)
            continue
        bound = bind_view(views[path], shapes[path])
        axes = bound.batch_axes, bound.reduction_axes, bound.output_axes
        assert layer.groups == 1, f"{path}: one matrix for {layer.groups} groups"
        same = [sorted(group) for group in axes] == [sorted(group) for group in layer.axes]
        assert same or is_by_heads(axes, layer.axes), f"{path}: {axes}, but {layer.axes}"
        (result.right if same else result.by_heads).add(path)
    return result


def is_by_heads(got: Axes, wanted: Axes) -> bool:
    """Whether one input or output axis became a batch axis, as for one matrix a head."""
    heads = set(got[0]) - set(wanted[0])
    rest = [sorted({*group} - heads) for group in wanted[1:]]
    return len(heads) == 1 and rest == [sorted(group) for group in got[1:]]


def within(layers: dict[str, Layer], module: str, place: int) -> dict[str, Layer]:
    """The layers, with those below one module stacked at a place."""
    return {
        path: Layer(stacked(layer.axes, place), layer.groups) if path.startswith(module) else layer
        for path, layer in layers.items()
    }


# Linen


class LinenAttention(nn.Module):
    use_bias: bool
    kv_heads: int = 4

    @nn.compact
    def __call__(self, x):
        heads = functools.partial(nn.DenseGeneral, use_bias=self.use_bias)
        y = nn.RMSNorm()(x)
        q = heads((4, 6), name="q_proj")(y)
        k = heads((self.kv_heads, 6), name="k_proj")(y)
        v = heads((self.kv_heads, 6), name="v_proj")(y)
        y = q + (k * v).mean(-2, keepdims=True)
        return x + heads(16, axis=(-2, -1), name="o_proj")(y)


class LinenMlp(nn.Module):
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(40, use_bias=self.use_bias)(nn.LayerNorm()(x)))
        return x + nn.Dense(16, use_bias=self.use_bias)(y)


class LinenBlock(nn.Module):
    use_bias: bool = False
    kv_heads: int = 4

    @nn.compact
    def __call__(self, x, _=None):
        x = LinenAttention(self.use_bias, self.kv_heads, name="attn")(x)
        return LinenMlp(self.use_bias, name="mlp")(x), None


class LinenStack(nn.Module):
    """Blocks under `nn.scan`, or `nn.vmap` where `place` is None."""

    place: int
    use_bias: bool
    kv_heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 16)(tokens)
        scan = nn.scan(
            nn.remat(LinenBlock), {"params": self.place}, split_rngs={"params": True}, length=3
        )
        x, _ = scan(self.use_bias, self.kv_heads, name="layers")(x, None)
        return nn.Dense(50, name="lm_head")(nn.RMSNorm()(x))


TOKENS = jnp.zeros((2, 5), jnp.int32)
HEADS = {f"layers/attn/{name}_proj/kernel" for name in "qkvo"}
DENSE = {f"layers/mlp/Dense_{i}/kernel" for i in range(2)}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_linen_scan(place, use_bias, kv_heads):
    params, layers = linen_layers(LinenStack(place, use_bias, kv_heads), TOKENS)
    found = outcome(params, within(layers, "layers", place))
    assert found.right == HEADS | DENSE
    assert found.left_out == {"lm_head/kernel"}


def test_linen_blocks_that_are_not_stacked():
    for use_bias in (False, True):
        params, layers = linen_layers(LinenBlock(use_bias, 2), zeros(2, 5, 16))
        assert outcome(params, layers).right == set(layers)


class LinenScanInVmap(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(LinenBlock, {"params": 0}, split_rngs={"params": True}, length=3)
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return VMAP(scan, in_axes=(0, None), **axes)(name="layers")(x, None)[0]


def test_linen_scan_in_vmap():
    params, layers = linen_layers(LinenScanInVmap(), zeros(2, 2, 5, 16))
    layers = within(within(layers, "layers", 0), "layers", 0)
    assert outcome(params, layers).right == HEADS | DENSE


class LinenExperts(nn.Module):
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        x = nn.RMSNorm()(x)
        gates = nn.Dense(4, use_bias=False, name="router")(x)
        experts = VMAP(
            LinenExpert, in_axes=None, out_axes=-1, axis_size=4,
            variable_axes={"params": 0}, split_rngs={"params": True},
        )(self.use_bias, name="experts")(x)  # fmt: skip
        return (experts * gates[..., None, :]).sum(-1)


class LinenExpert(nn.Module):
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(24, use_bias=self.use_bias, name="up")(x))
        return nn.Dense(16, use_bias=self.use_bias, name="down")(y)


@pytest.mark.parametrize("use_bias", [False, True])
def test_linen_experts(use_bias):
    params, layers = linen_layers(LinenExperts(use_bias), zeros(2, 5, 16))
    layers = within(layers, "experts", 0)
    assert outcome(params, layers).right >= {"experts/up/kernel", "experts/down/kernel"}


class LinenLayers(nn.Module):
    """One layer of each kind, whose axes a bias tells."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(4, qkv_features=24, name="attn")(x, x)
        x = nn.DenseGeneral((3, 10))(x)
        x = nn.DenseGeneral(12, axis=(-2, -1))(x)
        x = nn.Einsum((2, 12, 7), "...d,hdn->...hn")(x)
        x = nn.DenseGeneral(7, batch_dims=(), axis=-1)(x).reshape(2, 5, 14)
        x = nn.Conv(20, (3,), name="one")(x)
        x = nn.Conv(10, (3,), use_bias=False, name="conv_without_bias")(x)
        x = nn.ConvTranspose(8, (4,), transpose_kernel=True, name="up_conv")(x)
        x = nn.ConvLocal(6, (2,), name="local")(x)
        return nn.ConvTranspose(9, (4,), name="plain_conv")(x)


def test_linen_layers_of_every_kind():
    params, layers = linen_layers(LinenLayers(), zeros(2, 5, 16))
    found = outcome(params, layers)
    assert found.by_heads == {"Einsum_0/kernel"}
    assert found.right == set(layers) - found.by_heads


class LinenCells(nn.Module):
    @nn.compact
    def __call__(self, x: Any):
        for cell in (nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell, nn.MGUCell):
            layer: Any = nn.RNN(cell(16))
            x = layer(x)
        return nn.Bidirectional(nn.RNN(nn.LSTMCell(16)), nn.RNN(nn.LSTMCell(16)))(x)


def test_linen_cells():
    params, layers = linen_layers(LinenCells(), zeros(2, 5, 12))
    assert outcome(params, layers).right == set(layers)


def test_linen_convolutional_cell():
    cell = nn.ConvLSTMCell(8, (3, 3))
    state = zeros(2, 5, 5, 8)
    params, layers = linen_layers(cell, (state, state), zeros(2, 5, 5, 4))
    assert outcome(params, layers).right == set(layers)


class LinenConvNet(nn.Module):
    groups: int
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(True)(nn.Conv(16, (7, 7), use_bias=self.use_bias, name="conv_init")(x))
        for _ in range(2):
            y = nn.Conv(32, (1, 1), use_bias=self.use_bias)(x)
            y = nn.Conv(
                32, (3, 3), feature_group_count=self.groups, use_bias=self.use_bias
            )(nn.BatchNorm(True)(y))  # fmt: skip
            x = x + nn.Conv(16, (1, 1), use_bias=self.use_bias)(nn.BatchNorm(True)(y))
        return nn.Dense(10, name="head")(x.mean((1, 2)))


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 8, 32])
def test_linen_groups_of_channels(groups, use_bias):
    params, layers = linen_layers(LinenConvNet(groups, use_bias), zeros(1, 8, 8, 3))
    found = outcome(params, layers)
    grouped = {path for path, layer in layers.items() if layer.groups > 1}
    assert found.right == set(layers) - grouped - {"head/kernel"}
    assert found.warned == (grouped if groups in (4, 8) else set())


# NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, use_bias: bool, kv_heads: int = 4):
        general = functools.partial(nnx.LinearGeneral, use_bias=use_bias, rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.q = general(16, (4, 6))
        self.k = general(16, (kv_heads, 6))
        self.v = general(16, (kv_heads, 6))
        self.o = general((4, 6), 16, axis=(-2, -1))
        self.gate = nnx.Linear(16, 40, use_bias=use_bias, rngs=rngs)
        self.down = nnx.Linear(40, 16, use_bias=use_bias, rngs=rngs)


class NnxStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, place: int, **options: Any):
        @nnx.split_rngs(splits=3)
        @functools.partial(nnx.vmap, out_axes=place)
        def make(rngs):
            return NnxBlock(rngs, **options)

        self.tok = nnx.Embed(50, 16, rngs=rngs)
        self.layers = make(rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_nnx_vmap(place, use_bias, kv_heads):
    make = functools.partial(NnxStack, place=place, use_bias=use_bias, kv_heads=kv_heads)
    params, layers = nnx_layers(make)
    layers = within(layers, "layers", place)
    assert len(layers) == 6
    assert outcome(params, layers).right == set(layers)


class NnxLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.biased = nnx.MultiHeadAttention(4, 16, 24, decode=False, rngs=rngs)
        self.unbiased = nnx.MultiHeadAttention(4, 16, 24, use_bias=False, decode=False, rngs=rngs)
        self.general = nnx.LinearGeneral((2, 8), (3, 5), axis=(-2, -1), rngs=rngs)
        self.batched = nnx.LinearGeneral(8, 6, axis=-1, batch_axis={0: 3}, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dnh->btnh", (16, 2, 5), (2, 5), rngs=rngs)
        self.across_first = nnx.Einsum("btd,ndh->btnh", (3, 16, 7), (3, 7), rngs=rngs)
        self.back = nnx.Einsum("btf,df->btd", (16, 40), (16,), rngs=rngs)
        self.conv = nnx.Conv(16, 20, (3, 3), rngs=rngs)
        self.conv_1d = nnx.Conv(20, 16, (3,), use_bias=False, rngs=rngs)
        self.conv_3d = nnx.Conv(16, 20, (3, 3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 20, (2, 2), rngs=rngs)
        self.lstm = nnx.LSTMCell(16, 20, rngs=rngs)
        self.fast = nnx.OptimizedLSTMCell(16, 20, rngs=rngs)
        self.gru = nnx.GRUCell(16, 20, rngs=rngs)
        self.simple = nnx.SimpleCell(16, 20, rngs=rngs)
        self.adapted = nnx.LoRALinear(16, 20, lora_rank=2, rngs=rngs)


def test_nnx_layers_of_every_kind():
    params, layers = nnx_layers(NnxLayers)
    found = outcome(params, layers)
    assert found.by_heads == {"across_first/kernel"}
    assert found.right == set(layers) - found.by_heads


class NnxGroups(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, groups: int):
        self.tok = nnx.Embed(50, 24, rngs=rngs)
        self.expand = nnx.Linear(24, 48, rngs=rngs)
        self.mix = nnx.Conv(48, 48, (7,), feature_group_count=groups, rngs=rngs)
        self.shrink = nnx.Linear(48, 24, rngs=rngs)


@pytest.mark.parametrize("groups", [1, 3, 4, 8, 48])
def test_nnx_groups_of_channels(groups):
    params, layers = nnx_layers(functools.partial(NnxGroups, groups=groups))
    found = outcome(params, layers)
    assert found.warned == ({"mix/kernel"} if groups > 1 else set())
    assert found.right >= {"expand/kernel", "shrink/kernel"}
