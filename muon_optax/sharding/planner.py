"""Leaves -> buckets -> a strategy each: plain, hashable Python, computed while tracing.

Leaves whose matrices have one shape, one dtype and one layout form a bucket. Its matrices go to
owners in full rounds, one for each device; what is left over is a share of its own, whose owners
are chosen so that the busiest device has as little to do as possible.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import jax.numpy as jnp

from muon_optax.polar import NewtonSchulz, resolve_schedule
from muon_optax.sharding.buckets import Bucket, Leaf, Share, group_leaves
from muon_optax.sharding.cost import DeviceModel, Strategy, Work, estimate
from muon_optax.sharding.loads import Loads
from muon_optax.sharding.local import group_size
from muon_optax.tree_paths import raise_together

__all__ = ["STRATEGIES", "least_workspace", "plan_leaves"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

# The default of `max_workspace_bytes`, at least; `_Chooser._chunk` says what six matrices hold.
_LEAST_WORKSPACE = 2**28
_WORKSPACE_MATRICES = 6


@functools.lru_cache(maxsize=256)
def plan_leaves(
    leaves: tuple[Leaf, ...],
    solver: NewtonSchulz | None,
    device: DeviceModel,
    max_workspace_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Chooses a strategy for every leaf.

    Args:
      leaves: the leaves; empty ones are in no bucket.
      solver: the Newton-Schulz that runs; None for a function of the user's.
      device: the device model that decides.
      max_workspace_bytes: bound of the workspace of one exchange on a device; None is the larger of
        256 MiB and six times the largest matrix.

    Returns:
      The buckets, costliest matrices first.

    Raises:
      ValueError: listing the leaves whose layout rules out the strategy asked for.
    """
    filled = {i: leaf for i, leaf in enumerate(leaves) if math.prod(leaf.view.shape)}
    works = {leaf.key: _work(leaf, solver) for leaf in filled.values()}
    largest = max((w.matrix_bytes for w in works.values()), default=0)
    budget = max_workspace_bytes or max(_LEAST_WORKSPACE, _WORKSPACE_MATRICES * largest)
    _check_strategies(filled.values(), works, solver)
    groups = group_leaves(filled, works, solver)
    groups = sorted(groups, key=lambda members: -works[leaves[members[0]].key].flops)

    def planned(floors: Mapping[tuple, float]) -> list[Bucket]:
        loads = {sizes: Loads(sizes) for sizes in floors}
        buckets = []
        for members in groups:
            leaf = leaves[members[0]]
            work = works[leaf.key]
            of_mesh = loads[work.sizes], floors[work.sizes]
            are_single = all(leaves[i].count == 1 for i in members)
            chooser = _Chooser(leaf, work, solver, device, *of_mesh, budget, are_single)
            shares = chooser.shares(sum(leaves[i].count for i in members))
            buckets.append(Bucket(members, leaf, tuple(shares)))
        return buckets

    # Bucket after bucket, a choice can't know whether later ones fill the devices it leaves idle.
    # So one plan is made as if they did, one as if not.
    floors = _least_peaks(filled.values(), works)
    plans = planned(dict.fromkeys(floors, 0.0)), planned(floors)
    best = min(plans, key=lambda buckets: sum(s.cost.seconds for b in buckets for s in b.shares))
    return tuple(_without_lone_skip(best, device))


def least_workspace(strategy: Strategy, leaf: Leaf) -> int:
    """Bytes of workspace on a device while it handles one matrix of a leaf at a time."""
    matrix = leaf.view.fan_in * leaf.view.fan_out * jnp.dtype(leaf.dtype).itemsize
    return (_places(strategy) + 2) * matrix


def _places(strategy: Strategy) -> int:
    """How often a matrix is on a device at once: as slices and whole, in and out."""
    return 1 if strategy == "local" else 4


def _work(leaf: Leaf, solver: NewtonSchulz | None) -> Work:
    """What the cost of a leaf's bucket depends on, shared over all the axes that can share it."""
    rows, columns = sorted((leaf.view.fan_in, leaf.view.fan_out))
    dtype = jnp.dtype(leaf.dtype)
    # A function of the user's is counted as if it were the default iteration.
    counted = solver or NewtonSchulz(resolve_schedule())
    flops = sum(k * counted.flops(m, n, dtype) for k, m, n in leaf.view.matrices)
    mesh = leaf.layout.mesh
    return Work(
        rows,
        columns,
        itemsize=dtype.itemsize,
        flops=flops // leaf.view.batch,
        shard_axes=leaf.shard_axes,
        share_axes=leaf.layout.free,
        sizes=() if mesh is None else tuple(mesh.shape.items()),
        ends_whole=leaf.home is not None,
    )


