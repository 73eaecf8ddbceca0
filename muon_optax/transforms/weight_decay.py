"""Weight decay: optax's, one that acts where the step agrees, and one coupled to the rate."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import check_mask, check_number
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.tree_paths import align
from muon_optax.sharding.placement import keeping_placement
from muon_optax.transforms.matrix_sums import products
from muon_optax.transforms.standalone import value_at, weights_of
from muon_optax.transforms.wrappers import passing_over

__all__ = ["add_cautious_weight_decay", "coupled_decay", "decayed_weights", "may_decay"]


def decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any
) -> optax.GradientTransformation:
    """Optax's weight decay; nothing at all, and no need of parameters, for a number known as 0."""
    if mask is not None and not callable(mask):
        mask = functools.partial(_aligned, mask)
    if may_decay(weight_decay):
        return optax.add_decayed_weights(weight_decay, mask)
    nothing = optax.identity()
    return nothing if mask is None else optax.masked(nothing, mask)


def may_decay(weight_decay: optax.ScalarOrSchedule) -> bool:
    """Whether a decay isn't known to be 0."""
    return callable(weight_decay) or isinstance(weight_decay, Tracer) or float(weight_decay) != 0


def add_cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Cautious weight decay (arXiv 2510.12402): decays entries whose step is towards zero anyway.

    Adds weight_decay times W to the direction U in the entries where U W >= 0 (of complex ones, the
    real part of conj(U) W). Stands where `optax.add_decayed_weights` does: after all that changes
    signs, and before `scale_by_learning_rate`, which flips them: behind that, it would decay the
    other entries.

    Args:
      weight_decay: a number, an array or a schedule of the update count.
      mask: a tree of bools (or a prefix of one), or a function that returns one: which leaves
        decay.

    Returns:
      A transformation, with state only for a schedule. Updates keep their dtype, and are formed in
      float32 at least. A number that is 0 adds nothing, and needs no parameters.

    Raises:
      ValueError, TypeError: for options out of range; at an update without parameters.

    Example:
      >>> tx = add_cautious_weight_decay(0.1)
      >>> weights, direction = jnp.array([1.0, 1.0, 1.0]), jnp.array([1.0, -1.0, 0.0])
      >>> tx.update(direction, tx.init(weights), weights)[0]
      Array([ 1.1, -1. ,  0.1], dtype=float32)
    """
    check_number("weight_decay", weight_decay, schedule=True)
    check_mask("mask", mask)
    plain = optax.add_decayed_weights(weight_decay)  # whose state this has, too
    is_something = may_decay(weight_decay)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if not is_something:
            return updates, state
        decay: Any = weight_decay
        if callable(weight_decay):
            decay = weight_decay(state.count)
            state = state._replace(count=optax.safe_increment(state.count))
        arrays, treedef = jax.tree.flatten(updates)
        weights = weights_of(params, updates, "add_cautious_weight_decay")
        rows = zip(arrays, weights, strict=True)
        return treedef.unflatten([_decayed(decay, u, w) for u, w in rows]), state

    whole = optax.GradientTransformationExtraArgs(plain.init, update)
    tx = keeping_placement(passing_over(whole))
    if mask is None:
        return tx
    wanted = mask if callable(mask) else functools.partial(_aligned, mask)
    return optax.with_extra_args_support(optax.masked(tx, wanted))


def coupled_decay(
    weight_decay: optax.ScalarOrSchedule,
    learning_rate: optax.ScalarOrSchedule,
    max_learning_rate: float,
) -> optax.Schedule:
    """Weight decay that falls with the learning rate: decay times rate, over the largest rate.

    For the argument `weight_decay` of `muon`, `add_cautious_weight_decay` and optax's own. As the
    learning rate multiplies decay once more, weights decay by its square: AdamC (arXiv 2506.02285),
    for normalised layers. The speedrun of modded-nanogpt decays by weight_decay times the square of
    the rate: `max_learning_rate=1`.

    Args:
      weight_decay: the decay at the largest learning rate; a number or a schedule.
      learning_rate: the optimizer's learning rate; a number or a schedule.
      max_learning_rate: the largest learning rate of the run.

    Returns:
      A schedule of the update count.

    Raises:
      ValueError, TypeError: for values out of range.

    Example:
      >>> rate = optax.linear_schedule(0.02, 0.0, 100)
      >>> decay = coupled_decay(0.1, rate, 0.02)
      >>> [round(float(decay(count)), 4) for count in (0, 75)]
      [0.1, 0.025]
    """
    check_number("weight_decay", weight_decay, schedule=True)
    check_number("learning_rate", learning_rate, schedule=True)
    check_number("max_learning_rate", max_learning_rate)
    if not isinstance(max_learning_rate, Tracer) and not float(max_learning_rate) > 0:
        raise ValueError(f"max_learning_rate must be positive, got {max_learning_rate!r}")

    def schedule(count: Any) -> jax.typing.ArrayLike:
        rate = value_at(learning_rate, count)
        return value_at(weight_decay, count) * (rate / max_learning_rate)

    return schedule


def _decayed(decay: jax.typing.ArrayLike, update: jax.Array, weights: jax.Array) -> jax.Array:
    dtype = wide_dtype(update.dtype, weights.dtype)
    wide, weights = update.astype(dtype), weights.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        agrees = products(wide, weights) >= 0
    else:
        agrees = jnp.sign(wide) * jnp.sign(weights) >= 0  # a product of small values would be 0
    factor = jnp.asarray(decay, jnp.finfo(dtype).dtype)
    return (wide + jnp.where(agrees, factor * weights, 0)).astype(update.dtype)


def _aligned(mask: Any, tree: Any) -> Any:
    """A mask in the containers of `tree`, met by path."""
    return jax.tree.structure(tree).unflatten(align(mask, tree, what="the weight decay mask"))
