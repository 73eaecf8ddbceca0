from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import gaussian, relative_error

from muon_optax.orthogonalization import NewtonSchulz, newton_schulz, resolve_schedule

SHAPES = [(5, 9), (9, 5), (7, 7)]
FUNCTIONS = [
    NewtonSchulz(resolve_schedule("jordan"), "standard"),
    NewtonSchulz(resolve_schedule("tight"), "gram"),
    NewtonSchulz(resolve_schedule("fast", None, "frobenius"), "gram", "bfloat16"),
]
ROUNDING = dict(zip(FUNCTIONS, (1e-5, 1e-4, 3e-2), strict=True))
several = settings(max_examples=20, deadline=None)
functions = st.sampled_from(FUNCTIONS)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 10**6)


def matrix(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return gaussian(*shape, seed=seed).astype(np.float32)


def iterated(function: NewtonSchulz, x: Any) -> np.ndarray:
    return np.asarray(function(x))


@several
@given(functions, shapes, seeds, st.integers(-100, 100))
def test_powers_of_two_change_no_bit(function, shape, seed, k):
    x = matrix(shape, seed)
    np.testing.assert_array_equal(iterated(function, np.ldexp(x, k)), iterated(function, x))


@several
@given(functions, shapes, seeds)
def test_the_sign_passes_through(function, shape, seed):
    x = matrix(shape, seed)
    np.testing.assert_array_equal(iterated(function, -x), -iterated(function, x))


@several
@given(functions, shapes, seeds)
def test_transposition_passes_through(function, shape, seed):
    x = matrix(shape, seed)
    assert relative_error(iterated(function, x.T), iterated(function, x).T) < ROUNDING[function]


@several
@given(functions, shapes, seeds)
def test_permutations_pass_through(function, shape, seed):
    x = matrix(shape, seed)
    rng = np.random.default_rng(seed)
    rows, columns = (rng.permutation(k) for k in shape)
    permuted = iterated(function, x[rows][:, columns])
    assert relative_error(permuted, iterated(function, x)[rows][:, columns]) < ROUNDING[function]


@several
@given(functions, shapes, seeds)
def test_rotations_pass_through(function, shape, seed):
    x = matrix(shape, seed)
    u, v = (np.linalg.qr(gaussian(k, k, seed=seed + k))[0].astype(np.float32) for k in shape)
    # Rotated input is rounded anew, which singular values near zero magnify.
    assert (
        relative_error(iterated(function, u @ x @ v), u @ iterated(function, x) @ v)
        < 10 * ROUNDING[function]
    )


@several
@given(functions, seeds, st.sampled_from([(1, 0), (2, 3)]))
def test_zero_rows_and_columns_stay_zero_and_change_nothing(function, seed, padding):
    rows, columns = padding
    x = matrix((5, 9), seed)
    padded = iterated(function, np.pad(x, ((0, rows), (0, columns))))
    np.testing.assert_array_equal(padded[5:], 0)
    np.testing.assert_array_equal(padded[:, 9:], 0)
    assert relative_error(padded[:5, :9], iterated(function, x)) < ROUNDING[function]


@several
@given(functions, seeds, st.sampled_from([(1,), (3,), (2, 2)]))
def test_a_batch_is_its_matrices(function, seed, batch):
    x = matrix((*batch, 9, 5), seed)
    result = iterated(function, x)
    assert result.shape == x.shape
    for index in np.ndindex(*batch):
        assert relative_error(result[index], iterated(function, x[index])) < ROUNDING[function]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_else_is_in_the_batch_changes_no_bit(function):
    x = matrix((3, 5, 9), 0)
    others = x * np.array([1, 1e9, 1e9], np.float32)[:, None, None]
    np.testing.assert_array_equal(iterated(function, x)[0], iterated(function, others)[0])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5, 9), (1, 1)])
def test_zero_gives_zero(function, shape):
    np.testing.assert_array_equal(iterated(function, np.zeros(shape, np.float32)), 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 3, 4), (2, 0, 4)])
def test_empty_input_gives_empty_output(function, shape):
    assert iterated(function, np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize("value", [3e-30, -5.0, 1e30])
def test_vectors_become_unit_vectors(value):
    x = (value * gaussian(1, 8)).astype(np.float32)
    unit = np.asarray(x, np.float64) / np.linalg.norm(np.asarray(x, np.float64))
    np.testing.assert_allclose(newton_schulz(x, "polar_express", 8), unit, atol=1e-6)
    np.testing.assert_allclose(newton_schulz(x.T, "polar_express", 8), unit.T, atol=1e-6)
    np.testing.assert_allclose(
        newton_schulz(x[:, :1], "polar_express", 8), np.sign(x[:, :1]), atol=1e-6
    )
