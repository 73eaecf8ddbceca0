"""Hermitian matrices as their lower triangles."""

import jax.numpy as jnp
import numpy as np
import pytest

from muon_optax.sharding.strategies.triangle import (
    from_lower_triangle,
    lower_triangle,
    triangle_entries,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (8, 8), (2, 3, 37, 37), (0, 5, 5)])
def test_a_hermitian_matrix_comes_back(shape, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    if dtype == "complex64":
        x = x + 1j * rng.standard_normal(shape)
    x = jnp.asarray(x + np.swapaxes(x, -1, -2).conj()).astype(dtype)
    triangle = lower_triangle(x)
    assert triangle.shape == (*shape[:-2], triangle_entries(shape[-1]))
    assert triangle.dtype == dtype
    np.testing.assert_array_equal(from_lower_triangle(triangle, shape[-1]), x)


def test_what_is_above_the_diagonal_is_not_looked_at():
    x = np.arange(100.0).reshape(10, 10)
    below = np.tril(x)
    found = from_lower_triangle(lower_triangle(jnp.asarray(x)), 10)
    np.testing.assert_array_equal(found, below + below.T - np.diag(np.diag(x)))


@pytest.mark.parametrize(("m", "entries"), [(1, 1), (3, 6), (8, 36), (64, 36 * 64), (768, 331_776)])
def test_little_more_than_half_of_the_entries_are_sent(m, entries):
    assert triangle_entries(m) == entries
