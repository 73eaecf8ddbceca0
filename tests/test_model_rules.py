"""`model_rules` as a whole: which models it reads, and what its rules do beside others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from shown import report

from muon_optax import MatrixView, MuonDimensionNumbers, Rule, model_rules, muon
from muon_optax.partition import assign, check_rules
from muon_optax.readers.heads import Layer, heads_by_name, heads_by_shape
from muon_optax.readers.kernels import convolution, einsum
from muon_optax.readers.names import is_adapter, is_expert
from muon_optax.readers.stacks import Declared, stacked_axes


class Moe(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.experts = nnx.Einsum("etd,edf->etf", (4, 4, 6), rngs=rngs)
        self.out = nnx.Linear(6, 4, use_bias=False, rngs=rngs)


def moe() -> tuple[Any, Any]:
    model = nnx.eval_shape(lambda: Moe(nnx.Rngs(0)))
    return model, nnx.state(model, nnx.Param)


@pytest.mark.parametrize("model", [{"kernel": jnp.ones((2, 2))}, lambda x: x, nnx.Linear, None])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match=r"reads instances of flax\.nnx\.Module.*got builtins|got"):
        model_rules(model)


def test_rules_of_ones_own_come_first():
    model, params = moe()
    partition = (Rule("router", "adam", "router"), *model_rules(model))
    rows = {row.path: row for row in report(params, partition=partition).rows}
    assert (rows["router/kernel"].optimizer, rows["router/kernel"].reason) == ("adam", "router")
    assert rows["experts/kernel"].matrices == ((4, 4, 6),)
    tx = muon(0.02, partition=partition)
    assert jax.tree.leaves(jax.eval_shape(tx.init, params))


def test_rules_of_ones_own_behind_decide_nothing():
    model, params = moe()
    partition = (*model_rules(model), Rule("router", "adam", "router"))
    with pytest.raises(ValueError, match="'router' -> 'adam': an earlier rule"):
        check_rules(partition, params)


def test_rules_of_another_tree():
    """One match is enough, since a part may be trained; none at all is a mistake."""
    model, params = moe()
    rules = model_rules(model)
    check_rules(rules, {"router": params["router"]})
    with pytest.raises(ValueError, match=r"match no leaf of model/experts/kernel") as error:
        check_rules(rules * 10, {"model": params})
    assert str(error.value).count("\n") == 21  # of 30 rules 20 and an ellipsis
    with pytest.raises(ValueError, match="match no leaf"):
        check_rules((Rule(("router", "weight"), "adam"),), params)


def test_printed_rules_say_why():
    model, _ = moe()
    assert [f"{rule}: {rule.reason}" for rule in model_rules(model)] == [
        "('experts', 'kernel') -> 'muon': weight of Einsum",
        "('out', 'kernel') -> 'muon': weight of Linear",
        "('router', 'kernel') -> 'muon': weight of Linear",
    ]


def test_complex_and_integer_parameters():
    class Odd(nnx.Module):
        def __init__(self):
            self.phase = nnx.Param(jnp.ones((4, 4), complex))
            self.index = nnx.Param(jnp.ones((4, 4), int))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.phase[...] + self.index[...].sum()

    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    (rule,) = model_rules(Odd(), x)
    assert rule.pattern == ("phase",)
    decided = {
        d.path: d.label for d in assign(nnx.state(Odd(), nnx.Param), None, (rule,)).decisions
    }
    assert decided["index"] == "frozen"


@pytest.mark.parametrize(
    ("equation", "shape", "axes"),
    [
        ("...td,df->...tf", (4, 6), ((0,), (1,))),
        ("btnh,nhd->btd", (2, 3, 6), ((0, 1), (2,))),
        ("btd,ndh->btnh", (2, 6, 3), ((1,), (0, 2))),
        ("bsd,ckdh->cbskh", (2, 3, 6, 4), ((2,), (1, 3))),
        ("ebd,edf->ebf", (2, 4, 6), ((1,), (2,))),
        ("btd, sndh -> sbtnh", (3, 2, 6, 4), ((2,), (1, 3))),
        ("td,dn->nt", (4, 6), ((0,), (1,))),
    ],
)
def test_the_axes_of_an_einsum(equation, shape, axes):
    kernel = einsum(equation, shape)
    assert kernel is not None
    assert kernel.view == MuonDimensionNumbers(*axes)


@pytest.mark.parametrize("equation", ["td->t", "td,df", "td,...->td", "td,d->td", "td,dd->t"])
def test_equations_without_a_matrix(equation):
    assert einsum(equation, (4, 4)) is None


def test_groups_of_a_convolution():
    assert convolution((3, 2, 8), 1, 2, groups=2).view == MatrixView((0, 1), (2,), heads=2)
    assert convolution((3, 1, 8), 1, 2, groups=8).view is None
    of_torch = convolution((4, 3, 5), 0, 1, groups=2, grouped="reduction").view
    assert of_torch == MatrixView((0, 2), (1,), heads=2, axis="reduction")


def test_stacks_of_stacks():
    """Experts within layers: both axes, in any place."""
    leaves = {("w",): Declared((3, 8, 2, 5), (8, 5)), ("b",): Declared((3, 2, 5), (5,))}
    assert stacked_axes(leaves, {}) == {("w",): (0, 2), ("b",): (0, 1)}


def test_a_declared_shape_that_a_leaf_has_not():
    assert stacked_axes({("w",): Declared((4, 6), (4, 5))}, {}) == {("w",): None}


def layers(*sizes: tuple[str, int, int]) -> list[Layer]:
    return [Layer((name, "w"), (m, n), frozenset({m}), n) for name, m, n in sizes]


def test_heads_by_shape():
    hidden = [("up", 8, 32), ("down", 32, 8)]
    no_head = heads_by_shape(layers(*hidden), frozenset())
    assert no_head == set()
    found = heads_by_shape(layers(*hidden, ("policy", 8, 6), ("value", 8, 1)), frozenset())
    assert found == {("policy", "w"), ("value", "w")}
    assert heads_by_shape(layers(("only", 4, 8)), frozenset({4})) == set()
    mid = layers(("up", 8, 32), ("fused", 8, 24), ("down", 32, 8))
    assert heads_by_shape(mid, frozenset()) == set()  # not at the end
    assert heads_by_shape(layers(*hidden, ("fc", 8, 6)), frozenset({6})) == set()  # a norm takes it


def test_auxiliary_heads():
    """GoogLeNet's classifiers in the midst put out as many classes as the last one."""
    found = layers(("a", 8, 16), ("aux", 16, 10), ("b", 16, 16), ("fc", 16, 10))
    assert heads_by_shape(found, frozenset()) == {("aux", "w"), ("fc", "w")}


