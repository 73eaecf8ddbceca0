"""Units of planning and running: buckets of leaves, and slices of the work on their matrices."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from muon_optax.orthogonalization import NewtonSchulz
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.costs import Cost
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.specs import Axes
from muon_optax.sharding.strategies.base import Strategy

__all__ = ["Bucket", "WorkSlice", "group_leaves"]


@dataclasses.dataclass(frozen=True)
class WorkSlice:
    """Some matrices of a bucket, and how they are handled.

    Attributes:
      start, count: which of the bucket's matrices.
      strategy: how they are brought together.
      replica_axes: mesh axes whose replicas divide the work.
      first_owner: where there are fewer matrices than owners; see `rest_owners`.
      chunk: how many matrices are sent at once.
      cost: bytes, FLOPs and seconds.
      reason: why this strategy.
      added: FLOPs that it adds to the busiest device, the buckets before it counted in.
      skips: whether devices without a matrix go on to the next slice of the work; if not, they work
        on zeros. Skipping takes a branch, under which XLA runs no collective, so it must gain time.
      repeats: how many replicas work on each matrix; see `ShardedMatrices`.
      round: the number of a round of owners that it shares with slices of other buckets; None where
        it has rounds of its own.
    """

    start: int
    count: int
    strategy: Strategy
    replica_axes: Axes
    first_owner: int
    chunk: int
    cost: Cost
    reason: str
    added: int = 0
    skips: bool = False
    repeats: int = 1
    round: int | None = None

    @property
    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start, count) of each chunk."""
        for start in range(self.start, self.start + self.count, self.chunk):
            yield start, min(self.chunk, self.start + self.count - start)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that are handled together.

    Attributes:
      members: their indices among the leaves that were planned.
      leaf: the first of them, which stands for all.
      slices: the matrices, by how they are handled.
    """

    members: tuple[int, ...]
    leaf: BoundLeaf
    slices: tuple[WorkSlice, ...]

    @property
    def chunks(self) -> Iterator[tuple[WorkSlice, int, int]]:
        """(slice, start, count) of each chunk."""
        for work_slice in self.slices:
            for start, count in work_slice.chunks:
                yield work_slice, start, count


def group_leaves(
    leaves: Mapping[int, BoundLeaf],
    workloads: Mapping[tuple, Workload],
    newton_schulz: NewtonSchulz | None,
) -> list[tuple[int, ...]]:
    """Indices of the leaves of each bucket.

    Leaves whose transposes are sharded alike are one bucket if either kind would leave a round of
    owners incomplete; else transposing them gains nothing.

    Args:
      leaves: by index.
      workloads: by `BoundLeaf.key`.
      newton_schulz: the iteration that runs; None for a function of the user's.

    Returns:
      The indices, in tuples that stand for one bucket each.
    """
    groups: dict[tuple, dict[tuple, list[int]]] = {}
    for i, leaf in leaves.items():
        same_or_transposed = groups.setdefault(leaf.key_or_transposed(newton_schulz), {})
        same_or_transposed.setdefault(leaf.key, []).append(i)
    buckets: list[tuple[int, ...]] = []
    for by_key in groups.values():
        counts = {key: sum(leaves[i].count for i in group) for key, group in by_key.items()}
        if any(count % workloads[key].owners for key, count in counts.items()):
            buckets.append(tuple(itertools.chain(*by_key.values())))
        else:
            buckets += map(tuple, by_key.values())
    return buckets
