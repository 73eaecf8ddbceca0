"""What each leaf is, by names and by evidence: each case stands for a kind."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_roles import BLOCK, TORCH_BLOCK, Shapes, in_model, role_in_model, roles
from running import first_update
from shown import plan, report

from muon_optax import MuonDimensionNumbers, Rule, default_rules, muon
from muon_optax.partition.rules import RolePattern, first_rules

TABLES = [
    ("embed_tokens/weight", (512, 64), "embedding"),
    ("embed_tokens_per_layer/weight", (512, 128), "embedding"),
    ("token_embedder/embedding", (512, 64), "embedding"),
    ("embedder_block/segment_embedder/weight", (2, 64), "embedding"),
    ("transformer/wte/weight", (512, 64), "embedding"),
    ("tok_emb", (512, 64), "embedding"),
    ("tok/weight", (512, 64), "embedding"),
    ("shared/weight", (512, 64), "table"),
    ("layers/0/attn/relative_position_bias_table", (169, 4), "bias"),
    ("layers/0/attn/relative_attention_bias/weight", (32, 8), "table"),
    ("layers/0/attn/rel_pos_h", (27, 16), "table"),
    ("pos_embed_win", (1, 8, 8, 64), "embedding"),
    ("query_position_embeddings/weight", (100, 64), "embedding"),
    ("mask_token", (1, 64), "table"),
    ("register_tokens", (1, 4, 64), "table"),
    ("pooler/latents", (16, 64), "table"),
    ("quantizer/codebook/weight", (128, 8), "table"),
    ("prototypes", (100, 64), "table"),
    ("projector/query", (16, 64), "table"),
    ("memory_tokens/weight", (16, 64), "table"),
    ("vector_quantizer/embeddings", (64, 512), "embedding"),
    ("MAPHead_0/probe", (1, 1, 64), "table"),
]


@pytest.mark.parametrize(("path", "shape", "role"), TABLES)
def test_tables_by_name(path, shape, role):
    assert role_in_model(path, shape) == role
    assert role_in_model(path, shape, TORCH_BLOCK) == role


MULTIPLY: list[tuple[str, Shapes]] = [
    ("time_embedding/linear_1/weight", {"time_embedding/linear_1/bias": (256,)}),
    ("x_embedder/weight", {"x_embedder/bias": (256,)}),
    ("patch_embedding/weight", {}),
    ("patch_embed/proj/weight", {}),
    ("encoder/embedding_proj/weight", {}),
    ("token_mixing/weight", {}),
    ("attn/linear_pos/weight", {}),
    ("pos_key_proj/weight", {}),
    ("to_emb/weight", {}),
    ("attn/to_rel_k/weight", {}),
    ("memory_layer/weight", {}),
    ("norm_out/linear/weight", {"norm_out/linear/bias": (256,)}),
    ("norm1_modulation/weight", {}),
    ("vq/predictor_embeddings/kernel", {}),
]


@pytest.mark.parametrize(("path", "bias"), MULTIPLY)
def test_a_table_has_no_bias_and_does_not_project(path, bias):
    shapes = {path: (256, 64) if path.endswith("weight") else (64, 256)} | bias
    block = TORCH_BLOCK if path.endswith("weight") else BLOCK
    assert in_model(shapes, block)[path] in ("matrix", "transposed_matrix")


def test_a_query_beside_key_and_value_is_a_projection():
    assert in_model({"query": (64, 64), "key": (64, 64), "value": (64, 64)})["query"] == "matrix"


HEADS = [
    ("lm_head/kernel", (64, 512), "head"),
    ("decoder/logitdense/kernel", (64, 512), "head"),
    ("logits/kernel", (64, 10), "head"),
    ("classifier/kernel", (64, 10), "head"),
    ("head_dist/kernel", (64, 10), "head"),
    ("text_model/head/kernel", (64, 64), "head"),
    ("score/kernel", (64, 3), "head"),
    ("lm_loss/kernel", (64, 512), "head"),
    ("cls/predictions/decoder/kernel", (64, 512), "head"),
    ("qa_outputs/kernel", (64, 2), "head"),
    ("FinalLayer_0/Dense_1/kernel", (64, 16), "head"),
    ("value/kernel", (64, 1), "head"),
    ("output_proj/kernel", (64, 24), "head"),
    ("fc/kernel", (64, 10), "head"),
    # by shape alone: nothing takes these outputs
    ("Dense_0/kernel", (64, 10), "output"),
    ("linear2/kernel", (64, 10), "output"),
    ("mlp/layers/1/kernel", (64, 10), "output"),
    ("language_model/linear/w", (64, 512), "tall_table"),
    ("transformer/tied/kernel", (64, 3000), "tall_table"),
]


@pytest.mark.parametrize(("path", "shape", "role"), HEADS)
def test_heads(path, shape, role):
    assert role_in_model(path, shape) == role
    weight = path.replace("kernel", "weight").removesuffix("/w") + "/weight" * path.endswith("/w")
    assert role_in_model(weight, shape[::-1], TORCH_BLOCK) == role


def test_a_leaf_of_an_embeddings_shape_transposed_is_a_head():
    embed = {"embed/embedding": (96, 64)}
    assert in_model({**embed, "language_model/linear/w": (64, 96)})["language_model/linear/w"] == (
        "output"
    )
    assert in_model({**embed, "to_vocab": (64, 96)})["to_vocab"] == "tall_table"  # of its own


def test_a_name_like_classifier_does_not_beat_what_the_tree_shows():
    """VGG: the classifier's first layers hold most of the model."""
    vgg = roles(
        {
            "features/0/weight": (512, 256, 3, 3),
            "classifier/0/weight": (4096, 25088),
            "classifier/0/bias": (4096,),
            "classifier/3/weight": (4096, 4096),
            "classifier/3/bias": (4096,),
            "classifier/6/weight": (1000, 4096),
            "classifier/6/bias": (1000,),
        }
    )
    assert vgg["classifier/0/weight"] == "transposed_matrix"
    assert vgg["classifier/3/weight"] == "matrix"
    assert vgg["classifier/6/weight"] == "head"
    flax = roles(
        {
            "conv/kernel": (3, 3, 256, 512),
            "classifier/layers/0/kernel": (7, 7, 512, 4096),
            "classifier/layers/1/kernel": (1, 1, 4096, 4096),
            "classifier/layers/3/kernel": (4096, 1000),
        }
    )
    assert flax["classifier/layers/0/kernel"] == flax["classifier/layers/1/kernel"] == "undeclared"
    assert flax["classifier/layers/3/kernel"] == "head"


