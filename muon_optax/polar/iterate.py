"""The quintic Newton–Schulz iteration, in its standard and in its Gram form.

Every step is X ← (aI + bA + cA²)X with A = XXᴴ, for X wide. A tall X is worked on as its transpose,
which only changes the axes that products sum over: `axis` is the long one, -1 or -2. Nothing here
adds a batch dimension, as a product with one is slower on CPU.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muon_optax.polar.coefficients import Row, Schedule
from muon_optax.polar.normalize import Map, identity, precondition, scaled
from muon_optax.polar.symmetric import commuting_product, gram_matrix, product

__all__ = ["GramExchange", "gram", "standard"]


class GramExchange(NamedTuple):
    """How devices that hold slices of the same matrices work together; by default, one does.

    Attributes:
      maximum: (L, 1, 1) local maxima -> their maxima over the devices.
      reduce: (L, m, m) local Gram matrices -> (l, m, m), the sums of those that this device owns.
      spread: (l, ...) results of the owned matrices -> (L, ...), those of all matrices.
    """

    maximum: Map = identity
    reduce: Map = identity
    spread: Map = identity


ALONE = GramExchange()


def standard(x: jax.Array, schedule: Schedule, *, axis: int, precision: str | None) -> jax.Array:
    """The iteration as it is written: two products of X's size and one small one a step.

    Args:
      x: (..., m, n), not empty; its dtype is that of the products.
      schedule: the coefficients and the normalisation.
      axis: the long axis, -1 or -2.
      precision: as in `jax.lax.dot_general`.

    Returns:
      An array like `x`.
    """

    def square(a: jax.Array) -> jax.Array:
        a = a.astype(x.dtype)
        return commuting_product(a, a, precision)

    scale = None
    for step, row in enumerate(schedule.rows):
        a = gram_matrix(x, axis, precision)
        if step == 0:
            a, a2, scale = precondition(a, schedule, square)
        else:
            a2, scale = square(a), None
        x = _apply(_factor(row, a, a2), scale, x, axis, precision)
    return x


def gram(
    x: jax.Array,
    schedule: Schedule,
    *,
    axis: int,
    precision: str | None,
    exchange: GramExchange = ALONE,
) -> jax.Array:
    """The iteration on R = XXᴴ, which touches X only at the start, at restarts and at the end.

    R and the product Q of the steps' factors are float32 at least: in half precision they diverge,
    so their own products never have bfloat16 inputs either, the default on TPU.
    Source: Dao AI Lab, "Gram Newton–Schulz", github.com/Dao-AILab/gram-newton-schulz.

    Args:
      x: (..., m, n), not empty; with an `exchange`, this device's slice along `axis`.
      schedule: the coefficients, the normalisation, and the restarts.
      axis: the long axis, -1 or -2.
      precision: as in `jax.lax.dot_general`.
      exchange: Sums over the devices that hold `x`.

    Returns:
      An array like `x`.
    """
    times = functools.partial(commuting_product, precision=_at_least_high(precision))
    for start, end in itertools.pairwise((0, *schedule.restarts, len(schedule.rows))):
        r = exchange.reduce(gram_matrix(x, axis, precision))
        if start == 0:
            r, r2, scale = precondition(r, schedule, lambda r: times(r, r))
            scale = exchange.spread(scale)
        else:
            r2, scale = times(r, r), None
        q = _gram_steps(schedule.rows[start:end], r, r2, times)
        x = _apply(exchange.spread(q), scale, x, axis, precision)
    return x


def _gram_steps(
    rows: tuple[Row, ...],
    r: jax.Array,
    r2: jax.Array,
    times: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The product Q of some steps' factors, all polynomials of R."""
    q = factor = _factor(rows[0], r, r2)
    for row in rows[1:]:
        r = times(factor, times(r, factor))
        factor = _factor(row, r, times(r, r))
        q = times(factor, q)
    return q


def _at_least_high(precision: str | None) -> str | None:
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    effective = precision or default
    return "high" if effective in (None, "default", "fastest", "bfloat16") else precision


def _factor(row: Row, a: jax.Array, a2: jax.Array) -> jax.Array:
    """The factor aI + bA + cA². With aI in it, its product with X needs no pass over X after it."""
    return row[0] * jnp.eye(a.shape[-1], dtype=a.dtype) + row[1] * a + row[2] * a2


def _apply(
    factor: jax.Array, scale: jax.Array | None, x: jax.Array, axis: int, precision: str | None
) -> jax.Array:
    """``factor @ (scale * x)``, or its like for `axis` -2, rounded once, with no pass over `x`.

    In half precision the scale comes after the sum: float16 has no room for small factors.
    """
    after = None
    if scale is not None:
        after = jnp.max(scale, -2, keepdims=True)
        factor = scaled(factor, (scale / after if x.dtype.itemsize < 4 else scale).mT)
    factor = factor.astype(x.dtype)
    if axis == -1:
        y = product(factor, x, (-1, -2), precision)
    else:
        y = product(x, factor, (-1, -1), precision)
    if after is not None and x.dtype.itemsize < 4:
        y = scaled(y, after)
    return y.astype(x.dtype)
