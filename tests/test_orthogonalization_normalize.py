from functools import cache
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import gaussian, log_uniform, singular_values

from muon_optax.orthogonalization import Preconditioning, Schedule, newton_schulz, resolve_schedule
from muon_optax.orthogonalization.normalize import near_one, precondition

KINDS = get_args(Preconditioning)
ONE_STEP = ((3.0, -3.0, 1.0),)


@cache
def compiled(schedule: Schedule):
    return jax.jit(lambda gram: precondition(gram, schedule, lambda a: a @ a))


def preconditioned(x: np.ndarray, kind: Preconditioning, factor: float = 1.0):
    schedule = resolve_schedule("modded_nanogpt" if factor == 1.02 else "jordan", None, kind)
    return compiled(schedule)(x @ x.conj().T)


@pytest.mark.parametrize("value", [1.0, 3.4e38, 4e-38, 7.0, -7.0])
def test_near_one_is_exact(value):
    x = np.array([[value, value / 3]], np.float32)
    scaled = np.asarray(jax.jit(near_one)(x))
    assert 1 <= abs(scaled[0, 0]) < 4
    np.testing.assert_array_equal(np.frexp(scaled)[0], np.frexp(x)[0])


@pytest.mark.parametrize("value", [0.0, 1e-42, np.inf, -np.inf, np.nan])
def test_near_one_of_what_has_no_exponent(value):
    scaled = jax.jit(near_one)(np.full((1, 1), value, np.float32))
    np.testing.assert_equal(scaled.item(), 0.0 if value == 1e-42 else value)


def test_near_one_in_float64():
    with jax.enable_x64(True):
        x = np.array([1.7e308, 3e-308, 5.0]).reshape(3, 1, 1)
        expected = [1.7e308 * 2.0**-1022, 3e-308 * 2.0**1022, 1.25]
        np.testing.assert_array_equal(np.ravel(jax.jit(near_one)(x)), expected)


@pytest.mark.parametrize("factor", [1.0, 1.02])
@pytest.mark.parametrize(
    ("kind", "power"), [("frobenius", 2), ("schatten", 4), ("schatten8", 8), ("spectral", np.inf)]
)
def test_norms(kind, power, factor):
    x = gaussian(6, 9)
    gram, square, scale = preconditioned(x, kind, factor)
    y = x / np.linalg.norm(singular_values(x), power) / factor
    np.testing.assert_allclose(scale * x, y, rtol=1e-5)
    np.testing.assert_allclose(gram, y @ y.T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(square, y @ y.T @ y @ y.T, rtol=1e-4, atol=1e-6)


def test_aol_scales_rows():
    x = gaussian(6, 9)
    gram, square, scale = preconditioned(x, "aol", 1.02)
    y = x / np.sqrt(np.abs(x @ x.T).sum(1, keepdims=True)) / 1.02
    assert singular_values(y).max() <= 1
    np.testing.assert_allclose(scale * x, y, rtol=1e-5)
    np.testing.assert_allclose(gram, y @ y.T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(square, y @ y.T @ y @ y.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_and_zero_matrices(kind):
    x = gaussian(6, 7)
    x[2] = 0
    for part in preconditioned(x, kind):
        assert np.isfinite(part).all()
    for part in preconditioned(0 * x, kind)[:2]:
        np.testing.assert_array_equal(part, 0)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, jnp.float32) for kind in KINDS), ("schatten8", jnp.complex64)]
)
def test_derivatives_are_finite_at_zero_and_elsewhere(kind, dtype):
    def loss(x):
        return jnp.abs(newton_schulz(x, ONE_STEP, preconditioning=kind)[:, 0]).sum()

    gradient: Any = jax.jit(jax.grad(loss))
    row = np.zeros((3, 4))
    row[0] = 1.0
    for x in (0 * row, row, gaussian(3, 4)):
        assert np.isfinite(gradient(x.astype(dtype))).all()


def test_the_derivative_is_that_of_a_scale_invariant_function():
    x, y = (gaussian(3, 4, seed=seed).astype(np.float32) for seed in (0, 1))

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        return newton_schulz(x, ONE_STEP)[0, 0]

    _, slope = loss(x)
    np.testing.assert_allclose(np.vdot(x, slope), 0, atol=1e-5)
    step = np.float32(1e-3)
    difference = (loss(x + step * y)[0] - loss(x - step * y)[0]) / (2 * step)
    np.testing.assert_allclose(difference, np.vdot(y, slope), rtol=2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1e-36, 1e-9, 1e18, 1e37])
def test_singular_values_do_not_depend_on_the_scale(scale, dtype):
    x = (scale * log_uniform(24, 40, 10)).astype(dtype)
    values = singular_values(newton_schulz(x, "tight"))
    # bfloat16 input has a spectrum of its own.
    assert values.min() > (0.97 if dtype == jnp.float32 else 0.95)
    assert values.max() < 1.035


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_in_their_matrix_and_show(kind, value):
    x: Any = gaussian(3, 8, 6).astype(np.float32)
    clean = np.asarray(newton_schulz(x, ONE_STEP, preconditioning=kind))
    x[1, 2, 3] = value
    spoilt = np.asarray(newton_schulz(x, ONE_STEP, preconditioning=kind))
    assert not np.isfinite(spoilt[1]).any()
    np.testing.assert_array_equal(spoilt[::2], clean[::2])


def test_eigenvalues_are_found_one_matrix_at_a_time_on_cpu():
    """jaxlib shares a batch among the threads that run the devices, which may all wait for it."""
    orthogonalize = jax.jit(lambda x: newton_schulz(x, preconditioning="spectral"))
    text = orthogonalize.lower(jax.ShapeDtypeStruct((3, 16, 32), jnp.float32)).as_text()
    (call,) = [line for line in text.split("\n") if "syevd" in line]
    assert 'num_batch_dims = "0"' in call
    assert "(tensor<16x16xf32>)" in call
