"""What biases, neighbours and names tell about the axes of a weight, and what they don't."""

import pytest
from view_trees import (
    HEADS,
    HEADS_AXES,
    NORM,
    Axes,
    Shapes,
    axes_of,
    matrices_of,
    stack,
    stacked_axes,
    under,
)

from muon_optax import MuonWarning

# Experts, and what isn't a convolution


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        ({"moe/wi_0": (8, 64, 128), "moe/wo": (8, 128, 64)}, 8),
        ({"moe/wi": (8, 64, 128), "moe/wo": (8, 128, 64)}, 8),
        ({"experts/up/kernel": (3, 64, 128), "experts/down/kernel": (3, 128, 64)}, 3),
        ({"experts/up/kernel": (2, 4, 16, 24), "experts/down/kernel": (2, 4, 24, 16)}, 8),
        ({"experts/up/kernel": (3, 3, 16, 24), "experts/down/kernel": (3, 3, 24, 16)}, 9),
        ({"moe/gate_up_proj": (8, 64, 256), "moe/down_proj": (8, 128, 64)}, 8),
        ({"ffn/w1": (32, 64, 128), "ffn/w2": (32, 128, 64)}, 32),
        ({"a/kernel": (40, 64, 128), "b/kernel": (40, 128, 64)}, 40),
    ],
)
def test_experts_by_the_weights_that_lead_back(shapes, count):
    assert {p: m[0] for p, m in matrices_of(shapes).items()} == {
        path: (count, *shape[-2:]) for path, shape in shapes.items()
    }


@pytest.mark.parametrize(
    "shapes",
    [
        {"experts/up/kernel": (2, 4, 16, 24)},
        {"block/a/kernel": (3, 16, 24), "block/b/kernel": (3, 24, 16)},  # or windows of 3
        {"block/a/kernel": (3, 3, 16, 24), "block/b/kernel": (3, 3, 24, 16)},
        {"convs/mlp/a/kernel": (3, 16, 24), "convs/mlp/b/kernel": (3, 24, 16)},
        {"proj/kernel": (7, 7, 3, 64)},
        {"layers/Conv_0/kernel": (12, 3, 16, 24)},  # 12 of one dim
        {"moe/wo": (8, 128, 64)},
        {"wo/kernel": (8, 128, 64)},
        {"mix/kernel": (12, 768, 3072)},
        {"attn/query/kernel": (8, 8, 8), "attn/out/kernel": (8, 8, 8)},
        {"moe/router/kernel": (64, 4, 8)},
    ],
)
def test_ranks_and_names_alone_prove_nothing(shapes):
    with pytest.warns(MuonWarning, match="can't tell") as records:
        assert axes_of(shapes) == {}
    assert len(records) == 1
    for path, shape in shapes.items():
        assert f"{path} {shape}" in str(records[0].message)


def test_convolutions_by_bias_or_name():
    shapes: Shapes = {
        "a/kernel": (3, 16, 24), "a/bias": (24,), "b/kernel": (3, 24, 16), "b/bias": (16,),
        "Conv_0/kernel": (3, 3, 16, 24), "convolution/kernel": (1, 7, 16, 24),
        "up_conv/kernel": (2, 2, 24, 16), "up_conv/bias": (24,),
    }  # fmt: skip
    assert axes_of(shapes) == {
        "a/kernel": ((), (0, 1), (2,)),
        "b/kernel": ((), (0, 1), (2,)),
        "Conv_0/kernel": ((), (0, 1, 2), (3,)),
        "convolution/kernel": ((), (0, 1, 2), (3,)),
        "up_conv/kernel": ((), (0, 1, 3), (2,)),  # nn.ConvTranspose(transpose_kernel=True)
    }


def test_several_kernels_of_one_channel_are_depthwise():
    block: Shapes = {"mix/kernel": (7, 7, 1, 32), "mix/bias": (32,), "up/kernel": (32, 128)}
    shapes = under("0", block | {"down/kernel": (128, 32)})
    shapes |= under("1", block | {"down/kernel": (128, 32)})
    assert set(axes_of(shapes)) == {f"{i}/{name}/kernel" for i in "01" for name in ("up", "down")}
    with pytest.warns(MuonWarning, match=r"grey images.*: 0/mix/kernel \(7, 7, 1, 32\)$"):
        axes_of({path: shape for path, shape in shapes.items() if path[0] == "0"})


def test_stacked_kernels_of_one_channel_are_depthwise():
    layer: Shapes = {"in/kernel": (64, 96), "conv1d/kernel": (4, 1, 96), "out/kernel": (96, 64)}
    for place in (0, 1):
        found = axes_of(under("layers", stack(layer | NORM, place, 5)))
        assert set(found) == {"layers/in/kernel", "layers/out/kernel"}


