"""Whether a saved optimizer state is one that an optimizer can go on with."""

from typing import Any

import jax
import optax

from muon_optax._internal.leaf_types import kind_of
from muon_optax._internal.tree_paths import (
    Segments,
    leaves_with_segments,
    path_name,
    raise_all,
)

__all__ = ["check_state"]


def check_state(tx: optax.GradientTransformation, params: Any, state: Any) -> None:
    """Raises where a saved state isn't one that `tx` makes for these parameters.

    Orbax reads a moment that a checkpoint doesn't have as None, leaves out one that isn't asked
    for, and casts. Check the checkpoint's metadata before it is restored, or the state after.

    Args:
      tx: the optimizer that is to go on: `muon`, or any optax transformation.
      params: the parameters, as arrays or shape structs.
      state: a restored state, the tree of Orbax's metadata, or the
        result of `flax.serialization.msgpack_restore`: leaves with shape and dtype, by their paths.

    Raises:
      ValueError: listing every leaf that is missing or isn't wanted, such as the moments of a
        parameter that changed its optimizer, and those of another shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from muon_optax import muon
      >>> params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
      >>> state = muon(0.02).init(params)
      >>> check_state(muon(0.1), params, state)
      >>> check_state(muon(0.1, partition={"up": "muon", "down": "adam"}), params, state)
      Traceback (most recent call last):
        ...
      ValueError: this state can't go on with this optimizer:
        inner_states/adam/inner_state/0/mu/down: none in the state, float32(8, 4) wanted
        inner_states/adam/inner_state/0/nu/down: none in the state, float32(8, 4) wanted
        inner_states/muon/inner_state/0/mu/down: float32(8, 4) in the state, none wanted
    """
    want = dict(leaves_with_segments(jax.eval_shape(tx.init, params)))
    have = {_of_variable(path, want): leaf for path, leaf in leaves_with_segments(state)}
    kinds = [(p, kind_of(have.get(p)), kind_of(want.get(p))) for p in {**want, **have}]
    problems = [
        f"{path_name(path)}: {had} in the state, {wanted} wanted"
        for path, had, wanted in kinds
        if had != wanted
    ]
    raise_all(sorted(problems), "this state can't go on with this optimizer:")


def _of_variable(path: Segments, want: dict[Segments, Any]) -> Segments:
    """The path without the last segment under which Orbax's metadata has an NNX variable."""
    is_inside = path not in want and path[-1:] == ("value",) and path[:-1] in want
    return path[:-1] if is_inside else path
