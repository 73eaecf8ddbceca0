"""Leaves -> buckets -> a strategy each: plain, hashable Python, computed while tracing.

Leaves whose matrices have one shape, one dtype and one sharding form a bucket. Strategies are
compared by their cost alone. Where one has owners, a bucket's matrices go to them in full rounds,
one for each device; the remainder is a slice of the work of its own, whose owners are chosen so
that the busiest device has as little to do as possible. Where that costs less, the remainders of
several buckets share a round, in which their owners follow one another. Where there are more
devices than matrices, owners are groups of devices if that takes much off the time.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import jax.numpy as jnp

from muon_optax._internal.tree_paths import raise_all
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import Bucket, group_leaves
from muon_optax.sharding.planning.chooser import Chooser, Sharing
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.planning.loads import Loads
from muon_optax.sharding.planning.shared_rounds import OpenRounds, numbered
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies import GROUPS, STRATEGIES, Strategy

__all__ = ["plan_leaves"]

# The default of `max_workspace_bytes`, at least; `Chooser._chunk` says how six matrices are used.
_LEAST_WORKSPACE = 2**28
_WORKSPACE_MATRICES = 6

# The part of the time that sharing rounds must take off, a latency at least, to be worth a program
# with branches; and as much again for each slice of the work that it compiles more. Seven slices
# for DeepSeek-V3 on 64 H100s took off .02 of the time, and a tenth more to compile.
_LEAST_GAIN = 0.01

# The same for groups of owners, and more if they receive more bytes: what they send in the middle
# of the iteration is under no matmul, while all else may be.
_LEAST_GAIN_OF_GROUPS = 0.15


@functools.lru_cache(maxsize=256)
def plan_leaves(
    leaves: tuple[BoundLeaf, ...],
    newton_schulz: NewtonSchulz | None,
    device: DeviceModel,
    max_workspace_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Chooses a strategy for every leaf.

    Args:
      leaves: the leaves; empty ones are in no bucket.
      newton_schulz: the iteration that runs; None for a function of the user's.
      device: the device model that decides.
      max_workspace_bytes: bound of one chunk's workspace on a device; None is the larger of 256 MiB
        and six times the largest matrix.

    Returns:
      The buckets, costliest matrices first.

    Raises:
      ValueError: listing the leaves whose sharding rules out the strategy asked for.
    """
    filled = {i: leaf for i, leaf in enumerate(leaves) if math.prod(leaf.view.shape)}
    workloads = {leaf.key: _workload(leaf, newton_schulz) for leaf in filled.values()}
    largest = max((w.matrix_bytes for w in workloads.values()), default=0)
    budget = max_workspace_bytes or max(_LEAST_WORKSPACE, _WORKSPACE_MATRICES * largest)
    _check_strategies(filled.values(), newton_schulz)
    work = [
        _BucketWork(members, tuple(leaves[i] for i in members), workloads[leaves[members[0]].key])
        for members in group_leaves(filled, workloads, newton_schulz)
    ]
    work = sorted(work, key=lambda each: -each.workload.flops)

    def planned(
        floors: Mapping[tuple, float], sharing: Sharing, groups: Strategy | None = None
    ) -> list[Bucket]:
        # A shared round is as large as its first matrix.
        ordered = sorted(work, key=lambda each: -each.workload.matrix_bytes * (sharing == "all"))
        loads, rounds = {sizes: Loads(sizes) for sizes in floors}, OpenRounds()
        return numbered(
            [
                each.planned(loads, floors, device, budget, rounds, sharing, groups)
                for each in ordered
            ]
        )

    floors = _least_peaks(filled.values(), workloads)
    can_share = sum(each.leaves_rest for each in work) > 1
    best = _fastest(planned, floors, device, get_args(Sharing) if can_share else ("none",))
    owned = [each for each in work if each.workload.owners > 1]
    if owned and all(each.count < each.workload.owners for each in owned):
        best = _in_groups_if_faster(planned, floors, device, best)
    return tuple(_without_lone_skip(best, device))


@dataclasses.dataclass(frozen=True)
class _BucketWork:
    """A bucket that is to be planned.

    Attributes:
      members: as in `Bucket`.
      leaves: the members' records.
      workload: of its matrices.
    """

    members: tuple[int, ...]
    leaves: tuple[BoundLeaf, ...]
    workload: Workload

    @property
    def count(self) -> int:
        """How many matrices it has."""
        return sum(leaf.count for leaf in self.leaves)

    @property
    def leaves_rest(self) -> bool:
        """Whether a round of owners would be incomplete."""
        return self.count % self.workload.owners > 0

    def planned(
        self,
        loads: Mapping[tuple, Loads],
        floors: Mapping[tuple, float],
        device: DeviceModel,
        budget: int,
        rounds: OpenRounds,
        sharing: Sharing,
        groups: Strategy | None,
    ) -> Bucket:
        """The bucket as a `Chooser` plans it, to which the arguments go."""
        chooser = Chooser(
            leaf=self.leaves[0],
            workload=self.workload,
            device=device,
            loads=loads[self.workload.sizes],
            floor=floors[self.workload.sizes],
            budget=budget,
            are_single=all(leaf.count == 1 for leaf in self.leaves),
            rounds=rounds,
            sharing=sharing,
            groups=groups,
        )
        return Bucket(self.members, self.leaves[0], tuple(chooser.slices(self.count)))


