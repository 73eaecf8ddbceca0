"""Small wrappers around optax transformations that keep dtypes and layouts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_optax.momentum import wide_dtype, zeros_like_parameter
from muon_optax.tree_paths import cast_like

__all__ = ["after", "decayed_weights", "in_float32", "in_parameter_layout"]


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Forms updates in float32 at least; updates and state keep the dtypes they came with.

    Half-precision learning rates, decays and parameters then round once, at the end.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        new, new_state = inner.update(_widen(updates), state, _widen(params), **extra_args)
        return cast_like(new, updates), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def in_parameter_layout(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Makes the per-parameter state of `inner`, zero at first, lie where the parameters lie.

    optax's `zeros_like` loses the layout under `jit`: it raises on Explicit meshes without a
    context and puts all on device 0 on Auto ones.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        state = jax.eval_shape(inner.init, shapes)
        return optax.tree_map_params(
            inner,
            lambda s, p: zeros_like_parameter(p, s.dtype),
            state,
            params,
            transform_non_params=lambda s: jnp.zeros(s.shape, s.dtype),
        )

    return optax.GradientTransformationExtraArgs(init, inner.update)


def after(
    first: optax.GradientTransformation, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Feeds `inner` the updates of a stateless `first`; the state is that of `inner` alone."""

    def update(updates, state, params=None):
        updates, _ = first.update(updates, first.init(updates), params)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any
) -> optax.GradientTransformation:
    """Optax's weight decay; nothing at all, and no need of parameters, for the number 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return optax.identity()
    return optax.add_decayed_weights(weight_decay, mask)