def _least_peaks(leaves: Iterable[Leaf], works: Mapping[tuple, Work]) -> dict[tuple, float]:
    """FLOPs that the busiest device of each mesh has at least, however work is spread."""
    shared: dict[tuple, float] = collections.defaultdict(float)
    largest: dict[tuple, int] = collections.defaultdict(int)
    for leaf in leaves:
        work = works[leaf.key]
        shared[work.sizes] += leaf.count * work.flops / work.owners
        largest[work.sizes] = max(work.flops, largest[work.sizes])
    return {sizes: max(shared[sizes], largest[sizes]) for sizes in shared}


def _check_strategies(
    leaves: Iterable[Leaf], works: Mapping[tuple, Work], solver: NewtonSchulz | None
) -> None:
    problems = []
    for leaf in leaves:
        possible = _possible_strategies(leaf, works[leaf.key], solver)
        if leaf.strategy not in ("auto", *possible):
            why = _why_not_gram(leaf, solver) if leaf.strategy == "gram" else "it is in pieces"
            problems.append(f"{leaf.path}: {leaf.strategy!r} can't be, {why}; possible: {possible}")
    raise_together(problems, "these leaves can't have the strategy asked for:")


def _possible_strategies(leaf: Leaf, work: Work, solver: NewtonSchulz | None) -> list[Strategy]:
    """What can be asked for, whether or not it makes sense."""
    found: list[Strategy] = ["all_to_all", "gather"]
    if work.shards == 1:
        found.append("local")
    if _why_not_gram(leaf, solver) is None:
        found.append("gram")
    return found


def _why_not_gram(leaf: Leaf, solver: NewtonSchulz | None) -> str | None:
    """Why 'gram' can't be; None where it can."""
    view = leaf.view
    long = view.output_axes if view.fan_out >= view.fan_in else view.reduction_axes
    if leaf.home is not None:
        return "the results go whole to every device"
    if solver is None:
        return "a function of the user's needs whole matrices"
    if solver.schedule.preconditioning == "spectral":
        return "the spectral norm needs whole matrices"
    if len(view.block_sizes) > 1:
        return "fused blocks are cut from whole matrices"
    if not leaf.shard_axes or leaf.layout.axes_of(long) != leaf.layout.axes_of(view.stack_axes):
        return "the long side of a matrix, and that alone, must be sharded"
    if leaf.layout.is_mapped:
        return "JAX can't reduce-scatter under a vmap over an Explicit mesh axis"
    return None


