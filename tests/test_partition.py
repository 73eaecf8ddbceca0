"""Which optimizer each leaf gets: rules, labels and views, and errors that name the leaves."""

import collections
import dataclasses
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from muon_optax import MatrixView, MuonDimensionNumbers, MuonWarning, Rule, default_rules
from muon_optax.partition import assign, check_rules, words
from muon_optax.views.matrix_view import bind_view

MASKED = optax.MaskedNode()
DIMS = MuonDimensionNumbers(0, 1)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def labels(params: Any, views: Any = None, partition: Any = None) -> dict[str, str]:
    return {d.path: d.label for d in assign(params, views, partition).decisions}


def reasons(params: Any, views: Any = None, partition: Any = None) -> dict[str, str]:
    return {d.path: d.reason for d in assign(params, views, partition).decisions}


# Rules


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("head", ("head", "kernel"), True),
        ("head", ("overhead", "kernel"), False),
        ("head", ("heads", "kernel"), False),
        ("LM_Head", ("model", "lm_head", "kernel"), True),
        ("lm_head", ("model", "LM_HEAD", "kernel"), True),
        ("lora_*", ("q_proj", "lora_A"), True),
        ("lora_*", ("q_proj", "lora"), False),
        ("layer_[0-2]", ("layer_1", "w"), True),
        ("layer_[0-2]", ("layer_3", "w"), False),
        ("a/b", ("x", "a", "b", "c"), True),
        ("a/b", ("a", "x", "b"), False),
        ("a/b", ("a",), False),
        ("decoder/*/kernel", ("model", "decoder", "mlp", "kernel"), True),
        ("decoder/*/kernel", ("decoder", "mlp", "wi", "kernel"), False),
        ("*", ("a",), True),
        ("*", (), False),
        ("embed_tokens", ("model.embed_tokens.weight",), True),
        ("embed_tokens", ("model/embed_tokens/weight",), True),
        ("model/embed_tokens", ("model.embed_tokens.weight",), True),
        ("model.embed_tokens", ("model", "embed_tokens", "weight"), True),
        ("embed", ("model.embed_tokens.weight",), False),
        ("0", ("layers", "0", "w"), True),
        (re.compile(r".*/kernel"), ("mlp", "kernel"), True),
        (re.compile(r"kernel"), ("mlp", "kernel"), False),
        (re.compile(r"mlp"), ("mlp", "kernel"), False),
        (re.compile(r"MLP/.*"), ("mlp", "kernel"), False),
        (re.compile(r"(?i)MLP/.*"), ("mlp", "kernel"), True),
        (re.compile(r"model\.w"), ("model.w",), True),
        (lambda path, shape: path[-1] == "w" and shape[0] == 4, ("a", "w"), True),
        (lambda path, shape: shape == (5, 4), ("a", "w"), False),
    ],
)
def test_patterns(pattern, path, matches):
    assert Rule(pattern, "adam").matches(path, (4, 5)) is matches


def test_words_of_flat_keys():
    assert words(("Model.Embed", "a/b", "c")) == ("model", "embed", "a", "b", "c")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rule("a", cast(Any, "muonn")), ValueError, "'muonn'"),
        (lambda: Rule("a", cast(Any, ["muon"])), ValueError, "must be one of"),
        (lambda: Rule("a", cast(Any, np.zeros(2))), ValueError, "must be one of"),
        (lambda: Rule("", "adam"), ValueError, "empty segment: ''"),
        (lambda: Rule("a//b", "adam"), ValueError, "empty segment"),
        (lambda: Rule("/a", "adam"), ValueError, "empty segment"),
        (lambda: Rule(cast(Any, 3), "adam"), TypeError, "got 3"),
        (lambda: Rule(cast(Any, re.compile(b"a")), "adam"), TypeError, "expression of one"),
    ],
)
def test_wrong_rules_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


# The default rules