def test_a_temporal_convolution_is_no_matrix():
    with pytest.warns(MuonWarning, match=r"can't tell.*conv_1d/w \(4, 64\)"):
        assert axes_of({"conv_1d/w": (4, 64), "conv_1d/b": (64,)}) == {}


# Biases


@pytest.mark.parametrize(
    ("shape", "bias", "axes"),
    [
        ((192, 64), (192,), ((), (1,), (0,))),
        ((64, 192), (192,), ((), (0,), (1,))),
        ((3, 64, 192), (3, 192), ((0,), (1,), (2,))),
        ((64, 3, 192), (192, 3), ((1,), (0,), (2,))),
        ((3, 192, 64), (3, 192), ((0,), (2,), (1,))),
        ((2, 3, 64, 192), (2, 3, 192), ((0, 1), (2,), (3,))),
        ((64, 5, 4, 16), (4, 5, 16), ((1,), (0,), (2, 3))),
        ((4, 5, 16, 64), (64, 5), ((1,), (0, 2), (3,))),
    ],
)
def test_a_bias_tells_and_no_name_beats_it(shape, bias, axes):
    for module in ("c_attn", "query", "wo", "Conv", "experts", "einsum"):
        shapes: Shapes = {f"{module}/kernel": shape, f"{module}/bias": bias}
        assert axes_of(shapes) == {f"{module}/kernel": axes}


def test_gpt2_keeps_out_in_also_where_it_is_square():
    shapes: Shapes = {
        "attn/c_attn/kernel": (192, 64), "attn/c_attn/bias": (192,),
        "attn/c_proj/kernel": (64, 64), "attn/c_proj/bias": (64,),
        "mlp/c_fc/kernel": (256, 64), "mlp/c_fc/bias": (256,),
        "mlp/c_proj/kernel": (64, 256), "mlp/c_proj/bias": (64,),
    }  # fmt: skip
    kernels = [path for path in shapes if path.endswith("kernel")]
    assert axes_of(shapes) == {path: ((), (1,), (0,)) for path in kernels}
    encoder: Shapes = {"up/kernel": (64, 256), "up/bias": (256,), "q/kernel": (64, 64)}
    encoder["q/bias"] = (64,)
    found = axes_of(under("decoder", shapes) | under("encoder", encoder))
    assert found["encoder/q/kernel"] == ((), (0,), (1,))
    assert found["decoder/attn/c_proj/kernel"] == ((), (1,), (0,))


def test_a_bias_that_fits_nothing_tells_nothing():
    with pytest.warns(MuonWarning, match=r"can't tell.*query/kernel"):
        assert axes_of({"query/kernel": (64, 4, 16), "query/bias": (5, 7)}) == {}


def test_names_of_torch_have_no_order_without_a_bias():
    with pytest.warns(MuonWarning, match=r"can't tell.*up/weight \(256, 64\)"):
        assert axes_of({"up/weight": (256, 64)}) == {}
    assert axes_of({"up/weight": (256, 64), "up/bias": (256,)}) == {"up/weight": ((), (1,), (0,))}


def test_a_weight_called_as_a_bias_is_not_lost():
    with pytest.warns(MuonWarning, match=r"can't tell.*: factors/b \(8, 64\)$"):
        assert axes_of({"factors/a": (64, 8), "factors/b": (8, 64)}).keys() == {"factors/a"}
    assert axes_of({"query/w": (64, 4, 16), "query/b": (4, 16)}).keys() == {"query/w"}


# Attention


@pytest.mark.parametrize(
    "names",
    [
        ("query", "key", "value", "out"),
        ("q_proj", "k_proj", "v_proj", "attn_out_proj"),
        ("a", "b", "c", "d"),
    ],
)
def test_query_and_out_tell_each_other(names):
    shapes = dict(zip((f"attn/{name}/kernel" for name in names), HEADS.values(), strict=True))
    want = dict(zip(shapes, HEADS_AXES.values(), strict=True))
    assert axes_of(shapes) == want


def test_low_rank_attention_by_the_number_of_heads():
    shapes: Shapes = {
        "attn/wq_a/kernel": (512, 96), "attn/wq_b/kernel": (96, 16, 24),
        "attn/wkv_a/kernel": (512, 72), "attn/wkv_b/kernel": (64, 16, 32),
        "attn/out/kernel": (16, 16, 512),
    }  # fmt: skip
    found = axes_of(shapes)
    assert found["attn/wq_b/kernel"] == found["attn/wkv_b/kernel"] == ((), (0,), (1, 2))
    assert found["attn/out/kernel"] == ((), (0, 1), (2,))


