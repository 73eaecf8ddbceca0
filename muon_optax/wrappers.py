"""Small wrappers around optax transformations that keep dtypes and layouts."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax.dtypes import wide_dtype
from muon_optax.leaf_kinds import is_float_leaf
from muon_optax.momentum import map_moments, moment_dtype, zeros_like_parameter
from muon_optax.tree_paths import align, cast_like, with_leaves, without_absent

__all__ = [
    "chain_in_order",
    "decayed_weights",
    "in_float32",
    "in_parameter_layout",
    "passing_over",
    "widened",
]


def in_float32(
    inner: optax.GradientTransformation, *, takes_half: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Forms updates in float32 at least; updates and state keep the dtypes they came with.

    Half-precision learning rates, decays and parameters then round once, at the end.

    Args:
      inner: what forms the updates.
      takes_half: whether it gets half-precision gradients as they are, and widens them itself.

    Returns:
      The transformation.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        grads = updates if takes_half else widened(updates)
        new, new_state = inner.update(grads, state, widened(params), **extra_args)
        return cast_like(new, updates), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def widened(tree: Any) -> Any:
    """The tree with its floating-point leaves in float32 at least.

    Example:
      >>> widened({"mu": jnp.ones(2, "bfloat16"), "count": jnp.ones((), "int32")})
      {'count': Array(1, dtype=int32), 'mu': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)) if is_float_leaf(x) else x, tree)


def in_parameter_layout(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Makes the per-parameter state of `inner`, zero at first, lie where the parameters lie.

    optax's `zeros_like` loses the layout under `jit`: it raises on Explicit meshes without a
    context and puts all on device 0 on Auto ones. State of complex parameters is complex, and that
    of real ones real, whatever dtype `inner` is told to keep it in.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        state = jax.eval_shape(inner.init, shapes)
        return optax.tree_map_params(
            inner,
            lambda s, p: zeros_like_parameter(p, moment_dtype(s.dtype, p.dtype)),
            state,
            params,
            transform_non_params=lambda s: jnp.zeros(s.shape, s.dtype),
        )

    return optax.GradientTransformationExtraArgs(init, inner.update)


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


def chain_in_order(
    transforms: Sequence[optax.GradientTransformation], order: Sequence[int]
) -> optax.GradientTransformationExtraArgs:
    """`optax.chain`, but updates pass in the given order; the states lie in that of `transforms`.

    Example:
      >>> double, add_one = optax.scale(2.0), optax.stateless(lambda u, p: u + 1.0)
      >>> tx = chain_in_order([double, add_one], (1, 0))
      >>> tx.update(3.0, tx.init(0.0))[0]
      8.0
    """
    parts = [optax.with_extra_args_support(t) for t in transforms]

    def init(params):
        return tuple(part.init(params) for part in parts)

    def update(updates, state, params=None, **extra_args):
        states = list(state)
        for i in order:
            updates, states[i] = parts[i].update(updates, state[i], params, **extra_args)
        return updates, tuple(states)

    return optax.GradientTransformationExtraArgs(init, update)


def decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any
) -> optax.GradientTransformation:
    """Optax's weight decay; nothing at all, and no need of parameters, for a number known as 0."""
    if mask is not None and not callable(mask):
        mask = functools.partial(_aligned, mask)
    if callable(weight_decay) or isinstance(weight_decay, Tracer) or float(weight_decay) != 0:
        return optax.add_decayed_weights(weight_decay, mask)
    nothing = optax.identity()
    return nothing if mask is None else optax.masked(nothing, mask)


def _aligned(mask: Any, tree: Any) -> Any:
    """A mask in the containers of `tree`, met by path."""
    return jax.tree.structure(tree).unflatten(align(mask, tree, what="the weight decay mask"))