PATHS = [
    # cases from public reports: names that contain a telling word without being it
    ("embedder_mlp/kernel", (4, 8), "muon", "weight matrix"),
    ("patch_embed/proj/kernel", (4, 8), "muon", "weight matrix"),
    ("overhead/kernel", (4, 8), "muon", "weight matrix"),
    ("unembed/kernel", (4, 8), "adam", "head"),
    ("wi_0_bias", (4, 8), "adam", "bias or scale"),
    ("markov/embedding", (4, 8), "adam", "embedding"),
    # GPT-2, Llama, T5, BERT, ViT, Gemma, GPT-NeoX
    ("transformer/wte/embedding", (50, 8), "adam", "embedding"),
    ("transformer/wpe/embedding", (9, 8), "adam", "embedding"),
    ("transformer/h/0/attn/c_attn/kernel", (8, 24), "muon", "weight matrix"),
    ("model/embed_tokens/weight", (50, 8), "adam", "embedding"),
    ("lm_head/weight", (50, 8), "adam", "head"),
    ("model.layers.0.self_attn.q_proj.weight", (8, 8), "muon", "weight matrix"),
    ("model.embed_tokens.weight", (50, 8), "adam", "embedding"),
    ("model.layers.0.mlp.gate_proj.bias", (2, 8), "adam", "bias or scale"),
    ("decoder/relpos_bias/rel_embedding", (4, 32), "adam", "embedding"),
    ("decoder/logits_dense/kernel", (8, 50), "adam", "head"),
    ("bert/embeddings/token_type_embeddings/weight", (2, 8), "adam", "embedding"),
    ("posembed_input/pos_embedding", (9, 8), "adam", "embedding"),
    ("visual/positional_embedding", (9, 8), "adam", "embedding"),
    ("emb", (4096, 64), "adam", "embedding"),
    ("embedder/input_embedding", (50, 8), "adam", "embedding"),
    ("gpt_neox/embed_in/weight", (50, 8), "adam", "embedding"),
    ("embed_out/weight", (50, 8), "adam", "embedding"),
    # Linen and NNX
    ("Embed_0/embedding", (50, 8), "adam", "embedding"),
    ("Dense_0/kernel", (4, 8), "muon", "weight matrix"),
    ("Dense_0/bias", (8,), "adam", "fewer than two dims"),
    ("LayerNorm_0/scale", (3, 8), "adam", "bias or scale"),
    ("blocks/0/linear/kernel", (4, 8), "muon", "weight matrix"),
    ("linear/lora_a", (8, 2), "adam", "LoRA factor"),
    ("q_proj/lora_B/default/weight", (8, 2), "adam", "LoRA factor"),
    ("temperature", (), "adam", "fewer than two dims"),
    # shapes
    ("depthwise_conv/kernel", (3, 3, 1, 8), "adam", "depthwise kernel"),
    ("mixer/dwconv/kernel", (4, 1, 8192), "adam", "depthwise kernel"),
    ("conv/kernel", (1, 1, 4, 16), "adam", "no matrix view declared"),
    ("conv/kernel", (1, 1, 1, 16), "adam", "no matrix view declared"),
    ("mlp/kernel", (1, 8), "muon", "weight matrix"),
]


@pytest.mark.parametrize(("path", "shape", "label", "reason"), PATHS)
def test_default_rules(path, shape, label, reason):
    nested: Any = zeros(*shape)
    for name in reversed(path.split("/")):
        nested = {name: nested}
    (decision,) = assign(nested).decisions
    assert (decision.label, decision.reason) == (label, reason)
    (flat,) = assign({path: zeros(*shape)}).decisions
    assert (flat.label, flat.reason) == (label, reason)


def test_flattened_dicts_with_tuple_keys():
    params = {"Embed_0": {"embedding": zeros(9, 4)}, "Dense_0": {"kernel": zeros(4, 4)}}
    expected = {"Embed_0/embedding": "adam", "Dense_0/kernel": "muon"}
    assert labels(flatten_dict(params)) == labels(params) == expected


