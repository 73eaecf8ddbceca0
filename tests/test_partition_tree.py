"""Leaves and the leaves beside them: biases, repeated layers, and the order of axes."""

import pytest

from muon_optax.partition.order import Order
from muon_optax.partition.tree import Leaf, read_tree

Shapes = dict[str, tuple[int, ...]]


def read(shapes: Shapes) -> dict[str, Leaf]:
    leaves = read_tree([(tuple(path.split("/")), shape) for path, shape in shapes.items()])
    return {"/".join(leaf.path): leaf for leaf in leaves}


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        ("fc/kernel", "fc/bias"),
        ("fc.weight", "fc.bias"),
        ("linear/w", "linear/b"),
        ("attn/in_proj_weight", "attn/in_proj_bias"),
        ("lstm/weight_ih_l0", "lstm/bias_ih_l0"),
        ("cell/weight_hh", "cell/bias"),
        ("gru_cell/recurrent_kernel", "gru_cell/bias"),
        ("Fc/Kernel", "fc/bias"),
    ],
)
def test_biases(weight, bias):
    found = read({weight: (4, 6), bias: (6,), "other/bias": (4,)})
    assert found[weight].bias == (6,)
    assert found[weight].output_axis_by_bias == 1
    assert found[bias].bias is None


def test_a_bias_that_fits_both_axes_or_none_tells_nothing():
    assert read({"a/w": (6, 6), "a/b": (6,)})["a/w"].output_axis_by_bias is None
    assert read({"a/w": (4, 6), "a/b": (5,)})["a/w"].output_axis_by_bias is None
    assert read({"a/w": (4, 6), "a/b": (4, 6)})["a/w"].output_axis_by_bias is None


def test_layers_that_are_alike_may_be_told_once():
    found = read({"fc_1/weight": (8, 4), "fc_2/weight": (8, 8), "fc_1/bias": (8,)})
    assert found["fc_2/weight"].bias == (8,)


def test_the_vector_after_a_matrix_without_a_name_is_its_bias():
    found = read({"0": (4, 6), "1": (6,), "2": (6, 5), "3": (7,)})
    assert found["0"].bias == (6,)
    assert found["2"].bias is None


@pytest.mark.parametrize(
    ("path", "others", "is_repeated"),
    [
        ("layers/0/mlp/up/kernel", [], True),
        ("h.3.attn.weight", [], True),
        ("DiTBlock_0/Dense_0/kernel", [], True),
        ("Transformer/encoderblock_1/Dense_0/kernel", [], True),
        ("layers/mlp/up/kernel", [], True),  # scanned
        ("down1/conv/kernel", ["down2/conv/kernel"], True),
        ("down1/conv/kernel", [], False),
        ("FinalLayer_0/Dense_1/kernel", [], False),
        ("layers/8/weight", [], False),  # a sequence, not a stack
        ("mlp/layers/1/weight", [], False),
        ("mobile_net_v1/logits/w", [], False),
        ("head/0/fc/weight", [], False),
        ("Dense_0/kernel", ["Dense_1/kernel"], False),
    ],
)
def test_repeated_layers(path, others, is_repeated):
    found = read(dict.fromkeys([path, *others], (4, 6)))
    assert found[path].is_repeated is is_repeated


def order(shapes: Shapes, widths: set[int] | None = None) -> tuple[dict[str, int | None], bool]:
    leaves = read(shapes)
    found = Order(list(leaves.values()), widths or set())
    return {path: found.output_axis(leaf) for path, leaf in leaves.items()}, found.is_told


def test_flax_has_the_output_last():
    assert order({"fc/kernel": (4, 6), "linear/w": (4, 6), "conv/kernel": (3, 3, 4, 6)})[0] == {
        "fc/kernel": 1,
        "linear/w": 1,
        "conv/kernel": 3,
    }


def test_a_bias_tells_the_order_of_its_weight_and_of_the_others():
    """Equinox and PyTorch keep [out, in], GPT-2's Conv1D [in, out]."""
    torch = {"a/weight": (6, 4), "a/bias": (6,), "b/weight": (4, 6)}
    assert order({k: v for k, v in torch.items() if len(v) == 2}) == (
        {"a/weight": 0, "b/weight": 0},
        False,  # without the bias
    )
    leaves = read(torch)
    found = Order([leaves["a/weight"], leaves["b/weight"]], set())
    assert found.is_told
    assert found.output_axis(leaves["b/weight"]) == 0
    conv1d = read({"c_fc/weight": (4, 16), "c_fc/bias": (16,), "c_proj/weight": (16, 4)})
    found = Order([conv1d["c_fc/weight"], conv1d["c_proj/weight"]], set())
    assert [found.output_axis(conv1d[p]) for p in ("c_fc/weight", "c_proj/weight")] == [1, 1]


def test_the_models_width_tells_the_order_where_no_bias_does():
    up, down = "mlp/up_proj/weight", "mlp/down_proj/weight"
    assert order({up: (16, 4), down: (4, 16)}, {4}) == ({up: 0, down: 0}, True)
    assert order({up: (4, 16), down: (16, 4)}, {4}) == ({up: 1, down: 1}, True)


def test_a_sequence_tells_the_order_as_its_layers_fit():
    """`eqx.nn.MLP(4, 8, 64, 2, use_bias=False)`."""
    shapes = {"layers/0/weight": (64, 4), "layers/1/weight": (64, 64), "layers/2/weight": (8, 64)}
    assert order(shapes) == (dict.fromkeys(shapes, 0), True)
    assert order({path: shape[::-1] for path, shape in shapes.items()}) == (
        dict.fromkeys(shapes, 1),
        True,
    )


def test_nothing_tells_the_order_of_an_array_of_its_own():
    assert order({"wq": (4, 6)})[0] == {"wq": None}


@pytest.mark.parametrize(
    ("path", "shape", "channels"),
    [
        ("conv/kernel", (3, 3, 1, 8), 8),
        ("conv/kernel", (4, 1, 8), 8),
        ("conv/weight", (8, 1, 3, 3), 8),
        ("conv/kernel", (3, 3, 2, 8), 0),
        ("conv/kernel", (1, 1, 1, 8), 0),
        ("wi/kernel", (2048, 1, 10944), 0),  # one layer, stacked along the second axis
    ],
)
def test_depthwise_kernels(path, shape, channels):
    leaves = read({path: shape})
    assert Order(list(leaves.values()), set()).depthwise_channels(leaves[path]) == channels
