"""The axes of layers and experts that `nn.scan` and `nnx.vmap` stacked, told by shapes."""

import pytest
from view_trees import (
    HEADS,
    HEADS_AXES,
    MLP,
    MLP_AXES,
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


def test_the_layer_axis_second_by_the_dims_that_a_stack_shares():
    shapes: Shapes = {"layers/wi/kernel": (64, 4, 96), "layers/wo/kernel": (96, 4, 64)}
    want = {path: ((1,), (0,), (2,)) for path in shapes}
    assert axes_of(shapes, scanned=("layers",)) == want
    assert axes_of(shapes) == want
    assert matrices_of(shapes) == {
        "layers/wi/kernel": ((4, 64, 96),),
        "layers/wo/kernel": ((4, 96, 64),),
    }


@pytest.mark.parametrize("norm", [{}, NORM], ids=["kernels", "norm"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_stacks_of_attention_and_mlp(size, place, norm):
    layer = under("attn", HEADS) | under("mlp", MLP) | norm
    axes = {f"attn/{p}": a for p, a in HEADS_AXES.items()}
    axes |= {f"mlp/{p}": a for p, a in MLP_AXES.items()}
    want = {f"layers/{p}": a for p, a in stacked_axes(axes, place).items()}
    shapes = under("layers", stack(layer, place, size))
    if norm:
        assert axes_of(shapes) == want
    assert axes_of(shapes, scanned="layers") == want
    assert axes_of(layer) == axes


def test_two_stacks_of_one_tree():
    block = under("mlp", MLP) | NORM
    shapes = under("encoder", stack(block, 0, 3)) | under("decoder", stack(block, 1, 5))
    found = axes_of(shapes, scanned=("encoder", "decoder"))
    assert found["encoder/mlp/wi/kernel"] == ((0,), (1,), (2,))
    assert found["decoder/mlp/wi/kernel"] == ((1,), (0,), (2,))
    assert found == axes_of(shapes)


def test_a_stack_of_stacks():
    shapes = under("layers", stack(stack(under("mlp", MLP) | NORM, 0, 3), 0, 2))
    want: Axes = ((0, 1), (2,), (3,))
    assert axes_of(shapes) == {path: want for path in shapes if path.endswith("kernel")}


def test_the_layer_axis_last():
    layer = under("attn", HEADS) | under("mlp", MLP) | NORM
    shapes = under("layers", {path: (*shape, 7) for path, shape in layer.items()})
    found = axes_of(shapes)
    assert found["layers/mlp/wo/kernel"] == ((2,), (0,), (1,))
    assert found["layers/attn/out/kernel"] == ((3,), (0, 1), (2,))


@pytest.mark.parametrize(
    "shapes",
    [
        {"layers/a/kernel": (64, 4, 96)},
        {"layers/a/kernel": (64, 4, 96), "layers/b/kernel": (64, 4, 32)},
        {"layers/norm/scale": (4, 64), "layers/Dense_0/kernel": (4, 64, 96)},
        {"layers/q_proj/kernel": (12, 64, 64)},
        {"layers/attn/q_proj/kernel": (12, 64, 64), "layers/attn/k_proj/kernel": (12, 64, 32)},
    ],
)
def test_a_layer_axis_that_nothing_tells(shapes):
    for options in ({"scanned": "layers"}, {}):
        with pytest.warns(MuonWarning, match=r"can't tell.*scanned.*\{'layers': 1\}") as records:
            assert axes_of(shapes, **options) == {}
        assert len(records) == 1
        for path in shapes.keys() - {"layers/norm/scale"}:
            assert f"{path} {shapes[path]}" in str(records[0].message)
    assert axes_of(shapes, scanned={"layers": 1}).keys() >= {next(iter(shapes))} - {
        "layers/norm/scale"
    }


def test_norms_that_look_stacked_beside_a_leaf_that_does_not():
    layer = stack(under("attn", {"query/kernel": (64, 64)}) | NORM, 0, 4)
    shapes = under("layers", layer | {"shared/scale": (64,)})
    with pytest.warns(MuonWarning) as records:
        assert axes_of(shapes) == {}
    kernels, norms = sorted(str(record.message) for record in records)
    assert "layers/attn/query/kernel (4, 64, 64)" in kernels
    assert "layers/norm/scale (4, 64)" in norms


def test_norms_over_heads_are_no_stack():
    shapes = under("attn", HEADS | {"q_norm/scale": (4, 24), "k_norm/scale": (2, 24)})
    assert axes_of(shapes) == {f"attn/{path}": axes for path, axes in HEADS_AXES.items()}