HIDDEN = [
    ("lm_head/dense/kernel", (64, 64)),
    ("classifier/dense/kernel", (64, 64)),
    ("pre_classifier/kernel", (64, 64)),
    ("pooler/dense/kernel", (64, 64)),
    ("text_projection/kernel", (64, 48)),
    ("vision_head/attention/out_proj/kernel", (64, 64)),
    ("vision_head/mlp/fc1/kernel", (64, 256)),
    ("norm_out/linear/kernel", (64, 128)),  # a shift and a scale
    ("final_layer/Dense_0/kernel", (64, 128)),
    ("layers/0/mlp/gate/kernel", (64, 8)),  # in a repeated layer
    ("cross_attention/query/kernel", (64, 48)),
    ("lstm_cell/kernel", (64, 512)),
]


@pytest.mark.parametrize(("path", "shape"), HIDDEN)
def test_hidden_matrices_of_telling_names(path, shape):
    assert role_in_model(path, shape) == "matrix"


def test_outputs_that_go_on_as_a_feature_map_are_hidden():
    """A generator: [latent, 4 * 4 * 64], then convolutions of 64 channels."""
    found = roles(
        {
            "embed/kernel": (32, 100),
            "project/kernel": (100, 1024),
            "deconv/kernel": (4, 4, 64, 32),
            "to_rgb/kernel": (4, 4, 32, 3),
        }
    )
    assert found["project/kernel"] == "matrix"
    assert found["to_rgb/kernel"] == "output"


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("q_proj/kernel_lora_a", "lora"),
        ("q_proj/w_lora_b", "lora"),
        ("to_q_lora/down/weight", "lora"),
        ("q_proj/lora_A/default/weight", "lora"),
        ("attn/lora/lora/lora_a", "lora"),
        ("flora/kernel", "lora"),  # a name is not read for what it may have meant
    ],
)
def test_lora_factors_by_word(path, role):
    assert role_in_model(path, (64, 8)) == role


def test_the_base_matrix_in_a_module_called_lora_is_no_factor():
    found = in_model({"lora/kernel": (64, 64), "lora/lora/lora_a": (64, 8)})
    assert found == {"lora/kernel": "matrix", "lora/lora/lora_a": "lora"}


@pytest.mark.parametrize(
    "path",
    [
        "up/weight_scale_inv",
        "up/qzeros",
        "up/zeros",
        "up/weight_scale",
        "up/absmax",
        "up/scale_inv",
    ],
)
def test_companions_of_quantised_weights(path):
    assert role_in_model(path, (8, 16)) == "quantisation"


def test_norms_by_name_and_by_a_bias_of_their_own_shape():
    assert role_in_model("stacked/input_layernorm/weight", (4, 64)) == "norm"
    assert role_in_model("q_norm/weight", (4, 16)) == "norm"
    odd = in_model({"affine/weight": (64, 49), "affine/bias": (64, 49)})
    assert odd == {"affine/weight": "norm", "affine/bias": "bias"}
    assert in_model({"norm/linear/kernel": (64, 64)})["norm/linear/kernel"] == "matrix"