def test_nnx_states():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.tok = nnx.Embed(5, 4, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
            self.lm_head = nnx.Linear(4, 5, rngs=rngs)

    assert labels(nnx.state(Model(nnx.Rngs(0)), nnx.Param)) == {
        "blocks/0/bias": "adam",
        "blocks/0/kernel": "muon",
        "lm_head/bias": "adam",
        "lm_head/kernel": "adam",
        "tok/embedding": "adam",
    }


def test_leaves_of_every_array_type():
    for leaf in (zeros(4, 4), jnp.zeros((4, 4)), jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)):
        (decision,) = assign(leaf).decisions
        assert decision.label == "muon"
        assert decision.view is not None
        assert decision.view.matrices == ((1, 4, 4),)
        assert decision.dtype == str(leaf.dtype)
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((2, 3))})
    assert labels(shapes) == {"w": "muon"}


# Rules of the user's own

TREE = {"out": zeros(5, 4), "mlp": {"w": zeros(4, 4), "b": zeros(4)}, "proj": zeros(4, 4)}


def test_the_first_rule_that_matches_wins():
    first = (Rule("mlp/w", "frozen", "one"), Rule("w", "adam", "two"), Rule("*", "adam", "three"))
    assert reasons(TREE, partition=first)["mlp/w"] == "one"
    assert labels(TREE, partition=first[::-1])["mlp/w"] == "adam"


def test_rules_go_before_the_default_ones():
    rules = (Rule("emb", "muon", "wanted"), *default_rules())
    assert labels({"emb": zeros(5, 4)}, partition=rules) == {"emb": "muon"}
    assert labels({"head": zeros(5, 4)}, partition=list(default_rules())) == {"head": "adam"}


def test_rules_of_ones_own_replace_the_default_ones():
    # vectors can't be Muon's whatever the rules leave out
    found = labels({**TREE, "head": zeros(4, 4)}, partition=(Rule("proj", "frozen"),))
    assert found == {
        "out": "muon",
        "head": "muon",
        "mlp/b": "adam",
        "mlp/w": "muon",
        "proj": "frozen",
    }
    assert labels(TREE, partition=())["out"] == "muon"


def test_rules_that_match_nothing_raise_with_their_names():
    rules = (
        Rule("lm_haed", "adam"),
        Rule(re.compile("w"), "adam"),
        Rule(lambda p, s: False, "frozen"),
        Rule("mlp", "frozen"),
    )
    with pytest.raises(ValueError, match="match no leaf of mlp/b, mlp/w, out, proj:") as error:
        check_rules(rules, TREE)
    lines = str(error.value).split("\n")[1:]
    assert lines[0] == "  'lm_haed' -> 'adam'"
    assert lines[1] == "  re.compile('w') -> 'adam'"
    assert "<lambda> -> 'frozen'" in lines[2]
    assert len(lines) == 3


def test_default_rules_may_match_nothing():
    check_rules(None, TREE)
    check_rules((Rule("out", "frozen"), *default_rules()), TREE)
    check_rules((Rule("nothing", "frozen"),), {})


def test_a_rule_that_always_loses_raises():
    with pytest.raises(ValueError, match="'out' -> 'muon': an earlier rule, 'out' -> 'adam', take"):
        check_rules((Rule("out", "adam"), Rule("out", "muon")), TREE)
    with pytest.raises(ValueError, match=r"role 'vector' -> 'adam', takes mlp/b"):
        check_rules((*default_rules(), Rule("b", "muon")), TREE)
    check_rules((Rule("mlp", "adam"), Rule("b", "adam")), TREE)  # says the same
    check_rules((Rule("b", "adam"), Rule("mlp", "frozen")), TREE)  # has w


def test_rules_may_mean_what_is_masked_or_none():
    rules = (Rule("out", "frozen"), Rule(lambda p, s: s[0] > 4, "adam"))
    check_rules(rules, {"out": None, "w": zeros(4, 4)})
    check_rules(rules, {"out": MASKED, "w": zeros(4, 4)})
    with pytest.warns(MuonWarning, match="outside the masked parts; there are a, w:\n  'out'"):
        check_rules((Rule("out", "frozen"),), {"a": MASKED, "w": zeros(4, 4)})


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Rule("out", "adam"), "takes a sequence of rules, got one"),
        ((Rule("out", "adam"), default_rules()), "put a star before"),
        ([Rule("out", "adam"), ("w", "adam")], r"got \('w', 'adam'\) among rules"),
    ],
)
def test_what_is_nearly_rules_raises(partition, message):
    with pytest.raises(TypeError, match=message):
        assign(TREE, partition=partition)


