"""Meshes in words, and how a model's leaves are usually sharded by the names of mesh axes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from muon_optax._internal.tree_paths import (
    Segments,
    align,
    leaves_with_segments,
    path_name,
    raise_all,
)
from muon_optax.partition import Shape, words
from muon_optax.views.matrix_view import View, bind_view, is_view

__all__ = ["ROLES", "Role", "parse_sizes", "usual_specs"]

Role = Literal["replica", "fsdp", "tensor", "expert"]
ROLES: dict[str, Role] = {
    "replica": "replica",
    "data": "replica",
    "dp": "replica",
    "fsdp": "fsdp",
    "tensor": "tensor",
    "tp": "tensor",
    "model": "tensor",
    "expert": "expert",
    "ep": "expert",
}
# Layers that tensor parallelism cuts along the input, as those before are cut along the output.
_ROW_PARALLEL = {"o", "out", "down", "c_proj", "wo", "w2", "o_proj", "out_proj", "down_proj"}


def parse_sizes(text: str) -> dict[str, int]:
    """Reads the size of each mesh axis from 'replica=4,fsdp=16'.

    Raises:
      ValueError: for another form.

    Example:
      >>> parse_sizes("replica=4,fsdp=16")
      {'replica': 4, 'fsdp': 16}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        is_size = size.isascii() and size.isdigit() and 0 < len(size) < 10 and int(size) > 0
        if not axis.isidentifier() or axis in sizes or not is_size:
            raise ValueError(
                f"a mesh is written like replica=4,fsdp=16, each axis once, got {text!r}"
            )
        sizes[axis] = int(size)
    return sizes


def usual_specs(
    params: Any,
    views: Any,
    sizes: Mapping[str, int],
    *,
    fsdp: Literal["rows", "columns"] = "rows",
) -> Any:
    """A PartitionSpec for every leaf.

    Axes named replica, data or dp replicate all leaves. fsdp shards each matrix on its first dim
    (rows) or its last (columns), or where that doesn't divide on the largest that does. tensor, tp
    or model shards the output of a layer, but the input of output projections, as Megatron does;
    fsdp then takes the other dim. expert or ep shards the expert dim of leaves that have one.
    Vectors, and leaves that no size divides, are replicated.

    Args:
      params: the parameters, as arrays or shape structs.
      views: a tree (or a prefix of one) of matrix views, with None for leaves whose last two dims
        count as the matrix.
      sizes: size of each mesh axis.
      fsdp: which dim fsdp would rather shard.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: for an axis of another name, or views that don't fit.

    Example:
      >>> shapes = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> specs = usual_specs(shapes, None, {"replica": 2, "fsdp": 8, "tensor": 4})
      >>> specs["up"] == PartitionSpec("fsdp", "tensor")
      True
    """
    unknown = [axis for axis in sizes if axis not in ROLES]
    if unknown:
        raise ValueError(f"mesh axes must be among {tuple(ROLES)} or have specs, got {unknown}")
    leaves = leaves_with_segments(params)
    given = align(views, params, what="matrix views", is_leaf=is_view)
    specs, problems = [], []
    for (path, leaf), view in zip(leaves, given, strict=True):
        try:
            specs.append(_spec(path, tuple(leaf.shape), view, sizes, fsdp))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_all(problems, "these leaves can't be laid out:")
    return jax.tree.structure(params).unflatten(specs)


def _spec(
    path: Segments, shape: Shape, view: View | None, sizes: Mapping[str, int], fsdp: str
) -> PartitionSpec:
    batch, fan_in, fan_out = _axes(shape, view)
    matrix = sorted((*fan_in, *fan_out))
    has_experts = any(name.startswith("expert") for name in words(path))
    is_row_parallel = not _ROW_PARALLEL.isdisjoint(words(path)[-2:])  # 'down', or 'down/kernel'
    order: dict[Role, list[int]] = {
        "expert": batch[-1:] if has_experts else [],
        "tensor": [*fan_in, *fan_out[::-1]] if is_row_parallel else [*fan_out[::-1], *fan_in],
        "fsdp": _largest_after(matrix, 0 if fsdp == "rows" else -1, shape),
        "replica": [],
    }
    taken: dict[int, str] = {}
    for role, dims in order.items():
        for axis in [axis for axis in sizes if ROLES[axis] == role]:
            free = [d for d in dims if d not in taken and shape[d] % sizes[axis] == 0]
            if free:
                taken[free[0]] = axis
    entries = [taken.get(d) for d in range(len(shape))]
    return PartitionSpec(*entries) if taken else PartitionSpec()


def _axes(shape: Shape, view: View | None) -> tuple[list[int], list[int], list[int]]:
    """Batch, input and output axes."""
    if view is not None:
        bound = bind_view(view, shape)
        groups = (bound.batch_axes, bound.reduction_axes, bound.output_axes)
        return list(groups[0]), list(groups[1]), list(groups[2])
    if len(shape) < 2:
        return [], [], []
    *batch, fan_in, fan_out = range(len(shape))
    return batch, [fan_in], [fan_out]


def _largest_after(dims: Sequence[int], first: int, shape: Shape) -> list[int]:
    """The dims, the first or last before all others, those by size."""
    if not dims:
        return []
    chosen = dims[first]
    return [chosen, *sorted((d for d in dims if d != chosen), key=lambda d: -shape[d])]