@pytest.mark.parametrize(
    ("path", "shape", "role"),
    [
        ("layers/0/mixer/A_log", (64, 16), "bias"),
        ("layers/0/attn/sinks", (12, 8), "bias"),
        ("layers/0/attn/r_w_bias", (4, 16), "bias"),
        ("conv/bias", (3, 1, 1), "bias"),
        ("embeddings/mask_tokens", (10, 1, 1, 64), "table"),
        ("temperature_scale", (4, 16), "bias"),
        ("shift_table", (2, 64), "table"),
        ("clip_stats", (1, 64), "thin"),
        ("logit", (), "vector"),
    ],
)
def test_arrays_that_are_no_matrices(path, shape, role):
    assert role_in_model(path, shape) == role


def test_one_input_channel():
    """Depthwise by name or in a repeated layer, else doubtful; grey images if the tree shows it."""
    named = {"dwconv/kernel": (7, 7, 1, 64)}
    assert in_model(named) == {"dwconv/kernel": "depthwise"}
    assert in_model({"layers/0/conv/kernel": (7, 7, 1, 64)})["layers/0/conv/kernel"] == "depthwise"
    assert in_model({"conv/kernel": (3, 3, 1, 64)})["conv/kernel"] == "one_channel"
    grey = {"conv1/kernel": (3, 3, 1, 32), "conv2/kernel": (3, 3, 32, 48)}
    assert in_model(grey)["conv1/kernel"] == "undeclared"


# Through the public functions


def shapes_of(shapes: Shapes) -> dict[str, Any]:
    return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}


def test_an_equinox_mlp_is_scaled_by_its_outputs():
    """Weights are [out, in]: sqrt(64 / 4), not sqrt(4 / 64) bounded by 1."""
    for use_bias in (True, False):
        make = functools.partial(eqx.nn.MLP, 4, 8, 64, 2, use_bias=use_bias)
        mlp = eqx.filter_eval_shape(make, key=jax.random.key(0))
        is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
        rows = {row.path: row for row in report(eqx.filter(mlp, is_struct)).rows}
        assert rows["layers/0/weight"].scales == (4.0,)
        assert rows["layers/0/weight"].matrices == ((1, 4, 64),)
        assert rows["layers/1/weight"].scales == (1.0,)
        assert rows["layers/2/weight"].optimizer == "adam"


def test_an_update_of_a_transposed_matrix_has_its_scale():
    params = {"up": {"weight": np.eye(8, 2, dtype=np.float32), "bias": np.zeros(8, np.float32)}}
    tx = muon(1.0, "tight", nesterov=False)
    update = first_update(tx, params, jit=True)["up"]["weight"]
    np.testing.assert_allclose(update, -2.0 * np.eye(8, 2), atol=0.02)  # sqrt(8 / 2)


def test_an_order_that_nothing_tells_is_a_warning_with_a_rule():
    found = report(shapes_of({"a/weight": (64, 16), "b/weight": (16, 16)}))
    (text,) = found.warnings
    assert "nothing tells whether these weights are [in, out] or [out, in]" in text
    assert ": a/weight (64, 16). A rule says" in text
    rule = Rule("a/weight", "muon", view=MuonDimensionNumbers(1, 0))
    assert "Rule('a/weight', 'muon', view=MuonDimensionNumbers(1, 0))" in text
    told = report(shapes_of({"a/weight": (64, 16)}), partition=(rule, *default_rules()))
    assert (told.warnings, told.rows[0].scales) == ((), (2.0,))


def test_the_rule_in_a_warning_ends_it():
    params = shapes_of({**BLOCK, "head/pre_logits/fc/kernel": (64, 64), "head/fc/kernel": (64, 10)})
    (text,) = report(params).warnings
    assert "called heads or outputs get Muon" in text
    rule = "Rule('head/pre_logits/fc/kernel', 'adam')"
    assert f"partition=({rule}, *default_rules())" in text
    assert report(params, partition=(eval(rule), *default_rules())).warnings == ()


def test_a_wide_last_layer_is_told_of():
    found = report(shapes_of({**BLOCK, "stem/kernel": (64, 200)}))
    (row,) = [row for row in found.rows if row.path == "stem/kernel"]
    assert row.optimizer == "adam"
    (text,) = found.warnings
    assert ": stem/kernel (64, 200). A rule says" in text


def test_the_report_warns_as_init_does(recwarn):
    params = {"conv": jnp.ones((3, 3, 4, 8)), "0": jnp.ones((4, 4)), "1": jnp.ones((4, 4))}
    with pytest.warns() as caught:
        muon(0.1).init(params)
    found = report(params)
    assert found.warnings == tuple(str(w.message) for w in caught)
    assert len(found.warnings) == 2
    assert found.to_dict()["warnings"] == list(found.warnings)
    assert str(found).splitlines()[-2:] == [f"warning: {text}" for text in found.warnings]


