"""Warnings of what was probably not meant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from containers import Unnamed

from muon_optax import Rule
from muon_optax.partition import assign, find_warnings


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


TREE = {"mlp": {"w": zeros(4, 4), "b": zeros(4)}, "proj": zeros(4, 4)}


def warned(params: Any, views: Any = None, partition: Any = None) -> list[str]:
    return list(find_warnings(params, assign(params, views, partition), views, partition))


def test_no_warning_where_nothing_surprises():
    assert warned(TREE) == []
    assert warned({}) == []


def test_no_muon_leaf_warns_with_the_reasons():
    (text,) = warned({"head": zeros(4, 4), "b": zeros(4)})
    assert "no leaf gets Muon" in text
    assert "(reasons: fewer than two dims, head): b (4,), head (4, 4)" in text
    (text,) = warned(TREE, views=lambda p: None)
    assert "the function of matrix views returned None" in text


def test_one_warning_for_all_leaves_without_a_view():
    params = {"w": zeros(4, 4), **{f"c{i:02}": zeros(3, 3, 4, 4) for i in range(10)}}
    (text,) = warned(params)
    assert "three or more dims and no declared matrix view get AdamW" in text
    assert "muon_weight_dimension_numbers" in text
    assert "c00 (3, 3, 4, 4)" in text
    assert text.endswith("and 2 more")


def test_equal_layers_are_named_once():
    conv = {"conv": {"kernel": zeros(3, 3, 4, 4)}}
    (text,) = warned({"w": zeros(4, 4), "layers": [conv] * 12, "stem": conv})
    assert text.endswith(
        ": layers/0/conv/kernel (3, 3, 4, 4) and 11 like it, stem/conv/kernel (3, 3, 4, 4)"
    )


STACK = "look like stacked vectors"


def test_undeclared_stacks_warn():
    params = {"w": zeros(3, 4, 5), "v": zeros(3, 4), "other": zeros(7, 7)}
    assert {d.path: d.label for d in assign(params).decisions} == {
        "w": "adam",
        "v": "adam",
        "other": "muon",
    }
    no_view, stack = warned(params)
    assert "w (3, 4, 5)" in no_view
    assert STACK in stack
    assert "v (3, 4)" in stack
    assert "Rule('v', 'muon')" in stack
    assert "other" not in stack


@pytest.mark.parametrize("name", ["norm_1", "ln2", "rms", "attn_norm", "input_layernorm"])
def test_stacked_vectors_that_are_called_norms_do_not_warn(name):
    params = {"layers": {"up": zeros(3, 4, 5), name: zeros(3, 4)}, "mix": zeros(4, 3)}
    reasons = {d.path: (d.label, d.reason) for d in assign(params).decisions}
    assert reasons[f"layers/{name}"] == ("adam", "norm")
    (no_view,) = warned(params)
    assert STACK not in no_view


def test_vectors_of_a_scanned_block_warn_too():
    block = {"attn": {"w": zeros(3, 4, 5)}, "pre": {"weight": zeros(3, 4)}}
    _, stack = warned({"layers": block, "mix": zeros(4, 3)})
    assert "layers/pre/weight (3, 4)" in stack
    assert "mix" not in stack
    flat = {"layers.attn.w": zeros(3, 4, 5), "layers.pre.weight": zeros(3, 4), "mix": zeros(4, 3)}
    _, stack = warned(flat)
    assert "layers.pre.weight (3, 4)" in stack
    named = {"attn": {"w": zeros(3, 4, 5)}, "ln": {"weight": zeros(3, 4)}}
    assert len(warned({"layers": named, "mix": zeros(4, 3)})) == 1  # a norm for sure


def test_matrices_beside_a_convolution_are_no_stack():
    params = {
        "conv": {"kernel": zeros(3, 3, 4, 8)},
        "dense": {"kernel": zeros(3, 8)},
        "x": zeros(5),
    }
    assert not any(STACK in text for text in warned(params))
    # declared by the user: not our guess to make
    (text,) = warned({"w": zeros(3, 4, 5), "m": zeros(3, 4)}, partition=(Rule("m", "muon"),))
    assert STACK not in text


def test_a_single_array_of_three_dims():
    none, no_view = warned(zeros(3, 4, 5))
    assert "no leaf gets Muon" in none
    assert "(root) (3, 4, 5)" in no_view


def test_containers_without_names_warn():
    (text,) = warned(Unnamed(zeros(4, 4), zeros(6, 6)))
    assert "without names" in text
    assert "<0> (4, 4), <1> (6, 6)" in text
    assert "Rule('<0>', 'adam')" in text
    assert warned([zeros(4, 4)]) == []  # nothing beside it that it could be taken for


def test_a_list_of_arrays_warns_and_shapes_tell():
    """As Keras' `trainable_variables`: table, two layers with their biases, and a head."""
    params = [zeros(500, 16), zeros(16, 32), zeros(32), zeros(32, 16), zeros(16), zeros(16, 300)]
    assert [d.label for d in assign(params).decisions] == [
        "adam",
        "muon",
        "adam",
        "muon",
        "adam",
        "adam",
    ]
    (text,) = warned(params)
    assert ": 1 (16, 32), 3 (32, 16). " in text


def test_biases_in_a_list_are_no_norms():
    """A head with a bias, of as many outputs as the table has rows."""
    params = [zeros(500, 16), zeros(16, 32), zeros(32), zeros(32, 16), zeros(16)]
    labels = [d.label for d in assign([*params, zeros(16, 500), zeros(500)]).decisions]
    assert labels == ["adam", "muon", "adam", "muon", "adam", "adam", "adam"]
    labels = [
        d.label for d in assign([zeros(64, 16), zeros(16), zeros(16, 10), zeros(10)]).decisions
    ]
    assert labels == ["muon", "adam", "adam", "adam"]


def test_tied_arrays_of_two_labels_warn():
    tied = jnp.zeros((5, 4))
    params = {"v": tied, "lm_head": tied, "w": zeros(4, 4)}
    (text,) = warned(params)
    assert "one array under several paths has different optimizers" in text
    assert "lm_head (5, 4)" in text
    assert "v (5, 4)" in text
    assert warned({"tok_emb": tied, "lm_head": tied, "w": zeros(4, 4)}) == []


def test_one_shape_struct_in_many_places_is_no_tie():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert warned({"lm_head": shape, "w": shape}) == []
