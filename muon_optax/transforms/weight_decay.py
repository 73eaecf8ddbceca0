"""Weight decay, by optax."""

import functools
from typing import Any

import jax
import optax
from jax.core import Tracer

from muon_optax.tree_paths import align

__all__ = ["decayed_weights"]


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
