"""The whole optimizer: the conventions of other systems, dtypes, state and options."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from running import apply_updates, dtypes, first_update, run

from muon_optax import MuonDimensionNumbers, Rule, default_rules, muon, recipes

RATE, DECAY = 0.1, 0.02
# Where values don't matter: few shapes, as each operation outside of jit is compiled for each.
EYE, ONES = np.eye(2, dtype=np.float32), np.ones(2, np.float32)


def trail(seed=0, shape=(12, 20), steps=3):
    """A parameter and its gradients, as float32 arrays."""
    first, *rest = reference.gradients(seed, *shape, steps=steps + 1)
    return {"w": first}, [{"w": g} for g in rest]


def assert_follows(options, bound=1e-5, shape=(12, 20), **reference_options):
    """Compares a run with the one written out in numpy."""
    params, grads = trail(shape=shape)
    updates, _, _ = run(muon(**options), params, grads)
    want = reference.muon(params["w"], [g["w"] for g in grads], **reference_options)
    for got, right in zip(updates, want, strict=True):
        assert reference.relative_error(got["w"], right) <= bound


MOMENTA = list(itertools.product([True, False], ["ema", "sum"]))


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent"])
@pytest.mark.parametrize(("nesterov", "form"), MOMENTA)
def test_the_convention_of_torch(nesterov, form, kind):
    # torch.optim.Muon: m = (1 - b) g + b m, then (1 - b) g + b m again for Nesterov; Dion and
    # Moonlight keep M = b M + g and take g + b M.
    momentum = {"nesterov": nesterov, "bias_correction": False}
    assert_follows(
        {
            "learning_rate": RATE,
            "weight_decay": DECAY,
            "weight_decay_kind": kind,
            "momentum": form,
            **momentum,
        },
        learning_rate=RATE,
        weight_decay=DECAY,
        kind=kind,
        form=form,
        **momentum,
    )


def test_without_bias_correction_the_two_nesterov_forms_have_one_direction():
    params, grads = trail()
    average, _, _ = run(muon(1.0, bias_correction=False), params, grads)
    total, _, _ = run(muon(1.0, momentum="sum", bias_correction=False), params, grads)
    for a, b in zip(average, total, strict=True):
        assert reference.relative_error(a["w"], b["w"]) <= 1e-5


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent"])
def test_schedules_of_rate_and_decay_count_from_zero(kind):
    def rate(count):
        return 0.1 * (count + 1)

    def decay(count):
        return 0.02 * count

    options: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay}
    assert_follows({"weight_decay_kind": kind, **options}, kind=kind, **options)


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent"])
def test_the_state_of_the_momentum_comes_first_in_every_kind(kind):
    params, _ = trail()
    state: Any = muon(0.1, weight_decay=0.1, weight_decay_kind=kind).init(params)
    first = state.inner_states["muon"].inner_state[0]
    assert type(first).__name__ == "MuonState"
    assert first._fields == ("count", "mu")


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent"])
def test_decay_touches_what_its_mask_says(kind):
    params = {"a": EYE, "b": EYE, "bias": ONES}
    zero = jax.tree.map(np.zeros_like, params)
    mask = {"a": True, "b": False, "bias": True}
    tx = muon(0.5, weight_decay=0.1, weight_decay_kind=kind, weight_decay_mask=mask)
    update = first_update(tx, zero, params)
    want = {
        "decoupled": -0.05 * np.eye(2),
        "independent": -0.1 * np.eye(2),
        "l2": -0.5 * reference.newton_schulz(np.eye(2)),  # orthogonalised with the gradient
    }
    np.testing.assert_allclose(update["a"], want[kind], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(update["b"], np.zeros((2, 2)))
    np.testing.assert_array_equal(update["bias"], np.zeros(2))


@pytest.mark.parametrize("scale", ["shape_scaling", "match_rms_adamw", "unit_rms_norm", "none"])
def test_scales(scale):
    factors = {"shape_scaling": 2, "match_rms_adamw": 0.8, "unit_rms_norm": 2, "none": 1}
    assert_follows(
        {"learning_rate": RATE, "scale": scale, "scale_factor": 3.0},
        shape=(4, 16),
        learning_rate=RATE,
        factor=3.0 * factors[scale],
    )


ADAMW = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-9}


@pytest.mark.parametrize(
    ("nesterov", "adam_nesterov", "used"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_the_rest_gets_optax_adamw(nesterov, adam_nesterov, used):
    rng = np.random.default_rng(0)
    params = {"w": EYE, "bias": ONES, "scale": np.float32(1)}
    grads = [
        jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), params)
        for _ in range(3)
    ]
    options: dict[str, Any] = {
        "eps": ADAMW["eps"],
        **{f"adam_{k}": ADAMW[k] for k in ("b1", "b2", "eps_root")},
    }
    flags = {"nesterov": nesterov, "adam_nesterov": adam_nesterov}
    tx = muon(0.3, adam_weight_decay=DECAY, **flags, **options)
    got, _, _ = run(tx, params, grads)
    theirs = optax.adamw(0.3, weight_decay=DECAY, nesterov=used, **ADAMW)
    want, _, _ = run(theirs, params, grads)
    for name in ("bias", "scale"):
        np.testing.assert_allclose(
            [u[name] for u in got], [u[name] for u in want], rtol=1e-6, atol=1e-8
        )


def no_vectors(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
    "mask",
    [
        {"w": True, "mlp": {"w": False, "bias": True}, "norm": False, "table": True},
        {"w": True, "mlp": True, "norm": False, "table": False},
        no_vectors,
        lambda params: {"w": False, "mlp": True, "norm": True, "table": False},
        True,
        False,
    ],
)
@pytest.mark.parametrize("decay", [DECAY, optax.linear_schedule(0.2, 0.4, 3)])
def test_a_mask_of_the_decay_of_adamw(mask, decay):
    """One mask serves both optimizers; AdamW's is that of `optax.adamw`."""
    rng = np.random.default_rng(0)
    shapes = {"w": (2, 2), "mlp": {"w": (2, 2), "bias": (2,)}, "norm": (2,), "table": (2, 2)}
    params, *grads = [
        jax.tree.map(lambda s: np.asarray(rng.normal(size=s), "float32"), shapes, is_leaf=is_shape)
        for _ in range(3)
    ]
    rules = [Rule("table", "adam"), *default_rules()]
    masks: dict[str, Any] = {"weight_decay_mask": mask, "adam_weight_decay_mask": mask}
    options: dict[str, Any] = {"adam_nesterov": False, "partition": rules}
    tx = muon(0.3, weight_decay=0.1, adam_weight_decay=decay, **masks, **options)
    got, _, _ = run(tx, params, grads)
    want, _, _ = run(optax.adamw(0.3, weight_decay=decay, mask=mask), params, grads)
    plain, _, _ = run(muon(0.3, weight_decay=0.1, weight_decay_mask=mask, **options), params, grads)
    for ours, theirs, bare in zip(got, want, plain, strict=True):
        for name in ("norm", "table"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ours["mlp"]["bias"], theirs["mlp"]["bias"], rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(ours["w"], bare["w"])


def is_shape(x):
    return isinstance(x, tuple)


def test_recipes_that_decay_all_leaves_take_the_mask_too():
    params = {"w": EYE, "bias": ONES, "table": {"embedding": np.ones((2, 2), np.float32)}}
    tx = recipes.moonlight(0.5, weight_decay=0.1, adam_weight_decay_mask=no_vectors)
    update = first_update(tx, jax.tree.map(np.zeros_like, params), params)
    np.testing.assert_array_equal(update["bias"], np.zeros(2))
    np.testing.assert_allclose(update["table"]["embedding"], np.full((2, 2), -0.05), rtol=1e-5)


def test_a_large_epsilon_is_allowed():
    update = first_update(muon(1.0, eps=8.0), {"w": EYE, "b": ONES})
    np.testing.assert_allclose(update["b"], first_update(optax.nadam(1.0, eps=8.0), ONES))


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16", "float32", "complex64"])
def test_moments_of_complex_leaves_are_complex(mu_dtype):
    params = {"w": EYE, "b": np.array([1 + 1j, 2 - 3j], np.complex64), "r": ONES}
    tx = muon(0.1, mu_dtype=mu_dtype)
    updates, state, _ = run(tx, params, [params, params])
    exact, _, _ = run(optax.nadamw(0.1, weight_decay=0.0), params, [params, params])
    np.testing.assert_allclose(updates[1]["b"], exact[1]["b"], rtol=1e-2)
    moments = state.inner_states["adam"].inner_state[0].mu
    assert moments["b"].dtype == jnp.complex64
    real = "float32" if mu_dtype in (None, "complex64") else mu_dtype
    assert moments["r"].dtype == real
    assert dtypes(updates[1]) == dtypes(params)


def adamw(grads: Any, rounded: Any) -> list[np.ndarray]:
    """Updates in float64, without Nesterov momentum, for a rate of 1; moments are kept rounded."""
    m = v = np.zeros_like(grads[0], np.float64)
    updates = []
    for t, grad in enumerate(np.asarray(grads, np.float64), start=1):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        updates.append(-m / (1 - 0.9**t) / np.sqrt(v / (1 - 0.999**t)))
        m, v = np.asarray(rounded(m, "mu"), np.float64), np.asarray(rounded(v, "nu"), np.float64)
    return updates


@pytest.mark.parametrize(("param", "mu_dtype"), [("float32", "bfloat16"), ("bfloat16", None)])
def test_half_precision_moments_of_adamw_are_rounded_once(param, mu_dtype):
    """Decay rates aren't: bfloat16 has no 0.9, and takes 0.999 for 1."""
    kept = {"mu": jnp.dtype(mu_dtype or param), "nu": jnp.dtype(param)}
    grads = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    tx = muon(1.0, mu_dtype=mu_dtype, adam_nesterov=False)
    params = {"w": EYE, "b": np.zeros(64, jnp.dtype(param))}
    got, _, _ = run(tx, params, [{"w": EYE, "b": g} for g in grads], jit=True)
    want = adamw(grads, lambda x, name: x.astype(kept[name]))
    for update, expected in zip(got, want, strict=True):
        assert reference.relative_error(update["b"], expected) <= 3e-5  # 1 - b2^t in float32


def test_no_weak_types_and_types_that_stay():
    params = {"w": jnp.full((2, 3), 1.0), "b": jnp.full(3, 1.0), "s": jnp.asarray(2.0)}
    assert all(x.weak_type for x in jax.tree.leaves(params))
    for tx in (muon(0.1), muon(0.1, weight_decay=0.1, weight_decay_kind="independent")):
        tx: Any = tx
        state = tx.init(params)
        updates, new = tx.update(params, state, params)
        assert not any(x.weak_type for x in jax.tree.leaves((state, updates, new)))
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])
def test_a_scan_over_steps(mu_dtype):
    params = {
        "w": np.ones((4, 6), jnp.bfloat16),
        "b": np.ones(3, np.float16),
        "c": np.ones(2, np.complex64),
    }
    tx: Any = muon(optax.linear_schedule(0.1, 0.0, 9), mu_dtype=mu_dtype, weight_decay=0.1)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (apply_updates(params, updates), state), dtypes_as_zeros(updates)

    carry = (params, tx.init(params))
    (after, _), seen = jax.jit(lambda c: jax.lax.scan(step, c, length=3))(carry)
    assert dtypes(after) == dtypes(params) == dtypes(seen)
    by_hand, one = carry, jax.jit(step)
    for _ in range(3):
        by_hand, _ = one(by_hand, None)
    np.testing.assert_allclose(
        np.asarray(after["w"], np.float32), np.asarray(by_hand[0]["w"], np.float32), rtol=1e-2
    )


