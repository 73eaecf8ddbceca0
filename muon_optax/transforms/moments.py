"""Moments: zeros of the parameters' shardings to begin with, and the trees of them in a state."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.sharding.placement import is_abstract, is_on_host, to_device, to_host
from muon_optax.transforms.momentum_state import MuonState

__all__ = [
    "first_moments",
    "holds_moments",
    "is_moments",
    "map_moments",
    "moment_dtype",
    "zeros_like_parameter",
]

# The fields of each kind of state that are trees of moments, one for each leaf.
_FIELDS: dict[type, tuple[str, ...]] = {MuonState: ("mu",), optax.ScaleByAdamState: ("mu", "nu")}

State = TypeVar("State", bound=type)


def holds_moments(*fields: str) -> Callable[[State], State]:
    """A class decorator: says which fields of a state are trees of moments, like the parameters.

    Leaves without a gradient keep their entries in these trees.
    """

    def noted(kind: State) -> State:
        _FIELDS[kind] = fields
        return kind

    return noted


def is_moments(x: Any) -> bool:
    """Whether `x` is a state that has trees of moments."""
    return type(x) in _FIELDS


def map_moments(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Maps a function over the trees of moments, such as `mu` and `nu`, in a state.

    Args:
      function: gets a tree of moments, and those at its place in the other states.
      state: the state of any chain of optax transformations.
      others: states of the same structure but for the trees of moments.

    Returns:
      The state with the function's results; all else is as in `state`.
    """

    def mapped(x: Any, *rest: Any) -> Any:
        if not is_moments(x):
            return x
        new = {}
        for name in x._fields:  # a state may have another inside, as NAMO's has the momentum's
            own, theirs = getattr(x, name), [getattr(r, name) for r in rest]
            if name not in _FIELDS[type(x)]:
                new[name] = map_moments(function, own, *theirs)
            elif own is not None:
                new[name] = function(own, *theirs)
        return x._replace(**new)

    return jax.tree.map(mapped, state, *others, is_leaf=is_moments)


def first_moments(state: Any) -> dict[Segments, Any]:
    """The first moment that a state has for each leaf, by path."""
    found: dict[Segments, Any] = {}

    def noted(tree: Any) -> Any:
        for path, moment in leaves_with_segments(tree):
            found.setdefault(path, moment)
        return tree

    map_moments(noted, state)
    return found


def moment_dtype(wanted: Any, own: Any) -> jnp.dtype:
    """The dtype to keep a moment in: the wanted one, complex where the parameter's own is."""
    is_complex = jnp.issubdtype(own, jnp.complexfloating)
    dtype = wide_dtype(wanted, jnp.complex64) if is_complex else jnp.finfo(wanted).dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def zeros_like_parameter(param: Any, dtype: Any) -> Any:
    """Zeros sharded like the parameter, also under `jit` on a mesh without a context.

    In host memory too, where the parameter is offloaded; a shape struct where it is one.

    `jnp.zeros_like` forgets the sharding there; a result that depends on the parameter's value
    keeps it. NaN and infinity don't get through the `where`.
    """
    if is_abstract(param):
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)
    if isinstance(param, jax.Array):
        on_host = is_on_host(param)
        zeros = _zeros(to_device(param) if on_host else param, dtype)
        return to_host(zeros) if on_host else zeros
    return jnp.zeros(param.shape, dtype)


@functools.partial(jax.jit, static_argnums=1)  # traced once for all leaves of one type
def _zeros(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.where(False, x, jnp.zeros((), x.dtype)).astype(dtype)
