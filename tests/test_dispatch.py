"""Each leaf goes to its optimizer, and what isn't floating point stays as it is."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import apply_updates, first_update

from muon_optax import (
    MatrixView,
    MuonDimensionNumbers,
    MuonState,
    MuonWarning,
    Rule,
    default_rules,
    muon,
)
from muon_optax.config import MuonConfig
from muon_optax.partition.dispatch import dispatch
from muon_optax.sharding.execution import ExecutionOptions
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.transforms.direction import Direction
from muon_optax.transforms.momentum import Momentum
from muon_optax.transforms.shape_scale import Scaling
from muon_optax.transforms.stage import as_stage


def stamped(number: float, then: Any = lambda updates, params: updates) -> Any:
    """Multiplies by a number; has a momentum, as both halves have."""
    multiply: Any = lambda updates, state, params=None: (  # noqa: E731
        jax.tree.map(lambda x: number * x, updates),
        state,
    )
    init: Any = lambda params: MuonState(jnp.zeros([], jnp.int32), params)  # noqa: E731
    return optax.chain(optax.GradientTransformation(init, multiply), optax.stateless(then))


def stamps(views: Any = None, partition: Any = None) -> Any:
    """Muon's leaves times 2, AdamW's times 3."""
    return dispatch(as_stage(stamped(2.0)), stamped(3.0), config(views, partition))


def config(views: Any = None, partition: Any = None) -> MuonConfig:
    momentum = Momentum(0.9, None, nesterov=True, bias_correction=True, form="ema")
    direction = Direction(momentum, Orthogonalizer(lambda x: x), ExecutionOptions())
    return MuonConfig(direction, Scaling("none", 1.0), ShardingOptions(), views, partition)


PARAMS = {
    "mlp": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)},
    "embed": {"embedding": np.ones((8, 4), np.float32)},
}


def received(tx: Any, params: Any = PARAMS) -> Any:
    return jax.tree.map(lambda x: float(np.ravel(x)[0]), first_update(tx, params))


def test_default_rules():
    got = received(stamps())
    assert got == {"mlp": {"kernel": 2, "bias": 3}, "embed": {"embedding": 3}}


def test_rules_of_the_user():
    rules = [Rule("bias", "frozen"), Rule("embedding", "muon"), Rule("kernel", "adam")]
    got = received(stamps(partition=rules))
    assert got == {"mlp": {"kernel": 3, "bias": 0}, "embed": {"embedding": 2}}


@pytest.mark.parametrize("as_function", [False, True])
def test_labels(as_function):
    labels = {"mlp": {"kernel": "muon", "bias": "frozen"}, "embed": "adam"}
    got = received(stamps(partition=(lambda params: labels) if as_function else labels))
    assert got == {"mlp": {"kernel": 2, "bias": 0}, "embed": {"embedding": 3}}


def test_views_beat_rules():
    views = {"mlp": None, "embed": MuonDimensionNumbers()}
    with pytest.warns(MuonWarning, match=r"views beat partition.*: embed/embedding \(8, 4\)$"):
        got = received(stamps(views, [Rule("embedding", "adam")]))
    assert got == {"mlp": {"kernel": 3, "bias": 3}, "embed": {"embedding": 2}}


KERNEL = {"mlp": {"kernel": MuonDimensionNumbers(), "bias": None}, "embed": None}


@pytest.mark.parametrize(
    ("partition", "beaten"),
    [
        ([Rule("bias", "frozen"), Rule("kernel", "muon")], "mlp/bias (6,)"),
        ([Rule("embedding", "muon"), *default_rules()], "embed/embedding (8, 4)"),
        ([Rule("kernel", "frozen"), *default_rules()], "mlp/kernel (4, 6)"),
        ({"mlp": "frozen", "embed": "adam"}, "mlp/bias (6,), mlp/kernel (4, 6)"),
        (lambda params: {"mlp": "muon", "embed": "adam"}, "mlp/bias (6,)"),
    ],
)
@pytest.mark.parametrize("views", [KERNEL, lambda params: KERNEL])
def test_one_warning_names_the_leaves_of_which_views_and_partition_disagree(
    views, partition, beaten
):
    with pytest.warns(MuonWarning) as records:
        got = received(stamps(views, partition))
    (text,) = [str(r.message) for r in records]
    assert text.startswith("matrix views beat partition, which says otherwise of these leaves")
    assert text.endswith(f"(None is AdamW, nothing is frozen): {beaten}")
    assert got == {"mlp": {"kernel": 2, "bias": 3}, "embed": {"embedding": 3}}


@pytest.mark.parametrize(
    "partition",
    [
        default_rules(),
        [Rule("kernel", "muon"), Rule("embed", "adam"), *default_rules()],
        {"mlp": {"kernel": "muon", "bias": "adam"}, "embed": "adam"},
    ],
)
def test_no_warning_where_views_and_partition_agree(partition):
    got = received(stamps(KERNEL, partition))
    assert got == {"mlp": {"kernel": 2, "bias": 3}, "embed": {"embedding": 3}}


def test_the_muon_half_learns_the_views_of_its_own_tree():
    view = MatrixView(0, 1, heads=2)
    seen = []

    def update(updates, state, params, leaves):
        seen.append({leaf.path: leaf.view for leaf in leaves})
        return updates, state

    step = as_stage(stamped(2.0))._replace(update=update)
    views = {"mlp": {"kernel": view, "bias": None}, "embed": None}
    first_update(dispatch(step, stamped(3.0), config(views)), PARAMS)
    assert {path: view.matrices for path, view in seen[0].items()} == {"mlp/kernel": ((2, 4, 3),)}


def labels_of(label: str) -> dict[str, Any]:
    return {"mlp": {"kernel": "muon", "bias": "adam"}, "embed": {"embedding": label}}


@pytest.mark.parametrize(
    "embedding",
    [jnp.ones((5, 4)), jnp.ones((5, 4), "int32"), optax.MaskedNode()],
    ids=["float", "int", "masked"],
)
@pytest.mark.parametrize(
    ("partition", "may_freeze"),
    [
        (None, False),
        ((Rule("embedding", "adam"), *default_rules()), False),
        ((Rule("embedding", "frozen"), *default_rules()), True),
        (labels_of("adam"), False),
        (labels_of("frozen"), True),
        (lambda _: labels_of("adam"), True),
        (lambda _: labels_of("frozen"), True),
    ],
    ids=["default", "rules", "freezing rules", "labels", "freezing labels", "one", "another"],
)
def test_tree_map_params_through_a_placeholder(partition, may_freeze, embedding):
    """What is frozen, if anything, doesn't change how the state looks."""
    params = {**PARAMS, "embed": {"embedding": embedding}}
    tx: Any = muon(0.1, partition=partition)
    state = tx.init(params)
    assert set(state.inner_states) == {"muon", "adam", *["frozen"] * may_freeze}
    got: Any = optax.tree_map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert float(got.inner_states["muon"].inner_state[0].mu["mlp"]["kernel"][0, 0]) == 1
    assert float(got.inner_states["adam"].inner_state[0].nu["mlp"]["bias"][0]) == 1
    assert int(got.inner_states["muon"].inner_state[0].count) == 0


