"""Small wrappers around optax transformations: dtypes, sums, and leaves without a gradient."""

import functools
from typing import Any

import jax
import optax

from muon_optax._internal.dtypes import as_dtype, wide_dtype
from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import (
    cast_like,
    leaves_with_segments,
    with_leaves,
    without_absent,
)
from muon_optax.sharding.placement import to_types_of
from muon_optax.sharding.reductions import reduced_like, summed
from muon_optax.transforms.moments import first_moments, map_moments

__all__ = [
    "in_float32",
    "passing_over",
    "summing",
    "widened",
    "with_params_like_updates",
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


def with_params_like_updates(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Gives `inner` parameters that are sharded like the updates, along Explicit mesh axes."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        if params is not None:
            params = to_types_of(updates, params)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def widened(tree: Any) -> Any:
    """The tree with its floating-point leaves in float32 at least.

    Example:
      >>> import jax.numpy as jnp
      >>> widened({"mu": jnp.ones(2, "bfloat16"), "count": jnp.ones((), "int32")})
      {'count': Array(1, dtype=int32), 'mu': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: as_dtype(x, wide_dtype(x.dtype)) if is_float_leaf(x) else x, tree)


def summing(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Sums unreduced gradients, and gives updates the types of their parameters.

    A sum goes by a reduce-scatter to where its moment is sharded, as the type of that tells. The
    inner transformation gets plain types. Without parameters, whose shardings updates shall have,
    each device keeps its block.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return inner.init(summed(params))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            new, new_state = inner.update(summed(updates), state, **extra_args)
            return reduced_like(updates, new, updates), new_state
        grads = summed(updates, functools.partial(first_moments, state))
        new, new_state = inner.update(grads, state, summed(params), **extra_args)
        return reduced_like(params, new, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def passing_over(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Passes over leaves without a gradient, None or masked: their moments stay as they are.

    `equinox.filter_grad` makes such gradients. The parameters may have leaves there, as a whole
    model has functions and strings, and optax's transformations take that; but `scale_by_adam`
    would put None in the place of a moment, and the state would change its structure. None in the
    place of the whole tree of gradients is as None for each leaf.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args) -> Any:
        if updates is None:
            leaves = first_moments(state) if params is None else dict(leaves_with_segments(params))
            if leaves:  # None is an empty tree, too
                return None, update(dict.fromkeys(leaves), state, params, **extra_args)[1]
        if params is not None:
            params = without_absent(params, updates)
        present = map_moments(lambda tree: without_absent(tree, updates), state)
        grads: Any = updates
        new, new_state = inner.update(grads, present, params, **extra_args)
        return new, map_moments(lambda tree, old: with_leaves(old, tree), new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
