"""Moves of an update between the shardings of parameters and momentum."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import Axes
from muon_optax.sharding.execution import Prepared
from muon_optax.sharding.reductions import reduced_axes, summation
from muon_optax.sharding.resharding import moved_axes, resharding_bytes, summing_bytes
from muon_optax.sharding.specs import LeafSharding
from muon_optax.transforms.dion2_slices import Dion2

__all__ = ["Move", "matrix_sizes", "moves_of", "spec_text"]


class Move(NamedTuple):
    """How a leaf's gradients or results move; leaves of which it is the same share a row."""

    reason: str
    matrix: tuple[int, ...]
    spec: str
    dtype: str
    bytes: int
    axes: Axes


def moves_of(
    arrays: Sequence[Any], prepared: Prepared, dion2: Dion2 | None
) -> dict[Move, list[BoundLeaf]]:
    """How gradients and results move, beside the collectives of strategies."""
    found: dict[Move, list[BoundLeaf]] = {}
    rows = zip(arrays, prepared.leaves, prepared.result_shardings, prepared.moves, strict=True)
    for x, leaf, result, end in rows:
        if result is None or not (result.mesh and result.known and leaf.sharding.known):
            continue
        sums, summed = _sums(x, leaf, result)
        moves = [*sums, _move(leaf, summed, leaf.sharding, x.dtype, _TO_MOMENTUM)]
        if end is not None:
            old = leaf.result_sharding or leaf.sharding
            if dion2 is not None:
                old, end = dion2.moved(leaf, old, end)
            moves.append(_move(leaf, old, end, leaf.dtype, _TO_PARAMETERS))
        for move in moves:
            if move.bytes:
                found.setdefault(move, []).append(leaf)
    return found


_TO_MOMENTUM = "gradients go to where the momentum is"
_TO_PARAMETERS = "results go to where the parameters are"


def _sums(x: Any, leaf: BoundLeaf, result: LeafSharding) -> tuple[list[Move], LeafSharding]:
    """How the gradient is summed of a parameter whose type is reduced, and how the sum is sharded.

    It is reduce-scattered to where the momentum is, as far as that can be, and else all-reduced.
    """
    axes = tuple(sorted(reduced_axes(x)))
    if not axes:
        return [], result
    how = summation(result.type_key, axes, leaf.sharding.type_key, len(result.shape))
    summed, dtype = result.over(how.scattered), jnp.dtype(x.dtype)
    scattered, reduced = summing_bytes(result, how, dtype.itemsize)
    said = f"gradients come unreduced over {', '.join(axes)}, and are"
    ends = spec_text(summed)
    like = Move(f"{said} all-reduced", matrix_sizes(leaf), ends, dtype.name, reduced, how.rest)
    first = like._replace(
        reason=f"{said} reduce-scattered",
        spec=f"{spec_text(result)} -> {ends}",
        bytes=scattered,
        axes=how.axes,
    )
    return [first, like], summed


def _move(leaf: BoundLeaf, old: LeafSharding, new: LeafSharding, dtype: Any, reason: str) -> Move:
    dtype = jnp.dtype(dtype)
    size = resharding_bytes(old, new, dtype.itemsize)
    text = f"{spec_text(old)} -> {spec_text(new)}"
    return Move(reason, matrix_sizes(leaf), text, dtype.name, size, moved_axes(old, new))


def matrix_sizes(leaf: BoundLeaf) -> tuple[int, ...]:
    """Sizes of a leaf's matrix axes, in the leaf's own order."""
    return tuple(leaf.shape[a] for a in leaf.view.stack_axes)


def spec_text(sharding: LeafSharding, dims: Sequence[int] | None = None) -> str:
    """How these dims, or all, are sharded, for a table."""
    spec = sharding.spec or ((),) * len(sharding.shape)
    chosen = range(len(spec)) if dims is None else dims
    return ", ".join("*".join(spec[a]) or "-" for a in chosen)