def test_einsums_of_gemma():
    attention: Shapes = {"attn_vec_einsum/w": (4, 16, 64)}
    fused = attention | {"qkv_einsum/w": (3, 4, 64, 16)}
    apart = attention | {"q_einsum/w": (4, 64, 16), "kv_einsum/w": (2, 2, 64, 16)}
    assert matrices_of(under("attn", fused)) == {
        "attn/attn_vec_einsum/w": ((1, 64, 64),),
        "attn/qkv_einsum/w": ((3, 64, 64),),
    }
    assert matrices_of(under("attn", apart)) == {
        "attn/attn_vec_einsum/w": ((1, 64, 64),),
        "attn/q_einsum/w": ((1, 64, 64),),
        "attn/kv_einsum/w": ((2, 64, 32),),
    }
    alone: Shapes = {"qkv_einsum": (3, 4, 64, 16), "kv_einsum": (2, 2, 64, 16)}
    assert matrices_of(alone) == {"qkv_einsum": ((3, 64, 64),), "kv_einsum": ((2, 64, 32),)}


@pytest.mark.parametrize("place", [None, 0, 1])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_gate_and_up_of_gemma(is_transposed, place):
    gate = (2, 96, 64) if is_transposed else (2, 64, 96)
    layer: Shapes = {"mlp/gating_einsum": gate, "mlp/linear": (96, 64), **NORM}
    layer |= under("attn", HEADS)
    axes: Axes = ((0,), (2,), (1,)) if is_transposed else ((0,), (1,), (2,))
    if place is None:
        assert axes_of(layer)["mlp/gating_einsum"] == axes
        return
    found = axes_of(under("layers", stack(layer, place, 5)))["layers/mlp/gating_einsum"]
    (want,) = stacked_axes({"": axes}, place).values()
    assert [sorted(group) for group in found] == [sorted(group) for group in want]


@pytest.mark.parametrize(
    ("shape", "bias", "axes"),
    [
        ((64, 3, 4, 16), (3, 4, 16), ((1,), (0,), (2, 3))),
        ((64, 3, 4, 16), None, ((1,), (0,), (2, 3))),
        ((64, 4, 3, 16), None, ((2,), (0,), (1, 3))),
        ((3, 64, 4, 16), None, ((0,), (1,), (2, 3))),
        ((64, 3, 64), (3, 64), ((1,), (0,), (2,))),
    ],
)
def test_fused_query_key_and_value_are_three(shape, bias, axes):
    shapes: Shapes = {"attn/qkv/kernel": shape} | ({"attn/qkv/bias": bias} if bias else {})
    assert axes_of(shapes) == {"attn/qkv/kernel": axes}


def test_outputs_first_in_praxis():
    shapes: Shapes = {f"attn/{name}/w": (64, 4, 16) for name in ("query", "key", "value", "post")}
    found = axes_of(shapes | NORM)
    assert found["attn/query/w"] == ((), (0,), (1, 2))
    assert found["attn/post/w"] == ((), (1, 2), (0,))


# Warnings


def test_the_warning_names_all_the_leaves():
    shapes: Shapes = {f"layer_{i}/a/kernel": (3, 16, 24) for i in range(40)}
    with pytest.warns(MuonWarning) as records:
        assert axes_of(shapes) == {}
    assert len(records) == 1
    assert str(records[0].message).endswith(": layer_0/a/kernel (3, 16, 24) and 39 like it")


# Windows


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (32, 1, 7, 7), (24, 24, 5), (16, 1, 3, 3, 3)])
def test_windows_at_the_end_are_not_read_as_channels(shape):
    """Equinox has convolutions as [out, in, *window]; without a bias nothing tells the axes."""
    with pytest.warns(MuonWarning, match=r"conv1/weight \("):
        found = axes_of({"conv1/weight": shape, "mlp/kernel": (64, 96)})
    assert found == {"mlp/kernel": ((), (0,), (1,))}


@pytest.mark.parametrize("shape", [(3, 3, 3, 3), (7, 7, 3, 64), (3, 64, 3), (16, 16, 3, 768)])
def test_windows_at_the_front_are_read(shape):
    last = len(shape) - 1
    assert axes_of({"Conv_1/kernel": shape}) == {"Conv_1/kernel": ((), (*range(last),), (last,))}


@pytest.mark.parametrize("name", ["block1a_dwconv", "block_1_depthwise", "conv_dw_1"])
def test_depthwise_kernels_of_keras_have_no_view(name):
    """They are [h, w, channels, 1]: as a matrix, a vector."""
    shapes: Shapes = {f"{name}/kernel": (3, 3, 64, 1), "Conv_0/kernel": (1, 1, 48, 64)}
    assert f"{name}/kernel" not in axes_of(shapes)


def test_depthwise_convolutions_over_time_have_no_view():
    with pytest.warns(MuonWarning, match="conv1d_kernel"):
        found = axes_of({"mixer/conv1d_kernel": (512, 4), "mlp/kernel": (64, 96)})
    assert found == {"mlp/kernel": ((), (0,), (1,))}
