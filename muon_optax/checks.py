"""Checks of options at construction: what was got, and what is allowed."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = ["check_choice", "check_decay", "check_flag", "check_float_dtype", "check_number"]


def _is_known(value: Any) -> bool:
    return not isinstance(value, Tracer)


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a bool: 'false' and 1 are likely mistakes."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of the allowed strings."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")


def check_number(name: str, value: Any, *, low: float = 0.0, high: float = float("inf")) -> None:
    """Raises unless `value` is a real scalar in [low, high]; schedules and traced values pass."""
    if callable(value):
        return
    if isinstance(value, bool | np.bool_ | str) or value is None or jnp.ndim(value) != 0:
        raise TypeError(f"{name} must be a number, got {value!r}")
    if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
        raise TypeError(f"{name} must be real, got {value!r}")
    if _is_known(value) and not low <= float(value) <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value!r}")


def check_decay(name: str, value: Any, *, below: float = 1.0) -> None:
    """Checks a decay rate or an epsilon, in [0, below).

    A half-precision array is refused: bfloat16 rounds 0.999 to 1 and 1e-8 loses its digits, as
    happens under `optax.inject_hyperparams` with half-precision parameters.

    Raises:
      TypeError: for a value that isn't a real number, or is a half-precision array.
      ValueError: for a value out of range.
    """
    if callable(value):
        raise TypeError(
            f"{name} must be a number, got the function {value!r}; wrap the optimizer in "
            "optax.inject_hyperparams to schedule it"
        )
    check_number(name, value, high=below)
    if _is_known(value) and float(value) >= below:
        raise ValueError(f"{name} must be in [0, {below}), got {value!r}")
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} came as a {dtype} array, which rounds it too coarsely; give "
            "hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        )


def check_float_dtype(name: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype` is None or a floating-point dtype."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        raise TypeError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
