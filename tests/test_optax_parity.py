"""The numbers, state and behaviour of `optax.contrib.muon`, over its whole argument grid."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax import contrib
from running import dtypes, first_update, run

import muon_optax
from muon_optax import MuonDimensionNumbers, muon
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule

STEPS = 3
SHAPES = {"near_square": (10, 12), "tall": (24, 8)}
DION = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
CUBIC_LIKE = (2.0, -1.5, 0.5)


def matrices(seed, kappa=50.0, names=tuple(SHAPES)):
    """Parameters and gradients of hidden matrices and a bias."""
    rng = np.random.default_rng(seed)
    trails: dict[str, Any] = {
        name: reference.gradients(seed + i, *shape, steps=STEPS + 1, kappa=kappa)
        for i, (name, shape) in enumerate(SHAPES.items())
        if name in names
    }
    trails["bias"] = list(rng.normal(size=(STEPS + 1, 5)).astype(np.float32))
    first, *rest = (
        dict(zip(trails, step, strict=True)) for step in zip(*trails.values(), strict=True)
    )
    return first, rest


def bound_of(shape: tuple[int, int], options: Any) -> float:
    """1e-5; 1e-4 where the Gram method runs another schedule than jordan's five steps.

    Its rounding grows with each step: numerics allow 1e-4 in five and 2e-3 in more.
    """
    schedule = resolve_schedule(
        options.get("ns_coeffs", "jordan"),
        options.get("ns_steps"),
        options.get("preconditioning"),
    )
    method = NewtonSchulz(schedule).chosen_method(*shape, "float32")
    is_default = schedule.name == "jordan" and len(schedule.rows) <= 5
    return 1e-5 if method == "standard" or is_default else 1e-4


def assert_equal_updates(got, want, options):
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for name in theirs:
            error = reference.relative_error(ours[name], theirs[name])
            bound = bound_of(SHAPES[name], options) if name in SHAPES else 1e-5
            assert error <= bound, (step, name, error)


# Options of the direction, tried on both matrices.
DIRECTIONS = {
    "defaults": {},
    "one_step": {"ns_steps": 1},
    "eight_steps": {"ns_steps": 8},
    "preset_standard": {"ns_coeffs": "standard"},
    "preset_dion": {"ns_coeffs": "dion"},
    "table": {"ns_coeffs": DION},
    "short_table": {"ns_coeffs": tuple(DION[:2]), "ns_steps": 2},
    "array_table": {"ns_coeffs": np.array(DION)},
    "triple": {"ns_coeffs": CUBIC_LIKE},
    "triple_and_steps": {"ns_coeffs": CUBIC_LIKE, "ns_steps": 10},
    "beta": {"beta": 0.8},
    "beta_zero": {"beta": 0.0},
    "plain_momentum": {"nesterov": False},
    "plain_momentum_beta": {"nesterov": False, "beta": 0.5},
    "adaptive": {"adaptive": True},
    "adaptive_plain": {"adaptive": True, "nesterov": False, "consistent_rms": 0.3},
    "spectral": {"preconditioning": "spectral"},
    "aol": {"preconditioning": "aol"},
    "aol_dion": {"preconditioning": "aol", "ns_coeffs": "dion"},
    "schatten": {"preconditioning": "schatten"},
    "schatten_dion": {"preconditioning": "schatten", "ns_coeffs": "dion"},
    "frobenius": {"preconditioning": "frobenius"},
}
# Options of what comes after, tried on the tall one and the bias.
STEPS_TAKEN = {
    "eps": {"eps": 1e-12},
    "weight_decay": {"weight_decay": 0.1, "adam_weight_decay": 0.02},
    "decay_as_array": {"weight_decay": jnp.array(0.1)},
    "decay_mask_tree": {
        "weight_decay": 0.1,
        "weight_decay_mask": {"tall": False, "bias": True},
    },
    "decay_mask_function": {
        "weight_decay": 0.1,
        "weight_decay_mask": lambda params: {name: name == "tall" for name in params},
    },
    "decay_mask_prefix": {"weight_decay": 0.1, "weight_decay_mask": False},
    "consistent_rms": {"consistent_rms": 0.2},
    "adam": {"adam_b1": 0.8, "adam_b2": 0.9, "adam_eps_root": 1e-4},
    "adam_learning_rate": {"adam_learning_rate": 0.5},
    "adam_schedule": {"adam_learning_rate": optax.exponential_decay(0.5, 1, 0.5)},
    "schedule": {"learning_rate": optax.linear_schedule(0.1, 0.4, 3)},
    "learning_rate_as_array": {"learning_rate": np.float32(0.2)},
}


# Ours are compiled one operation at a time in these, which takes longer.
EAGER = ("defaults", "adaptive", "weight_decay", "schedule")


@pytest.mark.parametrize("name", DIRECTIONS)
def test_equal_directions_over_some_steps(name):
    options = {"learning_rate": 0.1, **DIRECTIONS[name]}
    params, grads = matrices(seed=0)
    got, _, _ = run(muon(**options), params, grads, jit=name not in EAGER)
    want, _, _ = run(contrib.muon(**options), params, grads, jit=True)
    assert_equal_updates(got, want, options)


@pytest.mark.parametrize("name", STEPS_TAKEN)
def test_equal_updates_over_some_steps(name):
    options = {"learning_rate": 0.1, **STEPS_TAKEN[name]}
    params, grads = matrices(seed=0, names=("tall",))
    got, _, _ = run(muon(**options), params, grads, jit=name not in EAGER)
    want, _, _ = run(contrib.muon(**options), params, grads, jit=True)
    assert_equal_updates(got, want, options)


@pytest.mark.parametrize("kappa", [1.0, 1e2])
def test_equal_updates_at_the_ends_of_the_range(kappa):
    params, grads = matrices(seed=3, kappa=kappa)
    got, _, _ = run(muon(0.1), params, grads, jit=True)
    want, _, _ = run(contrib.muon(0.1), params, grads, jit=True)
    assert_equal_updates(got, want, {})


def test_a_rounded_momentum_is_rounded_once():
    # optax's product of the decay rate and a bfloat16 buffer is rounded too, and with a buffer in
    # the gradient's dtype it orthogonalises in that, ours in the buffer's unless told.
    params, grads = matrices(seed=0)
    options = {"learning_rate": 0.1, "mu_dtype": jnp.bfloat16}
    tx = muon(ns_dtype=jnp.float32, scale="none", **options)
    got, state, _ = run(tx, params, grads, jit=True)
    for name in SHAPES:
        trail = [g[name] for g in grads]
        mixes = reference.mixes(trail, rounded=lambda x: x.astype(jnp.bfloat16))
        want = [-0.1 * reference.newton_schulz(mix) for mix in mixes]
        assert reference.relative_error([u[name] for u in got], want) <= 1e-5
    want, theirs, _ = run(contrib.muon(**options), params, grads, jit=True)
    assert dtypes(without_coefficients(theirs)) == dtypes(state)


@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_equal_updates_of_complex_matrices(preconditioning):
    params = {
        "tall": reference.matrix(1, 24, 8) + 1j * reference.matrix(2, 24, 8),
        "bias": np.arange(5) + 1j * np.arange(1, 6, dtype=np.float32),
    }
    options = {"learning_rate": 0.1, "preconditioning": preconditioning}
    got, _, _ = run(muon(**options), params, [params, params], jit=True)
    want, _, _ = run(contrib.muon(**options), params, [params, params], jit=True)
    assert_equal_updates(got, want, options)


def test_where_optax_gives_nan_for_complex_matrices_the_value_is_right():
    x = reference.matrix(1, 8, 10) + 1j * reference.matrix(2, 8, 10)
    leaf = x.astype(np.complex64)
    options = {"learning_rate": 1.0, "preconditioning": "schatten", "scale": "none"}
    want = reference.newton_schulz(x, norm="schatten")
    got = first_update(muon(**options), {"w": leaf}, jit=True)["w"]
    assert reference.relative_error(got, -want) <= 1e-5
    theirs = contrib.muon(1.0, preconditioning="schatten")
    assert np.isnan(first_update(theirs, {"w": leaf}, jit=True)["w"]).all()


VIEW = MuonDimensionNumbers
STACKED = {
    "layers": (3, 8, 10),
    "heads": (6, 3, 2, 4),
    "conv": (2, 2, 3, 9),
    "bias": (3, 8),
    "plain": (8, 8),
}
STACKED_VIEWS = {
    "layers": VIEW(1, 2),
    "heads": VIEW((0,), (-2, -1)),
    "conv": VIEW((-4, 1, 2), 3),
    "bias": None,
    "plain": VIEW(1, 0),
}


def stacked_params():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in STACKED.items()}


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_equal_updates_of_stacks_and_merged_axes(consistent_rms):
    params = stacked_params()
    options = {"muon_weight_dimension_numbers": STACKED_VIEWS, "consistent_rms": consistent_rms}
    got, _, _ = run(muon(0.1, **options), params, [params, params], jit=True)
    want, _, _ = run(contrib.muon(0.1, **options), params, [params, params], jit=True)
    for ours, theirs in zip(got, want, strict=True):
        for name in STACKED:
            assert reference.relative_error(ours[name], theirs[name]) <= 1e-5, name


NESTED = {"mlp": {"a": (4, 6), "b": (4, 6)}, "attention": {"a": (6, 4), "b": (6, 4)}}


@pytest.mark.parametrize(
    "views",
    [
        {"mlp": VIEW(), "attention": None},
        {"mlp": None, "attention": {"a": VIEW(1, 0), "b": None}},
        lambda params: {"mlp": VIEW(), "attention": {"a": None, "b": VIEW(1, 0)}},
        lambda params: jax.tree.map(lambda x: VIEW() if x.shape[0] == 4 else None, params),
        VIEW(1, 0),
    ],
)
def test_equal_labels_of_trees_prefixes_and_functions(views):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        NESTED,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    ours, theirs = (f(0.1, muon_weight_dimension_numbers=views) for f in (muon, contrib.muon))
    got, want = ours.init(params), theirs.init(params)
    assert jax.tree.structure(got) == jax.tree.structure(without_coefficients(want))
    got, want = (first_update(tx, params, jit=True) for tx in (ours, theirs))
    for path, value in jax.tree.leaves_with_path(want):
        error = reference.relative_error(dict(jax.tree.leaves_with_path(got))[path], value)
        assert error <= 1e-5, path


@pytest.mark.filterwarnings("ignore::muon_optax.MuonWarning")
@pytest.mark.parametrize("views", [None, lambda params: None])
def test_none_at_the_root_as_an_argument_and_as_a_result(views):
    params = {"w": np.ones((4, 6), np.float32), "b": np.ones(3, np.float32)}
    ours, theirs = (f(0.1, muon_weight_dimension_numbers=views) for f in (muon, contrib.muon))
    got, want = ours.init(params), without_coefficients(theirs.init(params))
    assert jax.tree.structure(got) == jax.tree.structure(want)


def without_coefficients(state):
    """optax's state, its MuonState replaced by ours."""
    return jax.tree.map(
        lambda x: muon_optax.MuonState(x.count, x.mu) if is_theirs(x) else x,
        state,
        is_leaf=is_theirs,
    )


