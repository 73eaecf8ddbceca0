"""Declared shardings, of users, arrays and shape structs, in one form; `specs` reads them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from muon_optax._internal.tree_paths import align

__all__ = [
    "Axes",
    "Declared",
    "as_axes",
    "as_declared",
    "bare_spec",
    "declared_entries",
    "declared_specs",
    "fits",
    "is_spec",
    "mesh_of",
    "plain_spec",
    "sharding_of_sums",
    "spec_without",
]

Axes = tuple[str, ...]
Declared = NamedSharding | PartitionSpec | None


def declared_specs(where: Any, params: Any) -> list[Declared]:
    """The sharding that the user declares for each leaf of `params`.

    Args:
      where: None, or a tree (or a prefix of one) of NamedSharding, PartitionSpec, arrays, or
        shape structs with a sharding; a None entry says nothing.
      params: the tree of leaves.

    Returns:
      One entry a leaf, without the axes that an array's type is unreduced or reduced over.

    Raises:
      ValueError: if the trees don't match.
      TypeError: for entries of another type.
    """
    return [as_declared(x) for x in declared_entries(where, params)]


def declared_entries(where: Any, params: Any) -> list[Any]:
    """The entry of `where` for each leaf as the user gave it: as `declared_specs`, unread."""
    if where is None or not jax.tree.leaves(params):
        return [None] * len(jax.tree.leaves(params))
    return align(where, params, what="shardings", is_leaf=is_spec)


def sharding_of_sums(
    shape: tuple[int, ...], whole: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding:
    """How sums over some dims of an array are sharded: along the dims that are left.

    Args:
      shape: of the sums: the array's dims, 1 where they were summed over; others may follow.
      whole: the array's shape.
      sharding: the array's.

    Returns:
      The sums' sharding.

    Example:
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> rows = NamedSharding(mesh, PartitionSpec("fsdp", None))
      >>> sharding_of_sums((4, 1), (4, 8), rows).spec, sharding_of_sums((1, 8), (4, 8), rows).spec
      (P('fsdp', None), P(None, None))
    """
    if shape == whole:
        return sharding
    spec = (*sharding.spec, *[None] * (len(whole) - len(sharding.spec)))
    kept = [a if n == size else None for n, size, a in zip(shape, whole, spec, strict=False)]
    return sharding.update(spec=PartitionSpec(*kept))


def is_spec(x: Any) -> bool:
    """Whether `x` is a spec, and so one entry of a tree of shardings."""
    return isinstance(x, PartitionSpec)


def as_declared(entry: Any) -> Declared:
    """The spec that one entry of a tree of shardings gives, or None for nothing.

    Raises:
      TypeError: for an entry of another type.
    """
    if entry is None:
        return None
    if isinstance(entry, PartitionSpec):
        return plain_spec(entry)
    if isinstance(entry, NamedSharding):
        spec = plain_spec(entry.spec)
        return entry if spec is entry.spec else entry.update(spec=spec)
    if isinstance(entry, Tracer):
        return None
    if isinstance(entry, jax.sharding.Sharding):
        return PartitionSpec()  # on one device
    if hasattr(entry, "sharding"):
        return as_declared(entry.sharding)
    raise TypeError(
        f"a sharding must be a NamedSharding, a PartitionSpec, an array or None, got {entry!r}"
    )


def bare_spec(declared: NamedSharding | PartitionSpec) -> PartitionSpec:
    """The spec alone, without the mesh that a NamedSharding adds."""
    return plain_spec(declared.spec if isinstance(declared, NamedSharding) else declared)


def plain_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec without the mesh axes that an array is unreduced or reduced over.

    JAX refuses to iterate over a spec that has any.

    Example:
      >>> plain_spec(PartitionSpec("model", reduced={"data"}))
      P('model',)
    """
    return PartitionSpec(*spec.partitions) if spec.unreduced or spec.reduced else spec


def spec_without(spec: PartitionSpec | None, axes: Iterable[str]) -> PartitionSpec:
    """The spec without some mesh axes."""
    dropped = set(axes)
    dims = [tuple(a for a in as_axes(entry) if a not in dropped) for entry in spec or ()]
    return PartitionSpec(*(dim or None for dim in dims))


def as_axes(entry: Any) -> Axes:
    """An entry of a PartitionSpec as a tuple of axes."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def fits(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> bool:
    """Whether a spec whose axes the mesh has cuts a shape in equal blocks."""
    counts = [math.prod(mesh.shape[a] for a in as_axes(entry)) for entry in spec]
    is_divided = all(n % count == 0 for n, count in zip(shape, counts, strict=False))
    return len(counts) <= len(shape) and is_divided


def mesh_of(x: Any, declared: Declared) -> Mesh | AbstractMesh | None:
    """The mesh that a leaf is on: the shard_map's, the array's, the declared, the context's."""
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        return context
    own = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    found = getattr(own, "mesh", None)
    if found is not None and not found.empty:
        return found
    if isinstance(declared, NamedSharding):
        return declared.mesh
    return None if declared is None or context.empty else context
