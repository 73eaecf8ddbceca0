"""Hermitian matrices as their lower triangles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_optax.sharding.strategies.triangle import (
    from_lower_triangle,
    lower_triangle,
    triangle_entries,
)

SHAPES = [(1, 1), (3, 3), (8, 8), (2, 3, 37, 37), (0, 5, 5)]


@jax.jit
def triangles_and_back(matrices):
    triangles = [lower_triangle(x) for x in matrices]
    return triangles, [
        from_lower_triangle(t, x.shape[-1]) for t, x in zip(triangles, matrices, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_hermitian_matrix_comes_back(dtype):
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal(shape) for shape in SHAPES]
    if dtype == "complex64":
        matrices = [x + 1j * rng.standard_normal(x.shape) for x in matrices]
    matrices = [(x + np.swapaxes(x, -1, -2).conj()).astype(jnp.dtype(dtype)) for x in matrices]
    triangles, found = triangles_and_back(matrices)
    for x, triangle, back in zip(matrices, triangles, found, strict=True):
        assert triangle.shape == (*x.shape[:-2], triangle_entries(x.shape[-1]))
        assert triangle.dtype == dtype
        np.testing.assert_array_equal(back, x)


def test_what_is_above_the_diagonal_is_not_looked_at():
    x = np.arange(100.0, dtype=np.float32).reshape(10, 10)
    below = np.tril(x)
    _, (found,) = triangles_and_back([x])
    np.testing.assert_array_equal(found, below + below.T - np.diag(np.diag(x)))


@pytest.mark.parametrize(("m", "entries"), [(1, 1), (3, 6), (8, 36), (64, 36 * 64), (768, 331_776)])
def test_little_more_than_half_of_the_entries_are_sent(m, entries):
    assert triangle_entries(m) == entries