def _fastest(
    planned: Callable[[Mapping[tuple, float], Sharing], list[Bucket]],
    floors: dict[tuple, float],
    device: DeviceModel,
    sharings: Sequence[Sharing],
) -> list[Bucket]:
    """The plan that takes least time, with shared rounds only if these are worth it.

    Bucket after bucket, a choice can't know whether later ones fill the devices it leaves idle. So
    one plan is made as if they did, one as if not.
    """
    peaks = dict.fromkeys(floors, 0.0), floors
    best, *shared = (
        min((planned(each, sharing) for each in peaks), key=_seconds_of) for sharing in sharings
    )
    worth = (each for each in sorted(shared, key=_seconds_of) if _is_worth(each, best, device))
    return next(worth, best)


def _in_groups_if_faster(
    planned: Callable[[Mapping[tuple, float], Sharing, Strategy], list[Bucket]],
    floors: Iterable[tuple],
    device: DeviceModel,
    best: list[Bucket],
) -> list[Bucket]:
    """The plan with groups of owners, where they take much off the time of this or smaller groups.

    All devices work on what a group works on: no matmuls are free, as if later ones filled them.
    """
    peaks = dict.fromkeys(floors, 0.0)
    for strategy in GROUPS:
        in_groups = planned(peaks, "all", strategy)
        gain = _seconds_of(best) - _seconds_of(in_groups)
        more = max(1.0, _received_by(in_groups) / max(1, _received_by(best)))
        if gain > max(_LEAST_GAIN_OF_GROUPS * more * _seconds_of(best), device.latency):
            best = in_groups
    return best


def _received_by(buckets: Iterable[Bucket]) -> int:
    return sum(work_slice.cost.bytes for bucket in buckets for work_slice in bucket.slices)


def _seconds_of(buckets: Iterable[Bucket]) -> float:
    return sum(work_slice.cost.seconds for bucket in buckets for work_slice in bucket.slices)


def _is_worth(shared: Sequence[Bucket], apart: Sequence[Bucket], device: DeviceModel) -> bool:
    """Whether sharing rounds takes so much time off that it makes up for compiling more."""
    seconds, slices = _seconds_of(apart), [sum(len(b.slices) for b in x) for x in (apart, shared)]
    least = _LEAST_GAIN * (1 + max(0, slices[1] - slices[0])) * seconds
    return seconds - _seconds_of(shared) > max(least, device.latency)


def _workload(leaf: BoundLeaf, newton_schulz: NewtonSchulz | None) -> Workload:
    """The work on a leaf's bucket, divided over all replicas that can divide it."""
    rows, columns = sorted((leaf.view.fan_in, leaf.view.fan_out))
    dtype = jnp.dtype(leaf.dtype)
    # A function of the user's is counted as if it were the default iteration.
    counted = newton_schulz or NewtonSchulz(resolve_schedule())
    flops = sum(k * counted.flops(m, n, dtype) for k, m, n in leaf.view.dense_matrices)
    method = counted.chosen_method(rows, columns, dtype)
    mesh = leaf.sharding.mesh
    return Workload(
        rows,
        columns,
        itemsize=dtype.itemsize,
        flops=flops // leaf.view.batch,
        shard_axes=leaf.shard_axes,
        replica_axes=leaf.sharding.free,
        sizes=() if mesh is None else tuple(mesh.shape.items()),
        newton_schulz=newton_schulz,
        results_are_replicated=leaf.result_sharding is not None,
        method=method,
        sent_gram_itemsize=counted.sent_gram_dtype(method, dtype).itemsize,
    )


def _least_peaks(
    leaves: Iterable[BoundLeaf], workloads: Mapping[tuple, Workload]
) -> dict[tuple, float]:
    """FLOPs that the busiest device of each mesh has at least, however the work is divided."""
    shared: dict[tuple, float] = collections.defaultdict(float)
    largest: dict[tuple, int] = collections.defaultdict(int)
    for leaf in leaves:
        workload = workloads[leaf.key]
        shared[workload.sizes] += leaf.count * workload.flops / workload.owners
        largest[workload.sizes] = max(workload.flops, largest[workload.sizes])
    return {sizes: max(shared[sizes], largest[sizes]) for sizes in shared}


def _check_strategies(leaves: Iterable[BoundLeaf], newton_schulz: NewtonSchulz | None) -> None:
    problems = []
    for leaf in leaves:
        why = {name: s.why_impossible(leaf, newton_schulz) for name, s in STRATEGIES.items()}
        if why.get(leaf.strategy) is not None:
            possible = [name for name, reason in why.items() if reason is None]
            problems.append(
                f"{leaf.path}: {leaf.strategy!r} can't be, {why[leaf.strategy]}; "
                f"possible: {possible}"
            )
    raise_all(problems, "these leaves can't have the strategy asked for:")


def _without_lone_skip(buckets: Sequence[Bucket], device: DeviceModel) -> Sequence[Bucket]:
    """Skips nothing where one slice alone would be: devices that skip it would only wait."""
    skipped = [s for bucket in buckets for s in bucket.slices if s.skips]
    if len(skipped) != 1 or not device.overlaps:
        return buckets
    return [
        dataclasses.replace(
            bucket, slices=tuple(dataclasses.replace(s, skips=False) for s in bucket.slices)
        )
        for bucket in buckets
    ]