def test_a_state_without_a_place_for_frozen_leaves_goes_on_by_a_function_of_labels():
    """As that of optax.contrib.muon, converted."""
    labels = labels_of("adam")
    txs: list[Any] = [muon(0.1, partition=p) for p in (labels, lambda _: labels)]
    state = txs[0].init(PARAMS)
    (want, _), (got, new) = (jax.jit(tx.update)(PARAMS, state, PARAMS) for tx in txs)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def mixed_tree() -> Any:
    return {
        "w": jnp.ones((4, 6)),
        "steps": jnp.arange(3),
        "on": jnp.array(True),
        "key": jax.random.key(0),
        "byte": jnp.array([7], jnp.uint8),
    }


@pytest.mark.parametrize("jit", [False, True])
def test_leaves_that_are_not_floating_point_stay_as_they_are(jit):
    params = mixed_tree()
    grads = {
        name: leaf if name == "w" else np.zeros(leaf.shape, jax.dtypes.float0)
        for name, leaf in params.items()
    }
    tx: Any = muon(0.1)
    state = tx.init(params)
    assert [x.shape for x in jax.tree.leaves(state)] == [(), (), (4, 6)]
    updates, state = (jax.jit(tx.update) if jit else tx.update)(grads, state, params)
    assert updates["key"].dtype == jax.dtypes.float0
    del params["key"], updates["key"]
    new = apply_updates(params, updates)
    for name in ("steps", "on", "byte"):
        np.testing.assert_array_equal(new[name], params[name])
        assert new[name].dtype == params[name].dtype
    assert np.abs(np.asarray(new["w"]) - np.asarray(params["w"])).min() > 0.01


def test_gradients_of_integers_as_jax_makes_them():
    def loss(params):
        return (params["w"] * params["steps"][1]).sum()

    params = {"w": jnp.ones((4, 6)), "steps": jnp.arange(3)}
    update = first_update(muon(0.1), jax.jit(jax.grad(loss, allow_int=True))(params), params)
    new = apply_updates(params, update)
    np.testing.assert_array_equal(new["steps"], [0, 1, 2])


def test_without_parameters_the_gradients_tell_the_types():
    params = {"w": jnp.ones((4, 6)), "steps": jnp.arange(3)}
    tx: Any = muon(0.1)
    updates, _ = tx.update(params, tx.init(params))
    np.testing.assert_array_equal(updates["steps"], np.zeros(3))


