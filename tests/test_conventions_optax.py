"""What people do with an optax optimizer works with ours, on one device and on meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from battery import (
    GRADS,
    OPTIONS,
    PARAMS,
    PLACES,
    SPECS,
    assert_close,
    assert_right,
    everywhere,
    momentum,
    plain,
    train,
)
from jax.sharding import PartitionSpec as P
from running import apply_compiled

from muon_optax import MuonDimensionNumbers, Rule, default_rules, muon


def test_the_plain_run_is_right():
    kernels = [g["mlp"]["kernel"] for g in GRADS]
    rates = {"learning_rate": 0.1, "rows": OPTIONS["ns_coeffs"], "weight_decay": 0.02}
    want = reference.muon(PARAMS["mlp"]["kernel"], kernels, **rates)
    assert_close([u["mlp"]["kernel"] for u in plain()], want)
    theirs: Any = optax.adamw(0.1, weight_decay=0.01, nesterov=True)
    want = train(theirs, PLACES[0])[0]
    assert_close([u["embed"] for u in plain()], [u["embed"] for u in want])
    assert_close([u["mlp"]["bias"] for u in plain()], [u["mlp"]["bias"] for u in want])


@everywhere
def test_plain_training(place):
    assert_right(place, train(place.muon(), place)[0], plain())


@everywhere
def test_extra_arguments(place):
    tx = place.muon()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    chain = optax.chain(tx, optax.contrib.reduce_on_plateau())
    params, grad = place.put(PARAMS), place.put(GRADS[0])
    state = jax.jit(chain.init)(params)
    update, _ = jax.jit(chain.update)(grad, state, params, value=jnp.float32(1.0), grad=grad)
    assert_right(place, [update], plain()[:1])


def rate(count):
    return 0.1 / (1 + count)


def beta(count):
    return 0.8 + 0.1 * count


def decay(count):
    return 0.02 * count


SCHEDULES: dict[str, Any] = {"learning_rate": rate, "beta": beta, "weight_decay": decay}


@functools.cache
def by_hand():
    """The updates of an optimizer made anew for each step, on one device."""
    state, params, updates = None, PARAMS, []
    for t, grad in enumerate(GRADS):
        tx = PLACES[0].muon(**{name: at(t) for name, at in SCHEDULES.items()})
        state = tx.init(params) if state is None else state
        update, state = jax.jit(tx.update)(grad, state, params)
        params = apply_compiled(params, update)
        updates.append(update)
    return updates


@everywhere
def test_injected_schedules(place):
    tx = optax.inject_hyperparams(muon, static_args=("ns_coeffs", "param_shardings"))(
        **{**OPTIONS, **place.declared, **SCHEDULES}
    )
    updates, state = train(tx, place)
    assert_right(place, updates, by_hand())
    for name, at in SCHEDULES.items():
        assert float(state.hyperparams[name]) == pytest.approx(at(len(GRADS) - 1))


def halves(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@functools.cache
def of_halves():
    tx = PLACES[0].muon(learning_rate=rate, weight_decay=decay)
    return train(tx, PLACES[0], halves(GRADS), halves(PARAMS))[0]


@everywhere
def test_injected_schedules_over_half_precision(place):
    inject = optax.inject_hyperparams(
        muon, static_args=("ns_coeffs", "param_shardings"), hyperparam_dtype=jnp.float32
    )
    options = {**OPTIONS, **place.declared, "learning_rate": rate, "weight_decay": decay}
    got, _ = train(inject(**options), place, halves(GRADS), halves(PARAMS))
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    assert_right(place, got, of_halves(), bound=4e-2)


# Under jit, MultiSteps forms zeros like the gradients without their layout, from jax 0.12 on; its
# cond then refuses what it adds to them. An eager init gives them the layout.
accumulating = pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place,
            marks=pytest.mark.xfail(
                place.name == "explicit" and jax.__version_info__ >= (0, 12),
                strict=True,
                reason="optax.MultiSteps under jit(init) on Explicit meshes",
            ),
        )
        for place in PLACES
    ],
    ids=lambda place: place.name,
)


@accumulating
def test_gradient_accumulation(place):
    parts = [jax.tree.map(lambda x, k=k: k * x, g) for g in GRADS for k in (0.5, 1.5)]
    tx = optax.MultiSteps(place.muon(), 2)
    updates, _ = train(tx, place, parts)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates[::2]))
    assert_right(place, updates[1::2], plain())


@everywhere
def test_a_step_that_is_not_finite_is_skipped(place):
    bad = jax.tree.map(lambda x: np.full_like(x, np.inf), GRADS[0])
    updates, state = train(optax.apply_if_finite(place.muon(), 5), place, [bad, *GRADS])
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates[0]))
    assert int(state.total_notfinite) == 1
    assert_right(place, updates[1:], plain())


@accumulating
def test_accumulation_skips_what_is_not_finite(place):
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), GRADS[0])
    tx = optax.MultiSteps(place.muon(), 1, should_skip_update_fn=optax.skip_not_finite)
    updates, _ = train(tx, place, [bad, *GRADS])
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates[0]))
    assert_right(place, updates[1:], plain())


MASK = {"mlp": {"kernel": True, "bias": False}, "embed": True}


def merged(kept, others):
    """The updates, but others for the bias, which the mask leaves out."""
    return {**kept, "mlp": {**kept["mlp"], "bias": others["mlp"]["bias"]}}


@everywhere
def test_a_mask_passes_the_rest_through(place):
    updates, _ = train(optax.masked(place.muon(), MASK), place)
    assert_right(place, updates, [merged(u, g) for u, g in zip(plain(), GRADS, strict=True)])


LABELS = {"mlp": {"kernel": "ours", "bias": "none"}, "embed": "ours"}
STILL = jax.tree.map(np.zeros_like, PARAMS)


@everywhere
@pytest.mark.parametrize("labels", [LABELS, lambda params: LABELS], ids=["tree", "function"])
def test_inside_a_partition_of_the_user(place, labels):
    tx = optax.partition({"ours": place.muon(), "none": optax.set_to_zero()}, labels)
    assert_close(train(tx, place)[0], [merged(u, STILL) for u in plain()])


@pytest.mark.parametrize("as_function", [False, True])
@everywhere
def test_labels_of_the_user(place, as_function):
    labels = {"mlp": {"kernel": "muon", "bias": "adam"}, "embed": "adam"}
    tx = place.muon(partition=(lambda params: labels) if as_function else labels)
    assert_right(place, train(tx, place)[0], plain())


FROZEN = (Rule("bias", "frozen"), *default_rules())


@everywhere
def test_frozen_subtrees(place):
    updates, state = train(place.muon(partition=FROZEN), place)
    assert_right(place, updates, [merged(u, STILL) for u in plain()])
    assert set(state.inner_states) == {"muon", "adam", "frozen"}


@everywhere
def test_missing_leaves(place):
    def without(tree):
        return {**tree, "gone": None, "mlp": {**tree["mlp"], "activation": None}}

    where = without(place.where)
    params, grad = (jax.device_put(without(tree), where) for tree in (PARAMS, GRADS[0]))
    tx = place.muon(**({"param_shardings": where} if place.declared else {}))
    updates, _ = jax.jit(tx.update)(grad, jax.jit(tx.init)(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(grad)
    assert_close(updates, without(plain()[0]))


@everywhere
def test_an_empty_tree(place):
    for empty in ({}, None, {"block": {}, "none": None}):
        tx = muon(0.1, param_shardings=empty if place.declared else None)
        state = jax.jit(tx.init)(empty)
        updates, state = jax.jit(tx.update)(empty, state, empty)
        assert updates == empty
        assert [int(x) for x in jax.tree.leaves(state)] == [1, 1]


def is_masked(x):
    return isinstance(x, optax.MaskedNode)


VIEWS = {"mlp": {"kernel": MuonDimensionNumbers(0, 1), "bias": None}, "embed": None}


@pytest.mark.parametrize(
    "options",
    [{}, {"muon_weight_dimension_numbers": VIEWS}, {"partition": FROZEN}],
    ids=["rules", "views", "frozen"],
)
@everywhere
def test_tree_map_params_with_the_parameters_and_with_specs(place, options):
    tx, params = place.muon(**options), place.put(PARAMS)
    state = jax.jit(tx.init)(params)
    add = lambda m, p: m if is_masked(m) else m + p  # noqa: E731
    add_to_all = lambda s, p: optax.tree_map_params(tx, add, s, p, is_leaf=is_masked)  # noqa: E731
    summed: Any = jax.jit(add_to_all)(state, params)
    assert jax.tree.structure(summed) == jax.tree.structure(state)
    kernel = momentum(summed)["mlp"]["kernel"]
    np.testing.assert_array_equal(kernel, PARAMS["mlp"]["kernel"])
    sharded.assert_sharded(kernel, place.where["mlp"]["kernel"])
    specs: Any = optax.tree_map_params(
        tx,
        lambda m, spec: spec,
        state,
        SPECS,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )
    assert tuple(specs.inner_states["muon"].inner_state[0]) == (P(), SPECS)
    assert specs.inner_states["adam"].inner_state[0].nu == SPECS


@everywhere
def test_tree_get_and_tree_set(place):
    inject = optax.inject_hyperparams(muon, static_args=("ns_coeffs", "param_shardings"))
    tx = inject(**{**OPTIONS, **place.declared, "weight_decay": 0.0, "adam_weight_decay": 0.0})
    params, grad = place.put(PARAMS), place.put(GRADS[0])
    step = jax.jit(tx.update)
    start = jax.jit(tx.init)(params)
    once, state = step(grad, start, params)
    assert len(optax.tree.get_all_with_path(state, "mu")) == 2
    share = 0.05 * GRADS[0]["mlp"]["kernel"]
    np.testing.assert_allclose(momentum(state)["mlp"]["kernel"], share, rtol=1e-5)
    assert optax.tree.get(state, "learning_rate") == pytest.approx(0.1)
    twice, _ = step(grad, optax.tree.set(start, learning_rate=jnp.float32(0.2)), params)
    assert_close(twice, jax.tree.map(lambda x: 2 * np.asarray(x), once))
