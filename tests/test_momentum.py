"""Momentum: every convention against float64 numpy, and the dtype and the buffers it is kept in."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from muon_optax._internal.dtypes import wide_dtype
from muon_optax.transforms.momentum import Momentum, combine, moment_dtype, zeros_like_parameter

CONVENTIONS = list(itertools.product([True, False], [True, False], ["ema", "sum"]))


def run(momentum, grads):
    """The mixes and the buffers of some steps, the buffer rounded between them as a state is.

    One program makes them all.
    """
    return jax.jit(partial(unrolled, momentum))(grads)


def unrolled(momentum, grads):
    buffer = momentum.init(grads[0])
    mixes, buffers = [], []
    for t, grad in enumerate(grads, start=1):
        weights = momentum.weights(jnp.asarray(t, jnp.int32))
        wide = combine(weights.keep, buffer, grad)
        mixes.append(combine(weights.mix, buffer, grad))
        buffer = wide.astype(buffer.dtype)
        buffers.append(buffer)
    return mixes, buffers


def some_gradients(dtype: Any = np.float32, steps=4) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(3, 2)).astype(dtype) for _ in range(steps)]


@pytest.mark.parametrize(("nesterov", "bias_correction", "form"), CONVENTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_every_convention(beta, nesterov, bias_correction, form):
    grads = some_gradients()
    got, _ = run(Momentum(beta, None, nesterov, bias_correction, form), grads)
    want = reference.mixes(
        grads, beta=beta, nesterov=nesterov, bias_correction=bias_correction, form=form
    )
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_the_buffer_is_what_its_form_says():
    grads = some_gradients()
    _, averages = run(Momentum(0.9, None, True, True, "ema"), grads)
    _, sums = run(Momentum(0.9, None, True, True, "sum"), grads)
    total = sum(0.9 ** (3 - i) * np.asarray(g, np.float64) for i, g in enumerate(grads))
    np.testing.assert_allclose(sums[-1], total, rtol=1e-6)
    np.testing.assert_allclose(averages[-1], 0.1 * total, rtol=1e-6, atol=1e-7)


def test_with_bias_correction_both_forms_mix_the_same():
    grads = some_gradients()
    for nesterov in (True, False):
        average, _ = run(Momentum(0.9, None, nesterov, True, "ema"), grads)
        total, _ = run(Momentum(0.9, None, nesterov, True, "sum"), grads)
        np.testing.assert_allclose(average, total, rtol=1e-5, atol=1e-6)


def test_the_first_corrected_mix_is_the_gradient():
    (grad,) = some_gradients(steps=1)
    (mixed,), _ = run(Momentum(0.95, None, False, True, "ema"), [grad])
    np.testing.assert_allclose(mixed, grad, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_wide_and_rounded_once(dtype):
    grads = some_gradients(dtype)
    momentum = Momentum(0.95, None, True, True, "ema")
    buffer = momentum.init(grads[0])
    assert buffer.dtype == dtype
    weights = momentum.weights(jnp.array(1))
    wide = combine(weights.keep, buffer, grads[0])
    assert wide.dtype == jnp.float32
    assert combine(weights.mix, buffer, grads[0]).dtype == jnp.float32
    exact = 0.05 * np.asarray(grads[0], np.float64)
    np.testing.assert_array_equal(wide.astype(dtype), jnp.asarray(exact, dtype))


def test_a_small_gain_is_not_lost_in_a_half_precision_sum():
    # In bfloat16, 0.999 m + 0.001 g is m wherever g is below 2 m.
    momentum = Momentum(0.999, jnp.float32, False, False, "ema")
    buffer = jnp.full((), 1.0, jnp.float32)
    for t in range(10):
        weights = momentum.weights(jnp.array(t))
        buffer = combine(weights.keep, buffer, jnp.full((), 0.5, jnp.bfloat16))
    np.testing.assert_allclose(buffer, 0.5 + 0.5 * 0.999**10, rtol=1e-6)


def test_complex_gradients():
    rng = np.random.default_rng(0)
    grads = [
        np.asarray(rng.normal(size=(3, 2)) + 1j * rng.normal(size=(3, 2)), np.complex64)
        for _ in range(3)
    ]
    momentum = Momentum(0.9, jnp.bfloat16, True, True, "ema")
    got, buffers = run(momentum, grads)
    assert buffers[0].dtype == jnp.complex64
    for part in (np.real, np.imag):
        want = reference.mixes([part(g) for g in grads], beta=0.9)
        np.testing.assert_allclose(part(np.asarray(got)), want, rtol=2e-6, atol=1e-6)


def test_double_precision_beside_single():
    with jax.enable_x64(True):
        momentum = Momentum(0.95, None, True, True, "ema")
        for dtype, bound in ((np.float64, 1e-15), (np.float32, 1e-6)):
            grads = some_gradients(dtype)
            got, buffers = run(momentum, grads)
            assert got[-1].dtype == buffers[-1].dtype == dtype
            np.testing.assert_allclose(got, reference.mixes(grads), rtol=bound, atol=bound)


def test_beta_may_be_traced_and_promotion_strict():
    grads = some_gradients()

    def last(beta):
        return unrolled(Momentum(beta, None, True, True, "ema"), grads)[0][-1]

    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(jax.vmap(last))(np.array([0.5, 0.9], np.float32))
    want = [reference.mixes(grads, beta=beta)[-1] for beta in (0.5, 0.9)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("wanted", "own", "kept"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "float16", "float32"),
        ("complex64", "bfloat16", "float32"),
        ("bfloat16", "complex64", "complex64"),
        ("float32", "complex64", "complex64"),
        ("float64", "float32", "float32"),  # without x64
        (float, "float32", "float32"),
    ],
)
def test_a_moment_is_complex_where_its_parameter_is(wanted, own, kept):
    assert moment_dtype(wanted, own) == kept
    assert Momentum(0.9, wanted, True, True, "ema").init(jnp.ones(2, own)).dtype == kept


def test_sums_are_formed_in_float32_at_least():
    assert wide_dtype(jnp.bfloat16, jnp.float16) == jnp.float32
    assert wide_dtype(jnp.bfloat16, jnp.complex64) == jnp.complex64


@pytest.mark.parametrize("param", [jnp.array([jnp.nan, jnp.inf, -2.0]), np.array([np.nan, 1, 2])])
def test_the_first_buffer_is_zero_whatever_the_parameter_holds(param):
    zeros = zeros_like_parameter(param, jnp.bfloat16)
    assert isinstance(zeros, jax.Array)
    assert zeros.dtype == jnp.bfloat16
    assert not zeros.weak_type
    np.testing.assert_array_equal(zeros, np.zeros(3))


def test_zeros_of_a_shape_struct_and_of_a_weakly_typed_scalar():
    assert zeros_like_parameter(jax.ShapeDtypeStruct((2, 3), jnp.float32), float).shape == (2, 3)
    assert not zeros_like_parameter(jnp.asarray(1.0), jnp.float32).weak_type


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ((1.5, None, True, True, "ema"), ValueError, r"beta must be in \[0, 1.0\), got 1.5"),
        ((-0.1, None, True, True, "ema"), ValueError, "beta must be in"),
        ((0.9, "int8", True, True, "ema"), TypeError, "mu_dtype must be a floating-point dtype"),
        ((0.9, None, "false", True, "ema"), TypeError, "nesterov must be True or False"),
        ((0.9, None, True, 0, "ema"), TypeError, "bias_correction must be True or False"),
        ((0.9, None, True, True, "avg"), ValueError, r"momentum must be one of \('ema', 'sum'\)"),
    ],
)
def test_options_are_checked_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        Momentum(*options)
