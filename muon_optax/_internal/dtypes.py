"""Dtypes to compute in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["as_dtype", "canonical", "compute_dtype", "scaled", "wide_dtype", "widened"]


def wide_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype to form sums in: that of the operands, but at least float32.

    Example:
      >>> wide_dtype("bfloat16"), wide_dtype("float16", "complex64")
      (dtype('float32'), dtype('complex64'))
    """
    with jax.numpy_dtype_promotion("standard"):  # the widening is meant
        return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def widened(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays in the dtype to form sums of them in.

    Example:
      >>> [x.dtype.name for x in widened(jnp.ones(2, "bfloat16"), jnp.ones(2, "float16"))]
      ['float32', 'float32']
    """
    dtype = wide_dtype(*(x.dtype for x in arrays))
    return tuple(x.astype(dtype) for x in arrays)


def as_dtype(x: Any, dtype: Any) -> jax.Array:
    """`x.astype(dtype)`, without an operation to trace where it has that dtype.

    JAX lets a weakly typed array take the dtype of the other operand, so such a one is cast all
    the same.
    """
    has_it = isinstance(x, jax.Array) and x.dtype == dtype and not x.weak_type
    return x if has_it else x.astype(dtype)


def canonical(tree: Any) -> Any:
    """The tree with numpy's arrays in the dtypes that JAX takes them for, as under `jit`.

    Outside of it a cast to a numpy array's own float64 would warn where x64 isn't enabled.

    Example:
      >>> canonical(np.ones(2)).dtype.name
      'float32'
    """

    def cast(x: Any) -> Any:
        is_number = isinstance(x, np.ndarray | np.generic) and np.issubdtype(x.dtype, np.number)
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) if is_number else x

    return jax.tree.map(cast, tree)


def compute_dtype(ns_dtype: Any, own: Any) -> Any:
    """`ns_dtype`, but complex for complex leaves and real for real ones."""
    if ns_dtype is None:
        return own
    if jnp.issubdtype(own, jnp.complexfloating):
        return wide_dtype(ns_dtype, jnp.complex64)
    return jnp.finfo(ns_dtype).dtype


def scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """The array times a factor, formed in float32 at least, in its own dtype; None is 1.

    Example:
      >>> scaled(jnp.ones(2, "bfloat16"), jnp.float32(2.0)).tolist()
      [2.0, 2.0]
    """
    if factor is None:
        return x
    return as_dtype(factor * as_dtype(x, wide_dtype(x.dtype)), x.dtype)
