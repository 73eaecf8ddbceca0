"""The state of momentum, which pieces, checkpoints and conversions share."""

from typing import NamedTuple

import jax
import optax

__all__ = ["MuonState"]


class MuonState(NamedTuple):
    """State of Muon.

    Attributes:
      count: number of updates so far, an int32 scalar.
      mu: the momentum, one buffer a leaf, in the parameter's layout.

    Example:
      >>> from muon_optax import scale_by_momentum
      >>> state = scale_by_momentum(mu_dtype="bfloat16").init({"w": jnp.ones((4, 8))})
      >>> int(state.count), state.mu["w"].dtype.name
      (0, 'bfloat16')
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Updates
