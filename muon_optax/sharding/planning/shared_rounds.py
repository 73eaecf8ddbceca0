"""Rounds of owners that matrices of different shapes share, as the planner fills them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import Bucket, WorkSlice
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies.base import Strategy

__all__ = ["OpenRound", "OpenRounds", "numbered"]


@dataclasses.dataclass(frozen=True)
class OpenRound:
    """A round of owners, some of which have no matrix yet.

    Attributes:
      number: by which slices of the work name it.
      first_leaf: path of a leaf of the slice that began it.
      kind: equal for all that may share it.
      next_owner: the device that follows the owners of its matrices; of a group, the first.
      free: owners without a matrix in each replica, devices or groups.
      padded: the sizes to which its matrices are padded.
      results: bytes of the results that a device gets, those of other replicas included.
    """

    number: int
    first_leaf: str
    kind: Any
    next_owner: int
    free: int
    padded: Workload
    results: int


class OpenRounds:
    """The rounds that a plan has begun."""

    def __init__(self) -> None:
        self._rounds: dict[int, OpenRound] = {}

    def for_rest(
        self, strategy: Strategy, leaf: BoundLeaf, workload: Workload
    ) -> Iterator[OpenRound]:
        """Those that have owners for the matrices of a leaf."""
        kind = _kind(strategy, leaf, workload)
        return (r for r in self._rounds.values() if r.kind == kind and r.free)

    def take(self, work_slice: WorkSlice, leaf: BoundLeaf, workload: Workload) -> int:
        """Puts a rest into its round, or makes one; returns the number."""
        each = -(-work_slice.count // workload.replicas)
        padded, group_size = workload, work_slice.strategy.group_size
        number = len(self._rounds) if work_slice.round is None else work_slice.round
        kind = _kind(work_slice.strategy, leaf, workload)
        results = work_slice.count * workload.result_bytes
        path, free = leaf.path, workload.shards // group_size
        if work_slice.round is not None:
            before = self._rounds[number]
            path, free = before.first_leaf, before.free
            padded = work_slice.strategy.padded_workload(before.padded, workload)
            results += before.results
        replica, shard = divmod(work_slice.first_owner, workload.shards)
        shard = (shard + each * group_size) % workload.shards
        next_owner = replica * workload.shards + shard
        self._rounds[number] = OpenRound(
            number, path, kind, next_owner, free - each, padded, results
        )
        return number


def _kind(strategy: Strategy, leaf: BoundLeaf, workload: Workload) -> tuple:
    return strategy, leaf.round_key, workload.replica_axes


def numbered(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same, with numbers from 0 on of the rounds that several slices share, and of no other."""
    slices = [s for bucket in buckets for s in bucket.slices if s.round is not None]
    found = [s.round for s in slices]
    shared = [n for n in dict.fromkeys(found) if found.count(n) > 1]
    new = {number: i for i, number in enumerate(shared)}
    return [
        dataclasses.replace(
            bucket,
            slices=tuple(dataclasses.replace(s, round=new.get(s.round)) for s in bucket.slices),
        )
        for bucket in buckets
    ]