# Labels


def test_label_trees_functions_and_prefixes():
    tree = {"out": "adam", "mlp": {"w": "muon", "b": "frozen"}, "proj": "muon"}
    expected = {"out": "adam", "mlp/b": "frozen", "mlp/w": "muon", "proj": "muon"}
    assert labels(TREE, partition=tree) == expected
    assert labels(TREE, partition=lambda params: tree) == expected
    assert labels(TREE, partition=jax.tree_util.Partial(lambda params: tree)) == expected
    prefix = {"out": "adam", "mlp": "frozen", "proj": "muon"}
    assert labels(TREE, partition=prefix)["mlp/w"] == "frozen"
    assert labels([zeros(4, 4), zeros(4)], partition=["muon", "adam"]) == {"0": "muon", "1": "adam"}
    assert set(reasons(TREE, partition=tree).values()) == {"label given"}


@pytest.mark.parametrize("is_leaf", [None, lambda x: isinstance(x, nnx.Param)])
def test_label_functions_over_nnx_states(is_leaf):
    state = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param)

    def label(params):
        return jax.tree.map(lambda x: "muon" if x.ndim == 2 else "adam", params, is_leaf=is_leaf)

    for tree in (state, nnx.as_pure(state)):
        assert labels(tree, partition=label) == {"bias": "adam", "kernel": "muon"}
        assert labels(tree, partition=label(state)) == {"bias": "adam", "kernel": "muon"}


def test_bad_leaves_come_in_one_error():
    params = {**TREE, "conv": zeros(2, 3, 4)}
    tree = {"out": "muonn", "mlp": "muon", "proj": None, "conv": "muon"}
    with pytest.raises(ValueError, match="can't take these leaves") as error:
        assign(params, partition=tree)
    lines = str(error.value).split("\n")[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["conv", "mlp/b", "out", "proj"]
    assert "shape (2, 3, 4), labelled 'muon': a leaf of three or more dims needs" in lines[0]
    assert "shape (5, 4), label 'muonn': must be one of ('muon', 'adam', 'frozen')" in lines[2]
    assert "shape (4,), labelled 'muon': Muon needs two dims" in lines[1]
    assert "label None" in lines[3]


def test_a_rule_that_forces_muon_on_a_vector_is_named():
    with pytest.raises(ValueError, match=r"mlp/b: shape \(4,\), labelled 'muon' by the rule 'mlp'"):
        assign(TREE, partition=(Rule("mlp", "muon"), *default_rules()))


def test_labels_of_other_types_are_shown_short():
    with pytest.raises(ValueError, match=r"w: shape \(40, 50\), label array\(") as error:
        assign({"w": zeros(40, 50)}, partition={"w": zeros(40, 50)})
    assert len(str(error.value)) < 300
    with pytest.raises(ValueError, match="label True"):
        assign({"w": zeros(4, 4)}, partition={"w": True})
    with pytest.raises(ValueError, match="label ''"):
        assign({"w": zeros(4, 4)}, partition="")


# Views


def test_what_none_means():
    params = {"w": zeros(4, 4), "head": zeros(4, 5), "b": zeros(4)}
    by_rules = {"w": "muon", "head": "adam", "b": "adam"}
    assert labels(params, views=None) == by_rules
    assert set(labels(params, views=lambda p: None).values()) == {"adam"}
    assert set(reasons(params, views=lambda p: None).values()) == {
        "the function of matrix views returned None"
    }
    given = {"w": None, "head": DIMS, "b": None}
    assert labels(params, views=given) == {"w": "adam", "head": "muon", "b": "adam"}
    assert labels(params, views=lambda p: given) == labels(params, views=given)
    assert reasons(params, views=given)["w"] == "no matrix view in the given tree"
    assert reasons(params, views=given)["head"] == "matrix view given"


def test_views_beat_rules_and_labels():
    params = {"emb": zeros(5, 4)}
    assert labels(params, {"emb": DIMS}, (Rule("emb", "frozen"),)) == {"emb": "muon"}
    assert labels(params, {"emb": DIMS}, {"emb": "adam"}) == {"emb": "muon"}


def test_views_spread_as_prefixes():
    params = {"emb": zeros(5, 4), "layers": [zeros(3, 4, 4), zeros(2, 4, 6)]}
    views = {"emb": None, "layers": MuonDimensionNumbers(1, 2)}
    matrices = [d.view and d.view.matrices for d in assign(params, views).decisions]
    assert matrices == [None, ((3, 4, 4),), ((2, 4, 6),)]
    assert labels([zeros(4, 4), zeros(5, 6)], DIMS) == {"0": "muon", "1": "muon"}


def test_views_over_masked_and_none():
    views = {"a": {"w": DIMS, "b": None}, "c": DIMS, "d": MatrixView(heads=2)}
    whole = {"a": {"w": zeros(4, 4), "b": zeros(4)}, "c": zeros(4, 4), "d": zeros(4, 4)}
    assert labels(whole, views) == {"a/w": "muon", "a/b": "adam", "c": "muon", "d": "muon"}
    assert labels({**whole, "a": MASKED, "c": None}, views) == {"d": "muon"}
    assert labels({**whole, "a": {"w": MASKED, "b": zeros(4)}, "c": MASKED}, views) == {
        "a/b": "adam",
        "d": "muon",
    }
    state = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param)
    boxed = jax.tree.map(lambda x: DIMS if x.ndim == 2 else None, state)
    assert labels(state, boxed) == {"bias": "adam", "kernel": "muon"}


