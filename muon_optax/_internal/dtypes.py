"""Dtypes to compute in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["compute_dtype", "wide_dtype"]


def wide_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype to form sums in: that of the operands, but at least float32.

    Example:
      >>> wide_dtype("bfloat16"), wide_dtype("float16", "complex64")
      (dtype('float32'), dtype('complex64'))
    """
    with jax.numpy_dtype_promotion("standard"):  # the widening is meant
        return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def compute_dtype(ns_dtype: Any, own: Any) -> Any:
    """`ns_dtype`, but complex for complex leaves and real for real ones."""
    if ns_dtype is None:
        return own
    if jnp.issubdtype(own, jnp.complexfloating):
        return wide_dtype(ns_dtype, jnp.complex64)
    return jnp.finfo(ns_dtype).dtype
