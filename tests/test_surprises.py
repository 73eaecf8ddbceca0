"""Warnings of what was probably not meant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from containers import Unnamed

from muon_optax import MuonWarning, Rule
from muon_optax.partition import assign
from muon_optax.surprises import warn_of_surprises


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


TREE = {"mlp": {"w": zeros(4, 4), "b": zeros(4)}, "proj": zeros(4, 4)}


def warned(params: Any, views: Any = None, partition: Any = None) -> list[str]:
    with pytest.warns(MuonWarning) as records:
        warn_of_surprises(params, assign(params, views, partition))
    return [str(r.message) for r in records if issubclass(r.category, MuonWarning)]


def test_no_warning_where_nothing_surprises():
    warn_of_surprises(TREE, assign(TREE))
    warn_of_surprises({}, assign({}))


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


STACK = "look like stacked vectors"


def test_undeclared_stacks_warn():
    no_view, stack = warned({"w": zeros(3, 4, 5), "b": zeros(3, 4), "other": zeros(7, 7)})
    assert "w (3, 4, 5)" in no_view
    assert STACK in stack
    assert "b (3, 4)" in stack
    assert "other" not in stack


def test_norms_of_a_scanned_block_warn_too():
    block = {"attn": {"w": zeros(3, 4, 5)}, "ln": {"weight": zeros(3, 4)}}
    _, stack = warned({"layers": block, "out": zeros(4, 3)})
    assert "layers/ln/weight (3, 4)" in stack
    assert "out" not in stack
    flat = {"layers.attn.w": zeros(3, 4, 5), "layers.ln.weight": zeros(3, 4), "out": zeros(4, 3)}
    _, stack = warned(flat)
    assert "layers.ln.weight (3, 4)" in stack


def test_matrices_beside_a_convolution_are_no_stack():
    params = {
        "conv": {"kernel": zeros(3, 3, 4, 8)},
        "dense": {"kernel": zeros(3, 8)},
        "x": zeros(5),
    }
    (text,) = warned(params)
    assert STACK not in text
    # declared by the user: not our guess to make
    (text,) = warned({"w": zeros(3, 4, 5), "m": zeros(3, 4)}, partition=(Rule("m", "muon"),))
    assert STACK not in text


def test_a_single_array_of_three_dims():
    none, no_view = warned(zeros(3, 4, 5))
    assert "no leaf gets Muon" in none
    assert "(root) (3, 4, 5)" in no_view


def test_containers_without_names_warn():
    (text,) = warned(Unnamed(zeros(4, 4), zeros(4)))
    assert "registered without names" in text
    assert "<0> (4, 4)" in text
    warn_of_surprises([zeros(4, 4)], assign([zeros(4, 4)]))  # a list hides nothing


def test_tied_arrays_of_two_labels_warn():
    tied = jnp.zeros((5, 4))
    params = {"tok": tied, "lm_head": tied, "w": zeros(4, 4)}
    (text,) = warned(params)
    assert "one array under several paths has different optimizers" in text
    assert "lm_head (5, 4)" in text
    assert "tok (5, 4)" in text
    both = {"tok_emb": tied, "lm_head": tied, "w": zeros(4, 4)}
    warn_of_surprises(both, assign(both))


def test_one_shape_struct_in_many_places_is_no_tie():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    params = {"lm_head": shape, "w": shape}
    warn_of_surprises(params, assign(params))
