"""How a leaf is sharded.

Three kinds of mesh axes tell it three ways: an Explicit axis is in the array's type; an Auto axis
is known from concrete arrays or from the user's declaration; inside a shard_map the axes are
Manual, the arrays are blocks, and only a declaration says of which arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muon_optax._internal.tree_paths import leaves_with_segments, path_name, raise_all
from muon_optax.sharding.declared import (
    Axes,
    Declared,
    as_axes,
    bare_spec,
    declared_specs,
    mesh_of,
    plain_spec,
    spec_without,
)
from muon_optax.sharding.trace_context import mapped_axes, varying_axes

__all__ = ["Axes", "LeafSharding", "read_sharding", "read_shardings", "whole_shapes"]


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """How one leaf is sharded: its `jax.sharding`, and the facts that Muon needs besides.

    Attributes:
      shape: the whole leaf's shape.
      mesh: the mesh; None where there is only one device.
      spec: for each dim, the mesh axes that shard it, major to minor; axes of size 1 are left out.
      written: the spec as it was given, for JAX.
      free: axes that replicate the leaf and that nothing else uses: work can be shared over them.
      manual: axes of the user's shard_map, inside which the array at hand is a block.
      known: axes along which the sharding is known, of any size; where none is, the partitioner
        alone knows it.
    """

    shape: tuple[int, ...]
    mesh: Mesh | AbstractMesh | None = None
    spec: tuple[Axes, ...] = ()
    written: PartitionSpec | None = None
    free: Axes = ()
    manual: Axes = ()
    known: Axes = ()

    def count(self, axes: Iterable[str]) -> int:
        """Number of devices along mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in axes)

    def axes_of(self, dims: Sequence[int]) -> Axes:
        """Mesh axes on these dims of the leaf, in the mesh's order."""
        if self.mesh is None:
            return ()
        used = {a for d in dims for a in self.spec[d]}
        return tuple(a for a in self.mesh.axis_names if a in used)

    def manual_axes_of(self, dims: Sequence[int]) -> Axes:
        """Manual mesh axes on these dims, those of each dim major to minor."""
        return tuple(a for d in dims for a in self.spec[d] if a in self.manual) if self.spec else ()

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        spec = self.spec or ((),) * len(self.shape)
        return tuple(n // self.count(axes) for n, axes in zip(self.shape, spec, strict=True))

    @property
    def is_known(self) -> bool:
        """Whether anything but the partitioner knows how the leaf is sharded."""
        return self.mesh is None or bool(self.known)

    @property
    def is_mapped(self) -> bool:
        """Whether a `vmap` maps over an Explicit axis of the mesh, hidden from the leaf."""
        return self.mesh is not None and any(a not in self.known for a in self.mesh.explicit_axes)

    def axes_to_map(self, also: Iterable[str] = ()) -> frozenset[str]:
        """Mesh axes to make Manual: all that are known and not Manual yet, if any is needed.

        Those are needed that shard the leaf, and `also`. Axes of size 1 count: matmuls of blocks
        typed with them would be refused.
        """
        needed = {a for axes in self.type_key for a in axes}.union(also)
        if self.mesh is None or not needed - set(self.manual):
            return frozenset()
        return frozenset(self.known) - set(self.manual)

    def block_of(self, array: jax.Array) -> jax.Array:
        """This device's block of an array that broadcasts against the whole leaf."""
        for dim, axes in enumerate(self.spec):
            inner = tuple(a for a in axes if a in self.manual)
            if inner and array.ndim and array.shape[dim] > 1:
                size = array.shape[dim] // self.count(inner)
                start = jax.lax.axis_index(inner) * size
                array = jax.lax.dynamic_slice_in_dim(array, start, size, dim)
        return array

    @property
    def type_key(self) -> tuple[Axes, ...]:
        """Mesh axes of each dim, those of size 1 too: equal for arrays that JAX can stack.

        On an Explicit mesh they are all in the array's type.
        """
        dims = [as_axes(entry) for entry in self.written or ()]
        return (*dims, *[()] * (len(self.shape) - len(dims)))

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as JAX writes it, without the axes that are Manual already."""
        return spec_without(self.written, self.manual)

    def cut_by(self, axes: Axes) -> tuple[Axes, ...]:
        """Which of these mesh axes cut each dim."""
        return tuple(tuple(a for a in dim if a in axes) for dim in self.spec)

    def over(self, more: Sequence[Axes]) -> "LeafSharding":
        """The sharding with more mesh axes on each dim, after those that it has."""
        added = {a for axes in more for a in axes}
        return dataclasses.replace(
            self,
            spec=tuple((*old, *new) for old, new in zip(self.spec, more, strict=True)),
            written=PartitionSpec(
                *((*old, *new) or None for old, new in zip(self.type_key, more, strict=True))
            ),
            free=tuple(a for a in self.free if a not in added),
        )

    def without(self, axes: Axes) -> "LeafSharding":
        """The sharding without these mesh axes."""
        spec = tuple(tuple(a for a in dim if a not in axes) for dim in self.spec)
        return dataclasses.replace(self, spec=spec, written=spec_without(self.written, axes))


def read_shardings(tree: Any, declared: Sequence[Declared]) -> list[LeafSharding]:
    """How each leaf of a tree is sharded.

    Args:
      tree: arrays, tracers or shape structs.
      declared: the declared sharding of each leaf, from `declared_specs`.

    Returns:
      One sharding a leaf.

    Raises:
      ValueError: listing every leaf whose sharding can't be, or can't be known.
    """
    mapped = functools.cache(mapped_axes)  # for now: another call may be in another vmap
    shardings = []
    problems: dict[str, list[str]] = {}
    for (path, leaf), spec in zip(leaves_with_segments(tree), declared, strict=True):
        try:
            shardings.append(read_sharding(leaf, spec, mapped))
        except ValueError as error:
            problems.setdefault(str(error), []).append(path_name(path))
    raise_all(
        [f"{_first_of(names)}: {problem}" for problem, names in problems.items()],
        "Muon can't use these leaves as they are sharded:",
    )
    return shardings


def _first_of(names: list[str], most: int = 8) -> str:
    """Names of leaves with one and the same problem, as all leaves have it inside a pmap."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def read_sharding(
    x: Any, declared: Declared = None, mapped: Callable[[Any], frozenset[str]] | None = None
) -> LeafSharding:
    """Reads how a leaf is sharded.

    Args:
      x: an array, a tracer, or a shape struct.
      declared: the user's declaration.
      mapped: a function that gives the axes of a mesh that a `vmap` maps over; None asks JAX.

    Returns:
      The sharding.

    Raises:
      ValueError: for a spec that doesn't fit the leaf or the mesh, and inside a shard_map for an
        array that may be a block of an unknown matrix.
    """
    mesh = mesh_of(x, declared)
    is_typed = isinstance(x, jax.Array) and bool(_typed_axes(x))
    if mesh is None or (math.prod(mesh.shape.values()) == 1 and not is_typed):
        return LeafSharding(tuple(x.shape))  # on one device, and no axis is in its type
    manual = tuple(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else ()
    if any(mesh.shape[a] > 1 for a in manual) and declared is None:
        _check_whole(x, mesh, manual)
    hidden = (mapped or mapped_axes)(mesh)
    written = _spec_of(x, declared)
    is_alone = all(a in hidden for a in mesh.axis_names if mesh.shape[a] > 1)
    if hidden and is_alone and not is_typed:
        return LeafSharding(tuple(x.shape), written=written)  # a vmap has each member on one device
    known = tuple(a for a in _known_axes(mesh, x, declared) if a not in hidden)
    spec = _normalised(written, len(x.shape), mesh)
    shape = _whole_shape(x.shape, spec, mesh, manual)
    _check_divides(shape, spec, mesh)
    _check_nesting(spec, manual)
    used = {a for axes in spec for a in axes}
    free = tuple(a for a in known if a not in used and mesh.shape[a] > 1)
    return LeafSharding(shape, mesh, spec, written, free, manual, known)


def whole_shapes(tree: Any, declared: Any) -> Any:
    """The tree with the shapes of whole leaves, where its arrays are blocks inside a shard_map.

    Args:
      tree: arrays.
      declared: as in `declared_specs`.

    Returns:
      `tree` itself outside a shard_map or where nothing is declared, else shape structs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if declared is None or not mesh.manual_axes:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    specs = declared_specs(declared, tree)
    return treedef.unflatten(
        [_whole_struct(x, spec, mesh) for x, spec in zip(leaves, specs, strict=True)]
    )


def _check_whole(x: Any, mesh: Mesh | AbstractMesh, manual: Axes) -> None:
    """A block taken for a matrix is silent and wrong, so leaves that may be either are refused."""
    advice = "declare with param_shardings how the parameters are sharded (P() for a whole matrix)"
    probe = jax.lax.axis_index(next(a for a in manual if mesh.shape[a] > 1))
    if not varying_axes(probe):
        raise ValueError(
            f"inside a pmap, or a shard_map with check_vma=False, a block looks whole; {advice}"
        )
    varying = [a for a in manual if a in varying_axes(x)]
    if varying:
        raise ValueError(
            f"the array of shape {x.shape} varies over {varying} inside a shard_map, so it may be "
            f"a block of a larger matrix; {advice}"
        )


def _typed_axes(x: Any) -> set[str]:
    """Mesh axes in an array's type."""
    return {a for entry in jax.typeof(x).sharding.spec.partitions for a in as_axes(entry)}


def _spec_of(x: Any, declared: Declared) -> PartitionSpec:
    """The type's spec where it is complete, else the declared one, else a concrete array's."""
    typed = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if typed is not None and set(typed.mesh.axis_types) == {AxisType.Explicit}:
        return plain_spec(typed.spec)
    if declared is not None:
        return bare_spec(declared)
    return _concrete_spec(x) or plain_spec(jax.typeof(x).sharding.spec)


def _concrete_spec(x: Any) -> PartitionSpec | None:
    """The spec that an array, or a shape struct, carries; None for a tracer."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return plain_spec(sharding.spec) if isinstance(sharding, NamedSharding) else None


def _known_axes(mesh: Mesh | AbstractMesh, x: Any, declared: Declared) -> Axes:
    """Axes along which the sharding is known."""
    if declared is not None or _concrete_spec(x) is not None:
        known = set(mesh.axis_names)
    else:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        known = {a for a, kind in kinds if kind != AxisType.Auto}
    return tuple(a for a in mesh.axis_names if a in known)


def _normalised(spec: PartitionSpec, rank: int, mesh: Mesh | AbstractMesh) -> tuple[Axes, ...]:
    """One tuple of axes a dim, axes of size 1 dropped."""
    entries = tuple(spec)
    if len(entries) > rank:
        raise ValueError(f"{spec} has {len(entries)} entries for a leaf of {rank} dims")
    dims = [as_axes(entry) for entry in (*entries, *[None] * (rank - len(entries)))]
    unknown = [a for axes in dims for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"{spec} names the axes {unknown}; the mesh has {mesh.axis_names}")
    used = [a for axes in dims for a in axes]
    if len(set(used)) < len(used):  # JAX checks a NamedSharding, but not a spec alone
        raise ValueError(f"{spec} names an axis twice; an axis cuts one dim at most")
    return tuple(tuple(a for a in axes if mesh.shape[a] > 1) for axes in dims)


def _whole_struct(x: Any, declared: Declared, mesh: AbstractMesh) -> Any:
    """The shape of the whole leaf of which a block is given; the block, if nothing is declared."""
    if declared is None:
        return x
    spec = _normalised(_spec_of(x, declared), len(x.shape), mesh)
    shape = _whole_shape(x.shape, spec, mesh, tuple(mesh.manual_axes))
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _whole_shape(
    shape: Sequence[int], spec: Sequence[Axes], mesh: Mesh | AbstractMesh, manual: Axes
) -> tuple[int, ...]:
    """Shape of the leaf that blocks of this shape make up along the Manual axes."""
    return tuple(
        n * math.prod(mesh.shape[a] for a in axes if a in manual)
        for n, axes in zip(shape, spec, strict=True)
    )


def _check_divides(
    shape: tuple[int, ...], spec: tuple[Axes, ...], mesh: Mesh | AbstractMesh
) -> None:
    """All blocks are of one size: matrices are put together from them."""
    for dim, (n, axes) in enumerate(zip(shape, spec, strict=True)):
        count = math.prod(mesh.shape[a] for a in axes)
        if n % count:
            raise ValueError(
                f"dim {dim} of shape {shape} must be a multiple of {count}, the size of {axes}"
            )


def _check_nesting(spec: tuple[Axes, ...], manual: Axes) -> None:
    """Other axes cut the blocks of a shard_map, so its own must come first."""
    for dim, axes in enumerate(spec):
        outer = tuple(a for a in axes if a in manual)
        if axes[: len(outer)] != outer:
            raise ValueError(
                f"dim {dim} is sharded over {axes}, but inside a shard_map over {manual} the order "
                f"must be {(*outer, *(a for a in axes if a not in manual))}"
            )