def test_missing_and_masked_leaves():
    params = {"w": jnp.ones((4, 6)), "none": None, "masked": optax.MaskedNode()}
    update = first_update(stamps(), params)
    assert update["none"] is None
    assert update["masked"] == optax.MaskedNode()
    np.testing.assert_array_equal(update["w"], 2 * params["w"])


def test_inside_a_mask_of_the_user():
    tx = optax.masked(stamps(), {"mlp": {"kernel": True, "bias": False}, "embed": True})
    got = received(tx)
    assert got == {"mlp": {"kernel": 2, "bias": 1}, "embed": {"embedding": 3}}


def test_python_numbers_as_leaves():
    params = {"w": jnp.ones((4, 6)), "scale": 2.0, "count": 3}
    update = first_update(muon(0.1), params)
    np.testing.assert_allclose(
        update["scale"], first_update(muon(0.1), {"w": params["w"], "scale": jnp.ones(())})["scale"]
    )
    assert int(update["count"]) == 0


def changed(before: Any, after: Any, params: Any = PARAMS) -> str:
    state = stamps(partition=before).init(params)
    with pytest.raises(ValueError, match="changed their optimizer") as error:
        stamps(partition=after).update(params, state, params)
    return str(error.value)


PAIR = {"w": np.ones((4, 6), np.float32), "b": np.ones(6, np.float32)}
FITS = "each gradient must be floating point, and of its parameter's and momentum's shape"


@pytest.mark.parametrize(
    ("grads", "params", "line"),
    [
        (
            {"w": jnp.ones((4, 6), int)},
            PAIR,
            "w: got gradient int32(4, 6), parameter float32(4, 6), momentum float32(4, 6)",
        ),
        (
            {"b": np.zeros(6, jax.dtypes.float0)},
            PAIR,
            "b: got gradient float0(6,), parameter float32(6,), momentum float32(6,)",
        ),
        ({"b": jnp.ones(6, bool)}, None, "b: got gradient bool(6,), momentum float32(6,)"),
        (
            {"w": jnp.ones((6, 4))},
            None,
            "w: got gradient float32(6, 4), momentum float32(4, 6)",
        ),
        (
            {"b": jnp.ones(1)},
            PAIR,
            "b: got gradient float32(1,), parameter float32(6,), momentum float32(6,)",
        ),
        (
            {},
            {**PAIR, "w": jnp.ones((1, 6))},
            "w: got gradient float32(4, 6), parameter float32(1, 6), momentum float32(4, 6)",
        ),
        (
            {},
            {**PAIR, "b": jnp.ones(6, int)},
            "b: got gradient float32(6,), parameter int32(6,), momentum float32(6,)",
        ),
        (
            {},
            {"w": PAIR["w"]},
            "b: got gradient float32(6,), parameter none, momentum float32(6,)",
        ),
        ({}, {**PAIR, "c": jnp.ones(2)}, "c: got gradient none, parameter float32(2,)"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_do_not_fit_are_an_error_that_names_them(grads, params, line, jit):
    tx: Any = muon(0.1, weight_decay=0.1 if params else 0.0)
    state, grads = tx.init(PAIR), {**PAIR, **grads}
    with pytest.raises(ValueError, match=FITS) as error:
        (jax.jit(tx.update) if jit else tx.update)(grads, state, params)
    assert str(error.value).splitlines()[1:] == [f"  {line}"]


def test_frozen_leaves_have_gradients_that_fit_too():
    tx: Any = stamps(partition=[Rule("b", "frozen")])
    state = tx.init(PAIR)
    np.testing.assert_array_equal(tx.update(PAIR, state, PAIR)[0]["b"], np.zeros(6))
    with pytest.raises(
        ValueError, match=r"b: got gradient float32\(2,\), parameter float32\(6,\)$"
    ):
        tx.update({**PAIR, "b": jnp.ones(2)}, state, PAIR)


def test_parameters_that_are_no_arrays_are_named_in_the_update():
    tx: Any = muon(0.1)
    with pytest.raises(ValueError, match=r"must be arrays.*\n  w: got str 'x'"):
        tx.update(PAIR, tx.init(PAIR), {**PAIR, "w": "x"})


BASE = {"mlp": {"kernel": "muon", "bias": "adam"}, "embed": {"embedding": "adam"}}
NO_BIAS = {"mlp": {"kernel": "muon", "bias": "frozen"}, "embed": {"embedding": "adam"}}
SWAPPED = {"mlp": {"kernel": "adam", "bias": "adam"}, "embed": {"embedding": "muon"}}


def test_a_leaf_that_changes_its_optimizer_is_an_error_that_lists_all():
    message = changed(BASE, SWAPPED)
    assert "  embed/embedding: adam in the state, muon now" in message
    assert "  mlp/kernel: muon in the state, adam now" in message
    assert "bias" not in message


def test_freezing_and_thawing_change_the_optimizer_too():
    assert "mlp/bias: adam in the state, frozen now" in changed(BASE, NO_BIAS)
    assert "mlp/bias: frozen in the state, adam now" in changed(NO_BIAS, BASE)


def test_a_leaf_that_the_state_does_not_know():
    state = stamps().init(PARAMS)
    more = {**PARAMS, "new": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="new: absent in the state, muon now"):
        stamps().update(more, state, more)
    less = {"mlp": PARAMS["mlp"]}
    with pytest.raises(ValueError, match="embed/embedding: adam in the state, absent now"):
        stamps().update(less, state, less)


LABELS = {"mlp": {"kernel": "muon", "bias": "adam"}, "embed": "adam"}


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (optax.adam(0.1), "(ScaleByAdamState, EmptyState)"),
        (optax.sgd(0.1), "(EmptyState, EmptyState)"),
        (optax.scale_by_adam(), "ScaleByAdamState"),
        (optax.MultiSteps(muon(0.1), 2), "MultiStepsState"),
        (optax.partition({"a": optax.adam(0.1)}, "a"), "PartitionState{a: (ScaleByAdamState, Em"),
        (
            optax.partition({"muon": optax.adam(0.1), "adam": optax.sgd(0.1)}, LABELS),
            "PartitionState{adam: (EmptyState, EmptyState), muon: (ScaleByAdamState, EmptyState)}",
        ),
        (
            optax.partition({"muon": optax.scale(0.1), "adam": optax.adam(0.1)}, LABELS),
            "PartitionState{adam: (ScaleByAdamState, EmptyState), muon: EmptyState}",
        ),
    ],
)
def test_a_state_of_another_optimizer_is_an_error_that_names_it(other, kind):
    with pytest.raises(TypeError, match="muon goes on with a state of its own") as error:
        muon(0.1).update(PARAMS, other.init(PARAMS), PARAMS)
    assert f"got {kind}" in str(error.value)


@pytest.mark.parametrize("state", [None, (), "text", {"inner_states": {}}, PARAMS, 3])
def test_what_is_no_state_is_an_error_too(state):
    with pytest.raises(TypeError, match=r"PartitionState{muon: \(MuonState, .*, got"):
        muon(0.1).update(PARAMS, state, PARAMS)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (3, r"got 3 at \(root\)"),
        ({"a": "muon", "b": {"c": 1}}, "got 1 at b/c"),
        ([Rule("a", "adam"), "muon"], "rules or labels, not both: got 'muon'"),
        ((Rule, "adam"), "a sequence of Rule"),
    ],
)
def test_a_partition_of_the_wrong_type(partition, message):
    with pytest.raises(TypeError, match=message):
        muon(0.1, partition=partition)


