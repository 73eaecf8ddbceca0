"""Moves leaves to other shardings, and between device and host memory."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from muon_optax._internal.dtypes import canonical
from muon_optax._internal.tree_paths import raise_all, restructured_like
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import (
    Declared,
    bare_spec,
    declared_entries,
    mesh_of,
    spec_without,
)
from muon_optax.sharding.specs import LeafSharding, read_sharding
from muon_optax.sharding.trace_context import mapped_axes

__all__ = [
    "HOST_MEMORY",
    "check_manual_blocks_stay",
    "check_mu_shardings_divide",
    "declared_on_host",
    "is_abstract",
    "is_on_host",
    "keeping_placement",
    "momentum_to_host",
    "names_host",
    "on_mesh_of",
    "place",
    "to_device",
    "to_host",
    "to_memory_of",
    "to_types_of",
]

HOST_MEMORY = "pinned_host"  # the memory kind of offloaded arrays


def place(tree: Any, where: Sequence[LeafSharding | Declared]) -> Any:
    """Moves each leaf of a tree to another sharding.

    Args:
      tree: arrays, or shape structs, which get the sharding.
      where: for each leaf its declared or known sharding; one of which nothing is said or
        known stays.

    Returns:
      The tree, moved.
    """
    if all(declared is None for declared in where):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    specs = [(x.written if x.known else None) if isinstance(x, LeafSharding) else x for x in where]
    return treedef.unflatten([_placed(x, spec) for x, spec in zip(leaves, specs, strict=True)])


def _placed(x: Any, declared: Declared) -> Any:
    mesh = mesh_of(x, declared)
    if declared is None or mesh is None:
        return x
    spec = spec_without(bare_spec(declared), mesh.manual_axes)  # blocks stay where they are
    if is_abstract(x):
        return x.update(sharding=NamedSharding(mesh, spec))
    is_mixed = bool(mesh.explicit_axes and mesh.auto_axes)
    if is_mixed and isinstance(mesh, Mesh) and not isinstance(x, Tracer):
        # Outside of jit a constraint on Auto axes would undo the reshard.
        return jax.device_put(x, NamedSharding(mesh, spec))
    if mesh.explicit_axes:
        x = _typed(x, mesh, spec_without(spec, mesh.auto_axes))
    if set(mesh.axis_types) != {AxisType.Explicit}:
        rest = spec_without(spec, mesh.explicit_axes)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rest))
    return x


def on_mesh_of(sharding: LeafSharding, x: jax.Array) -> jax.Array:
    """The array, put on its leaf's Explicit mesh, sharded like it, if its type names no mesh.

    Numpy arrays and those that were put nowhere have such a type, as the momentum that was made or
    read before the parameters were put on the mesh.
    """
    mesh = sharding.mesh
    if mesh is None or not mesh.explicit_axes or not jax.typeof(x).sharding.mesh.empty:
        return x
    spec = spec_without(sharding.written, (*mesh.auto_axes, *mesh.manual_axes))
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def to_types_of(old: Any, new: Any) -> Any:
    """The leaves of `new`, sharded along Explicit mesh axes like those of `old` at the same paths.

    How they are sharded along Auto axes isn't in a type, and stays.
    """

    def moved(x: Any, like: Any) -> Any:
        sharding = jax.typeof(like).sharding
        mesh = mesh_of(x, sharding.spec)
        is_typed = AxisType.Explicit in sharding.mesh.axis_types
        return _typed(x, mesh, sharding.spec) if is_typed and mesh is not None else x

    return jax.tree.map(moved, new, restructured_like(old, new))


def _typed(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    own = jax.typeof(x).sharding
    is_there = own.spec == spec and not own.mesh.empty
    return x if is_there else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def check_manual_blocks_stay(tree: Any, leaves: Sequence[BoundLeaf]) -> None:
    """Raises for momentum that should be sharded otherwise along the axes of the user's shard_map.

    Blocks can't be moved from inside it, and taken for others they would be silently wrong.

    Raises:
      ValueError: listing the leaves.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    pairs = zip(leaves, jax.tree.leaves(tree), strict=True)
    moved = [(leaf, x) for leaf, x in pairs if leaf.mu_sharding is not None]
    if not manual or not moved:
        return
    problems = []
    for leaf, x in moved:
        old, new = read_sharding(x, leaf.param_sharding), read_sharding(x, leaf.mu_sharding)
        if old.cut_by(manual) != new.cut_by(manual):
            problems.append(f"{leaf.path}: mu_shardings {new.written}, parameter {old.written}")
    raise_all(
        problems,
        f"inside a shard_map over {manual} momentum must be sharded there like its parameter:",
    )


