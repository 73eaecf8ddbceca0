"""Bytes that an update of a model must move, by the formulas of the strategies.

    gather      L mn b f                    each matrix whole on every device
    all_to_all  2 ceil(L / N) mn b f        each matrix whole on one device, and back
    gram        2 (1 + r) ceil(L / N) m² 4 (N - 1)   where its long side alone is sharded

with L matrices m x n (m <= n) of b bytes an element, N devices to a replica, f = (N - 1) / N and r
restarts. Where R replicas share the work, L is ceil(L / R), and each receives the results of the
others: ceil(L / R) mn b / N (R - 1), or L / R mn b / N (R - 1) at best, where several replicas work
on the same matrix and each sends a part of its result. Matrices of different shapes that are
sharded over the same axes may be in one round of N owners of an all_to_all, in which each slice is
as long as the longest: 2 mn b f of the largest. So may those that groups of g devices own, by 2 mn
b f / g of the largest, and what a group sends within itself: log2(g) (T (9/16 m² 2 + 4) + 4), in T
steps with the most rows of the round, for triangles of Gram matrices in float16, a factor of each,
and the largest entry.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.shapes import ModelOnMesh
from muon_optax import Plan
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.views.matrix_view import bind_view, is_view

__all__ = ["Kind", "chosen_bytes", "fewest_bytes", "ideal_flops", "largest_bytes"]

ITEMSIZE, RESTARTS, STEPS = 2, 1, 5


@dataclasses.dataclass(frozen=True)
class Kind:
    """Matrices of one shape and one sharding.

    Attributes:
      fan_in, fan_out: sizes of a matrix, a fused one as it is exchanged.
      spec: mesh axes along either side.
      along_input, along_output: how many devices those are.
      replicas: devices that hold the same block.
      blocks: (number, fan-in, fan-out) of the matrices that are orthogonalised.

    Example:
      >>> rows = Kind(4096, 14336, (("fsdp",), ()), 8, 1, 1, ((1, 4096, 14336),))
      >>> rows.received("all_to_all", 8, 1) == 2 * 4096 * 14336 * 2 * 7 / 8
      True
    """

    fan_in: int
    fan_out: int
    spec: tuple[tuple[str, ...], tuple[str, ...]]
    along_input: int
    along_output: int
    replicas: int
    blocks: tuple[tuple[int, int, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes of one matrix."""
        return self.fan_in * self.fan_out * ITEMSIZE

    @property
    def sides(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Size and mesh axes of either side."""
        return (self.fan_in, self.spec[0]), (self.fan_out, self.spec[1])

    @property
    def shards(self) -> int:
        """N."""
        return self.along_input * self.along_output

    def received(self, strategy: str, count: int, sharing: int) -> float:
        """Bytes that a device receives at best for matrices, shared over so many replicas."""
        inside = self.inside(strategy, count, sharing)
        return inside + self.fewest_from_replicas(count, sharing)

    def inside(self, strategy: str, count: int, sharing: int) -> float:
        """The same, from the other shards."""
        n, mine = self.shards, math.ceil(count / sharing)
        owned, short = math.ceil(mine / n), min(self.fan_in, self.fan_out)
        return {
            "local": 0.0,
            "gather": mine * self.bytes * (n - 1) / n,
            "all_to_all": 2 * owned * self.bytes * (n - 1) / n,
            "gram": 2 * (1 + RESTARTS) * owned * short**2 * 4 * (n - 1),
        }[strategy]

    def in_group(self, count: int, sharing: int, group_size: int) -> tuple[float, float]:
        """Bytes for matrices that groups own: from all shards, and from a group's other devices."""
        owned = math.ceil(count / sharing) * group_size / self.shards
        rows = min(self.fan_in, self.fan_out)
        slices = 2 * math.ceil(owned) * self.bytes / group_size * (self.shards - 1) / self.shards
        sums = STEPS * (2 * rows**2 * 9 / 16 + 4) + 4
        return slices, math.ceil(owned) * math.log2(group_size) * sums

    def from_replicas(self, count: int, sharing: int, repeats: int) -> float:
        """The results of other replicas, of which so many work on the same matrix."""
        return math.ceil(count / sharing) / repeats * self.bytes / self.shards * (sharing - 1)

    def fewest_from_replicas(self, count: int, sharing: int) -> float:
        """The same without a zero."""
        return count / sharing * self.bytes / self.shards * (sharing - 1)

    def fewest(self, count: int) -> float:
        """The same under the strategy with the fewest."""
        along_long = self.along_output if self.fan_in <= self.fan_out else self.along_input
        if self.shards == 1:
            return 0.0
        is_long_cut = along_long == self.shards and self.blocks == ((1, self.fan_in, self.fan_out),)
        possible = ("gather", "all_to_all", *(("gram",) if is_long_cut else ()))
        return min(
            self.received(strategy, count, sharing)
            for strategy in possible
            for sharing in {1, self.replicas}
        )


def chosen_bytes(promised: Plan, model: ModelOnMesh) -> float:
    """The formulas' bytes of what a plan chose."""
    kinds = {path: kind for path, kind, *_ in _of(model)}
    in_rounds: dict[Any, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    total = 0.0
    for i, row in enumerate(promised.rows):
        kind, sharing = kinds[row.leaves[0]], math.prod(model.sizes[a] for a in row.share_axes)
        total += kind.from_replicas(row.count, sharing, row.repeats)
        inside = (
            kind.in_group(row.count, sharing, row.group_size)
            if row.group_size > 1
            else (kind.inside(row.strategy, row.count, sharing), 0.0)
        )
        name = ("row", i) if row.round is None else ("round", row.round)
        in_rounds[name] = list(map(max, in_rounds[name], inside))
    return total + sum(map(sum, in_rounds.values()))


def fewest_bytes(model: ModelOnMesh) -> float:
    """The formulas' bytes of the strategies with the fewest.

    All matrices of a kind go together, with those of the transposed sharding where that sends less,
    or in rounds that they share with others that are sharded over the same axes.
    """
    places: dict[Any, dict[frozenset, dict[Kind, int]]] = {}
    for _, kind, count, groups in _of(model):
        place = frozenset(a for side in kind.spec for a in side), groups
        of_place = places.setdefault(place, collections.defaultdict(collections.Counter))
        of_place[frozenset(kind.sides)][kind] += count
    return sum(
        min(_fewest_in_rounds(list(kinds.values()), sharing) for sharing in _sharings(kinds))
        for kinds in places.values()
    )


def _sharings(groups: dict[frozenset, dict[Kind, int]]) -> set[int]:
    return {1} | {kind.replicas for kinds in groups.values() for kind in kinds}


def _fewest_in_rounds(groups: list[dict[Kind, int]], sharing: int) -> float:
    """The fewest bytes where each group goes by itself, or into rounds, the largest first.

    A round of n owners is as large as its first matrix. `fewest` has those of the groups so far, by
    the owners that the last round has left.
    """
    fewest = {0: 0.0}
    for kinds in sorted(groups, key=lambda kinds: -next(iter(kinds)).bytes):
        first, total = next(iter(kinds)), sum(kinds.values())
        alone = min(sum(k.fewest(count) for k, count in kinds.items()), first.fewest(total))
        mine, shards = math.ceil(total / sharing), first.shards
        found = {left: before + alone for left, before in fewest.items()}
        for left, before in fewest.items():
            rounds = math.ceil(max(0, mine - left) / shards)
            received = first.inside("all_to_all", rounds * shards, 1)
            received += before + first.fewest_from_replicas(total, sharing)
            new = left + rounds * shards - mine
            found[new] = min(received, found.get(new, math.inf))
        fewest = found
    return min(fewest.values())


def ideal_flops(model: ModelOnMesh) -> float:
    """FLOPs of the busiest device where all is shared as well as can be."""
    solver = NewtonSchulz(resolve_schedule())
    total = largest = 0
    for _, kind, count, groups in _of(model):
        flops = sum(n * solver.flops(*shape, "bfloat16") for n, *shape in kind.blocks)
        total += flops * count * groups
        largest = max(largest, flops)
    return max(total / math.prod(model.sizes.values()), largest)


def largest_bytes(model: ModelOnMesh) -> int:
    """Bytes of the largest matrix."""
    return max(kind.bytes for _, kind, *_ in _of(model))


def _of(model: ModelOnMesh) -> Iterator[tuple[str, Kind, int, int]]:
    """(path, kind, matrices in a group, groups) of each leaf that Muon gets.

    A stack that is sharded over its layers or experts is in groups of devices.
    """
    specs = jax.tree.leaves(model.specs)
    views = jax.tree.leaves(model.views, is_leaf=lambda x: x is None or is_view(x))
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    for (path, x), view, spec in zip(leaves, views, specs, strict=True):
        if view is None:
            continue
        bound = bind_view(view, x.shape)
        of_dim = [_axes(entry) for entry in (*spec, *[None] * (x.ndim - len(spec)))]
        along_input, along_output = (
            tuple(a for d in side for a in of_dim[d])
            for side in (bound.reduction_axes, bound.output_axes)
        )
        groups = _cuts(model, sum((of_dim[d] for d in bound.batch_axes), ()))
        cuts = _cuts(model, along_input), _cuts(model, along_output)
        kind = Kind(
            bound.fan_in,
            bound.fan_out,
            (along_input, along_output),
            *cuts,
            replicas=math.prod(model.sizes.values()) // math.prod((*cuts, groups)),
            blocks=tuple((n // bound.batch, *shape) for n, *shape in bound.matrices),
        )
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield name, kind, bound.batch // groups, groups


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _cuts(model: ModelOnMesh, axes: tuple[str, ...]) -> int:
    return math.prod(model.sizes[a] for a in axes)