def test_unknown_labels_are_listed_with_path_and_shape():
    labels = {"mlp": {"kernel": "muonn", "bias": "adamw"}, "embed": "adam"}
    with pytest.raises(ValueError, match=r"(?s)bias.*\(6,\).*'adamw'.*kernel.*\(4, 6\).*'muonn'"):
        muon(0.1, partition=labels).init(PARAMS)


def test_a_warning_where_no_leaf_gets_muon_and_none_otherwise():
    with pytest.warns(MuonWarning, match="no leaf gets Muon"):
        stamps().init({"bias": jnp.ones(3)})
    with pytest.warns(MuonWarning, match="no leaf gets Muon"):
        stamps(lambda params: None).init(PARAMS)
    stamps().init({})


TWO = {
    "out": jnp.ones((5, 4)),
    "mlp": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)},
    "proj": jnp.eye(4),
}
GROUPS = {"mlp": {"w": "a", "b": "a"}, "out": "b", "proj": "b"}


@pytest.mark.parametrize(
    ("pattern", "groups", "warned"),
    [
        ("w", GROUPS, 0),  # masked by its path in the second group
        ("proj", GROUPS, 0),
        (lambda path, shape: path == ("mlp", "w"), GROUPS, 0),
        ("porj", GROUPS, 2),
        ("w", {**GROUPS, "mlp": "a"}, 1),  # masked with all of mlp
    ],
)
def test_a_rule_for_a_leaf_of_another_group_is_passed_over(pattern, groups, warned):
    """As docs/per_leaf.md says."""
    rules = (Rule(pattern, "adam"), Rule(lambda path, shape: len(shape) == 2, "muon"))
    halves: Any = {n: muon(0.1, partition=(*rules, *default_rules())) for n in "ab"}
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", MuonWarning)
        optax.partition(halves, groups).init(TWO)
    texts = [str(record.message) for record in records]
    assert (
        len([text for text in texts if "match no leaf outside the masked parts" in text]) == warned
    )
