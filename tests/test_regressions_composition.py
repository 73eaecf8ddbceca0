"""Regressions from public reports: composition with optax and JAX."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec
from running import apply_updates, first_update, run

from muon_optax import muon

# A skipped overflow step poisons the momentum for good.
# https://github.com/deepspeedai/DeepSpeed/issues/8432
# https://github.com/deepspeedai/DeepSpeed/issues/8435


def assert_equal_trees(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


EYE, ONES = np.eye(3, dtype=np.float32), np.ones(3, np.float32)


def with_first(x, value):
    """A copy whose first entry is another."""
    x = x.copy()
    x.flat[0] = value
    return x


@pytest.mark.parametrize("bad_leaf", ["w", "b"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_the_state_as_it_was(bad_leaf, bad):
    params = {"w": EYE, "b": ONES}
    tx: Any = optax.apply_if_finite(muon(0.1), 5)
    update = jax.jit(tx.update)
    _, before = update(params, tx.init(params), params)
    broken = {**params, bad_leaf: with_first(params[bad_leaf], bad)}
    skipped, after = update(broken, before, params)
    assert_equal_trees(skipped, jax.tree.map(np.zeros_like, params))
    assert_equal_trees(after.inner_state, before.inner_state)
    assert (bool(after.last_finite), int(after.total_notfinite)) == (False, 1)
    got, _ = update(params, after, params)
    want, _ = update(params, before, params)
    assert_equal_trees(got, want)
    assert np.isfinite(got["w"]).all()


def test_what_is_not_finite_stays_visible():
    for bad in (np.inf, np.nan):
        update = first_update(muon(0.1), {"w": with_first(EYE, bad), "b": ONES}, jit=True)
        assert np.isnan(update["w"]).all()
        assert np.isfinite(update["b"]).all()


def test_accumulation_may_skip_what_is_not_finite():
    params = {"w": EYE, "b": ONES}
    tx: Any = optax.MultiSteps(muon(0.1), 2, should_skip_update_fn=optax.skip_not_finite)
    update = jax.jit(tx.update)
    state = tx.init(params)
    for grads in (params, {**params, "w": with_first(EYE, np.inf)}, params):
        got, state = update(grads, state, params)
    want = first_update(muon(0.1), params, jit=True)
    for name in params:
        assert reference.relative_error(got[name], want[name]) <= 1e-5


# A scheduler drives only one of the two learning rates; per-group rates are discarded.
# https://github.com/deepspeedai/DeepSpeed/issues/7713
# https://github.com/deepspeedai/DeepSpeed/issues/8440
# https://github.com/tenstorrent/tt-metal/issues/56027
# https://github.com/google-deepmind/optax/issues/1565


def falling(count):
    return 0.4 - 0.1 * count


def rising(count):
    return 0.1 * (1 + count)


def unit_steps(tx):
    """The rates of both halves at each of four steps with a constant gradient, and the state.

    The momentum of a constant gradient has one direction, and AdamW's update is near 1.
    """
    params = {"w": np.eye(2, dtype=np.float32), "b": np.ones(2, np.float32)}
    updates, state, _ = run(tx, params, [params] * 4, jit=True)
    plain, _, _ = run(muon(1.0), params, [params] * 4, jit=True)
    pairs = list(zip(updates, plain, strict=True))
    rates = {
        name: [np.ravel(u[name])[0] / np.ravel(p[name])[0] for u, p in pairs] for name in params
    }
    return rates["w"], rates["b"], state


def test_each_half_follows_its_own_schedule_from_zero():
    on_muon, on_adam, _ = unit_steps(muon(falling, adam_learning_rate=rising))
    np.testing.assert_allclose(on_muon, [0.4, 0.3, 0.2, 0.1], rtol=1e-5)
    np.testing.assert_allclose(on_adam, [0.1, 0.2, 0.3, 0.4], rtol=1e-5)


def test_one_schedule_drives_both_halves():
    on_muon, on_adam, _ = unit_steps(muon(falling))
    np.testing.assert_allclose(on_muon, [0.4, 0.3, 0.2, 0.1], rtol=1e-5)
    np.testing.assert_allclose(on_adam, [0.4, 0.3, 0.2, 0.1], rtol=1e-5)


def test_injected_schedules_can_be_read_from_the_state():
    tx = optax.inject_hyperparams(muon)(learning_rate=falling, adam_learning_rate=rising)
    on_muon, on_adam, state = unit_steps(tx)
    np.testing.assert_allclose(on_muon, [0.4, 0.3, 0.2, 0.1], rtol=1e-5)
    np.testing.assert_allclose(on_adam, [0.1, 0.2, 0.3, 0.4], rtol=1e-5)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.1)
    assert float(state.hyperparams["adam_learning_rate"]) == pytest.approx(0.4)
    assert float(state.hyperparams["beta"]) == pytest.approx(0.95)


def test_rates_and_decays_of_single_leaves():
    params = {"a": np.eye(2, dtype=np.float32), "b": 2 * np.eye(2, dtype=np.float32)}
    tx = optax.partition(
        {"slow": muon(0.1, weight_decay=0.5), "fast": muon(0.3)}, {"a": "slow", "b": "fast"}
    )
    update = first_update(tx, params, jit=True)
    one = reference.newton_schulz(np.eye(2))
    np.testing.assert_allclose(update["a"], -0.1 * (one + 0.5 * np.eye(2)), atol=1e-5)
    np.testing.assert_allclose(update["b"], -0.3 * one, atol=1e-5)


# The optimizer under vmap, for ensembles, or over hyperparameters.
# https://github.com/borisdayma/dalle-mini/issues/166 https://github.com/jax-ml/jax/issues/34249


def ensemble():
    """Three members: a matrix and a bias each."""
    stack = np.stack([reference.matrix(i, 4, 6) for i in range(3)])
    return {"w": stack, "b": np.arange(-9, 9, dtype=np.float32).reshape(3, 6)}


def assert_members_equal_a_loop(members, got, tx):
    got = jax.tree.map(np.asarray, got)
    for i in range(3):
        member = jax.tree.map(lambda x, i=i: x[i], members)
        want, _, _ = run(tx, member, [member, member], jit=True)
        for name in member:
            assert reference.relative_error(got[name][i], want[1][name]) <= 1e-5


def two_updates(tx, params, state):
    updates, state = tx.update(params, state, params)
    return tx.update(params, state, apply_updates(params, updates))[0]


def test_members_of_an_ensemble_equal_a_loop():
    members = ensemble()
    tx: Any = muon(0.1, weight_decay=0.1)
    state = jax.vmap(tx.init)(members)
    got = jax.jit(jax.vmap(lambda p, s: two_updates(tx, p, s)))(members, state)
    assert_members_equal_a_loop(members, got, tx)


def test_members_of_a_sharded_ensemble_equal_a_loop():
    members = ensemble()
    mesh = jax.make_mesh((3,), ("member",))
    sharded = jax.device_put(members, NamedSharding(mesh, PartitionSpec("member")))
    tx: Any = muon(0.1, weight_decay=0.1)

    # Counts aren't batched, so a state that leaves the vmap would have unsharded ones.
    got = jax.jit(jax.vmap(lambda p: two_updates(tx, p, tx.init(p))))(sharded)
    assert got["w"].sharding.spec[0] == "member"
    assert_members_equal_a_loop(members, got, tx)


def test_a_batch_of_learning_rates_equals_a_loop():
    params = jax.tree.map(lambda x: x[0], ensemble())
    rates = np.array([0.1, 0.2, 0.4], np.float32)
    got = jax.jit(jax.vmap(lambda rate: first_update(muon(rate), params)))(rates)
    for i, rate in enumerate(rates):
        want = first_update(muon(float(rate)), params)
        for name in params:
            assert reference.relative_error(got[name][i], want[name]) <= 1e-5


# The rate baked into the program; integer hyperparameters traced when injected.
# https://github.com/google-deepmind/optax/issues/577
# https://github.com/google-deepmind/optax/issues/412
# https://github.com/google-deepmind/optax/issues/1730

PARAMS = {"w": np.eye(3, 4, dtype=np.float32), "b": ONES}


@pytest.mark.parametrize("options", [{}, {"ns_steps": 3, "static": "ns_steps"}])
def test_one_compile_for_several_rates(options):
    static = options.pop("static", ())
    tx: Any = optax.inject_hyperparams(muon, static_args=static)(learning_rate=1.0, **options)
    state = jax.jit(tx.init)(PARAMS)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, rate):
        state.hyperparams["learning_rate"] = rate
        return tx.update(PARAMS, state, PARAMS)

    want = first_update(muon(1.0, **options), PARAMS, jit=True)
    for rate in (0.1, 0.2, 0.4):
        update, _ = step(state, jnp.asarray(rate))
        for name in PARAMS:
            right = rate * np.asarray(want[name], np.float64)
            assert reference.relative_error(update[name], right) <= 1e-5


def test_one_compile_for_all_steps():
    tx: Any = muon(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)


def test_traced_steps_say_how_to_make_them_static():
    tx: Any = optax.inject_hyperparams(muon)(learning_rate=0.1, ns_steps=3)
    with pytest.raises(TypeError, match=r"static Python int.*static_args=\('ns_steps',\)"):
        jax.jit(tx.init)(PARAMS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mu_dtype", jnp.float32),  # a function, to optax
        ("ns_dtype", jnp.bfloat16),
        ("max_workspace_bytes", 2**20),
        ("orthogonalizer", lambda x: x),
    ],
)
def test_what_injection_makes_an_array_of_names_the_way_out(name, value):
    options: Any = {"learning_rate": 0.1, name: value}
    with pytest.raises(TypeError, match=rf"{name} came as a JAX array.*static_args=\('{name}',\)"):
        optax.inject_hyperparams(muon)(**options).init(PARAMS)
    tx = optax.inject_hyperparams(muon, static_args=(name,))(**options)
    got, want = (first_update(tx, PARAMS, jit=True) for tx in (tx, muon(**options)))
    for leaf in PARAMS:
        assert reference.relative_error(got[leaf], want[leaf]) <= 1e-5


def test_half_precision_hyperparameters_name_the_way_out():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(TypeError, match=r"bfloat16 array.*hyperparam_dtype=jnp\.float32"):
        optax.inject_hyperparams(muon)(learning_rate=0.1).init(params)
    tx = optax.inject_hyperparams(muon, hyperparam_dtype=jnp.float32)(learning_rate=0.1)
    got, want = (first_update(tx, params, jit=True) for tx in (tx, muon(0.1)))
    for name in params:
        assert got[name].dtype == jnp.bfloat16
        assert reference.relative_error(got[name], want[name]) <= 1e-2


# Options out of range: see the checks of `muon`. Parameters are needed for decay alone.
# https://github.com/modelscope/ms-swift/issues/10145


def test_parameters_are_needed_for_decay_alone():
    tx: Any = muon(0.1)
    got, _ = tx.update(PARAMS, tx.init(PARAMS))
    assert_equal_trees(got, first_update(tx, PARAMS))
    for decayed in (muon(0.1, weight_decay=0.1), muon(0.1, adam_weight_decay=0.1)):
        decayed: Any = decayed
        with pytest.raises(ValueError, match="not passing `params`"):
            decayed.update(PARAMS, decayed.init(PARAMS))