def test_views_that_do_not_fit_come_in_one_error():
    params = {"a": zeros(4), "b": zeros(2, 3), "c": zeros(4, 10), "d": zeros(4, 4)}
    views: Any = {"a": DIMS, "b": MuonDimensionNumbers(5, 1), "c": MatrixView(heads=3), "d": "out"}
    with pytest.raises(ValueError, match="can't take these leaves") as error:
        assign(params, views)
    lines = str(error.value).split("\n")[1:]
    assert "a: a matrix needs two dims or more, got shape (4,)" in lines[0]
    assert "b: reduction axes must be" in lines[1]
    assert "(2, 3)" in lines[1]
    assert "c: heads=3" in lines[2]
    assert (
        "d: a matrix view must be MuonDimensionNumbers, MatrixView or None, got 'out'" in lines[3]
    )
    assert len(lines) == 4


def test_structures_that_differ_name_the_path():
    with pytest.raises(ValueError, match="mlp/v: an entry"):
        assign(TREE, {"out": None, "mlp": {"w": DIMS, "b": None, "v": DIMS}, "proj": DIMS})
    with pytest.raises(ValueError, match=r"proj: a leaf of shape \(4, 4\) without an entry"):
        assign(TREE, partition={"out": "adam", "mlp": "adam"})
    with pytest.raises(ValueError, match="w: a leaf"):
        assign({"w": zeros(4, 4)}, {"w": (0, 1)})
    with pytest.raises(ValueError, match="got <class"):
        assign({"w": zeros(4, 4)}, MatrixView)


# Trees of all kinds


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """An equinox-like module: a pytree that is callable."""

    kernel: Any
    value: Any

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("the user's model was called")


def test_callable_trees_are_never_called():
    params = Model(zeros(4, 4), zeros(4))
    expected = {"kernel": "muon", "value": "adam"}
    assert labels(params) == expected
    assert labels(params, partition=Model("muon", "adam")) == expected
    assert labels(params, views=Model(DIMS, None)) == expected
    assert labels(params, partition=lambda p: Model("muon", "adam")) == expected
    assert labels({"m": params}, partition={"m": Model("muon", "adam")})["m/kernel"] == "muon"
    assert labels(params, views=Model(None, None)) == {"kernel": "adam", "value": "adam"}


