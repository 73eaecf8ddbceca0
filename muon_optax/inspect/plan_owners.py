"""Which devices own the matrices of a plan's row, where there are fewer than owners."""

import itertools
from collections.abc import Iterable, Sequence

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import WorkSlice
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices

__all__ = ["owners_of", "owners_text"]

_RANGES = 3  # that a table shows


def owners_of(work_slice: WorkSlice, leaf: BoundLeaf) -> tuple[int, ...]:
    """The owners of each matrix of a rest, or the first device of the group that owns it.

    Of full rounds nothing, as every device owns as many.
    """
    matrices = ShardedMatrices(
        leaf,
        work_slice.count,
        work_slice.replica_axes,
        work_slice.first_owner,
        repeats=work_slice.repeats,
        group_size=work_slice.strategy.group_size,
    )
    is_rest = work_slice.count < matrices.shards * matrices.replicas // matrices.group_size
    return matrices.owners if work_slice.strategy.has_owners and is_rest else ()


def owners_text(owners: Iterable[int], group_size: int = 1) -> str:
    """The owners, for a table.

    Args:
      owners: their numbers, or those of the first device of each group.
      group_size: devices that own a matrix together.

    Returns:
      The numbers of all.

    Example:
      >>> owners_text((0, 1, 2, 5)), owners_text((4, 6), 2)
      ('owners 0-2, 5', 'owners 4-7')
    """
    return f"owners {_ranges(sorted(i + k for i in owners for k in range(group_size)))}"


def _ranges(numbers: Sequence[int]) -> str:
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[n for _, n in run] for _, run in runs]
    texts = [f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans]
    more = [f"and {len(texts) - _RANGES} such more"] if len(texts) > _RANGES else []
    return ", ".join([*texts[:_RANGES], *more])