def dtypes_as_zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros((), x.dtype), tree)


def test_the_size_of_gradients_does_not_matter():
    params, grads = trail()
    plain, _, _ = run(muon(1.0), params, grads, jit=True)
    for power in (-108, 123):  # 3e-33 and 1e37
        sized = [{"w": np.ldexp(g["w"], power)} for g in grads]
        got, _, _ = run(muon(1.0), params, sized, jit=True)
        for a, b in zip(got, plain, strict=True):
            assert reference.relative_error(a["w"], b["w"]) <= 1e-5
    even = [{"w": np.sign(g["w"]) * 2.0**-5} for g in grads]  # nothing on the way is subnormal
    plain, _, _ = run(muon(1.0), params, even, jit=True)
    got, _, _ = run(muon(1.0), params, [{"w": np.ldexp(g["w"], -80)} for g in even], jit=True)
    for a, b in zip(got, plain, strict=True):
        np.testing.assert_array_equal(a["w"], b["w"])


def test_half_precision_rates_and_decays_are_taken_as_they_are():
    params, (grad,) = trail(steps=1)
    tenth = jnp.bfloat16(0.1)
    got = first_update(muon(tenth, weight_decay=tenth), grad, params)
    want = first_update(muon(float(tenth), weight_decay=float(tenth)), grad, params)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)