def check_mu_shardings_divide(tree: Any, leaves: Sequence[BoundLeaf]) -> None:
    """Raises for momentum that can't be sharded as declared; in a shard_map, blocks can't tell.

    Raises:
      ValueError: listing the leaves.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    mapped = functools.cache(mapped_axes)
    problems = []
    for leaf, x in zip(leaves, jax.tree.leaves(tree), strict=True):
        spec, mesh = leaf.mu_sharding, mesh_of(x, leaf.mu_sharding)
        if spec is None or mesh is None:
            continue
        try:  # a shape, since an array's type would count for more than the declaration
            whole = NamedSharding(mesh, PartitionSpec())
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
            read_sharding(shape, bare_spec(spec), mapped)
        except ValueError as error:
            problems.append(f"{leaf.path}: {error}")
    raise_all(problems, "the momentum of these leaves can't be sharded as mu_shardings says:")


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in pinned host memory: its type says so."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def is_abstract(x: Any) -> bool:
    """Whether a leaf is a shape without data."""
    return isinstance(x, jax.ShapeDtypeStruct)


def to_device(tree: Any) -> Any:
    """The tree with all of its leaves in device memory."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def to_host(x: Any) -> Any:
    """The array, or shape struct, in host memory, sharded as it was."""
    if not is_abstract(x):
        return jax.device_put(x, jax.memory.Space.Host)
    return x if x.sharding is None else x.update(sharding=x.sharding.with_memory_kind(HOST_MEMORY))


def to_memory_of(old: Any, new: Any) -> Any:
    """The leaves of `new`, in host memory where those of `old` at the same paths are."""
    if not any(map(is_on_host, jax.tree.leaves(old))):
        return new
    return jax.tree.map(
        lambda n, o: to_host(n) if is_on_host(o) else n, new, restructured_like(old, new)
    )


def declared_on_host(where: Any, params: Any) -> list[bool]:
    """Whether each leaf is declared to be in host memory.

    `Declared` doesn't say it of arrays on one device, which have no spec.
    """
    return list(map(names_host, declared_entries(where, params)))


def momentum_to_host(tree: Any, leaves: Sequence[BoundLeaf]) -> Any:
    """Sends to host memory the momentum that is declared to be there; all else stays."""
    found, treedef = jax.tree.flatten(tree)
    pairs = zip(found, leaves, strict=True)
    return treedef.unflatten([to_host(x) if leaf.is_mu_on_host else x for x, leaf in pairs])


def names_host(entry: Any) -> bool:
    """Whether an entry of a tree of shardings, or a leaf, says that it is in host memory."""
    if isinstance(entry, Tracer):
        return is_on_host(entry)
    return getattr(getattr(entry, "sharding", entry), "memory_kind", None) == HOST_MEMORY


def keeping_placement(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Keeps updates and state of `inner` in the memory, and on the mesh, that they came from.

    Counts are made where the parameters are, as an update leaves them: else the second step would
    be traced and compiled anew. Updates are formed in device memory, since JAX multiplies no array
    of one memory with one of another, and go back with the state to where they came from.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        state, sharding = inner.init(canonical(params)), _replicated_sharding(params)
        zero = _mapped_zero(params)
        if zero is not None:
            return jax.tree.map(lambda x: x if x.ndim else x + zero.astype(x.dtype), state)
        if any(map(is_abstract, jax.tree.leaves(params))):
            return jax.tree.map(lambda x: _abstract(x, sharding), state)
        return jax.tree.map(lambda x: x if sharding is None else _scalar_at(sharding, x), state)

    def update(updates, state, params=None, **extra_args):
        new, new_state = inner.update(
            to_device(canonical(updates)),
            to_device(state),
            to_device(canonical(params)),
            **extra_args,
        )
        return to_memory_of(updates, new), to_memory_of(state, new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _mapped_zero(params: Any) -> jax.Array | None:
    """A zero that is mapped as the parameters are by a `vmap` over Explicit mesh axes, if any is.

    Constants come out of such a `vmap` replicated, and another one refuses them beside moments that
    are sharded over the members. So a count has to depend on a parameter: on none of its elements,
    since those may be NaN.
    """
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and x.ndim)
    x = next(arrays, None)
    if x is None or not mapped_axes(jax.typeof(x).sharding.mesh):
        return None
    return jnp.sum(jax.lax.slice_in_dim(x, 0, 0))


def _replicated_sharding(params: Any) -> Sharding | None:
    """All of the mesh, or the device, that parameters were put on; None where JAX chose it."""
    put = [sharding for x in jax.tree.leaves(params) if (sharding := _put_on(x)) is not None]
    if not put:
        return None
    if isinstance(put[0], NamedSharding):
        return NamedSharding(put[0].mesh, PartitionSpec())
    return SingleDeviceSharding(min(put[0].device_set, key=lambda device: device.id))


def _put_on(x: Any) -> Sharding | None:
    """Where an array was put, or is to be put if it is a shape struct."""
    if is_abstract(x):
        return x.sharding
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return x.sharding if is_concrete and x.committed else None


def _abstract(x: Any, sharding: Sharding | None) -> Any:
    """A count in the state of abstract parameters as a shape struct; all else stays."""
    is_new = isinstance(x, jax.Array) and x.ndim == 0
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_new else x


def _scalar_at(sharding: Sharding, x: Any) -> Any:
    """Puts a scalar there that was put nowhere yet.

    Not by `device_put`, which would compare its value among processes.
    """
    is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    is_new = is_array and x.ndim == 0 and not x.committed
    return jnp.full((), x.item(), x.dtype, device=sharding) if is_new else x
