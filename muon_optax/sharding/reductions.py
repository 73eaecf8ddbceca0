"""Arrays whose type is unreduced or reduced over Explicit mesh axes.

The gradient of a parameter of type `P(..., reduced={"data"})` is unreduced over 'data': each device
has a summand of it. An optimizer isn't linear in the gradient, so it needs the sum.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from muon_optax._internal.tree_paths import leaves_with_segments, path_name, raise_all
from muon_optax.sharding.declared import plain_spec
from muon_optax.sharding.trace_context import unreduced_axes

__all__ = ["check_summed", "reduced_axes", "reduced_like", "summed"]


def check_summed(updates: Any) -> None:
    """Raises for gradients that are unreduced inside the user's own shard_map.

    Raises:
      ValueError: listing the leaves.
    """
    arrays = [(path, x) for path, x in leaves_with_segments(updates) if isinstance(x, jax.Array)]
    problems = [
        f"{path_name(path)}: unreduced over {sorted(axes)}"
        for path, x in arrays
        if (axes := unreduced_axes(x))
    ]
    raise_all(
        problems,
        "inside a shard_map, sum these gradients with jax.lax.psum over the axes before the "
        "update, since each device has a summand alone:",
    )


def summed(tree: Any) -> Any:
    """The tree with plain types: unreduced leaves are summed, reduced ones stay as they are.

    Args:
      tree: arrays, tracers or shape structs.

    Returns:
      The tree, of which each device has the same block as before.
    """
    return jax.tree.map(_summed, tree)


def _summed(x: Any) -> Any:
    sharding = _sharding(x)
    if not reduced_axes(x) or sharding is None:
        return x
    plain = sharding.update(spec=plain_spec(sharding.spec))
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    return x.update(sharding=plain) if is_abstract else jax.sharding.reshard(x, plain)


def reduced_like(old: Any, new: Any) -> Any:
    """The leaves of `new`, reduced over the axes that those of `old` are reduced or unreduced over.

    An update then has the type of its parameter, as `optax.apply_updates` needs.

    Args:
      old: the parameters, or the gradients where these aren't known.
      new: updates of plain types.

    Returns:
      The updates. Nothing is sent.
    """
    axes = {path: reduced_axes(x) for path, x in leaves_with_segments(old)}
    if not any(axes.values()):
        return new
    leaves = [_reduced(x, axes.get(path, frozenset())) for path, x in leaves_with_segments(new)]
    return jax.tree.structure(new).unflatten(leaves)


def _reduced(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    if not axes:
        return x
    own = jax.typeof(x).sharding
    return jax.sharding.reshard(x, own.update(spec=own.spec.update(reduced=axes)))


def reduced_axes(x: Any) -> frozenset[str]:
    """Explicit mesh axes that an array's type is reduced or unreduced over."""
    sharding = _sharding(x)
    return frozenset() if sharding is None else sharding.spec.reduced | sharding.spec.unreduced


def _sharding(x: Any) -> NamedSharding | None:
    """The sharding in the type of an array, or that of a shape struct."""
    found = jax.typeof(x).sharding if isinstance(x, jax.Array) else getattr(x, "sharding", None)
    return found if isinstance(found, NamedSharding) else None
