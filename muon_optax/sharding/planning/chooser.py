"""Chooses the strategies of one bucket, with those of the buckets before it in mind."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import WorkSlice
from muon_optax.sharding.planning.costs import estimate
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.planning.loads import Loads
from muon_optax.sharding.planning.shared_rounds import OpenRound, OpenRounds
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.runtime.orthogonalizer import group_size
from muon_optax.sharding.strategies import STRATEGIES, Strategy
from muon_optax.sharding.strategies.groups import Groups

__all__ = ["Allowed", "Chooser", "Sharing"]

# Which remainders share rounds: none, those for which that is fastest, or all that can, over all
# replicas and in as few rounds as possible.
Sharing = Literal["none", "fastest", "all"]

# The part of their time that sending matrices in two parts must take off, as more is compiled.
_LEAST_GAIN_IN_TWO = 0.05

# How many latencies sending a chunk takes at least, where matmuls hide it.
_LATENCIES = 5


class Allowed(NamedTuple):
    """What a plan may have; the planner makes several plans and takes one.

    Attributes:
      sharing: which remainders share rounds.
      repeats: whether several replicas may work on the same matrix.
      groups: the strategy with groups of devices for owners that is weighed too, if any.
    """

    sharing: Sharing = "none"
    repeats: bool = False
    groups: Groups | None = None


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses the strategies of one bucket.

    Attributes:
      leaf: stands for the bucket's leaves.
      workload: of its matrices, divided over all the axes that can divide it.
      device: as in `plan_leaves`.
      loads: FLOPs of the devices so far; the chosen slices' are added.
      floor: FLOPs that the busiest device is taken to have in the end, at least.
      budget: bytes of workspace for one chunk.
      are_single: whether each leaf has one matrix.
      rounds: those that other buckets have begun.
      allowed: what the plan may have.
    """

    leaf: BoundLeaf
    workload: Workload
    device: DeviceModel
    loads: Loads
    floor: float
    budget: int
    are_single: bool
    rounds: OpenRounds
    allowed: Allowed

    def slices(self, count: int) -> list[WorkSlice]:
        """The cheapest way: all matrices under one strategy, or full rounds and a rest."""
        options = [
            option
            for workload in self._divided_or_not()
            for strategy in self._strategies(count, workload)
            for option in self._options(strategy, count, workload)
            if all(map(self._rows_fit, option))
        ]
        if self.allowed.sharing == "all" and self.allowed.groups is None:
            options = [o for o in options if self._can_share(o[-1])] or options
        best = min(options, key=lambda slices: sum(map(self._price, slices)))
        return [self._taken(work_slice) for work_slice in best]

    def _divided_or_not(self) -> list[Workload]:
        """The work divided over replicas, if there are any, and repeated on each."""
        repeated = dataclasses.replace(self.workload, replica_axes=())
        return [self.workload, repeated] if self.workload.replica_axes else [repeated]

    def _strategies(self, count: int, workload: Workload) -> list[Strategy]:
        """The one that is asked for, or those that 'auto' weighs."""
        is_divided = workload.replica_axes == self.workload.replica_axes
        groups: list[Strategy] = []
        if self.allowed.groups and is_divided and count < workload.owners:
            groups.append(dataclasses.replace(self.allowed.groups, method=workload.method))
        possible = [
            s
            for s in (*groups, *STRATEGIES.values())
            if s.why_impossible(self.leaf, self.workload.newton_schulz) is None
            and (s.communicates or not workload.replica_axes)
        ]
        if self.leaf.strategy != "auto":
            return [s for s in possible if s.name == self.leaf.strategy]
        return [s for s in possible if s.is_candidate(self.leaf, workload)]

    def _options(self, strategy: Strategy, count: int, workload: Workload) -> list[list[WorkSlice]]:
        """Ways to handle all matrices: of a strategy with owners, full rounds and any rest."""
        if not strategy.has_owners:
            return list(self._divisions(strategy, 0, count, workload))
        each = strategy.round_size(workload)
        rounds = count // each * each
        full = [self._slice(strategy, 0, rounds, workload)] if rounds else []
        if rounds == count:
            return [full]
        rest_count = count - rounds
        return [
            [*full, *rest]
            for s in self._strategies(count, workload)
            if not s.has_owners or rest_count < s.round_size(workload)
            for rest in self._rests(s, rounds, rest_count, workload)
        ]

    def _rests(
        self, strategy: Strategy, start: int, count: int, workload: Workload
    ) -> Iterator[list[WorkSlice]]:
        """Fewer matrices than owners: in a round that has room, or one of their own, or both."""
        if self.allowed.sharing != "none" and strategy.shares_rounds:
            for each in self.rounds.for_rest(strategy, self.leaf, workload):
                room = each.free * workload.replicas
                if not self._holds(strategy, each, min(count, room), workload):
                    continue
                if count <= room:
                    for repeats in self._repeats(strategy, count, workload):
                        yield [self._joined(strategy, start, count, workload, each, repeats)]
                elif self.allowed.sharing == "all":
                    # This takes as long as a new round for all, and leaves more room in it.
                    last = self._slice(strategy, start + room, count - room, workload)
                    yield [self._joined(strategy, start, room, workload, each), last]
        yield from self._divisions(strategy, start, count, workload)

    def _divisions(
        self, strategy: Strategy, start: int, count: int, workload: Workload
    ) -> Iterator[list[WorkSlice]]:
        """Matrices that are sent at once, or in two parts.

        The all-gather of results has equal rows for all replicas, of zeros where one has no matrix.
        Fewer are empty if several replicas work on the same matrix, and each sends a part of it.
        """
        at_once = [
            self._slice(strategy, start, count, workload, repeats)
            for repeats in self._repeats(strategy, count, workload)
        ]
        yield from ([each] for each in at_once)
        first = self._first_part(count, workload.replicas)
        if not self._can_repeat(strategy) or not 0 < first < count:
            return
        in_two = [
            self._slice(strategy, start + i, n, workload, workload.most_repeats(n))
            for i, n in ((0, first), (first, count - first))
        ]
        least = (1 - _LEAST_GAIN_IN_TWO) * min(map(self._price, at_once))
        if sum(map(self._price, in_two)) < least:
            yield in_two

    @staticmethod
    def _first_part(count: int, replicas: int) -> int:
        """How many matrices are in the first of two parts, which gives all R replicas as many.

        As large a multiple of R as there is; of fewer matrices R/2, R/4, ..., each on 2, 4, ...
        replicas.
        """
        if count >= replicas:
            return count - count % replicas
        return replicas >> (replicas // count).bit_length()

    def _repeats(self, strategy: Strategy, count: int, workload: Workload) -> list[int]:
        """How many replicas may work on each matrix: one, or as many as can."""
        most = workload.most_repeats(count) if self._can_repeat(strategy) else 1
        return [1] if most == 1 else [1, most]

    def _can_repeat(self, strategy: Strategy) -> bool:
        return self.allowed.repeats and strategy.group_size == 1

    def _rows_fit(self, work_slice: WorkSlice) -> bool:
        """Whether the workspace has room for the rows of replicas that have nothing to send."""
        workload, repeats = self._workload_of(work_slice), work_slice.repeats
        rows = -(work_slice.count * repeats) % workload.replicas
        return rows * workload.result_bytes // repeats <= self.budget

    def _holds(self, strategy: Strategy, into: OpenRound, count: int, workload: Workload) -> bool:
        """Whether the workspace has room for a round's results with those of more matrices.

        A round of one shape writes the results of all replicas where they stay. Shapes that share
        one get theirs in one flat array, which is cut then. Groups work on padded matrices, of
        which the workspace must hold one besides.
        """
        if strategy.group_size > 1:
            padded = strategy.padded_workload(into.padded, workload)
            matrix = padded.rows * padded.columns * padded.itemsize
            if strategy.least_workspace(matrix) > self.budget:
                return False
        return into.results + count * workload.result_bytes <= self.budget

    def _joined(
        self,
        strategy: Strategy,
        start: int,
        count: int,
        workload: Workload,
        into: OpenRound,
        repeats: int = 1,
    ) -> WorkSlice:
        """Matrices for the owners in a round that have none."""
        reason = f"{count} in the round of {into.first_leaf}"
        return dataclasses.replace(
            self._slice(strategy, start, count, workload, repeats),
            first_owner=into.next_owner,
            cost=estimate(strategy, count, workload, self.device, into.padded, repeats),
            reason=reason if self.leaf.strategy == "auto" else f"asked for; {reason}",
            round=into.number,
        )

    def _can_share(self, work_slice: WorkSlice) -> bool:
        """Whether these are fewer matrices than owners, who may get others in the same round."""
        is_divided = work_slice.replica_axes == self.workload.replica_axes
        return work_slice.skips and work_slice.strategy.shares_rounds and is_divided

    def _slice(
        self, strategy: Strategy, start: int, count: int, workload: Workload, repeats: int = 1
    ) -> WorkSlice:
        skips = strategy.has_owners and strategy.group_size == 1 and count < workload.owners
        return WorkSlice(
            start,
            count,
            strategy,
            replica_axes=workload.replica_axes,
            first_owner=self.loads.best_first_owner(count, workload, repeats) if skips else 0,
            chunk=self._chunk(strategy, count, workload),
            cost=estimate(strategy, count, workload, self.device, repeats=repeats),
            reason=self._reason(strategy, count, workload),
            skips=skips,
            repeats=repeats,
        )

    def _chunk(self, strategy: Strategy, count: int, workload: Workload) -> int:
        """Matrices to send at once, as many as the workspace holds.

        Each that a device works on takes as many copies as the strategy holds, and two are on their
        way: the chunks before and after.
        """
        held = self.budget // max(1, workload.matrix_bytes)
        at_once = max(1, (held - 2) // strategy.copies_held)
        if self.device.overlaps and strategy.communicates:
            # The first chunk has nothing to arrive under and the last one nothing to leave under.
            # So chunks are small: as few matrices as take much longer to send than the latency.
            bandwidth = self.device.bandwidth_over(workload.shard_axes, dict(workload.sizes))
            seconds = workload.matrix_bytes / bandwidth
            at_once = min(at_once, max(1, math.ceil(_LATENCIES * self.device.latency / seconds)))
        elif not strategy.communicates and self.are_single and self.leaf.sharding.is_known:
            elements = workload.rows * workload.columns
            at_once = min(at_once, group_size(count, elements, self.device.batch_elements))
        round_size = strategy.round_size(workload)
        if strategy.group_size > 1:
            return round_size
        if at_once * round_size >= count:
            return count
        return round_size * self._evenly(at_once, round_size)

    def _evenly(self, at_once: int, round_size: int) -> int:
        """About so many rounds, if possible such that they cut a leaf in equal chunks.

        Equal chunks are a loop, and compiled once.
        """
        rounds = range(at_once, at_once // 2, -1)
        return next((n for n in rounds if self.leaf.count % (n * round_size) == 0), at_once)

    def _reason(self, strategy: Strategy, count: int, workload: Workload) -> str:
        if not self.leaf.sharding.is_known:
            return "sharding unknown: left to the partitioner; give param_shardings"
        if self.leaf.strategy != "auto":
            return "asked for"
        return strategy.reason(self.leaf, count, workload)

    def _price(self, work_slice: WorkSlice) -> float:
        """Seconds that a slice of the work adds.

        Matmuls of some devices are free below what the busiest device will have in the end. Those
        that every device does never are: what comes later can't go to another.
        """
        if not work_slice.skips:
            return work_slice.cost.seconds
        peak = self.loads.peak_with(
            work_slice.first_owner,
            work_slice.count,
            self._workload_of(work_slice),
            work_slice.repeats,
        )
        return self._seconds(work_slice, max(0, peak - max(self.floor, self.loads.peak)))

    def _taken(self, work_slice: WorkSlice) -> WorkSlice:
        """The slice as it is planned: its FLOPs are the growth of the highest load."""
        before, workload = self.loads.peak, self._workload_of(work_slice)
        strategy = work_slice.strategy
        if work_slice.skips:
            if work_slice.round is None:  # a part of the rest may have been placed since
                first = self.loads.best_first_owner(work_slice.count, workload, work_slice.repeats)
                work_slice = dataclasses.replace(work_slice, first_owner=first)
            self.loads.add_to_rest(
                work_slice.first_owner, work_slice.count, workload, work_slice.repeats
            )
        else:
            self.loads.add_to_all(work_slice.cost.flops)
        if strategy.shares_rounds and work_slice.count < strategy.round_size(workload):
            number = self.rounds.take(work_slice, self.leaf, workload)
            work_slice = dataclasses.replace(work_slice, round=number)
        added = self.loads.peak - before
        cost = dataclasses.replace(work_slice.cost, seconds=self._seconds(work_slice, added))
        return dataclasses.replace(work_slice, cost=cost, added=added)

    def _workload_of(self, work_slice: WorkSlice) -> Workload:
        return dataclasses.replace(self.workload, replica_axes=work_slice.replica_axes)

    def _seconds(self, work_slice: WorkSlice, flops: float) -> float:
        """The slice's collectives, and matmuls of so many FLOPs."""
        spared = work_slice.cost.flops - flops
        return work_slice.cost.seconds - spared / self.device.rate(self.workload.itemsize)
