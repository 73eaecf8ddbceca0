"""Rules that teach `flax_matrix_views` what it can't find."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from view_trees import Shapes, axes_of, tree

from muon_optax import (
    MatrixView,
    MuonDimensionNumbers,
    MuonWarning,
    Rule,
    default_rules,
    flax_matrix_views,
    muon,
)


def test_rules_teach_views_and_silence_warnings():
    shapes: Shapes = {"mix_out": (4, 16, 64), "up": (3, 64, 96), "head": (64, 50)}
    rules = (
        Rule("mix_out", "muon", view=MuonDimensionNumbers((0, 1), 2)),
        Rule("up", "adam"),
        Rule("head", "muon"),
        *default_rules(),
    )
    assert axes_of(shapes, rules=rules) == {
        "mix_out": ((), (0, 1), (2,)),
        "head": ((), (0,), (1,)),
    }
    with pytest.warns(MuonWarning, match=r"can't tell.*: mix_out \(4, 16, 64\), up \(3"):
        assert axes_of(shapes) == {}


def test_a_rule_beats_what_would_be_found():
    shapes: Shapes = {"q/kernel": (64, 4, 16), "q/bias": (4, 16), "lm_head/kernel": (64, 50)}
    by_heads = Rule("q", "muon", view=MuonDimensionNumbers(0, 2))
    assert axes_of(shapes) == {"q/kernel": ((), (0,), (1, 2))}
    rules = (by_heads, Rule("lm_head", "muon"))
    assert axes_of(shapes, rules=rules) == {
        "q/kernel": ((1,), (0,), (2,)),
        "lm_head/kernel": ((), (0,), (1,)),
    }
    assert axes_of(shapes, rules=(Rule("q", "adam"),)) == {}


def test_one_rule_with_negative_axes_serves_stacked_and_single_leaves():
    shapes: Shapes = {"layers/mix": (6, 8, 64, 96), "last/mix": (8, 64, 96)}
    rules = (Rule("mix", "muon", view=MuonDimensionNumbers(-2, -1)),)
    assert axes_of(shapes, rules=rules) == {
        "layers/mix": ((0, 1), (2,), (3,)),
        "last/mix": ((0,), (1,), (2,)),
    }


def test_rules_with_fused_views():
    params = tree({"qkv/kernel": (64, 96)})
    view = MatrixView(-2, -1, split=(64, 16, 16))
    assert flax_matrix_views(params, rules=(Rule("qkv", "muon", view=view),)) == {
        "qkv": {"kernel": view}
    }


def test_a_rule_for_a_module_is_for_its_weight():
    shapes: Shapes = {"mix/w": (6, 8, 64), "mix/bias": (6, 64), "mix/scale": (64,)}
    rules = (Rule("mix", "muon", view=MuonDimensionNumbers(-2, -1)),)
    assert axes_of(shapes, rules=rules) == {"mix/w": ((0,), (1,), (2,))}
    rules = (Rule("mix/bias", "muon", view=MuonDimensionNumbers(-2, -1)),)
    assert axes_of(shapes, rules=rules)["mix/bias"] == ((), (0,), (1,))


def test_rules_that_can_not_hold():
    params = tree({"a/kernel": (64, 32), "b/kernel": (64, 32)})
    with pytest.raises(ValueError, match=r"match no leaf of a/kernel, b/kernel:\n  'c' -> 'muon'"):
        flax_matrix_views(params, rules=(Rule("c", "muon"),))
    with pytest.raises(ValueError, match=r"views freeze nothing.*\n  'a' -> 'frozen'$"):
        flax_matrix_views(params, rules=(Rule("a", "frozen"), Rule("b", "adam")))
    three = Rule("kernel", "muon", view=MuonDimensionNumbers(1, 2))
    with pytest.raises(ValueError, match=r"don't fit:\n  a/kernel by .*\[-2, 1\].*\n  b/kernel by"):
        flax_matrix_views(params, rules=(three,))


def test_a_partial_is_asked_at_each_trace():
    shapes: Shapes = {"layers/mix": (2, 4, 6), "head": (6, 8)}
    params = {path: jnp.ones(shape) for path, shape in shapes.items()}
    rules = (Rule("*mix", "muon", view=MuonDimensionNumbers(-2, -1)),)
    views = functools.partial(flax_matrix_views, rules=rules)
    tx = muon(1.0, "tight", scale="none", muon_weight_dimension_numbers=views)
    state = jax.jit(tx.init)(params)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p)[0])(params, state, params)
    norms = np.linalg.norm(np.asarray(update["layers/mix"]), 2, axis=(1, 2))
    np.testing.assert_allclose(norms, 1.0, atol=0.05)
