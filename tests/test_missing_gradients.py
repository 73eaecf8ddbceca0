"""Leaves without a gradient are passed over, as Equinox's training steps expect."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import make_mesh

from muon_optax import (
    MuonDimensionNumbers,
    Namo,
    Rule,
    add_cautious_weight_decay,
    default_rules,
    hyperball,
    muon,
    orthogonalize,
    scale_by_momentum,
    scale_by_muon,
    scale_by_neuron,
    scale_by_shape,
)


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    embed: eqx.nn.Embedding
    dropout: eqx.nn.Dropout
    steps: jax.Array
    name: str
    scale: float = 2.0

    def __call__(self, token):
        return self.scale * self.dropout(self.mlp(self.embed(token)))


def make_model() -> Model:
    keys = jax.random.split(jax.random.key(0))
    mlp = eqx.nn.MLP(4, 3, 8, 1, key=keys[0])
    embed = eqx.nn.Embedding(5, 4, key=keys[1])
    return Model(mlp, embed, eqx.nn.Dropout(0.5, inference=True), jnp.array(3), "a model")


def loss(model, shift):
    """Of all tokens, so that gradients have full rank."""
    tokens = jnp.arange(5)
    return jnp.sum(
        (jax.vmap(model)(tokens) - jnp.cos(jnp.outer(tokens, shift + jnp.arange(3)))) ** 2
    )


gradients_of = eqx.filter_jit(eqx.filter_grad(loss))


def arrays(tree: Any) -> dict[str, Any]:
    """The floating-point arrays of a tree by path: a tree of which nothing is missing."""
    leaves, _ = jax.tree.flatten_with_path(eqx.filter(tree, eqx.is_inexact_array))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


# By the name of the leaf alone, so that the flat tree of `arrays` gets the same optimizers.
RULES = [
    Rule(lambda path, shape: "embed" in "".join(path), "adam", "table"),
    Rule(lambda path, shape: len(shape) == 2, "muon", "weight"),
]


def halves(x):
    """Quick to compile, where the mathematics don't matter."""
    return x / 2


def make_tx(rate: Any = 0.1, **options: Any) -> Any:
    options = {"orthogonalizer": halves, **options}
    return muon(rate, weight_decay=0.1, adam_weight_decay=0.2, partition=RULES, **options)


INEXACT, ARRAYS, ALL = eqx.is_inexact_array, eqx.is_array, lambda _: True
# What stands around the optimizer, what the state is made from and what the update gets. MultiSteps
# and inject_hyperparams take no functions themselves, whatever they stand around.
AROUND: dict[str, tuple[Any, Any, Any]] = {
    "nothing": (make_tx, INEXACT, ALL),
    "nothing, integers too": (make_tx, ARRAYS, ALL),
    "nothing, integers twice": (make_tx, ARRAYS, ARRAYS),
    "nothing, integers once": (make_tx, ARRAYS, INEXACT),
    "chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), make_tx()), ARRAYS, ALL),
    "apply_if_finite": (lambda: optax.apply_if_finite(make_tx(), 3), ARRAYS, ALL),
    "l2": (lambda: make_tx(weight_decay_kind="l2"), ARRAYS, ALL),
    "independent": (lambda: make_tx(weight_decay_kind="independent"), ARRAYS, ALL),
    "MultiSteps": (lambda: optax.MultiSteps(make_tx(), 2), INEXACT, INEXACT),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(lambda rate: make_tx(rate))(rate=0.1),
        ARRAYS,
        ARRAYS,
    ),
}


