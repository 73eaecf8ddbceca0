"""Moves leaves: to other layouts, to host memory and back; counts are born on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from muon_optax.sharding.specs import (
    Declared,
    Layout,
    bare_spec,
    declared_specs,
    is_spec,
    mesh_of,
    read_layouts,
)
from muon_optax.tree_paths import align, graft

__all__ = [
    "back",
    "homes_of",
    "in_its_place",
    "is_on_host",
    "names_host",
    "place",
    "to_declared_memory",
    "to_device",
    "to_host",
    "typed_specs",
]

_HOST = "pinned_host"


def place(tree: Any, where: Any) -> Any:
    """Moves each leaf of a tree to another layout.

    Args:
      tree: arrays.
      where: as in `declared_specs`, or a list with a `Layout` or None for each leaf. A leaf of
        which nothing is said or known stays.

    Returns:
      The tree, moved.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if isinstance(where, list) and all(x is None or isinstance(x, Layout) for x in where):
        specs = [x.written if x is not None and x.known else None for x in where]
    else:
        specs = declared_specs(where, tree)
    return treedef.unflatten([_placed(x, spec) for x, spec in zip(leaves, specs, strict=True)])


def typed_specs(tree: Any) -> Any:
    """Where each leaf lies as its type says it, as `place` takes it; None where it doesn't."""

    def spec(x: Any) -> PartitionSpec | None:
        sharding = jax.typeof(x).sharding
        return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None

    return jax.tree.map(spec, tree)


def homes_of(tree: Any, declared: Any) -> list[Layout | None]:
    """Where results go that lie elsewhere while they are computed: to where `tree` lies."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return [None] * len(jax.tree.leaves(tree))
    return list(read_layouts(tree, declared))


def _placed(x: jax.Array, declared: Declared) -> jax.Array:
    mesh = mesh_of(x, declared)
    if declared is None or mesh is None:
        return x
    spec = bare_spec(declared)
    if AxisType.Explicit in mesh.axis_types:
        lies_there = jax.typeof(x).sharding.spec == spec
        return x if lies_there else jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


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


def in_its_place(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the type of a state, where it lies included.

    Counts are born where the parameters were put, as an update leaves them: else the second step
    would be traced and compiled anew. Updates are formed in device memory, since JAX multiplies no
    array of one memory with one of another, and go back with the state to where they came from.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        state, home = inner.init(params), _whole_place(params)
        return jax.tree.map(lambda x: x if home is None else _scalar_at(home, x), state)

    def update(updates, state, params=None, **extra_args):
        new, new_state = inner.update(
            to_device(updates), to_device(state), to_device(params), **extra_args
        )
        return back(new, updates), back(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _whole_place(params: Any) -> Sharding | None:
    """All of the mesh, or the device, that parameters were put on; None where JAX chose it."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    put = [x.sharding for x in arrays if not isinstance(x, Tracer) and x.committed]
    if not put:
        return None
    if isinstance(put[0], NamedSharding):
        return NamedSharding(put[0].mesh, PartitionSpec())
    return SingleDeviceSharding(min(put[0].device_set, key=lambda device: device.id))


def _scalar_at(home: Sharding, x: Any) -> Any:
    """A scalar of no place, put there; `device_put` would compare its value among processes."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    is_homeless = is_array and x.ndim == 0 and not x.committed
    return jnp.full((), x.item(), x.dtype, device=home) if is_homeless else x


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
