"""Leaves -> buckets -> a strategy each: plain, hashable Python, computed while tracing.

Leaves whose matrices have one shape, one dtype and one sharding form a bucket. Strategies are
compared by their cost alone. Where one has owners, a bucket's matrices go to them in full rounds,
one for each device; the remainder is a slice of the work of its own, whose owners are chosen so
that the busiest device has as little to do as possible. Where that costs less, the remainders of
several buckets share a round, in which their owners follow one another. Of fewer matrices than
replicas each may be on several, if that takes enough off the time. Where there are more devices
than matrices, owners are groups of devices if that takes much off the time.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import jax.numpy as jnp

from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.tree_paths import raise_all
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import Bucket, group_leaves
from muon_optax.sharding.planning.chooser import Allowed, Chooser, Sharing
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.planning.loads import Loads
from muon_optax.sharding.planning.shared_rounds import OpenRounds, numbered
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies import GROUPS, STRATEGIES

__all__ = ["plan_leaves"]

# The default of `max_workspace_bytes`, at least; `Chooser._chunk` says how six matrices are used.
_LEAST_WORKSPACE = 2**28
_WORKSPACE_MATRICES = 6

# The part of the time that sharing rounds must take off, a latency at least, to be worth a program
# with branches; and as much again for each slice of the work that it compiles more. Seven slices
# for DeepSeek-V3 on 64 H100s took off .02 of the time, and a tenth more to compile.
_LEAST_GAIN = 0.01

# The part of the time that groups for owners must take off, times the ratio of the bytes received
# if they receive more. Their sums are in the middle of the iteration, so that no matmuls hide them,
# while other collectives may be hidden.
_LEAST_GAIN_OF_GROUPS = 0.15


@functools.lru_cache(maxsize=256)
def plan_leaves(
    leaves: tuple[BoundLeaf, ...],
    newton_schulz: NewtonSchulz | None,
    device: DeviceModel,
    max_workspace_bytes: int | None = None,
    *,
    adaptive: bool = False,
) -> tuple[Bucket, ...]:
    """Chooses a strategy for every leaf.

    Args:
      leaves: the leaves; empty ones are in no bucket.
      newton_schulz: the iteration that runs; None for a function of the user's.
      device: the device model that decides.
      max_workspace_bytes: bound of one chunk's workspace on a device; None is the larger of 256 MiB
        and six times the largest matrix.
      adaptive: as in `Orthogonalizer`.

    Returns:
      The buckets, costliest matrices first.

    Raises:
      ValueError: listing the leaves whose sharding rules out the strategy asked for.
    """
    filled = {i: leaf for i, leaf in enumerate(leaves) if math.prod(leaf.view.shape)}
    workloads = {leaf.key: _workload(leaf, newton_schulz, adaptive) for leaf in filled.values()}
    largest = max((w.matrix_bytes for w in workloads.values()), default=0)
    budget = max_workspace_bytes or max(_LEAST_WORKSPACE, _WORKSPACE_MATRICES * largest)
    _check_strategies(filled.values(), newton_schulz)
    work = [
        _BucketWork(members, tuple(leaves[i] for i in members), workloads[leaves[members[0]].key])
        for members in group_leaves(filled, workloads, newton_schulz)
    ]
    work = tuple(sorted(work, key=lambda each: -each.workload.flops))
    planner = _Planner(work, device, budget, _least_peaks(filled.values(), workloads))
    best = planner.with_single_owners()
    if planner.has_more_devices_than_matrices:
        best = planner.with_groups_if_faster(best)
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

    @property
    def leaves_replicas_idle(self) -> bool:
        """Whether some replicas would have fewer matrices than others."""
        return self.count % self.workload.replicas > 0


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Makes plans for all buckets, of which `plan_leaves` takes one.

    One shares no rounds, one those where that is fastest, and one has as few rounds as possible;
    each is made without replicas that repeat a matrix, and where some would be idle also with them.
    Groups for owners take another for each of their sizes, with as few rounds as possible.

    Attributes:
      work: the buckets, costliest matrices first.
      device: as in `plan_leaves`.
      budget: bytes of workspace for one chunk.
      floors: for each mesh, by the sizes of its axes, FLOPs that its busiest device has at least.
    """

    work: tuple[_BucketWork, ...]
    device: DeviceModel
    budget: int
    floors: Mapping[tuple, float]

    @property
    def has_more_devices_than_matrices(self) -> bool:
        """Whether every bucket whose matrices have owners leaves some of the owners idle."""
        owned = [each for each in self.work if each.workload.owners > 1]
        return bool(owned) and all(each.count < each.workload.owners for each in owned)

    def with_single_owners(self) -> list[Bucket]:
        """The fastest plan with single devices for owners, and shared rounds where worth it."""
        can_share = sum(each.leaves_rest for each in self.work) > 1
        sharings = get_args(Sharing) if can_share else ("none",)
        apart, *shared = (self._fastest(sharing) for sharing in sharings)
        fastest_first = sorted(shared, key=_seconds_of)
        return next((x for x in fastest_first if _is_worth(x, apart, self.device)), apart)

    def with_groups_if_faster(self, best: list[Bucket]) -> list[Bucket]:
        """A plan with groups for owners, if it takes much off the time of `best`.

        Larger groups must take as much off the time of smaller ones. All devices take part in the
        work of every group, so that nothing is free for the devices without a matrix.
        """
        for groups in GROUPS:
            in_groups = self._plan(self._zero_floors, Allowed("all", groups=groups))
            gain = _seconds_of(best) - _seconds_of(in_groups)
            more = max(1.0, _received_by(in_groups) / max(1, _received_by(best)))
            if gain > max(_LEAST_GAIN_OF_GROUPS * more * _seconds_of(best), self.device.latency):
                best = in_groups
        return best

    def _fastest(self, sharing: Sharing) -> list[Bucket]:
        """The fastest plan, in which replicas repeat matrices of others where that is worth it."""
        best = self._faster(Allowed(sharing))
        if not any(each.leaves_replicas_idle for each in self.work):
            return best
        repeating = self._faster(Allowed(sharing, repeats=True))
        return repeating if _is_worth(repeating, best, self.device) else best

    def _faster(self, allowed: Allowed) -> list[Bucket]:
        """The faster of two plans.

        Bucket after bucket, a choice can't know whether later ones fill the devices it leaves idle.
        So one plan is made as if they did, one as if not.
        """
        plans = [self._plan(floors, allowed) for floors in (self._zero_floors, self.floors)]
        return min(plans, key=_seconds_of)

    @property
    def _zero_floors(self) -> Mapping[tuple, float]:
        """Those under which no device's matmuls are free."""
        return dict.fromkeys(self.floors, 0.0)

    def _plan(self, floors: Mapping[tuple, float], allowed: Allowed) -> list[Bucket]:
        """One plan, bucket after bucket; the arguments are as in `Chooser`."""
        loads, rounds = {sizes: Loads(sizes) for sizes in floors}, OpenRounds()
        buckets, work = [], self.work
        if allowed.sharing == "all":  # a shared round is as large as its first matrix
            work = sorted(work, key=lambda each: -each.workload.matrix_bytes)
        for each in work:
            chooser = Chooser(
                leaf=each.leaves[0],
                workload=each.workload,
                device=self.device,
                loads=loads[each.workload.sizes],
                floor=floors[each.workload.sizes],
                budget=self.budget,
                are_single=all(leaf.count == 1 for leaf in each.leaves),
                rounds=rounds,
                allowed=allowed,
            )
            buckets.append(Bucket(each.members, each.leaves[0], tuple(chooser.slices(each.count))))
        return numbered(buckets)


