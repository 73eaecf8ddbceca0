"""Matmuls that are Hermitian by construction, by the backend of the platform they run on.

A new backend, such as a kernel for GPUs, is a file beside `halved` and its line in `BACKENDS`.
"""

import functools

import jax
from jax import lax

from muon_optax.orthogonalization.hermitian.backend import HermitianBackend, HermitianMatmul
from muon_optax.orthogonalization.hermitian.halved import HALVED
from muon_optax.orthogonalization.matmul import matmul

__all__ = ["BACKENDS", "commuting_matmul", "gram_matrix", "hermitian_flops"]

# The first that takes a matmul on a platform has it; elsewhere it is a plain one.
BACKENDS: tuple[HermitianBackend, ...] = (HALVED,)


def gram_matrix(x: jax.Array, axis: int, precision: str | None = None) -> jax.Array:
    """``XXᴴ`` for ``axis=-1``, ``XᵀX̅`` for ``axis=-2``.

    Args:
      x: (..., m, n) or (..., n, m).
      axis: the axis of length n, which is summed over: -1 or -2.
      precision: as in `jax.lax.dot_general`.

    Returns:
      (..., m, m), float32 for half-precision input.

    Example:
      >>> import jax.numpy as jnp
      >>> print(gram_matrix(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), -2))
      [[35. 44.]
       [44. 56.]]
    """

    def plain(x: jax.Array, y: jax.Array, axis: int, precision: str | None) -> jax.Array:
        return matmul(x, y.conj(), (axis, axis), precision)

    return _on_platform(plain, x.shape[-3 - axis], axis, precision, x)


def commuting_matmul(x: jax.Array, y: jax.Array, precision: str | None = None) -> jax.Array:
    """``XY`` of Hermitian matrices that commute, so that the matmul is Hermitian too.

    Where halves are mirrored, the result is Hermitian to the last bit; where not, this is XY and
    not XYᴴ. Both matter: a factor's skew rounding error, once transposed, grows by 2a² a step.

    Args:
      x: (..., m, m), Hermitian.
      y: (..., m, m), Hermitian; a polynomial of `x`, for example.
      precision: as in `jax.lax.dot_general`.

    Returns:
      (..., m, m), float32 for half-precision input.

    Example:
      >>> import jax.numpy as jnp
      >>> print(commuting_matmul(jnp.diag(jnp.array([2.0, 3.0])), jnp.eye(2)))
      [[2. 0.]
       [0. 3.]]
    """

    def plain(x: jax.Array, y: jax.Array, axis: int, precision: str | None) -> jax.Array:
        return matmul(x, y, (axis, -2), precision)

    # A square keeps its one factor, so that a backend can see that it is one.
    return _on_platform(plain, x.shape[-1], -1, precision, *((x,) if x is y else (x, y)))


def hermitian_flops(m: int, n: int) -> int:
    """FLOPs of an m×m matmul, known to be Hermitian, that sums over n, by the best backend.

    Of any platform: plans are made where no device need be, and the choice between the methods
    should not change with the machine that makes the plan.

    Example:
      >>> hermitian_flops(1024, 10) == 0.625 * (2 * 1024 * 1024 * 10)
      True
      >>> hermitian_flops(3, 10) == 2 * 3 * 3 * 10
      True
    """
    taken = [backend.flops(m, n) for backend in _backends(m).values()]
    return min(taken, default=2 * m * m * n)


def _backends(m: int) -> dict[str, HermitianBackend]:
    """By platform, the backend for results of m rows."""
    taken = [backend for backend in reversed(BACKENDS) if backend.takes(m)]
    return {platform: backend for backend in taken for platform in backend.platforms}


def _on_platform(
    plain: HermitianMatmul, m: int, axis: int, precision: str | None, *factors: jax.Array
) -> jax.Array:
    """Calls the backend of the platform that the program is lowered for, or the plain matmul."""

    def of(function: HermitianMatmul, *factors: jax.Array) -> jax.Array:
        return function(factors[0], factors[-1], axis, precision)

    default = functools.partial(of, plain)
    ways = {name: functools.partial(of, x.matmul) for name, x in _backends(m).items()}
    return lax.platform_dependent(*factors, default=default, **ways) if ways else default(*factors)
