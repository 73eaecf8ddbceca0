"""Paths read word by word."""

import pytest

from muon_optax.partition.names import EMBEDDING, HEAD, LORA, NORM, leaf_name, tokens


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("embed_tokens_per_layer", "embed tokens per layer"),
        ("lm_loss", "lm loss"),
        ("kernel_lora_a", "kernel lora a"),
        ("relative_position_bias_table", "relative position bias table"),
        ("A_log", "a log"),
        ("pos_embed_win", "pos embed win"),
        ("MultiHeadDotProductAttention_0", "multi head dot product attention"),
        ("LayerNorm", "layer norm"),
        ("RMSNorm_12", "rms norm"),
        ("DenseReluDense", "dense relu dense"),
        ("to-out", "to out"),
        ("fc2", "fc"),
        ("0", ""),
        ("", ""),
    ],
)
def test_tokens(name, wanted):
    assert " ".join(tokens(name)) == wanted


@pytest.mark.parametrize(
    ("path", "layer", "above", "is_weight", "is_numbered"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "q proj", "self attn", True, False),
        ("classifier/0/weight", "classifier", "", True, True),
        ("encoder.layers.0.in_proj_weight", "in proj", "layers", True, False),
        ("lstm.weight_ih_l0", "ih l", "lstm", True, False),
        ("pos_embed", "pos embed", "", False, False),
        ("tok/weight/0", "tok", "", True, False),  # Haliax
        ("q_proj/lora_A/default/weight", "lora a", "q proj", True, False),  # PEFT
        ("q_proj/base_layer/weight", "q proj", "", True, False),
        ("res_net/~/logits/w", "logits", "", True, False),  # Haiku
        ("conv/parametrizations/weight/original1", "conv", "", True, False),
        ("embedder/embedding/value", "embedding", "embedder", False, False),
        ("layers/3", "layers", "", False, True),
        ("7", "", "", False, True),
    ],
)
def test_leaf_names(path, layer, above, is_weight, is_numbered):
    for segments in ((path,), tuple(path.split("/"))):
        found = leaf_name(segments)
        assert " ".join(found.layer) == layer
        assert " ".join(found.above[-1] if found.above else ()) == above
        assert (found.is_weight, found.is_numbered) == (is_weight, is_numbered)


def test_the_root_has_no_name():
    assert leaf_name(()).layer == ()


@pytest.mark.parametrize(
    ("meaning", "word", "is_one"),
    [
        (EMBEDDING, "embedder", True),
        (EMBEDDING, "wordembeddings", True),
        (EMBEDDING, "member", False),
        (HEAD, "logitdense", True),
        (HEAD, "classification", True),
        (HEAD, "header", False),
        (NORM, "layernorm", True),
        (NORM, "lnf", True),
        (NORM, "line", False),
        (LORA, "qlora", True),
        (LORA, "flow", False),
    ],
)
def test_meanings(meaning, word, is_one):
    assert meaning.is_in(["other", word]) is is_one