def test_rules_may_carry_the_views_that_no_name_tells():
    """nanodo's attn_out_proj, Gemma's q_einsum, MaxText's wi_0 and wkv_b."""
    params = shapes_of(
        {
            "blocks/attn_out_proj/kernel": (4, 16, 64),
            "attn/q_einsum/w": (4, 64, 16),
            "layers/mlp/wi_0/kernel": (64, 3, 256),
            "layers/attn/wkv_b/kernel": (32, 3, 4, 48),
            "layers/attn/wkv_b/bias": (3, 192),
            "blocks/attn_out_proj/bias": (64,),  # which a rule with a view passes over
        }
    )
    rules = (
        Rule("attn_out_proj", "muon", view=MuonDimensionNumbers((0, 1), 2)),
        Rule("q_einsum", "muon", view=MuonDimensionNumbers(1, (0, 2))),
        Rule("wi_*", "muon", view=MuonDimensionNumbers(0, 2)),
        Rule("wkv_b/kernel", "muon", view=MuonDimensionNumbers(0, (2, 3))),
        *default_rules(),
    )
    found = report(params, partition=rules)
    assert {row.path: row.matrices for row in found.rows if row.optimizer == "muon"} == {
        "attn/q_einsum/w": ((1, 64, 64),),
        "blocks/attn_out_proj/kernel": ((1, 64, 64),),
        "layers/attn/wkv_b/kernel": ((3, 32, 192),),
        "layers/mlp/wi_0/kernel": ((3, 64, 256),),
    }
    assert found.warnings == ()
    planned = plan(params, partition=rules)
    assert sum(row.count for row in planned.rows) == 8


def test_roles_are_told_of_the_whole_tree():
    head = (("Dense_1", "kernel"), (64, 10))
    rule = Rule(RolePattern("output"), "adam")
    assert not rule.matches(*head)  # alone it is a matrix
    leaves = [head, (("Dense_0", "kernel"), (32, 64))]
    assert first_rules((rule,), leaves) == [rule, None]


def test_default_rules_are_data():
    rules = default_rules()
    assert len({rule.pattern for rule in rules}) == len(rules)
    assert all(rule.optional and rule.reason for rule in rules)
    eager = tuple(dataclasses.replace(r, label="frozen") for r in rules if r.reason == "head")
    params = shapes_of({**BLOCK, "lm_head/kernel": (64, 512)})
    labels = {r.path: r.optimizer for r in report(params, partition=(*eager, *rules)).rows}
    assert labels["lm_head/kernel"] == "frozen"
    assert labels["layers/0/mlp/up/kernel"] == "muon"


def test_t5s_shared_table_and_shared_layers():
    """TabNet's `shared_layers/1` is one of its feature transformers' layers."""
    assert role_in_model("shared/weight", (500, 64), TORCH_BLOCK) == "table"
    assert role_in_model("shared_layers/1/weight", (128, 64), TORCH_BLOCK) == "transposed_matrix"


def few_and_many(tables: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Roles of tables beside enough matrices whose sizes fit."""
    others = {f"layers/{i}/mlp/{n}/weight": s for i in (0, 1) for n, s in _MLP.items()}
    return in_model(tables | others, TORCH_BLOCK)


_MLP = {"up": (256, 64), "gate": (256, 64), "down": (64, 256)}


def test_tables_whose_rows_are_concatenated_are_doubtful():
    """Features of atoms, each of 16 entries, and Inkling's profiles over distances."""
    features = {"element/weight": (128, 16), "charge/weight": (11, 16)}
    found = few_and_many({f"factory/features/{path}": x for path, x in features.items()})
    assert {found[f"factory/features/{path}"] for path in features} == {"unconnected"}
    profile = "layers/0/attn/distance_logits_proj/proj"
    assert few_and_many({profile: (16, 512)})[profile] == "unconnected"


def test_layers_that_share_a_size_are_no_tables():
    """Low-rank queries, with and without a norm between, and a layer with a bias."""
    low_rank = {
        "layers/0/attn/q_a/weight": (48, 64),
        "layers/0/attn/q_b/weight": (1000, 48),
        "layers/0/attn/kv_norm/weight": (24,),
        "layers/0/attn/kv_b/weight": (800, 24),
        "features/mix/weight": (90, 17),
        "features/mix/bias": (90,),
    }
    found = few_and_many(low_rank)
    matrices = {found[path] for path, shape in low_rank.items() if len(shape) == 2}
    assert matrices == {"transposed_matrix"}


def test_of_a_few_layers_none_is_called_unconnected():
    assert "unconnected" not in roles({"a/w": (4, 8), "b/w": (16, 32), "c/w": (5, 7)}).values()
