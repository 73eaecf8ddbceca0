"""Small wrappers around optax transformations: dtypes, and leaves without a gradient."""

from typing import Any

import jax
import optax

from muon_optax._internal.dtypes import as_dtype, wide_dtype
from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import cast_like, with_leaves, without_absent
from muon_optax.transforms.moments import map_moments

__all__ = [
    "in_float32",
    "passing_over",
    "widened",
]


def in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Forms updates in float32 at least; updates and state keep the dtypes they came with.

    Half-precision learning rates, decays and parameters then round once, at the end.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        new, new_state = inner.update(widened(updates), state, widened(params), **extra_args)
        return cast_like(new, updates), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def widened(tree: Any) -> Any:
    """The tree with its floating-point leaves in float32 at least.

    Example:
      >>> import jax.numpy as jnp
      >>> widened({"mu": jnp.ones(2, "bfloat16"), "count": jnp.ones((), "int32")})
      {'count': Array(1, dtype=int32), 'mu': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: as_dtype(x, wide_dtype(x.dtype)) if is_float_leaf(x) else x, tree)


def passing_over(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Passes over leaves without a gradient, None or masked: their moments stay as they are.

    `equinox.filter_grad` makes such gradients. The parameters may have leaves there, as a whole
    model has functions and strings, and optax's transformations take that; but `scale_by_adam`
    would put None in the place of a moment, and the state would change its structure.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        if params is not None:
            params = without_absent(params, updates)
        present = map_moments(lambda tree: without_absent(tree, updates), state)
        new, new_state = inner.update(updates, present, params, **extra_args)
        return new, map_moments(lambda tree, old: with_leaves(old, tree), new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
