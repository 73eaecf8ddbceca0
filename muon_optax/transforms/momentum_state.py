"""The state of momentum, which pieces, checkpoints and conversions share."""

from typing import Any, NamedTuple

import jax
import optax

from muon_optax._internal.tree_paths import is_masked

__all__ = ["MuonState", "momentum"]


class MuonState(NamedTuple):
    """State of Muon.

    Attributes:
      count: number of updates so far, an int32 scalar.
      mu: the momentum, one buffer a leaf, sharded like the parameter unless otherwise declared.

    Example:
      >>> import jax.numpy as jnp
      >>> from muon_optax import scale_by_momentum
      >>> state = scale_by_momentum(mu_dtype="bfloat16").init({"w": jnp.ones((4, 8))})
      >>> int(state.count), state.mu["w"].dtype.name
      (0, 'bfloat16')
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Updates


def momentum(state: Any) -> Any:
    """The momentum in a state: a tree like the parameters, masked where leaves have none.

    Args:
      state: the state of `muon`, or of any optax transformation around it.

    Returns:
      The tree. Where the state holds several, of different leaves, it is the tree of all.

    Raises:
      ValueError: if there is none, or one leaf has several.

    Example:
      >>> import jax.numpy as jnp
      >>> from muon_optax import muon
      >>> state = muon(0.02).init({"up": jnp.ones((4, 8)), "bias": jnp.ones(8)})
      >>> jax.tree.map(jnp.shape, momentum(state))
      {'bias': MaskedNode(), 'up': (4, 8)}
    """
    states = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MuonState))
    trees = [x.mu for x in states if isinstance(x, MuonState)]
    if not trees:
        raise ValueError(f"there is no state of Muon in a {type(state).__name__}")

    def only(*leaves: Any) -> Any:
        found = [x for x in leaves if not is_masked(x)]
        if len(found) > 1:
            raise ValueError("a leaf has several momenta: the state holds several Muons of it")
        return found[0] if found else leaves[0]

    return jax.tree.map(only, *trees, is_leaf=is_masked)
