"""Which mesh axes a shard_map or a vmap around the running code maps over, as far as JAX tells."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

__all__ = ["as_varying", "mapped_axes", "unreduced_axes", "varying_axes"]


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which an array's values differ, as far as its type says."""
    return jax.typeof(x).manual_axis_type.varying


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` with the type of arrays that differ between the devices along mesh axes."""
    missing = tuple(set(axes) - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def unreduced_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over whose devices an array's summands are distributed."""
    return jax.typeof(x).manual_axis_type.unreduced


def mapped_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Explicit axes of the mesh that a `vmap` maps over.

    They are in no type inside of it, and can't be used there. A sign of them is that a shard_map
    over all axes leaves them out, also where a jit, a scan or a cond inside the vmap hides its
    tracers.

    Example:
      >>> mesh = jax.make_mesh((1,), ("members",), axis_types=(jax.sharding.AxisType.Explicit,))
      >>> members = jax.sharding.NamedSharding(mesh, PartitionSpec("members"))
      >>> def axes(_):
      ...     print(set(mapped_axes(mesh)))
      >>> _ = jax.vmap(axes)(jax.device_put(jax.numpy.ones(3), members))
      {'members'}
    """
    if not mesh.explicit_axes:
        return frozenset()
    bound: list[str] = []

    def note_bound(x):
        bound.extend(jax.sharding.get_abstract_mesh().manual_axes)
        return x

    whole = PartitionSpec()
    probe = jax.shard_map(note_bound, mesh=mesh, in_specs=whole, out_specs=whole)
    jax.eval_shape(probe, jax.ShapeDtypeStruct((), "float32"))
    return frozenset(mesh.axis_names).difference(bound)