def test_leaves_that_are_not_floating_point_are_frozen_by_any_rule():
    params = {
        "w": zeros(4, 4),
        "int": zeros(4, 4, dtype=np.int32),
        "bool": zeros(4, dtype=np.bool_),
        "float0": zeros(4, 4, dtype=jax.dtypes.float0),
        "key": jax.random.key(0),
        "count": 3,
        "flag": True,
        "none": None,
        "masked": MASKED,
    }
    others = dict.fromkeys(("int", "bool", "float0", "key", "count", "flag"), "frozen")
    assert labels(params) == {**others, "w": "muon"}
    assert labels(params, partition=dict.fromkeys(params, "muon"))["int"] == "frozen"
    assert labels(params, views={**dict.fromkeys(params), "w": DIMS}) == {**others, "w": "muon"}
    assert labels(params, views={"w": DIMS, **dict.fromkeys(others)}) == {**others, "w": "muon"}
    found = assign(params)
    assert set(jax.tree.leaves(found.labels_of(params))) == {
        "adam",
        "muon",
    }  # masked, so any will do


def test_scalars_of_python_and_numpy():
    assert labels({"a": 1.0, "b": np.float32(2), "c": 1j}) == dict.fromkeys("abc", "adam")


def test_low_precision_and_complex_floats_are_trained():
    params = {
        "bf16": jax.ShapeDtypeStruct((4, 4), jnp.bfloat16),
        "f16": zeros(4, 4, dtype=np.float16),
        "c64": zeros(4, 4, dtype=np.complex64),
    }
    assert set(labels(params).values()) == {"muon"}


def test_leaves_that_are_no_arrays_are_named():
    params = {"w": zeros(4, 4), "act": jax.nn.relu, "name": "gelu", "inner": [object]}
    with pytest.raises(ValueError, match="parameters must be arrays") as error:
        assign(params)
    lines = str(error.value).split("\n")[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["act", "inner/0", "name"]
    assert "got str 'gelu'" in lines[2]


def test_empty_trees():
    for tree in ({}, [], None, {"a": None, "b": MASKED}):
        assert assign(tree).decisions == ()
        assert assign(tree, views={"a": DIMS}, partition={"x": "adam"}).decisions == ()


def test_labels_keep_the_containers():
    params = collections.OrderedDict(b=zeros(4), a=zeros(4, 4))
    assert assign(params).labels_of(params) == collections.OrderedDict(b="adam", a="muon")


def test_views_of_a_masked_tree():
    assignment = assign(TREE)
    masked = {"emb": MASKED, "mlp": {"w": TREE["mlp"]["w"], "b": MASKED}, "proj": MASKED}
    views = assignment.views_of(masked)
    assert views["mlp"]["w"].matrices == ((1, 4, 4),)
    assert views["emb"] == MASKED


def test_matrices_of_8_bits_are_refused():
    params = {"a": {"w": jnp.zeros((4, 8), "float8_e4m3fn")}, "b": zeros(4, 4)}
    with pytest.raises(ValueError, match="a/w: dtype float8_e4m3fn: Muon needs 16 bits or more"):
        assign(params)
    assert labels(params, partition=(Rule("w", "adam"),)) == {"a/w": "adam", "b": "muon"}


def test_a_rule_may_carry_a_view_and_a_tuple_is_one_whole_path():
    params = {"attn": {"q": jnp.ones((8, 2, 4))}, "other": {"attn": {"q": jnp.ones((8, 2, 4))}}}
    view = MuonDimensionNumbers(0, (1, 2))
    rules = (Rule(("attn", "q"), "muon", "by hand", view), Rule("q", "adam"))
    decided = {d.path: d for d in assign(params, None, rules).decisions}
    assert decided["attn/q"].view == bind_view(view, (8, 2, 4))
    assert decided["attn/q"].reason == "by hand"
    assert decided["other/attn/q"].label == "adam"
    with pytest.raises(ValueError, match="Rule has a view, so its label must be 'muon'"):
        Rule("q", "adam", view=view)
    with pytest.raises(TypeError, match="Rule view must be"):
        Rule("q", "muon", view=(0, 1))  # pyright: ignore[reportArgumentType]
