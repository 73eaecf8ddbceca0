"""Regressions from public reports: numerics and dtypes."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec
from running import apply_compiled, dtypes, first_update, run

from muon_optax import muon, newton_schulz
from muon_optax.orthogonalization import SCHEDULES

PRECONDITIONINGS = ["frobenius", "spectral", "aol", "schatten", "schatten8"]
VARIANTS: list[dict[str, Any]] = [
    *({"ns_coeffs": name} for name in SCHEDULES),
    *({"preconditioning": name} for name in PRECONDITIONINGS),
    *({"ns_coeffs": "dion", "ns_method": method} for method in ("standard", "gram")),
    {"adaptive": True},
    {"nesterov": False, "momentum": "sum"},
    {"bias_correction": False},
    {"consistent_rms": 0.2},
    {"scale": "unit_rms_norm"},
    {"mu_dtype": "bfloat16"},
    {"ns_dtype": "float16"},
    {"weight_decay": 0.1, "weight_decay_kind": "independent"},
]


# 0/0 on a zero gradient or a zero parameter.
# https://github.com/microsoft/dion/issues/24 https://github.com/marin-community/marin/issues/9054
# https://github.com/google-deepmind/optax/issues/1743
# https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/254


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_zero_gradient_gives_exactly_zero(options):
    decay = options.get("weight_decay", 0.0)
    zeros = np.zeros((4, 4), np.float32)
    grads = {"ones": zeros, "zeros": zeros, "b": zeros[0]}
    params = {**grads, "ones": np.ones_like(zeros)}
    for rate in (0.0, 0.1):
        updates, state, _ = run(muon(rate, **options), params, [grads])
        np.testing.assert_array_equal(updates[0]["ones"], -np.float32(decay) * params["ones"])
        np.testing.assert_array_equal(updates[0]["zeros"], grads["zeros"])
        np.testing.assert_array_equal(updates[0]["b"], grads["b"])
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))


def test_a_zero_gradient_between_others_does_no_harm():
    zeros, eye = np.zeros((4, 4), np.float32), np.eye(4, dtype=np.float32)
    grads = [{"w": g} for g in (zeros, eye, zeros)]
    updates, _, _ = run(muon(1.0), {"w": zeros}, grads)
    want = reference.muon(zeros, [g["w"] for g in grads], learning_rate=1.0)
    np.testing.assert_allclose([u["w"] for u in updates], want, atol=1e-5)


# Complex: a transpose without conjugate gives NaN, real leaves turn complex.
# https://github.com/google-deepmind/optax/issues/1494
# https://github.com/google-deepmind/optax/issues/1506
# https://github.com/google-deepmind/optax/issues/1761
# https://github.com/google-deepmind/optax/issues/287


def complex_matrix(m, n):
    return reference.matrix(1, m, n, kappa=10) + 1j * reference.matrix(2, m, n, kappa=10)


@pytest.mark.parametrize("kind", PRECONDITIONINGS)
def test_complex_matrices_become_nearly_unitary(kind):
    x = complex_matrix(4, 6)
    leaves = {"wide": x, "tall": x.conj().T}
    update = first_update(muon(1.0, preconditioning=kind, scale="none"), leaves, jit=True)
    want = -reference.newton_schulz(x, norm=kind)
    assert reference.relative_error(update["wide"], want) <= 1e-5
    assert reference.relative_error(update["tall"], want.conj().T) <= 1e-5
    gram = want @ want.conj().T
    np.testing.assert_allclose(gram, np.eye(4), atol=0.5)


def test_each_leaf_and_its_state_keep_their_dtype_beside_complex_ones():
    ones = np.ones(3, np.float32)
    params = {"complex": complex_matrix(4, 6), "real": reference.matrix(0, 4, 6), "b": ones}
    tx = muon(optax.linear_schedule(0.1, 0.0, 5))
    updates, state, _ = run(tx, params, [params] * 3, jit=True)
    assert all(dtypes(u) == dtypes(params) for u in updates)
    halves = state.inner_states
    moments = [halves["muon"].inner_state[0].mu, halves["adam"].inner_state[0].mu]
    assert moments[0]["complex"].dtype == jnp.complex64
    assert moments[0]["real"].dtype == moments[1]["b"].dtype == jnp.float32
    alone, _, _ = run(tx, {"real": params["real"]}, [{"real": params["real"]}] * 3, jit=True)
    np.testing.assert_allclose(updates[2]["real"], alone[2]["real"], rtol=1e-5, atol=1e-7)


# Polar Express or spectral scaling diverges where rounding lifts a singular value above 1.
# https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/228
# https://github.com/marin-community/marin/issues/6301
# https://github.com/google-deepmind/optax/issues/1613


def hard_matrices(n):
    """A stack of n x n matrices: orthogonal of three sizes, of rank one, and Gaussian."""
    gaussian = np.random.default_rng(0).normal(size=(n, n))
    orthogonal, _ = np.linalg.qr(gaussian)
    rank_one = np.outer(gaussian[0], gaussian[1])
    return np.stack([orthogonal, 1e-4 * orthogonal, 1e4 * orthogonal, rank_one, gaussian])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "size"), [("frobenius", 256), ("spectral", 64)])
def test_polar_express_does_not_grow_with_steps(dtype, kind, size):
    largest = []
    x: Any = hard_matrices(size).astype(jnp.dtype(dtype))
    for steps in (5, 8, 12):
        y = newton_schulz(x, "polar_express", steps, preconditioning=kind)
        values = np.linalg.svd(np.asarray(y, np.float64), compute_uv=False)
        largest.append(values.max(-1))
        assert values.max() <= 1.2
    assert (np.diff(largest, axis=0) <= 1e-2).all()


# Newton-Schulz of the raw gradient instead of the momentum.
# https://github.com/google-deepmind/optax/issues/1170


def test_the_second_update_depends_on_the_first_gradient():
    second = reference.matrix(3, 2, 2, kappa=3)
    updates = []
    for first in (np.diag([1.0, 2.0]), np.diag([2.0, -1.0])):
        grads = [{"w": np.float32(g)} for g in (first, second)]
        got, _, _ = run(muon(1.0, beta=0.95), {"w": np.zeros((2, 2), np.float32)}, grads, jit=True)
        mix = reference.mixes([first, second], beta=0.95)[-1]
        assert reference.relative_error(got[1]["w"], -reference.newton_schulz(mix)) <= 1e-5
        updates.append(got[1]["w"])
    assert reference.relative_error(*updates) > 0.1


# MultiSteps: the branches of lax.cond differ in dtype; cond inside shard_map.
# https://github.com/google-deepmind/optax/issues/377
# https://github.com/google-deepmind/optax/issues/1038
# https://github.com/google-deepmind/optax/issues/1039 https://github.com/jax-ml/jax/issues/23693


HALF = {"w": np.eye(4, 6, dtype=jnp.bfloat16), "b": np.ones(3, jnp.bfloat16)}


def accumulated(update, params, state, grads):
    seen = []
    for grad in grads:
        updates, state = update(grad, state, params)
        params = apply_compiled(params, updates)
        seen.append(updates)
    return params, seen


def half_precision_problem():
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    return HALF, [jax.tree.map(draw, HALF) for _ in range(2)]


def test_accumulated_steps_equal_one_step_on_the_mean():
    params, grads = half_precision_problem()
    inner = muon(0.1, mu_dtype=jnp.float32, weight_decay=0.1)
    tx: Any = optax.MultiSteps(inner, 2)
    update = jax.jit(tx.update)
    after, seen = accumulated(update, params, tx.init(params), [grads[0], grads[0], *grads[1:] * 2])
    zeros = jax.tree.map(np.zeros_like, params)
    for i in (0, 2):
        jax.tree.map(np.testing.assert_array_equal, seen[i], zeros)
    assert all(dtypes(u) == dtypes(params) for u in seen)
    want, _, by_hand = run(inner, params, grads, jit=True)
    for got, right in zip(seen[1::2], want, strict=True):
        for name in params:
            assert reference.relative_error(got[name], right[name]) <= 1e-2, name
    assert dtypes(after) == dtypes(by_hand)


def test_accumulated_steps_inside_a_shard_map():
    params, grads = half_precision_problem()
    tx: Any = optax.MultiSteps(muon(0.1, mu_dtype=jnp.float32), 2)
    mesh = jax.make_mesh((2,), ("data",))
    everywhere, split = PartitionSpec(), PartitionSpec("data")

    def body(params, parts):
        def update(part, state, params):
            return tx.update(jax.lax.pmean(part, "data"), state, params)

        own = [jax.tree.map(lambda x: x[0], part) for part in parts]
        return accumulated(update, params, tx.init(params), own)

    parts = [jax.tree.map(lambda x: np.stack([2 * x, 0 * x]), g) for g in [grads[0]] * 2]
    step = jax.shard_map(body, mesh=mesh, in_specs=(everywhere, split), out_specs=everywhere)
    parts = jax.device_put(parts, NamedSharding(mesh, split))
    got, seen = jax.jit(step)(jax.device_put(params, NamedSharding(mesh, everywhere)), parts)
    want, alone = accumulated(jax.jit(tx.update), params, tx.init(params), [grads[0]] * 2)
    assert dtypes(got) == dtypes(want)
    for name in params:
        assert reference.relative_error(seen[1][name], alone[1][name]) <= 1e-2


# The update's dtype depends on how the learning rate was given.
# https://github.com/google-deepmind/optax/issues/1405

RATES = {
    "python": 1e-3,
    "np32": np.float32(1e-3),
    "np64": np.float64(1e-3),
    "np_bf16": np.asarray(1e-3, jnp.bfloat16)[()],
    "jnp": jnp.array(1e-3),
    "jnp_bf16": jnp.array(1e-3, jnp.bfloat16),
    "schedule": lambda count: 1e-3,
    "np_schedule": lambda count: np.float64(1e-3),
    "int": 1,
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", RATES)
def test_updates_have_the_gradients_dtype_however_the_rate_is_given(name, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), HALF)
    got = first_update(muon(RATES[name]), params)
    assert dtypes(got) == dtypes(params)
    factor = 1e3 if name == "int" else 1.0
    want = first_update(muon(1e-3), params)
    for leaf in params:
        right = factor * np.asarray(want[leaf], np.float64)
        assert reference.relative_error(got[leaf], right) <= 1e-2


def test_a_traced_rate_gives_the_same():
    got = jax.jit(jax.vmap(lambda lr: first_update(muon(lr), HALF)))(np.array([1e-3], np.float32))
    want = first_update(muon(1e-3), HALF)
    assert dtypes(got) == dtypes(want)
    for name in HALF:
        assert reference.relative_error(got[name][0], want[name]) <= 1e-2


# Newton-Schulz forced to bfloat16 for float32 users; crashes on mixed dtypes.
# https://github.com/pytorch/pytorch/issues/160213
# https://github.com/NVIDIA/physicsnemo/issues/1743 https://github.com/nil0x9/flash-muon/issues/9
# https://github.com/zichongli5/NorMuon/issues/4 https://github.com/zichongli5/NorMuon/issues/10


def test_single_precision_stays_single_and_half_is_a_choice():
    x = reference.matrix(0, 128, 64, kappa=100)
    leaf, want = {"w": x}, -reference.newton_schulz(x)
    single = first_update(muon(1.0), leaf, jit=True)["w"]
    half = first_update(muon(1.0, ns_dtype="bfloat16"), leaf, jit=True)["w"]
    assert single.dtype == half.dtype == jnp.float32
    assert reference.relative_error(single, want) <= 1e-5
    assert 1e-3 <= reference.relative_error(half, want) <= 4e-2


TYPES = ["float32", "bfloat16", "float16"]


@functools.cache
def single_precision_update() -> tuple[Any, Any]:
    """Gradients, and what they give in float32."""
    x = {"w": reference.matrix(0, 16, 24), "b": np.ones(3, np.float32)}
    return x, first_update(muon(0.1), x, jit=True)


@pytest.mark.parametrize(("param", "grad"), list(itertools.product(TYPES, TYPES)))
def test_every_mixture_of_dtypes(param, grad):
    params = {"w": np.eye(16, 24, dtype=jnp.dtype(param)), "b": np.ones(3, jnp.dtype(param))}
    x, want = single_precision_update()
    grads = jax.tree.map(lambda x: x.astype(jnp.dtype(grad)), x)
    pieces: dict[str, Any] = {mu: muon(0.1, mu_dtype=mu) for mu in TYPES}
    of_each = lambda g, p: {mu: first_update(tx, g, p) for mu, tx in pieces.items()}  # noqa: E731
    found = jax.jit(of_each)(grads, params)
    for mu, tx in pieces.items():

        def step(state, _, tx=tx):
            updates, state = tx.update(grads, state, params)
            return state, updates

        state = tx.init(params)
        assert state.inner_states["muon"].inner_state[0].mu["w"].dtype == mu
        assert state.inner_states["adam"].inner_state[0].mu["b"].dtype == mu
        # Tracing the scan fails where a state's type changes.
        new, updates = jax.eval_shape(lambda s, step=step: jax.lax.scan(step, s, length=2), state)
        assert dtypes(new) == dtypes(state)
        assert dtypes(updates) == dtypes(grads)
        for name in params:
            assert reference.relative_error(found[mu][name], want[name]) <= 4e-2


def test_double_precision_beside_single():
    with jax.enable_x64(True):
        x = np.asarray(reference.matrix(0, 12, 20), np.float64)
        params = {"double": x, "single": x.astype(np.float32), "b": np.ones(3)}
        updates, state, _ = run(muon(0.1, weight_decay=0.1), params, [params] * 3, jit=True)
        want = reference.muon(x, [x] * 3, learning_rate=0.1, weight_decay=0.1)
        adam, _, _ = run(optax.nadam(0.1), params["b"], [params["b"]] * 3, jit=True)
        for got, right, rest in zip(updates, want, adam, strict=True):
            assert dtypes(got) == dtypes(params)
            assert reference.relative_error(got["double"], right) <= 1e-12
            assert reference.relative_error(got["single"], right) <= 1e-5
            np.testing.assert_allclose(got["b"], rest, rtol=1e-12)
        moments = state.inner_states["muon"].inner_state[0].mu
        assert moments["single"].dtype == jnp.float32