def assert_same(got: Any, want: dict[str, Any]) -> None:
    got = arrays(got)
    assert got.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_allclose(got[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("around", AROUND)
def test_the_whole_model_may_be_given_as_parameters(around):
    make, made_from, given = AROUND[around]
    model, tx = make_model(), make()
    flat, state = arrays(model), tx.init(eqx.filter(model, made_from))
    flat_state, flat_update = tx.init(flat), jax.jit(tx.update)
    update = eqx.filter_jit(tx.update)
    for shift in (1, 2):
        grads = gradients_of(model, shift)
        want, flat_state = flat_update(arrays(grads), flat_state, flat)
        before = state
        updates, state = update(grads, state, eqx.filter(model, given))
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert jax.tree.structure(state) == jax.tree.structure(before)
        assert_same(updates, want)


def test_the_step_of_equinox_examples_is_compiled_once():
    model, tx = make_model(), make_tx(orthogonalizer=None)
    state = tx.init(eqx.filter(model, eqx.is_array))
    traces = []

    @eqx.filter_jit(donate="all")
    def step(model, state, shift):
        traces.append(None)
        value, grads = eqx.filter_value_and_grad(loss)(model, shift)
        updates, state = tx.update(grads, state, model)
        return value, eqx.apply_updates(model, updates), state

    values = []
    for _ in range(5):
        value, model, state = step(model, state, 1)
        values.append(float(value))
    assert len(traces) == 1
    assert values[-1] < 0.5 * values[0]


TREE = {
    "mlp": {
        "up": np.ones((4, 6), np.float32),
        "down": np.full((6, 4), 2, np.float32),
        "bias": np.ones(6, np.float32),
    },
    "embed": np.ones((8, 4), np.float32),
}


TO_GO_ON: Any = muon(0.1, weight_decay=0.1, adam_weight_decay=0.1, orthogonalizer=halves)


def gradients(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), TREE)


def without(tree: Any, *paths: str, mark: Any = None) -> Any:
    """The tree with `mark` at some paths."""
    return jax.tree.map_with_path(
        lambda path, x: mark if jax.tree_util.keystr(path, simple=True) in paths else x, tree
    )


def moments(state: Any, name: str) -> dict[str, Any]:
    """What the state has for the leaves of a name, by path."""
    leaves = jax.tree.leaves_with_path(state)
    found = {jax.tree_util.keystr(path): x for path, x in leaves}
    return {path: x for path, x in found.items() if f"['{name}']" in path}


@pytest.mark.parametrize("mark", [None, optax.MaskedNode()])
@pytest.mark.parametrize("gone", ["up", "bias", "embed"])
def test_moments_of_leaves_without_a_gradient_stay_and_go_on(gone, mark):
    path = gone if gone == "embed" else f"mlp{gone}"
    update, state = jax.jit(TO_GO_ON.update), TO_GO_ON.init(TREE)
    _, first = update(gradients(0), state, TREE)
    _, full = update(gradients(1), first, TREE)
    updates, skipped = update(without(gradients(1), path, mark=mark), first, TREE)
    assert jax.tree.structure(skipped) == jax.tree.structure(state)
    assert (updates["embed"] if gone == "embed" else updates["mlp"][gone]) == mark
    own, kept = moments(skipped, gone), moments(first, gone)
    assert len(own) == (1 if gone == "up" else 2)
    for key, x in own.items():
        np.testing.assert_array_equal(x, kept[key])
    for name in {"up", "down", "bias", "embed"} - {gone}:
        for key, x in moments(skipped, name).items():
            np.testing.assert_array_equal(x, moments(full, name)[key])
    again, _ = update(gradients(2), skipped, TREE)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again))
    assert jax.tree.structure(again) == jax.tree.structure(TREE)


def test_none_stands_for_a_whole_subtree():
    tx: Any = muon(0.1, adam_weight_decay=0.1, orthogonalizer=halves)
    state = tx.init(TREE)
    grads = gradients(0)
    update = jax.jit(tx.update)
    updates, new = update({**grads, "mlp": None}, state, TREE)
    want, _ = update(grads, state, TREE)
    assert updates["mlp"] is None
    np.testing.assert_allclose(updates["embed"], want["embed"], rtol=1e-6)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_nothing_but_missing_gradients():
    tx: Any = muon(0.1, weight_decay=0.1, orthogonalizer=halves)
    state = tx.init(TREE)
    updates, new = tx.update(jax.tree.map(lambda _: None, TREE), state, TREE)
    assert jax.tree.leaves(updates) == []
    assert jax.tree.structure(new) == jax.tree.structure(state)


WHOLE: dict[str, Any] = {
    "decay": lambda: muon(0.1, weight_decay=0.1),
    "chain": lambda: optax.chain(optax.clip(1.0), muon(0.1, weight_decay=0.1)),
    "hyperball": lambda: muon(0.1, step=hyperball(0.1), scale="none"),
    "NAMO": lambda: muon(0.1, namo=Namo(), bias_correction=False, weight_decay=0.1),
    "scale_by_muon": lambda: scale_by_muon(orthogonalizer=halves),
    "scale_by_momentum": scale_by_momentum,
    "scale_by_neuron": scale_by_neuron,
    "add_cautious_weight_decay": lambda: add_cautious_weight_decay(0.1),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["tree", "array"])