def is_theirs(x):
    return isinstance(x, contrib.MuonState)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learning_rate": lambda count: 0.1, "adam_learning_rate": 0.2},
        {"weight_decay": 0.1, "adam_weight_decay": 0.1, "mu_dtype": jnp.bfloat16},
        {
            "weight_decay": 0.1,
            "weight_decay_mask": {"near_square": True, "tall": False, "bias": True},
        },
        {"weight_decay_mask": lambda params: jax.tree.map(lambda x: True, params)},
        {"weight_decay": lambda count: 0.1},
    ],
)
def test_the_state_differs_by_the_coefficients_only(options):
    params, _ = matrices(seed=0)
    options = {"learning_rate": 0.1, **options}
    got = muon(**options).init(params)
    want = without_coefficients(contrib.muon(**options).init(params))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert dtypes(got) == dtypes(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_adaptive_acts_on_each_matrix_of_a_stack_where_optax_takes_the_whole():
    stack = np.stack([c * reference.matrix(i, 6, 8) for i, c in enumerate((1.0, 3.0))])
    tx = muon(0.1, adaptive=True, muon_weight_dimension_numbers=VIEW(1, 2))
    update = first_update(tx, {"w": stack}, jit=True)["w"]
    apart = dict(enumerate(stack))
    want = first_update(contrib.muon(0.1, adaptive=True), apart, jit=True)
    for i in apart:
        assert reference.relative_error(update[i], want[i]) <= 1e-5


def test_scale_by_muon_and_scale_by_shape_take_the_place_of_optax_ones():
    params = stacked_params()
    del params["bias"]
    views = {name: view for name, view in STACKED_VIEWS.items() if view is not None}
    updates = []
    for module in (muon_optax, importlib.import_module("optax.contrib._muon")):
        direction = module.scale_by_muon(beta=0.9, weight_dimension_numbers=views)
        shape = module.scale_by_shape(views, consistent_rms=0.2)
        updates.append(first_update(optax.chain(direction, shape), params, jit=True))
    for name in params:
        assert reference.relative_error(updates[0][name], updates[1][name]) <= 1e-5
