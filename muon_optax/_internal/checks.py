"""Checks of options at construction; errors tell the value got and those allowed."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = [
    "check_choice",
    "check_decay",
    "check_flag",
    "check_float_dtype",
    "check_instance",
    "check_mask",
    "check_number",
    "check_static",
    "is_float_dtype",
]


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a bool: 'false' and 1 are likely mistakes."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Raises TypeError unless `value` is None or of the kind."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or None, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")


def check_mask(name: str, mask: Any) -> None:
    """Raises TypeError unless `mask` is None, a function or a tree of bools."""
    if callable(mask):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        check_flag(name + jax.tree_util.keystr(path), leaf)


def check_number(name: str, value: Any, *, schedule: bool = False, below: float = math.inf) -> None:
    """Checks a finite number, at least 0; of a traced value only its type.

    Args:
      name: the option's name, for the message.
      value: the value given.
      schedule: a function of the update count is fine too.
      below: the number must be less.

    Raises:
      TypeError: for anything but a real scalar (or a schedule).
      ValueError: for a number out of range.
    """
    if callable(value) and schedule:
        return
    if callable(value):
        raise TypeError(
            f"{name} must be a number, got the function {value!r}; wrap the optimizer in "
            "optax.inject_hyperparams to schedule it"
        )
    if not _is_real_scalar(value):
        kinds = "a number or a schedule" if schedule else "a number"
        raise TypeError(f"{name} must be {kinds}, got {value!r}")
    if not isinstance(value, Tracer) and not 0 <= float(value) < below:
        allowed = "finite and not negative" if below == math.inf else f"in [0, {below})"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _is_real_scalar(value: Any) -> bool:
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        return False
    dtype = jnp.result_type(value)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return is_real and jnp.ndim(value) == 0


def check_decay(name: str, value: Any, *, below: float = 1.0) -> None:
    """Checks a decay rate in [0, 1), or an epsilon with its own bound.

    A half-precision array is refused: bfloat16 rounds 0.999 to 1, and 1e-8 is 0 in float16, as
    happens under `optax.inject_hyperparams` with half-precision parameters.

    Raises:
      TypeError: for a value that isn't a real number, or is a half-precision array.
      ValueError: for a value out of range.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} came as a {dtype} array, which rounds it too coarsely; give "
            "hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        )
    check_number(name, value, below=below)
    if not isinstance(value, Tracer) and np.float32(value) >= below:
        raise ValueError(f"{name} must stay below {below} in float32, got {value!r}")


def check_static(name: str, value: Any) -> None:
    """Raises TypeError for an array in place of an option that is fixed at construction.

    `optax.inject_hyperparams` makes one of each number, and calls each function as a schedule.
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} came as a JAX array, which optax.inject_hyperparams makes of every number and "
            f"function (jnp.bfloat16 is one); pass static_args=({name!r},)"
        )


def check_float_dtype(name: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype` is None or a floating-point dtype of 16 bits or more."""
    check_static(name, dtype)
    if dtype is not None and not is_float_dtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} must be a floating-point dtype or None, got {dtype!r} (16 bits or more)"
        )


def is_float_dtype(dtype: Any, kind: Any) -> bool:
    """Whether `dtype` names a dtype of 16 bits or more of a kind.

    Args:
      dtype: the value given.
      kind: `jnp.floating` for real ones, `jnp.inexact` for complex ones too.

    Returns:
      False for a value that names no dtype.

    Example:
      >>> is_float_dtype("bfloat16", jnp.floating), is_float_dtype("bf16", jnp.floating)
      (True, False)
    """
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        return False
    return jnp.issubdtype(known, kind) and known.itemsize > 1