def test_none_stands_for_the_whole_tree(name, kind):
    """Moments stay, and counts go on, as where the gradient of each leaf is None."""
    tx, params = WHOLE[name](), {"up": jax.random.normal(jax.random.key(0), (4, 6))}
    whole: Any = params if kind == "tree" else params["up"]
    _, state = tx.update(whole, tx.init(whole), whole)
    updates, new = tx.update(None, state, whole)
    assert updates is None
    assert jax.tree.structure(new) == jax.tree.structure(state)
    moments = [[x for x in jax.tree.leaves(tree) if x.ndim] for tree in (state, new)]
    for old, kept in zip(*moments, strict=True):
        np.testing.assert_array_equal(kept, old)
    _, state = tx.update(params, tx.init(params), params)
    _, want = tx.update({"up": None}, state, params)
    for got, wanted in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_function_of_the_whole_tree_sees_what_it_saw_at_init():
    """The largest leaf gets AdamW, also where it has no gradient."""

    def labels(tree):
        largest = max(x.size for x in jax.tree.leaves(tree))
        is_adam = lambda x: x.size == largest or x.ndim < 2  # noqa: E731
        return jax.tree.map(lambda x: "adam" if is_adam(x) else "muon", tree)

    tx: Any = muon(0.1, partition=labels, orthogonalizer=halves)
    state = tx.init(TREE)
    updates, _ = tx.update(without(gradients(0), "embed"), state, TREE)
    want, _ = tx.update(gradients(0), state, TREE)
    for name, x in updates["mlp"].items():
        np.testing.assert_allclose(x, want["mlp"][name], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": {"mlp": {"up": "muon", "down": "adam", "bias": "frozen"}, "embed": "adam"}},
        {"partition": [Rule("mlp/up", "muon"), *default_rules()]},
        {
            "muon_weight_dimension_numbers": {
                "mlp": {
                    "up": MuonDimensionNumbers(1, 0),
                    "down": MuonDimensionNumbers(),
                    "bias": None,
                },
                "embed": None,
            }
        },
        {"weight_decay": 0.1, "weight_decay_mask": {"mlp": {"up": True, "down": False}}},
        {"weight_decay": 0.1, "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)},
        {"strategy": (("up", "local"),)},
        {"mu_dtype": "bfloat16"},
    ],
)
def test_options_that_name_leaves(options):
    """The other leaves' updates are what they are with all gradients."""
    tx: Any = muon(0.1, orthogonalizer=halves, **options)
    state = tx.init(TREE)
    want, _ = tx.update(gradients(0), state, TREE)
    updates, _ = tx.update(without(gradients(0), "mlpup", "embed"), state, TREE)
    assert updates["embed"] is updates["mlp"]["up"] is None
    for name in ("down", "bias"):  # optax corrects all of its moments in one compiled function
        np.testing.assert_allclose(updates["mlp"][name], want["mlp"][name], rtol=1e-6)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("zero_1", [False, True])
def test_on_a_mesh(kind, zero_1):
    mesh = make_mesh({"f": 2}, kind)
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P("f")), TREE)
    homes = jax.tree.map(lambda _: NamedSharding(mesh, P()), TREE) if zero_1 else rows
    mu_shardings = rows if zero_1 else None
    tx: Any = muon(0.1, param_shardings=homes, mu_shardings=mu_shardings, orthogonalizer=halves)
    params, grads = jax.device_put((TREE, gradients(0)), (homes, homes))
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    want, _ = update(grads, state, params)
    updates, new = update(without(grads, "mlpup", "embed"), state, params)
    assert updates["embed"] is updates["mlp"]["up"] is None
    np.testing.assert_allclose(updates["mlp"]["down"], want["mlp"]["down"], rtol=1e-5)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, new, state)
    assert all(jax.tree.leaves(same))


PIECES: dict[str, Any] = {
    "scale_by_muon": scale_by_muon(),
    "scale_by_momentum": scale_by_momentum(),
    "orthogonalize": orthogonalize(),
    "scale_by_shape": scale_by_shape(),
}


@pytest.mark.parametrize("name", PIECES)
def test_the_pieces_pass_over_leaves_too(name):
    tx = PIECES[name]
    params = {"w": TREE["mlp"]["up"], "v": np.ones((2, 3), np.float32), "none": None}
    grads = {"w": gradients(0)["mlp"]["up"], "v": None, "none": None}
    state = tx.init(params)
    updates, new = tx.update(grads, state, {**params, "none": jax.nn.relu})
    alone = {"w": params["w"]}
    want, want_state = tx.update({"w": grads["w"]}, tx.init(alone), alone)
    assert updates["v"] is updates["none"] is None
    np.testing.assert_array_equal(updates["w"], want["w"])
    assert jax.tree.structure(new) == jax.tree.structure(state)
    if name in ("scale_by_muon", "scale_by_momentum"):
        np.testing.assert_array_equal(new.mu["w"], want_state.mu["w"])
        np.testing.assert_array_equal(new.mu["v"], np.zeros((2, 3)))
        with pytest.raises(ValueError, match=r"belong(?s:.*):\n  w: in the state only$"):
            tx.update({"v": grads["v"], "none": None}, state, params)


def test_what_does_not_fit_is_still_an_error():
    """A leaf that the gradients don't even have a place for was forgotten."""
    tx: Any = muon(0.1)
    params = {"up": TREE["mlp"]["up"], "down": TREE["mlp"]["down"], "act": None}
    state = tx.init(params)
    model = {**params, "act": jax.nn.relu}
    for grads, line in [
        ({"up": None, "act": None}, "down: got gradient none, parameter float32(6, 4), momentum"),
        ({**params, "up": None, "down": params["up"]}, "down: got gradient float32(4, 6), "),
        ({**params, "act": np.ones(3, np.float32)}, "act: got custom_jvp"),
        (
            {**params, "up": None, "new": np.ones(3, np.float32)},
            "new: got gradient float32(3,), parameter",
        ),
    ]:
        with pytest.raises(ValueError, match="must be") as error:
            tx.update(grads, state, model)
        (shown,) = str(error.value).splitlines()[1:]
        assert shown.strip().startswith(line)
