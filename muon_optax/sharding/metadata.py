"""How Flax's metadata says that parameters are sharded: Linen's boxes and NNX's variables."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muon_optax._internal.tree_paths import Segments, is_box, leaves_with_segments, segments_of
from muon_optax.sharding.declared import Declared, as_axes, as_declared, bare_spec, fits, mesh_of

__all__ = ["Annotations", "annotations_of", "usable"]

# Names under which versions of Flax keep the sharding in a variable's metadata.
_VARIABLE_KEYS = ("out_sharding", "sharding_names", "sharding")

Annotations = Mapping[Segments, NamedSharding | PartitionSpec]


def annotations_of(params: Any) -> Annotations:
    """The metadata of the boxes and variables in a tree, by path.

    Logical names that no rule translates to mesh axes are left as they are.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: is_box(type(x)))
    said = {segments_of(path): _annotation(x) for path, x in flat if is_box(type(x))}
    return {path: spec for path, spec in said.items() if spec is not None}


def usable(found: Annotations, params: Any) -> dict[Segments, Declared] | None:
    """An entry for each leaf, by path: the annotation where it fits the leaf and its mesh.

    Logical names aren't axes of the mesh; and a concrete array needs no annotation, which says
    where it is meant to be and not where it is. None where no annotation fits.
    """
    leaves = leaves_with_segments(params)
    fits = {path for path, x in leaves if path in found and _fits(x, found[path])}
    return {path: found[path] if path in fits else None for path, _ in leaves} if fits else None


def _annotation(box: Any) -> Declared:
    if hasattr(box, "get_metadata"):
        return _of_variable(box.get_metadata())
    names = getattr(box, "names", None)
    if names is None:
        return None
    if not hasattr(box, "rules"):
        return _on_mesh(box.mesh, PartitionSpec(*names))
    from flax.linen.spmd import logical_to_mesh_axes  # a box is there, and so is Flax

    rules = box.rules or _context_rules()
    return _on_mesh(box.mesh, logical_to_mesh_axes(names, rules) if rules else None)


def _of_variable(metadata: Mapping[str, Any]) -> Declared:
    said = next((metadata[key] for key in _VARIABLE_KEYS if metadata.get(key)), None)
    if said is None or isinstance(said, jax.sharding.Sharding):
        return as_declared(said)
    if not isinstance(said, tuple | list | PartitionSpec):
        return None  # a `Format`, which says how memory is laid out too
    renamed = dict((*_context_rules(), *(metadata.get("sharding_rules") or ())))
    spec = PartitionSpec(*(renamed.get(name, name) for name in said))
    return _on_mesh(metadata.get("mesh"), spec)


def _context_rules() -> Sequence[tuple[str, Any]]:
    """The rules from logical names to mesh axes of Flax's context."""
    from flax.core.spmd import get_logical_axis_rules

    return get_logical_axis_rules()


def _on_mesh(mesh: Mesh | None, spec: PartitionSpec | None) -> Declared:
    if mesh is None or spec is None or not _axes(spec) <= set(mesh.axis_names):
        return spec
    return NamedSharding(mesh, spec)


def _axes(spec: PartitionSpec) -> set[str]:
    return {axis for entry in spec for axis in as_axes(entry)}


def _fits(x: Any, declared: NamedSharding | PartitionSpec) -> bool:
    is_placed = isinstance(getattr(x, "sharding", None), NamedSharding)
    mesh = mesh_of(x, declared)
    if mesh is None or (is_placed and not isinstance(x, Tracer)):
        return False
    spec = bare_spec(declared)
    is_of_mesh = _axes(spec) <= set(mesh.axis_names) and fits(spec, x.shape, mesh)
    return is_of_mesh and (not isinstance(x, jax.Array) or _agrees_with_type(x, spec))


def _agrees_with_type(x: jax.Array, spec: PartitionSpec) -> bool:
    """Whether the array's type, which says how it is sharded along Explicit axes, says the same."""
    typed = jax.typeof(x).sharding
    explicit = set(typed.mesh.explicit_axes)
    said = [tuple(a for a in as_axes(entry) if a in explicit) for entry in spec]
    said += [()] * (x.ndim - len(said))
    return not explicit or said == [as_axes(entry) for entry in typed.spec.partitions]
