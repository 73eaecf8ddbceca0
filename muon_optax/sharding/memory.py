"""Leaves in host memory: worked on in device memory, and sent back."""

from typing import Any

import jax
import optax
from jax.core import Tracer

from muon_optax.sharding.specs import is_spec
from muon_optax.tree_paths import align, graft

__all__ = [
    "back",
    "in_device_memory",
    "is_on_host",
    "names_host",
    "to_declared_memory",
    "to_device",
    "to_host",
]

_HOST = "pinned_host"


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, lies in pinned host memory: its type says so."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The tree with all of its leaves in device memory."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def to_host(x: jax.Array) -> jax.Array:
    """The array in host memory, sharded as it was."""
    return jax.device_put(x, jax.memory.Space.Host)


def in_device_memory(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Updates in device memory; the state and the updates go back to where they came from.

    JAX multiplies no array of one memory with one of another, and a state must keep its type.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        new, new_state = inner.update(
            to_device(updates), to_device(state), to_device(params), **extra_args
        )
        return back(new, updates), back(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def back(new: Any, old: Any) -> Any:
    """The leaves of `new` in the memory that those of `old` at their paths lie in."""
    if not any(map(is_on_host, jax.tree.leaves(old))):
        return new
    return jax.tree.map(lambda n, o: to_host(n) if is_on_host(o) else n, new, graft(old, new))


def to_declared_memory(tree: Any, where: Any) -> Any:
    """Sends to host memory what is declared to lie there.

    Args:
      tree: arrays.
      where: as in `declared_specs`; what says nothing of host memory leaves a leaf where it is.

    Returns:
      The tree, moved.
    """
    leaves, treedef = jax.tree.flatten(tree)
    entries = align(where, tree, what="shardings", is_leaf=is_spec) if leaves else []
    pairs = zip(leaves, entries, strict=True)
    return treedef.unflatten([to_host(x) if names_host(entry) else x for x, entry in pairs])


def names_host(entry: Any) -> bool:
    """Whether an entry of a tree of shardings, or a leaf, is of host memory."""
    if isinstance(entry, Tracer):
        return is_on_host(entry)
    return getattr(getattr(entry, "sharding", entry), "memory_kind", None) == _HOST