def _received_by(buckets: Iterable[Bucket]) -> int:
    """Bytes that a device receives."""
    return sum(work_slice.cost.bytes for bucket in buckets for work_slice in bucket.slices)


def _seconds_of(buckets: Iterable[Bucket]) -> float:
    """The time of a plan on the device model."""
    return sum(work_slice.cost.seconds for bucket in buckets for work_slice in bucket.slices)


def _is_worth(plan: Sequence[Bucket], plainer: Sequence[Bucket], device: DeviceModel) -> bool:
    """Whether a plan takes so much time off a plainer one that it makes up for compiling more."""
    seconds, slices = _seconds_of(plainer), [sum(len(b.slices) for b in x) for x in (plainer, plan)]
    least = _LEAST_GAIN * (1 + max(0, slices[1] - slices[0])) * seconds
    return seconds - _seconds_of(plan) > max(least, device.latency)


def _workload(leaf: BoundLeaf, newton_schulz: NewtonSchulz | None, adaptive: bool) -> Workload:
    """The work on a leaf's bucket, divided over all replicas that can divide it."""
    rows, columns = sorted((leaf.view.fan_in, leaf.view.fan_out))
    dtype = jnp.dtype(leaf.dtype)
    # A function of the user's is counted as if it were the default iteration.
    counted = newton_schulz or NewtonSchulz(resolve_schedule())
    flops = sum(k * counted.flops(m, n, dtype) for k, m, n in leaf.view.dense_matrices)
    method = counted.chosen_method(rows, columns, dtype)
    mesh, wide = leaf.sharding.mesh, wide_dtype(dtype)
    largest_entry = jnp.finfo(wide).bits // 8  # a real number of complex matrices, too
    return Workload(
        rows,
        columns,
        itemsize=dtype.itemsize,
        flops=flops // leaf.view.batch,
        shard_axes=leaf.shard_axes,
        replica_axes=leaf.sharding.free,
        sizes=() if mesh is None else tuple(mesh.shape.items()),
        newton_schulz=newton_schulz,
        gathered_axes=leaf.gathered_axes,
        method=method,
        sent_gram_itemsize=counted.sent_gram_dtype(method, dtype).itemsize,
        sent_scalars=(largest_entry, wide.itemsize) if adaptive else (largest_entry,),
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
