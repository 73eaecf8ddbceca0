"""The matmul of the iterations: batched, with sums in float32 at least."""

import jax
from jax import lax

from muon_optax._internal.dtypes import wide_dtype

__all__ = ["matmul"]


def matmul(
    x: jax.Array, y: jax.Array, axes: tuple[int, int], precision: str | None = None
) -> jax.Array:
    """Sums over ``axes[0]`` of `x` and ``axes[1]`` of `y`, each -1 or -2, for each matrix.

    Args:
      x: (..., m, k) or (..., k, m).
      y: (..., k, n) or (..., n, k), of the dtype of `x`.
      axes: which axes have length k.
      precision: as in `jax.lax.dot_general`.

    Returns:
      (..., m, n), float32 for half-precision input.

    Example:
      >>> import jax.numpy as jnp
      >>> matmul(jnp.ones((2, 3)), jnp.ones((4, 3)), (-1, -1)).shape
      (2, 4)
    """
    batch = tuple(range(x.ndim - 2))
    return lax.dot_general(
        x,
        y,
        (((x.ndim + axes[0],), (y.ndim + axes[1],)), (batch, batch)),
        precision=precision,
        preferred_element_type=wide_dtype(x.dtype),
    )
