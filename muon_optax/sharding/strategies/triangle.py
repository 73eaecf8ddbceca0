"""Hermitian matrices as their lower triangles, for collectives: the upper ones need not be sent."""

import itertools
import math

import jax
import jax.numpy as jnp

__all__ = ["from_lower_triangle", "lower_triangle", "triangle_entries"]

# A triangle is cut in so many strips of rows, each of which ends with its block on the diagonal:
# 9/16 of the matrix. Strips are copied at the memory's rate; exact triangles need a slow gather.
_STRIPS = 8


def triangle_entries(m: int) -> int:
    """The number of entries that `lower_triangle` keeps of an m×m matrix.

    Example:
      >>> triangle_entries(64) / 64**2
      0.5625
    """
    return sum((end - start) * end for start, end in _strips(m))


def lower_triangle(x: jax.Array) -> jax.Array:
    """The entries on and below the diagonal, and the few above it in the blocks on the diagonal.

    Args:
      x: (..., m, m).

    Returns:
      (..., triangle_entries(m)).
    """
    strips = [x[..., start:end, :end] for start, end in _strips(x.shape[-1])]
    return jnp.concatenate([y.reshape(*y.shape[:-2], math.prod(y.shape[-2:])) for y in strips], -1)


def from_lower_triangle(x: jax.Array, m: int) -> jax.Array:
    """Undoes `lower_triangle`.

    Args:
      x: (..., triangle_entries(m)).
      m: rows of the matrix.

    Returns:
      (..., m, m), Hermitian to the last bit; the diagonal is as it was given.

    Example:
      >>> x = jnp.array([[1.0, 2.0], [2.0, 3.0]])
      >>> print(from_lower_triangle(lower_triangle(x), 2))
      [[1. 2.]
       [2. 3.]]
    """
    rows, taken = [], 0
    for start, end in _strips(m):
        size = (end - start) * end
        strip = x[..., taken : taken + size].reshape(*x.shape[:-1], end - start, end)
        rows.append(jnp.pad(strip, [(0, 0)] * (x.ndim) + [(0, m - end)]))
        taken += size
    lower = jnp.concatenate(rows, -2)
    is_below = jnp.tri(m, dtype=bool).reshape((1,) * (x.ndim - 1) + (m, m))
    return jnp.where(is_below, lower, lower.mT.conj())


def _strips(m: int) -> list[tuple[int, int]]:
    """The first row of each strip, and the row after its last."""
    edges = sorted({m * i // _STRIPS for i in range(_STRIPS + 1)})
    return list(itertools.pairwise(edges))