def test_an_abstract_init_equals_the_concrete_one():
    params = {
        "w": np.ones((4, 6), jnp.bfloat16),
        "b": np.ones(3, np.float32),
        "c": np.ones(2, np.complex64),
        "i": np.arange(3, dtype=np.int32),
    }
    tx: Any = muon(lambda count: 0.1, mu_dtype=jnp.float32, weight_decay=lambda count: 0.1)
    concrete = tx.init(params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for other in (jax.eval_shape(tx.init, params), tx.init(shapes), jax.jit(tx.init)(params)):
        assert jax.tree.structure(other) == jax.tree.structure(concrete)
        assert dtypes(other) == dtypes(concrete)
        assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, concrete)


def test_numpy_parameters_and_gradients():
    params = {"w": EYE, "b": ONES}
    got = first_update(muon(0.1, weight_decay=0.1), params)
    want = first_update(muon(0.1, weight_decay=0.1), jax.tree.map(jnp.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_orthogonaliser_of_the_users():
    _, (grad,) = trail(steps=1)
    options: dict[str, Any] = {
        "orthogonalizer": lambda x: x,
        "scale": "none",
        "bias_correction": False,
    }
    got = first_update(muon(1.0, **options, nesterov=False), grad)["w"]
    np.testing.assert_allclose(got, -0.05 * grad["w"], rtol=1e-5)

    def polar(x):
        u, _, v = jnp.linalg.svd(x, full_matrices=False)
        return u @ v

    got = first_update(muon(1.0, orthogonalizer=polar, scale="match_rms_adamw"), grad)["w"]
    values = np.linalg.svd(got, compute_uv=False)
    np.testing.assert_allclose(values, 0.2 * 20**0.5, rtol=1e-5)


def test_several_learning_rates_by_a_partition_of_several():
    params = {"slow": {"w": EYE, "b": ONES}, "fast": {"w": EYE}}
    tx = optax.partition(
        {"slow": muon(0.1, scale="none"), "fast": muon(0.4, scale="none")},
        {"slow": "slow", "fast": "fast"},
    )
    update = first_update(tx, params)
    np.testing.assert_allclose(update["fast"]["w"], 4 * update["slow"]["w"], rtol=1e-6)
    np.testing.assert_allclose(update["slow"]["b"], first_update(optax.nadam(0.1), ONES))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learning_rate": -0.1}, ValueError, "learning_rate must be finite and not negative"),
        ({"learning_rate": "0.1"}, TypeError, "learning_rate must be a number or a schedule"),
        ({"learning_rate": None}, TypeError, "learning_rate must be a number or a schedule"),
        ({"adam_learning_rate": -1}, ValueError, "adam_learning_rate must be finite"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be finite and not negative"),
        ({"adam_weight_decay": True}, TypeError, "adam_weight_decay must be a number or a sche"),
        ({"weight_decay_mask": "false"}, TypeError, "weight_decay_mask must be True or False"),
        ({"adam_weight_decay_mask": {"b": 1}}, TypeError, r"adam_weight_decay_mask\['b'\] must be"),
        ({"weight_decay_kind": "L2"}, ValueError, "weight_decay_kind must be one of .*'l2'"),
        ({"ns_coeffs": "muon"}, ValueError, "ns_coeffs='muon' is no schedule; allowed are"),
        ({"ns_coeffs": (1.0, 2.0)}, ValueError, r"ns_coeffs has shape \(2,\)"),
        ({"ns_steps": 0}, ValueError, "ns_steps=0"),
        ({"ns_steps": -1}, ValueError, "ns_steps=-1"),
        ({"ns_steps": "3"}, TypeError, "ns_steps='3'"),
        ({"ns_steps": True}, TypeError, "ns_steps=True is a bool"),
        ({"ns_steps": 2.0}, TypeError, "ns_steps=2.0 is a float"),
        ({"ns_coeffs": "dion", "ns_steps": 3}, ValueError, "ns_steps=3, but ns_coeffs has 5 rows"),
        ({"beta": 1.5}, ValueError, r"beta must be in \[0, 1.0\), got 1.5"),
        ({"beta": -0.1}, ValueError, r"beta must be in \[0, 1.0\), got -0.1"),
        ({"eps": -1e-8}, ValueError, "eps must be finite and not negative"),
        ({"adam_b1": 1.0}, ValueError, "adam_b1 must be in"),
        ({"adam_b2": jnp.bfloat16(0.5)}, TypeError, "adam_b2 came as a bfloat16 array"),
        ({"adam_eps_root": "0"}, TypeError, "adam_eps_root must be a number, got '0'"),
        ({"mu_dtype": "int32"}, TypeError, "mu_dtype must be a floating-point dtype"),
        ({"nesterov": "false"}, TypeError, "nesterov must be True or False, got 'false'"),
        ({"adam_nesterov": "no"}, TypeError, "adam_nesterov must be True or False, got 'no'"),
        ({"adaptive": 1}, TypeError, "adaptive must be True or False, got 1"),
        ({"bias_correction": "no"}, TypeError, "bias_correction must be True or False"),
        ({"preconditioning": "none"}, ValueError, "preconditioning='none'; allowed are"),
        ({"momentum": "heavy"}, ValueError, "momentum must be one of"),
        ({"scale": "rms"}, ValueError, "scale must be one of"),
        ({"scale": "none", "consistent_rms": 0.2}, ValueError, "scale or consistent_rms, not both"),
        ({"scale_factor": "1"}, TypeError, "scale_factor must be a number"),
        ({"ns_method": "fast"}, ValueError, "ns_method must be one of .*'gram'.*got 'fast'"),
        ({"ns_dtype": "bf16"}, TypeError, "ns_dtype must be a floating-point dtype"),
        ({"ns_precision": "max"}, ValueError, "ns_precision must be one of .*got 'max'"),
        ({"orthogonalizer": "svd"}, TypeError, "orthogonalizer must be a function, got 'svd'"),
        ({"partition": 3}, TypeError, "partition must be a sequence of Rule.*got 3"),
        ({"partition": [Rule("a", "adam"), "muon"]}, TypeError, "rules or labels, not both"),
        ({"strategy": "fastest"}, ValueError, "strategy must be one of"),
        ({"device": "h9000"}, ValueError, "device must be one of .*'h100'.*got 'h9000'"),
        ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes must be a positive integer"),
    ],
)
def test_options_are_checked_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        muon(**{"learning_rate": 0.1, **options})


def test_axes_are_checked_at_init():
    params = {"block": {"kernel": np.ones((2, 3, 4), np.float32)}}
    tx = muon(0.1, muon_weight_dimension_numbers=MuonDimensionNumbers(5, 7))
    with pytest.raises(ValueError, match=r"(?s)block/kernel: .*\[-3, 2\].*\(2, 3, 4\).*got 5"):
        tx.init(params)


def test_the_learning_rate_has_optax_type():
    import inspect

    annotation = inspect.signature(muon).parameters["learning_rate"].annotation
    assert annotation == optax.ScalarOrSchedule
