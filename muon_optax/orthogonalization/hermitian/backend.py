"""The interface of a backend for Hermitian matmuls.

A backend is a file of its own, as `halved`, and a line of `BACKENDS` in this package's `__init__`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

__all__ = ["HermitianBackend", "HermitianMatmul"]


class HermitianMatmul(Protocol):
    """A matmul whose result is known to be Hermitian."""

    def __call__(
        self, x: jax.Array, y: jax.Array, axis: int, precision: str | None, /
    ) -> jax.Array:
        """XYᴴ for `axis` -1, and XᵀY̅ for -2.

        Args:
          x: (..., m, n), or (..., n, m) for `axis` -2.
          y: like `x`; `x` itself for a Gram matrix or a square.
          axis: the axis that is summed over, -1 or -2.
          precision: as in `jax.lax.dot_general`.

        Returns:
          (..., m, m), float32 for half-precision input.
        """
        ...


class HermitianBackend(NamedTuple):
    """A way to compute Hermitian matmuls on some platforms.

    Attributes:
      platforms: where it runs, as `jax.lax.platform_dependent` calls them: 'cpu', 'cuda', 'rocm'
        or 'tpu'.
      takes: whether it gains anything for results of m rows.
      matmul: the matmul.
      flops: FLOPs of the matmul for an m×m result and sums over n; the choice between the standard
        and the Gram method counts with it.
    """

    platforms: tuple[str, ...]
    takes: Callable[[int], bool]
    matmul: HermitianMatmul
    flops: Callable[[int, int], int]
