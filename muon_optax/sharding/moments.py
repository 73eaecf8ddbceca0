"""Where moments are sharded over more mesh axes than their parameters, as in ZeRO-1."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from muon_optax._internal.tree_paths import leaves_with_segments, path_name, raise_all
from muon_optax.sharding.declared import Declared, declared_specs
from muon_optax.sharding.reductions import reduced_axes
from muon_optax.sharding.specs import LeafSharding, read_sharding
from muon_optax.sharding.trace_context import mapped_axes

__all__ = ["check_moment_axes", "moment_shardings", "over_axes"]


def check_moment_axes(axes: Any) -> tuple[str, ...] | None:
    """The option `shard_moments_over` as a tuple of mesh axes.

    Raises:
      TypeError: for anything but None, a name or a sequence of names.
    """
    if axes is None:
        return None
    named = (axes,) if isinstance(axes, str) else axes
    if not isinstance(named, Sequence) or not all(isinstance(a, str) for a in named):
        raise TypeError(
            f"shard_moments_over must be a mesh axis, a sequence of them or None, got {axes!r}"
        )
    return tuple(named)


def moment_shardings(
    params: Any, where: Any, axes: Sequence[str] | None
) -> list[NamedSharding | None]:
    """How moments are sharded, where that isn't as their parameters are.

    Args:
      params: arrays, tracers or shape structs.
      where: how they are declared to be sharded, as in `declared_specs`.
      axes: mesh axes to shard moments over, too; None is those that a parameter's type is reduced
        over, along which gradients are summed.

    Returns:
      A sharding for each leaf; None where its moments are sharded like it.

    Raises:
      ValueError: listing the leaves whose mesh has no such axis, or whose sharding can't be seen.
    """
    leaves = leaves_with_segments(params)
    each = [reduced_axes(x) if axes is None else axes for _, x in leaves]
    if not any(each):
        return [None] * len(leaves)
    mapped = functools.cache(mapped_axes)
    found, problems = [], []
    for (path, x), spec, wanted in zip(leaves, declared_specs(where, params), each, strict=True):
        try:
            found.append(_sharding(x, spec, wanted, mapped) if wanted else None)
        except _UnknownError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_all(problems, "shard_moments_over can't be had for these leaves:")
    return found


class _UnknownError(Exception):
    """Why the moments of a leaf can't be sharded over an axis."""


def _sharding(x: Any, declared: Declared, wanted: Iterable[str], mapped: Any) -> Any:
    if not getattr(x, "shape", ()):
        return None
    if manual := [a for a in jax.sharding.get_abstract_mesh().manual_axes if a in wanted]:
        raise _UnknownError(f"inside a shard_map over {manual} they are sharded like parameters")
    try:
        sharding = read_sharding(x, declared, mapped)
    except ValueError:  # whoever needs to know it says what is wrong
        return None
    mesh = sharding.mesh
    if mesh is None:
        return None
    if unknown := [a for a in wanted if a not in mesh.shape]:
        raise _UnknownError(f"got the axes {unknown}; the mesh has {mesh.axis_names}")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    hidden = [a for a in wanted if kinds[a] == AxisType.Auto and a not in sharding.known]
    if hidden:
        raise _UnknownError("traced arrays hide their sharding on Auto axes: give param_shardings")
    axes = [a for a in mesh.axis_names if a in wanted]
    moved = over_axes(sharding, axes)
    if moved == sharding or moved.written is None:
        return None
    return NamedSharding(mesh, moved.written)


def over_axes(sharding: LeafSharding, axes: Iterable[str]) -> LeafSharding:
    """A sharding over more axes, each on the first dim that it divides.

    First are the dims before the last two, which have layers and experts: matrices stay whole. Then
    come those that are sharded already, so that matrices aren't cut both ways. An axis that divides
    no dim is left out, as are those that shard the leaf already.

    Args:
      sharding: of a leaf on a mesh.
      axes: names of axes.

    Returns:
      The sharding; gradients are cut where they are to come to it.
    """
    for axis in axes:
        if axis not in sharding.free:
            continue
        rank, dims = len(sharding.shape), sharding.type_key
        order = sorted(range(rank), key=lambda d: (d >= rank - 2 and not dims[d], d))
        fitting = [d for d in order if sharding.block[d] % sharding.count((axis,)) == 0]
        if fitting:
            sharding = sharding.over([(axis,) if d == fitting[0] else () for d in range(rank)])
    return sharding
