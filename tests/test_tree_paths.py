"""Paths that don't depend on wrappers, and trees that meet by path whatever their containers."""

import collections
import dataclasses
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from containers import Unnamed
from flax import nnx
from flax.traverse_util import flatten_dict
from shown import report

from muon_optax import muon, scale_by_momentum
from muon_optax._internal.tree_paths import (
    align,
    cast_like,
    has_unnamed,
    is_absent,
    leaves_with_segments,
    path_name,
    raise_all,
    restructured_like,
    short,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    """Fields named as NNX and Linen name what is inside their wrappers."""

    query: Any
    value: Any


def names(tree: Any) -> list[str]:
    return [path_name(path) for path, _ in leaves_with_segments(tree)]


W = np.ones((2, 3), np.float32)


def test_nnx_params_have_the_paths_of_pure_states():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    assert names(state) == names(nnx.as_pure(state)) == ["bias", "kernel"]
    assert names(nnx.Param(W)) == ["(root)"]


def test_linen_boxes_leave_no_trace():
    assert names({"kernel": nn.Partitioned(W, names=("a", None))}) == ["kernel"]


def test_a_field_called_value_is_kept():
    assert names({"attn": Attention(W, W)}) == ["attn/query", "attn/value"]
    assert names({"attn": Attention(W, optax.MaskedNode())}) == ["attn/query"]
    assert names({"value": Attention(nnx.Param(W), nnx.Param(W))}) == ["value/query", "value/value"]


def test_trees_inside_a_box_lose_the_box_alone():
    inside = {"low": W, "high": [W]}
    assert names({"w": nnx.Param(inside)}) == ["w/high/0", "w/low"] == names({"w": inside})


def test_keys_of_every_kind():
    named = collections.namedtuple("named", ["a"])
    tree = {"x": [named(W), (W,)], "y": {3: W}}
    assert names(tree) == ["x/0/a", "x/1/0", "y/3"]
    assert names(flatten_dict({"dense": {"kernel": W}, "b": W})) == ["b", "dense/kernel"]
    assert names(Unnamed(W, {"a": W})) == ["<0>", "<1>/a"]
    assert names(W) == ["(root)"]


def test_containers_without_names_are_known():
    assert [has_unnamed(path) for path, _ in leaves_with_segments(Unnamed(W))] == [True]
    assert not any(has_unnamed(path) for path, _ in leaves_with_segments([{"<a>": W}, (W,)]))


TWINS = {
    "numbers": collections.OrderedDict([(0, W), ("0", W)]),
    "tuples": collections.OrderedDict([(("a", "b"), W), ("a", {"b": W}), ("c", W)]),
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("numbers", r"0: \[0\] and \['0'\]$"),
        ("tuples", r"a/b: \[\('a', 'b'\)\] and \['a'\]\['b'\]$"),
    ],
)
def test_leaves_of_one_path_are_an_error_that_names_both(kind, message):
    for use in (leaves_with_segments, muon(0.1).init, scale_by_momentum().init, report):
        with pytest.raises(ValueError, match=r"matched by their paths(?s:.*)  " + message):
            use(TWINS[kind])


def test_a_slash_in_a_name_makes_no_twin():
    assert len(leaves_with_segments({"a/b": W, "a": {"b": W}})) == 2


def test_absent_places_are_kept_on_request():
    tree = {"a": None, "b": optax.MaskedNode(), "c": nnx.Param(optax.MaskedNode()), "d": W}
    places = leaves_with_segments(tree, is_absent)
    assert [path for path, _ in places] == [("a",), ("b",), ("c",), ("d",)]
    assert [is_absent(x) for _, x in places] == [True, True, True, False]
    assert names(tree) == ["d"]


