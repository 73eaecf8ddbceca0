"""Regressions from public reports: partitioning and labels."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import matrix, newton_schulz, relative_error
from running import first_update
from shown import report

from muon_optax import (
    MuonDimensionNumbers,
    MuonWarning,
    Rule,
    default_rules,
    flax_matrix_views,
    muon,
)
from muon_optax._internal.tree_paths import is_masked

DIMS = MuonDimensionNumbers(0, 1)


def one_update(tx: Any, params: Any, grads: Any = None) -> Any:
    grads = params if grads is None else grads
    return first_update(tx, grads, params, jit=True)


def direction(grad: Any) -> np.ndarray:
    """Muon's first update of one [fan-in, fan-out] matrix at learning rate 1, in float64.

    The first momentum mix is a multiple of the gradient, which the iteration doesn't see.
    """
    fan_in, fan_out = grad.shape
    return -(max(1.0, fan_out / fan_in) ** 0.5) * newton_schulz(grad)


def adam(grad: Any, **options: Any) -> np.ndarray:
    """AdamW's first update at learning rate 1, optax's own."""
    tx = optax.scale_by_adam(nesterov=True, **options)
    return -np.asarray(jax.jit(lambda grad: tx.update(grad, tx.init(grad))[0])(grad))


def sigmas(x: Any) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


# optax.partition fails under nnx.Optimizer: a mask stands inside a variable.
# https://github.com/google/flax/issues/4901 https://github.com/google/flax/issues/5372
# https://github.com/google-deepmind/optax/issues/1148


def train_nnx(model: Any, tx: Any, steps: int = 3) -> list[float]:
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = matrix(0, 8, 4)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


def by_rank(params: Any, is_leaf: Any = None) -> Any:
    return jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adam", params, is_leaf=is_leaf)


def is_param(x: Any) -> bool:
    return isinstance(x, nnx.Param)


LABELLED: dict[str, Any] = {
    "rules": lambda state: None,
    "function": lambda state: by_rank,
    "function of whole params": lambda state: functools.partial(by_rank, is_leaf=is_param),
    "tree": by_rank,
    "tree of whole params": functools.partial(by_rank, is_leaf=is_param),
    "dict": lambda state: {"kernel": "muon", "bias": "adam"},
}


@pytest.mark.parametrize("labelled", LABELLED)
def test_nnx_optimizer_and_jit(labelled):
    model = nnx.jit(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))()
    before = np.asarray(model.kernel[...])
    tx = muon(0.05, partition=LABELLED[labelled](nnx.state(model, nnx.Param)))
    losses = train_nnx(model, tx)
    assert losses[0] > losses[1] > losses[2]
    # three steps, none of them longer than 0.05 times the largest singular value of a direction
    assert 0.05 * 0.6 < np.linalg.norm(np.asarray(model.kernel[...]) - before, 2) < 3 * 0.05 * 1.25


def test_a_module_with_one_vector():
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((1,)))

        def __call__(self, x):
            return x * self.w[...]

    with pytest.warns(MuonWarning, match=r"no leaf gets Muon.*w \(1,\)"):
        losses = train_nnx(Scale(), muon(0.05))
    assert losses[0] > losses[1] > losses[2]


def test_a_label_tree_of_another_structure_names_the_path():
    state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0))), nnx.Param)
    with pytest.raises(ValueError, match=r"bias: a leaf of shape \(3,\)(.|\n)*kernle: an entry"):
        muon(0.1, partition={"kernel": "muon", "kernle": "adam"}).init(state)


# None at the root, None at a leaf and a mask mean different things.
# https://github.com/google-deepmind/optax/issues/1537
# https://github.com/google-deepmind/optax/issues/1538

MATRIX = matrix(1, 4, 6)
PAIR = {"w": MATRIX, "b": np.arange(1, 7, dtype=np.float32)}
WANTED = {"w": direction(MATRIX), "b": adam(PAIR["b"])}
ADAM_ONLY = {"w": adam(PAIR["w"]), "b": adam(PAIR["b"])}
MEANINGS: dict[str, tuple[Any, Any]] = {
    "root None": (None, WANTED),
    "function of None": (lambda params: None, ADAM_ONLY),
    "leaf None": ({"w": DIMS, "b": None}, WANTED),
    "function of leaf None": (lambda params: {"w": DIMS, "b": None}, WANTED),
    "all None": ({"w": None, "b": None}, ADAM_ONLY),
}


def test_meanings_of_none():
    for views, wanted in MEANINGS.values():
        tx = muon(1.0, muon_weight_dimension_numbers=views)
        if wanted is ADAM_ONLY:
            with pytest.warns(MuonWarning, match="no leaf gets Muon"):
                tx.init(PAIR)
            continue
        got = one_update(tx, PAIR)
        assert relative_error(got["w"], wanted["w"]) < 1e-5
        np.testing.assert_allclose(got["b"], wanted["b"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore::muon_optax.MuonWarning")
@pytest.mark.parametrize("views", ["function of None", "all None"])
def test_no_views_at_all_mean_adamw(views):
    got = one_update(muon(1.0, muon_weight_dimension_numbers=MEANINGS[views][0]), PAIR)
    chex.assert_trees_all_close(got, ADAM_ONLY, rtol=1e-5)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("views", ["root None", "leaf None", "function of leaf None"])
def test_meanings_of_none_under_a_mask(views, adaptive):
    tx = muon(1.0, adaptive=adaptive, muon_weight_dimension_numbers=MEANINGS[views][0])
    masked = optax.masked(tx, {"w": True, "b": False})
    got = one_update(masked, PAIR)
    wanted = WANTED["w"]
    if adaptive:  # times the inner product of the momentum mix and the result
        mix = MATRIX * (0.95 * 0.05 / (1 - 0.95**2) + 1)  # Nesterov, bias-corrected, first step
        wanted = wanted * np.sum(mix * newton_schulz(MATRIX))
    assert relative_error(got["w"], wanted) < 1e-4
    np.testing.assert_array_equal(got["b"], PAIR["b"])  # passed through, as optax.masked does


# The default by rank labels a stacked tree backwards.
# https://github.com/goodfire-ai/spd/issues/975 https://github.com/goodfire-ai/spd/issues/982

STACK = {
    "w": np.stack([matrix(s, 4, 5) for s in range(3)]),
    "b": matrix(9, 3, 4),
}


def test_a_declared_stack_is_as_many_matrices():
    views = {"w": MuonDimensionNumbers(1, 2), "b": None}
    got = one_update(muon(1.0, muon_weight_dimension_numbers=views), STACK)
    for layer in range(3):
        assert relative_error(np.asarray(got["w"])[layer], direction(STACK["w"][layer])) < 1e-5
    np.testing.assert_allclose(got["b"], adam(STACK["b"]), rtol=1e-5)


def test_an_undeclared_stack_is_visible():
    with pytest.warns(MuonWarning) as records:
        muon(1.0).init(STACK)
    _, no_view, vectors = [str(r.message) for r in records if r.category is MuonWarning]
    assert "w (3, 4, 5)" in no_view
    assert "look like stacked vectors" in vectors
    assert "b (3, 4)" in vectors
    rows = {row.path: (row.optimizer, row.reason) for row in report(STACK).rows}
    assert rows["w"] == ("adam", "no matrix view declared")
    assert rows["b"] == ("adam", "a stack of vectors, by the stacks beside it")


# A kernel with the scan axis in the middle.
# https://github.com/AI-Hypercomputer/maxtext/issues/2546


def test_the_scan_axis_in_the_middle():
    x = np.random.default_rng(2).normal(size=(6, 3, 2, 4)).astype(np.float32)
    views = {"kernel": MuonDimensionNumbers((0,), (-2, -1))}
    tx = muon(1.0, muon_weight_dimension_numbers=views)
    got = np.asarray(one_update(tx, {"kernel": x})["kernel"])
    alone = one_update(tx, {"kernel": x[:, 1]})["kernel"]  # unscanned, the same spec
    for layer in range(3):
        m = x[:, layer].reshape(6, 8)
        wanted = -((8 / 6) ** 0.5) * newton_schulz(m)
        assert relative_error(got[:, layer].reshape(6, 8), wanted) < 1e-5
    np.testing.assert_allclose(alone, got[:, 1], rtol=1e-5, atol=1e-6)


# A leaf that no group owns, or a rule that beats the check of the rank.
# https://github.com/NVIDIA/Megatron-LM/issues/6642
# https://github.com/deepspeedai/DeepSpeed/issues/8441


def test_labels_that_no_optimizer_has_raise_at_init():
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 3))}
    tx = muon(0.1, partition=lambda p: {"w": "muon", "v": "muonn"})
    with pytest.raises(ValueError, match=r"v: shape \(4, 3\), label 'muonn'"):
        tx.init(params)


@pytest.mark.parametrize(
    "partition",
    [(Rule("b", "muon"), *default_rules()), {"w": "muon", "b": "muon"}, lambda p: "muon"],
)
def test_muon_forced_on_a_vector_raises_at_init(partition):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    with pytest.raises(ValueError, match=r"b: shape \(4,\), labelled 'muon'"):
        muon(0.1, partition=partition).init(params)


def test_the_plainest_configuration_is_muon():
    grad = matrix(3, 4, 4, kappa=10.0)
    got = one_update(muon(1.0), {"w": grad})["w"]
    assert np.all((sigmas(got) > 0.6) & (sigmas(got) < 1.25))
    assert relative_error(got, direction(grad)) < 1e-5


def test_each_leaf_is_updated_by_exactly_one_group():
    params = {"w": jnp.ones((4, 4)), "head": jnp.ones((4, 3)), "b": jnp.ones(3), "f": jnp.ones(2)}
    rules = (Rule("f", "frozen"), *default_rules())
    state: Any = muon(0.1, partition=rules).init(params)
    owned = {
        label: jax.tree.map(
            lambda x: not is_masked(x),
            state.inner_states[label].inner_state[0].mu,
            is_leaf=is_masked,
        )
        for label in ("muon", "adam")
    }
    assert owned["muon"] == {"w": True, "head": False, "b": False, "f": False}
    assert owned["adam"] == {"w": False, "head": True, "b": True, "f": False}


# Names matched by substrings catch or miss leaves.
# https://github.com/deepspeedai/DeepSpeed/issues/7641
# https://github.com/AI-Hypercomputer/maxtext/issues/4843
# https://github.com/vllm-project/speculators/issues/866


def test_names_match_by_whole_segments():
    names = (
        "embedder_mlp/kernel",
        "patch_embed/proj/kernel",
        "overhead/kernel",
        "unembed/kernel",
        "wi_0_bias",
        "markov/embedding",
    )
    nested: Any = {}
    for name in names:
        node = nested
        *above, last = name.split("/")
        for key in above:
            node = node.setdefault(key, {})
        node[last] = matrix(4, 4, 6)
    rows = {row.path: (row.optimizer, row.reason) for row in report(nested).rows}
    assert rows == {
        "embedder_mlp/kernel": ("muon", "weight matrix"),
        "patch_embed/proj/kernel": ("muon", "weight matrix"),
        "overhead/kernel": ("muon", "weight matrix"),
        "unembed/kernel": ("adam", "head"),
        "wi_0_bias": ("adam", "bias or scale"),
        "markov/embedding": ("adam", "embedding"),
    }
    got = one_update(muon(1.0), nested)
    wanted = direction(matrix(4, 4, 6))
    assert relative_error(got["overhead"]["kernel"], wanted) < 1e-5
    np.testing.assert_allclose(got["wi_0_bias"], adam(nested["wi_0_bias"]), rtol=1e-5)


def test_anchored_expressions():
    params = {"a": {"kernel": jnp.ones((4, 4))}, "b": {"kernel": jnp.ones((4, 4))}}
    rules = (Rule(re.compile(r"a/.*"), "adam", "by hand"), *default_rules())
    text = str(report(params, partition=rules))
    assert re.search(r"a/kernel +4 x 4 +adam +by hand", text)
    assert re.search(r"b/kernel +4 x 4 +1 of 4 x 4 +muon", text)


# A tied weight goes to two optimizers; fresh state shares buffers.
# https://github.com/NVIDIA/Megatron-LM/issues/4641
# https://github.com/NVIDIA/Megatron-LM/issues/5034
# https://github.com/PaddlePaddle/Paddle/issues/78975
# https://github.com/google-deepmind/optax/issues/1059 https://github.com/jax-ml/jax/issues/9635


def test_a_tied_array_with_one_label_is_quiet_and_with_two_warns():
    tied = jnp.asarray(matrix(5, 6, 4))
    muon(0.1).init({"tok_emb": tied, "lm_head": tied, "w": jnp.ones((4, 4))})
    with pytest.warns(MuonWarning, match=r"one array under several paths.*lm_head.*proj"):
        muon(0.1).init({"proj": tied, "lm_head": tied})


def pointers(tree: Any) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


@pytest.mark.parametrize("jit", [False, True])
def test_a_fresh_state_shares_no_buffer(jit):
    tied = jnp.zeros((16, 16))
    params = {"tok_emb": tied, "lm_head": tied, "w": jnp.zeros((16, 16)), "b": jnp.zeros(16)}
    tx = muon(0.1, weight_decay=0.1)
    state = (jax.jit(tx.init) if jit else tx.init)(params)
    mine = pointers(state)
    assert len(set(mine)) == len(mine)
    assert not set(mine) & set(pointers(params))


def test_donation_straight_after_init():
    tx = muon(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.asarray(matrix(6, 4, 4)), "b": jnp.ones(4)}
    before = jax.tree.map(np.asarray, params)
    state = tx.init(params)
    params, state = step(params, state)
    params, state = step(params, state)
    # all-ones gradients have rank 1: each step moves along it by about 0.1 * p(1), p(1) = 0.696436
    moved = np.asarray(params["w"]) - before["w"]
    np.testing.assert_allclose(moved, np.full((4, 4), -2 * 0.1 * 0.696436 / 4), rtol=1e-5)
    tied = jnp.ones((4, 4))
    twice = {"tok_emb": tied, "lm_head": tied, "w": jnp.ones((4, 4))}
    with pytest.raises(Exception, match=r"(?i)donate") as error:
        step(twice, tx.init(twice))
    assert "ArgInfo" not in str(error.value)


# LoRA factors of extreme aspect ratio, with a zero gradient at first.
# https://github.com/Nerogar/OneTrainer/issues/1314 https://github.com/KellerJordan/Muon/issues/25


def test_lora_factors():
    grads = {"A": np.zeros((512, 4), np.float32), "B": matrix(7, 4, 512, kappa=10.0)}
    got = one_update(muon(1.0), grads)
    np.testing.assert_array_equal(got["A"], np.zeros((512, 4)))
    scale = (512 / 4) ** 0.5
    assert np.all((sigmas(got["B"]) > 0.6 * scale) & (sigmas(got["B"]) < 1.25 * scale))
    override = muon(1.0, partition=(Rule("A", "adam"), *default_rules()))
    grads["A"] = np.ones((512, 4), np.float32)
    got = one_update(override, grads)
    np.testing.assert_allclose(got["A"], adam(grads["A"]), rtol=1e-5)
    named = {"q": {"lora_A": grads["A"], "lora_B": grads["B"], "kernel": grads["B"] + 0}}
    got = one_update(muon(1.0), named)["q"]
    np.testing.assert_allclose(got["lora_B"], adam(grads["B"]), rtol=1e-5)
    assert relative_error(got["kernel"], direction(grads["B"])) < 1e-5


def test_the_base_of_a_lora_layer_is_no_factor():
    """Nor is it where the layer itself is called `lora`."""

    def make(rngs):
        base = nnx.Linear(8, 16, rngs=rngs)
        return nnx.Dict(
            lora=nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs),
            up=nnx.Dict(lora=nnx.LoRA(8, 2, 16, base_module=base, rngs=rngs)),
            to_q=nnx.Dict(lora=nnx.Dict(down=nnx.Linear(8, 2, use_bias=False, rngs=rngs))),
        )

    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    found = {row.path: row.optimizer for row in report(nnx.state(model, nnx.Param)).rows}
    assert found == {
        "lora/bias": "adam",
        "lora/kernel": "muon",
        "lora/lora/lora_a": "adam",
        "lora/lora/lora_b": "adam",
        "to_q/lora/down/kernel": "adam",
        "up/lora/base_module/bias": "adam",
        "up/lora/base_module/kernel": "muon",
        "up/lora/lora_a": "adam",
        "up/lora/lora_b": "adam",
    }


# Nested masks and frozen leaves.
# https://github.com/google-deepmind/optax/issues/271
# https://github.com/google-deepmind/optax/issues/290
# https://github.com/google-deepmind/optax/issues/477

THREE = {
    "w": matrix(8, 4, 6),
    "emb": np.ones((5, 4), np.float32),
    "b": np.arange(1, 7, dtype=np.float32),
}
FULL = {"w": DIMS, "emb": None, "b": None}


@pytest.mark.parametrize("views", [None, FULL, lambda p: FULL])
def test_nested_masks(views):
    tx = muon(1.0, muon_weight_dimension_numbers=views)
    got = one_update(optax.masked(tx, {"w": True, "emb": False, "b": True}), THREE)
    assert relative_error(got["w"], direction(THREE["w"])) < 1e-5
    np.testing.assert_allclose(got["b"], adam(THREE["b"]), rtol=1e-5)
    np.testing.assert_array_equal(got["emb"], THREE["emb"])


@pytest.mark.parametrize("views", [None, FULL])
def test_partition_with_set_to_zero(views):
    tx = optax.partition(
        {"m": muon(1.0, muon_weight_dimension_numbers=views), "z": optax.set_to_zero()},
        {"w": "m", "emb": "z", "b": "m"},
    )
    got = one_update(tx, THREE)
    np.testing.assert_array_equal(got["emb"], np.zeros((5, 4)))
    assert relative_error(got["w"], direction(THREE["w"])) < 1e-5
    np.testing.assert_allclose(got["b"], adam(THREE["b"]), rtol=1e-5)


@pytest.mark.parametrize("views", [None, FULL])
def test_whole_subtrees_masked_by_a_prefix(views):
    params = {"train": THREE, "rest": THREE}
    dims = None if views is None else {"train": views, "rest": views}
    tx = optax.partition(
        {"m": muon(1.0, muon_weight_dimension_numbers=dims), "z": optax.set_to_zero()},
        {"train": "m", "rest": "z"},
    )
    got = one_update(tx, params)
    assert relative_error(got["train"]["w"], direction(THREE["w"])) < 1e-5
    chex.assert_trees_all_equal(got["rest"], jax.tree.map(np.zeros_like, THREE))


def test_frozen_leaves_need_no_outer_partition():
    rules = (Rule("emb", "frozen"), *default_rules())
    got = one_update(muon(1.0, partition=rules, weight_decay=0.1), THREE)
    np.testing.assert_array_equal(got["emb"], np.zeros((5, 4)))


@pytest.mark.parametrize("views", [None, {**FULL, "act": None, "gone": None}])
def test_none_stays_none(views):
    params = {**THREE, "act": None, "gone": None}  # as equinox.filter leaves them
    tx = muon(1.0, muon_weight_dimension_numbers=views)
    got = one_update(tx, params)
    assert got["act"] is None
    assert got["gone"] is None
    assert relative_error(got["w"], direction(THREE["w"])) < 1e-5


# tree_map_params, which calls init on a placeholder

SECOND = {"w": "of w", "emb": "of emb", "b": "of b"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"muon_weight_dimension_numbers": FULL},
        {"muon_weight_dimension_numbers": lambda p: FULL},
        {"muon_weight_dimension_numbers": flax_matrix_views},
        {"partition": (Rule("emb", "frozen"), *default_rules())},
        {"partition": {"w": "muon", "emb": "adam", "b": "adam"}},
    ],
    ids=["rules", "views", "function", "flax", "frozen", "labels"],
)
def test_tree_map_params_with_a_second_tree(options):
    tx = muon(0.1, **options)
    state = tx.init(THREE)
    mapped: Any = optax.tree_map_params(
        tx,
        lambda x, name: name if is_masked(x) else f"{x.shape} {name}",
        state,
        SECOND,
        transform_non_params=lambda x: "other",
        is_leaf=is_masked,
    )
    in_muon = mapped.inner_states["muon"].inner_state[0]
    in_adam = mapped.inner_states["adam"].inner_state[0]
    assert in_muon.count == "other"
    assert in_muon.mu == {**SECOND, "w": "(4, 6) of w"}
    frozen = "partition" in options and isinstance(options["partition"], tuple)
    emb = "of emb" if frozen else "(5, 4) of emb"
    assert in_adam.nu == {"w": "of w", "emb": emb, "b": "(6,) of b"}
    assert ("frozen" in mapped.inner_states) is frozen
