"""The cost of moving leaves from one sharding to another, as XLA does it."""

import itertools
import math

from muon_optax.sharding.declared import Axes
from muon_optax.sharding.reductions import Summation
from muon_optax.sharding.specs import LeafSharding

__all__ = ["moved_axes", "resharding_bytes", "summing_bytes"]


def resharding_bytes(old: LeafSharding, new: LeafSharding, itemsize: int) -> int:
    """Bytes that a device receives to have its block of `new`.

    XLA slices blocks by new axes, all-gathers along those that are dropped, and sends those that go
    to another dim by an all-to-all. A collective-permute comes before where a dim's axes are put in
    another order: P(("fsdp", "replica")) is sliced from P("fsdp"), P(("replica", "fsdp")) isn't.

    Args:
      old: the sharding before.
      new: the sharding after, on the same mesh.
      itemsize: bytes of an element.

    Returns:
      The bytes.
    """
    parts = old.count(_left_axes(old, new))
    received = math.prod(new.block) * (parts - 1) // parts
    if _permuted_axes(old, new):
        used = {a for axes in (*old.spec, *new.spec) for a in axes}
        received += math.prod(new.shape) // new.count(used)
    return received * itemsize


def moved_axes(old: LeafSharding, new: LeafSharding) -> Axes:
    """Mesh axes along which blocks are sent."""
    return tuple(dict.fromkeys((*_left_axes(old, new), *_permuted_axes(old, new))))


def _left_axes(old: LeafSharding, new: LeafSharding) -> Axes:
    """Axes that no longer shard the dim that they did."""
    return tuple(a for before, after in _dims(old, new) for a in before if a not in after)


def _permuted_axes(old: LeafSharding, new: LeafSharding) -> Axes:
    """Axes of the dims whose remaining axes aren't the first ones, before and after."""
    permuted: list[str] = []
    for before, after in _dims(old, new):
        kept = tuple(a for a in before if a in after)
        if not before[: len(kept)] == kept == after[: len(kept)]:
            permuted += [*before, *after]
    return tuple(permuted)


def _dims(old: LeafSharding, new: LeafSharding) -> list[tuple[Axes, Axes]]:
    return list(itertools.zip_longest(old.spec, new.spec, fillvalue=()))


def summing_bytes(sharding: LeafSharding, how: Summation, itemsize: int) -> tuple[int, int]:
    """Bytes that a device receives to sum a block over mesh axes.

    Args:
      sharding: of the summands.
      how: over which axes, and how.
      itemsize: bytes of an element.

    Returns:
      Those of reduce-scatters and those of all-reduces.
    """
    size = math.prod(sharding.block) * itemsize
    parts, rest = (sharding.count(axes) for axes in (how.axes, how.rest))
    return size * (parts - 1) // parts, 2 * (size // parts) * (rest - 1) // rest
