"""The quintic Newton–Schulz iteration, in its standard and in its Gram form.

Every step is X ← (aI + bA + cA²)X with A = XXᴴ, for X wide. A tall X is worked on as its transpose,
which only changes the axes that matmuls sum over: `axis` is the long one, -1 or -2. Nothing here
adds a batch dimension, as a matmul with one is slower on CPU.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muon_optax.orthogonalization.coefficients import Row, Schedule
from muon_optax.orthogonalization.hermitian import commuting_matmul, gram_matrix
from muon_optax.orthogonalization.matmul import matmul
from muon_optax.orthogonalization.normalize import Map, identity, precondition, scaled

__all__ = ["ALONE", "GramCollectives", "gram", "standard"]


class GramCollectives(NamedTuple):
    """How devices that hold slices of the same matrices work together; by default, one does.

    Attributes:
      maximum: (L, 1, 1) local maxima -> their maxima over the devices.
      reduce: (L, m, m) local Gram matrices -> (l, m, m), the sums of those that this device owns.
      to_all: (l, ...) results of the owned matrices -> (L, ...), those of all matrices; the
        identity where every device owns all of them.
    """

    maximum: Map = identity
    reduce: Map = identity
    to_all: Map = identity


ALONE = GramCollectives()


def standard(
    x: jax.Array,
    schedule: Schedule,
    *,
    axis: int,
    precision: str | None,
    reduce: Map = identity,
) -> jax.Array:
    """The iteration as it is written: two matmuls of X's size and one small one a step.

    Args:
      x: (..., m, n), not empty; its dtype is that of the matmuls.
      schedule: the coefficients and the normalisation.
      axis: the long axis, -1 or -2.
      precision: as in `jax.lax.dot_general`.
      reduce: (..., m, m) Gram matrices of slices along `axis` -> their sums over the devices that
        hold the slices of a matrix, on each of these devices; by default `x` is whole.

    Returns:
      An array like `x`.
    """

    def square(a: jax.Array) -> jax.Array:
        a = a.astype(x.dtype)
        return commuting_matmul(a, a, precision)

    scale = None
    for step, row in enumerate(schedule.rows):
        a = reduce(gram_matrix(x, axis, precision))
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
    collectives: GramCollectives = ALONE,
) -> jax.Array:
    """The iteration on R = XXᴴ, which touches X only at the start, at restarts and at the end.

    R and the product Q of the steps' factors are float32 at least. Q magnifies small singular
    values a hundredfold and large ones not at all, as a difference of large entries, so that its
    rounding is felt most along large ones. So all matmuls of float32 matrices have precision
    'highest' (even 'high' means TF32 on GPUs), and in half precision Q is multiplied by X in two
    parts, see `_apply`.
    Source: Dao AI Lab, "Gram Newton–Schulz", github.com/Dao-AILab/gram-newton-schulz.

    Args:
      x: (..., m, n), not empty; with `collectives`, this device's slice along `axis`.
      schedule: the coefficients, the normalisation, and the restarts.
      axis: the long axis, -1 or -2.
      collectives: Sums over the devices that hold `x`.

    Returns:
      An array like `x`.
    """
    precision = "highest"
    times = functools.partial(commuting_matmul, precision=precision)
    for start, end in itertools.pairwise((0, *schedule.restarts, len(schedule.rows))):
        r = collectives.reduce(gram_matrix(x, axis, precision))
        if start == 0:
            r, r2, scale = precondition(r, schedule, lambda r: times(r, r))
            scale = collectives.to_all(scale)
        else:
            r2, scale = times(r, r), None
        q = _gram_steps(schedule.rows[start:end], r, r2, times)
        x = _apply(collectives.to_all(q), scale, x, axis, precision, split=True)
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


def _factor(row: Row, a: jax.Array, a2: jax.Array) -> jax.Array:
    """The factor aI + bA + cA². With aI in it, its matmul with X needs no pass over X after it."""
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    eye = eye.reshape((1,) * (a.ndim - 2) + eye.shape)  # for jax.numpy_rank_promotion("raise")
    return row[0] * eye + row[1] * a + row[2] * a2


def _apply(
    factor: jax.Array,
    scale: jax.Array | None,
    x: jax.Array,
    axis: int,
    precision: str | None,
    split: bool = False,
) -> jax.Array:
    """``factor @ (scale * x)``, or its like for `axis` -2, rounded once, with no pass over `x`.

    In half precision the scale comes after the sum: float16 has no room for small factors.

    Args:
      factor: (..., m, m), float32 at least.
      scale: (..., 1, 1) or (..., m, 1), or None for 1.
      x: (..., m, n), or (..., n, m) for `axis` -2.
      axis: the long axis of `x`.
      precision: as in `jax.lax.dot_general`.
      split: Whether in half precision two matrices are multiplied by `x`, the factor rounded and
        what rounding took from it, so that the factor has 16 bits (bfloat16) or 22 (float16).
    """
    is_half = x.dtype.itemsize < 4
    after = None
    if scale is not None:
        after = jnp.max(scale, -2, keepdims=True)
        factor = scaled(factor, (scale / after if is_half else scale).mT)

    def times_x(factor: jax.Array) -> jax.Array:
        if axis == -1:
            return matmul(factor, x, (-1, -2), precision)
        return matmul(x, factor, (-1, -1), precision)

    if is_half and split:
        # Not by astype and back, which XLA takes for no change at all where it may keep precision.
        info = jnp.finfo(x.dtype)
        rounded = lax.reduce_precision(factor, info.nexp, info.nmant)
        y = times_x(rounded.astype(x.dtype)) + times_x((factor - rounded).astype(x.dtype))
    else:
        y = times_x(factor.astype(x.dtype))
    if after is not None and is_half:
        y = scaled(y, after)
    return y.astype(x.dtype)
