"""Shapes of real models: published counts, and the optimizer that the rules give each leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from shown import plan, report

from muon_optax import MatrixView, MuonDimensionNumbers, default_rules
from muon_optax._internal.tree_paths import align, leaves_with_segments
from muon_optax.models import MODELS, as_trained, model_shapes
from muon_optax.partition import first_rules
from muon_optax.views.matrix_view import bind_view, is_view

# Counts as published: of the checkpoints, by their safetensors indices, and in torchvision's docs.
SIZES = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "deepseek-v3": 671_026_419_200,
    "olmoe-7b": 6_919_161_856,
    "vit-l": 304_326_632,
    "resnet-50": 25_557_032,
}


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_published_ones(name, scanned):
    shapes = model_shapes(name, scanned=scanned, dtype="float32")
    assert shapes.size == SIZES[name]
    assert {x.dtype for x in jax.tree.leaves(shapes.params)} == {np.dtype("float32")}
    assert shapes.source


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_views_are_where_the_rules_say_muon(name, scanned):
    shapes = model_shapes(name, scanned=scanned)
    views = align(shapes.views, shapes.params, what="views", is_leaf=is_view)
    leaves = [(path, leaf.shape) for path, leaf in leaves_with_segments(shapes.params)]
    rules = first_rules(default_rules(), leaves)
    for (path, _), rule, view in zip(leaves, rules, views, strict=True):
        assert (view is None) == (rule is not None and rule.label == "adam"), path


@pytest.mark.parametrize("name", MODELS)
def test_scanned_and_unscanned_have_the_same_matrices(name):
    counts = []
    for scanned in (False, True):
        shapes = model_shapes(name, scanned=scanned)
        found: dict[tuple[int, int], int] = {}
        for row in report(shapes.params, muon_weight_dimension_numbers=shapes.views).rows:
            for count, fan_in, fan_out in row.matrices:
                found[fan_in, fan_out] = found.get((fan_in, fan_out), 0) + count
        counts.append(found)
    assert counts[0] == counts[1]


def matrices(name: str, *path: str) -> tuple[tuple[int, int, int], ...]:
    shapes = model_shapes(name, scanned=True)
    leaf, view = shapes.params, shapes.views
    for key in path:
        leaf, view = leaf[key], view[key]
    return bind_view(view, leaf.shape).matrices


def test_what_is_fused_is_cut():
    assert matrices("gpt2-124m", "blocks", "attn", "c_attn", "kernel") == ((36, 768, 768),)
    assert matrices("vit-l", "blocks", "attn", "qkv", "kernel") == ((72, 1024, 1024),)
    latent = ("moe_blocks", "attn")
    assert matrices("deepseek-v3", *latent, "kv_a", "kernel") == ((58, 7168, 512), (58, 7168, 64))
    assert matrices("deepseek-v3", *latent, "kv_b", "kernel") == ((116, 512, 16384),)


def test_each_expert_is_a_matrix():
    shapes = model_shapes("deepseek-v3")
    up = shapes.params["moe_blocks"][0]["mlp"]["experts"]["up"]["kernel"]
    assert up.shape == (256, 7168, 2048)
    experts = ("moe_blocks", "mlp", "experts")
    assert matrices("deepseek-v3", *experts, "up", "kernel") == ((58 * 256, 7168, 2048),)
    assert matrices("deepseek-v3", *experts, "down", "kernel") == ((58 * 256, 2048, 7168),)


def test_a_convolution_is_a_matrix():
    view = model_shapes("resnet-50").views["stage_1"]["first"]["conv_2"]["kernel"]
    assert view == MuonDimensionNumbers((0, 1, 2), 3)
    assert matrices("resnet-50", "stage_1", "blocks", "conv_2", "kernel") == ((2, 576, 64),)


def test_views_of_a_stack_are_one_axis_on():
    views = model_shapes("gpt2-124m", scanned=True).views["blocks"]["attn"]
    assert views["c_attn"]["kernel"] == MatrixView(1, 2, split=(768, 768, 768))
    assert views["c_proj"]["kernel"] == MuonDimensionNumbers(1, 2)
    assert views["c_proj"]["bias"] is None


def test_unknown_names():
    with pytest.raises(ValueError, match=r"model must be one of.*llama3-8b.*'gpt5'"):
        model_shapes("gpt5")


def test_as_trained_keeps_shapes_and_shardings():
    mesh = jax.make_mesh((2,), ("f",))
    rows = NamedSharding(mesh, PartitionSpec("f"))
    params = {
        "w": jax.device_put(jnp.ones((4, 8), "float8_e4m3fn"), rows),
        "scale": jax.ShapeDtypeStruct((2, 2), "float32"),
        "steps": jnp.zeros((), "int32"),
        "none": None,
    }
    found = as_trained(params, "bfloat16")
    assert found["w"] == jax.ShapeDtypeStruct((4, 8), "bfloat16", sharding=rows)
    assert (found["scale"].dtype, found["steps"].dtype) == ("bfloat16", "int32")
    (row,) = [row for row in plan(found).to_dict()["rows"] if row["leaves"] == ("w",)]
    assert (row["dtype"], row["spec"]) == ("bfloat16", "f, -")
    with pytest.raises(ValueError, match=r"w: dtype float8_e4m3fn.*muon_optax\.models\.as_trained"):
        report(params)
    for wrong in ("float8_e4m3fn", "int8", "bf16", None, "complex64"):
        with pytest.raises(TypeError, match="dtype must be a real one of 16 bits or more"):
            as_trained(params, wrong)