def test_heads_by_shape_without_an_order():
    """`nnx.eval_shape` sorts attributes: a layer beside others may be in the midst of them."""
    last = Layer(("fc", "w"), (8, 6), frozenset({8}), 6)
    fused = [
        Layer(("attention", name), (8, n), frozenset({8}), n) for name, n in (("a", 24), ("b", 8))
    ]
    assert heads_by_shape([last, *fused], frozenset(), is_ordered=False) == {("fc", "w")}


def test_heads_by_name():
    pair = [
        Layer(("lm_head", "dense", "w"), (8, 8), frozenset({8}), 8),
        Layer(("lm_head", "decoder", "w"), (8, 50), frozenset({8}), 50),
    ]
    assert heads_by_name(pair, frozenset()) == {("lm_head", "decoder", "w")}
    pooling = [  # SigLIP's head attends and has an MLP of its own, and puts out the model's width
        Layer(("head", "attention"), (24, 8), frozenset({8}), 24),
        Layer(("head", "fc1"), (32, 8), frozenset({8}), 32),
        Layer(("head", "fc2"), (8, 32), frozenset({32}), 8),
    ]
    assert heads_by_name(pooling, frozenset({8})) == set()
    assert heads_by_name(layers(("mix", 8, 2), ("classifier", 8, 8)), frozenset({8})) == {
        ("classifier", "w")
    }


@pytest.mark.parametrize(
    "path",
    ["q/kernel_lora_a", "w_lora_b", "to_q_lora/down/weight", "q/lora_A/default/weight", "lora/a"],
)
def test_paths_of_adapters(path):
    assert is_adapter(tuple(path.split("/")))


@pytest.mark.parametrize("path", ["flora/kernel", "lora/base_module/kernel", "explorator/w"])
def test_paths_that_are_no_adapters(path):
    assert not is_adapter(tuple(path.split("/")))


def test_paths_of_experts():
    assert is_expert(("MoeBlock_0", "wi_0"))
    assert is_expert(("layers.0.mlp.experts", "down"))
    assert not is_expert(("attention", "wo"))