@dataclasses.dataclass(frozen=True)
class _Chooser:
    """Chooses the strategies of one bucket.

    Attributes:
      leaf: stands for the bucket's leaves.
      work: one of its matrices, shared over all the axes that can share it.
      solver: as in `plan_leaves`.
      device: as in `plan_leaves`.
      loads: of the devices so far; what is chosen is added.
      floor: FLOPs that the busiest device is taken to have in the end, at least.
      budget: bytes of workspace for one exchange.
      are_single: whether each leaf has one matrix.
    """

    leaf: Leaf
    work: Work
    solver: NewtonSchulz | None
    device: DeviceModel
    loads: Loads
    floor: float
    budget: int
    are_single: bool

    def shares(self, count: int) -> list[Share]:
        """The cheapest way: all matrices under one strategy, or full rounds and a rest."""
        options = [
            option
            for work in self._shared_or_not()
            for strategy in self._strategies(work)
            for option in self._options(strategy, count, work)
        ]
        best = min(options, key=lambda shares: sum(map(self._price, shares)))
        return [self._taken(share) for share in best]

    def _shared_or_not(self) -> list[Work]:
        """The work shared over replicas, if there are any, and repeated on each."""
        alone = dataclasses.replace(self.work, share_axes=())
        return [self.work, alone] if self.work.share_axes else [alone]

    def _strategies(self, work: Work) -> list[Strategy]:
        """The one that is asked for, or those that 'auto' weighs."""
        possible = self._possible(work)
        if self.leaf.strategy != "auto":
            return [s for s in possible if s == self.leaf.strategy]
        if work.owners == 1:
            return ["local"]
        return [s for s in possible if self._is_sensible(s, work)]

    def _possible(self, work: Work) -> list[Strategy]:
        found = _possible_strategies(self.leaf, work, self.solver)
        return [s for s in found if s != "local" or not work.share_axes]

    def _is_sensible(self, strategy: Strategy, work: Work) -> bool:
        """Whether 'auto' may take it: as good as others, with the numbers of one device."""
        if strategy == "gather":
            return work.shards > 1  # else it's all_to_all, without its balance over devices
        if strategy != "gram" or self.solver is None:
            return strategy != "local"
        view = self.leaf.view
        return self.solver.chosen_method(view.fan_in, view.fan_out, self.leaf.dtype) == "gram"

    def _options(self, strategy: Strategy, count: int, work: Work) -> list[list[Share]]:
        """Ways to do all matrices: 'all_to_all' takes full rounds, and a rest may go another."""
        if strategy != "all_to_all":
            return [[self._share(strategy, 0, count, work)]]
        rounds = count // work.owners * work.owners
        full = [self._share("all_to_all", 0, rounds, work)] if rounds else []
        if rounds == count:
            return [full]
        rests: list[Strategy] = ["all_to_all"]
        if self.leaf.strategy == "auto":
            rests = [s for s in self._possible(work) if self._is_sensible(s, work)]
        return [[*full, self._share(s, rounds, count - rounds, work)] for s in rests]

    def _share(self, strategy: Strategy, start: int, count: int, work: Work) -> Share:
        cost = estimate(strategy, count, work, self.device, self.solver)
        skips = strategy == "all_to_all" and count < work.owners
        return Share(
            start,
            count,
            strategy,
            axes=work.share_axes,
            offset=self.loads.best_offset(count, work) if skips else 0,
            chunk=self._chunk(strategy, count, work),
            cost=cost,
            reason=_reason(strategy, self.leaf, count, work),
            skips=skips,
        )

    def _chunk(self, strategy: Strategy, count: int, work: Work) -> int:
        """Matrices to exchange at once, as many as the workspace holds.

        For k on a device that is 4 k + 2 matrices: each lies there as slices and whole, in and out.
        Without an exchange it is k + 2: results are written over what they are made of. Several
        large ones are a loop of products, which hides less of the exchange than the products
        themselves, so those that take much longer than the latency go one by one.
        """
        held = self.budget // max(1, work.matrix_bytes)
        at_once = max(1, (held - 2) // _places(strategy))
        seconds = work.matrix_bytes / self.device.bandwidth_over(work.shard_axes, dict(work.sizes))
        is_large = seconds > 5 * self.device.latency
        if self.device.overlaps and is_large and strategy != "local":
            at_once = 1
        elif strategy == "local" and self.are_single and self.leaf.layout.is_known:
            at_once = min(at_once, group_size(count, work.rows * work.columns))
        each = {"local": 1, "gather": work.replicas}.get(strategy, work.owners)
        return min(count, at_once * each)

    def _price(self, share: Share) -> float:
        """Seconds that a share adds.

        Products of some devices are free below what the busiest device will have in the end. Those
        that every device does never are: what comes later can't go to another.
        """
        if not share.skips:
            return share.cost.seconds
        peak = self.loads.peak_with(share.offset, share.count, self._work_of(share))
        return self._seconds(share, max(0, peak - max(self.floor, self.loads.peak)))

    def _taken(self, share: Share) -> Share:
        """The share as it is planned: its products take what the highest load grows by."""
        before = self.loads.peak
        if share.skips:
            self.loads.add_to_rest(share.offset, share.count, self._work_of(share))
        else:
            self.loads.add_to_all(share.cost.flops)
        added = self.loads.peak - before
        cost = dataclasses.replace(share.cost, seconds=self._seconds(share, added))
        return dataclasses.replace(share, cost=cost, added=added)

    def _work_of(self, share: Share) -> Work:
        return dataclasses.replace(self.work, share_axes=share.axes)

    def _seconds(self, share: Share, flops: float) -> float:
        """The share's exchange, and products of so many FLOPs."""
        spared = share.cost.flops - flops
        return share.cost.seconds - spared / self.device.rate(self.work.itemsize)


def _reason(strategy: Strategy, leaf: Leaf, count: int, work: Work) -> str:
    """Why a share has its strategy, for the plan's table."""
    if not leaf.layout.is_known:
        return "layout unknown: left to the partitioner; give param_shardings"
    if leaf.strategy != "auto":
        return "asked for"
    if strategy == "local" and work.count(leaf.layout.free) > 1:
        return "repeating it takes less time than sharing it"
    if strategy == "all_to_all" and count < work.owners:
        matrices = "matrix" if count == 1 else "matrices"
        return f"{count} {matrices} for {work.owners} owners, the least busy ones"
    return {
        "local": "matrices are whole here",
        "all_to_all": "each matrix whole on one device, once",
        "gather": "fewer bytes than a round of owners",
        "gram": "Gram matrices are smaller than the matrices",
    }[strategy]


def _without_lone_skip(buckets: Sequence[Bucket], device: DeviceModel) -> Sequence[Bucket]:
    """Skips nothing where one share alone would be: devices that skip it would only wait."""
    skipped = [share for bucket in buckets for share in bucket.shares if share.skips]
    if len(skipped) != 1 or not device.overlaps:
        return buckets
    return [
        dataclasses.replace(
            bucket, shares=tuple(dataclasses.replace(share, skips=False) for share in bucket.shares)
        )
        for bucket in buckets
    ]