TREE = {"emb": W, "layers": [{"w": W, "b": W}, {"w": W, "b": W}]}


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("x", ["x"] * 5),
        ({"emb": "e", "layers": "l"}, ["e", "l", "l", "l", "l"]),
        ({"emb": None, "layers": ["p", {"w": "w", "b": "b"}]}, [None, "p", "p", "b", "w"]),
        ({"emb": "e", "layers": {0: "p", 1: "q"}}, ["e", "p", "p", "q", "q"]),
    ],
)
def test_prefixes_spread_over_the_leaves(prefix, expected):
    assert align(prefix, TREE, what="labels") == expected


def test_align_over_nnx_dicts_and_dataclasses():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    is_param = lambda x: isinstance(x, nnx.Param)  # noqa: E731
    wrapped = jax.tree.map(lambda p: str(p.ndim), state)
    plain = jax.tree.map(lambda p: str(p.ndim), state, is_leaf=is_param)
    for labels in (wrapped, plain, {"kernel": "2", "bias": "1"}):
        assert align(labels, state, what="labels") == ["1", "2"]
    assert align({"query": 1, "value": 2}, Attention(W, W), what="labels") == [1, 2]


def test_align_names_every_path_that_one_tree_lacks():
    with pytest.raises(ValueError, match="tree of labels") as error:
        align({"emb": 1, "layers": [2], "head": "x" * 500}, TREE, what="labels")
    text = str(error.value)
    assert "layers/1/b: a leaf of shape (2, 3) without an entry" in text
    assert "layers/1/w: a leaf" in text
    assert "head: an entry ('xxx" in text
    assert len(text) < 500


def test_entries_for_what_is_masked_or_none_are_allowed():
    masked = optax.MaskedNode()
    full = {"emb": "e", "layers": [{"w": "w0", "b": "b0"}, {"w": "w1", "b": "b1"}]}
    by_leaf = {"emb": masked, "layers": [{"w": W, "b": None}, {"w": W, "b": masked}]}
    assert align(full, by_leaf, what="labels") == ["w0", "w1"]
    by_subtree = {"emb": W, "layers": [masked, None]}  # as a prefix mask leaves it
    assert align(full, by_subtree, what="labels") == ["e"]
    with pytest.raises(ValueError, match="layer: an entry"):
        align({**full, "layer": 1}, by_subtree, what="labels")


def test_masked_entries_serve_no_leaf():
    with pytest.raises(ValueError, match=r"a: a leaf of shape \(2, 3\) without"):
        align({"a": optax.MaskedNode()}, {"a": W}, what="labels")
    assert align({"a": optax.MaskedNode()}, {"a": None}, what="labels") == []


def test_raise_together():
    raise_all([], "nothing")
    with pytest.raises(ValueError, match=r"^bad:\n  a\n  b$"):
        raise_all(["a", "b"], "bad:")


def test_short_cuts_long_values():
    assert short("a") == "'a'"
    assert len(short(jnp.arange(1000))) == 80


def test_graft_pairs_by_path_not_by_order():
    ordered = collections.OrderedDict(b=jnp.zeros(2), a=jnp.ones(2))
    grafted = restructured_like({"a": jnp.full(2, 5.0), "b": jnp.full(2, 7.0)}, ordered)
    assert type(grafted) is collections.OrderedDict
    chex.assert_trees_all_equal(
        grafted, collections.OrderedDict(b=jnp.full(2, 7.0), a=jnp.full(2, 5.0))
    )
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    boxed = restructured_like({"kernel": "k", "bias": "b"}, state)
    assert isinstance(boxed["bias"], nnx.Param)
    assert jax.tree.leaves(boxed) == ["b", "k"]


def test_graft_names_what_one_tree_lacks():
    with pytest.raises(ValueError, match=r"only one of them has:\n  b\n  c$"):
        restructured_like({"a": W, "c": W}, {"a": W, "b": W})


def test_cast_like_keeps_dtypes_and_containers():
    old = collections.OrderedDict(b=jnp.zeros(2, jnp.bfloat16), a=jnp.zeros(3, jnp.int32))
    new = cast_like({"a": jnp.ones(3), "b": jnp.ones(2)}, old)
    chex.assert_trees_all_equal_structs(new, old)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
