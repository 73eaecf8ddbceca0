"""What is planned and carried out: leaves, buckets of leaves, and shares of their matrices."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from muon_optax.matrix_view import BoundView
from muon_optax.polar import NewtonSchulz
from muon_optax.sharding.cost import Cost, Strategy, Work
from muon_optax.sharding.specs import Axes, Layout

__all__ = ["Bucket", "Leaf", "Share", "group_leaves"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What planning needs to know of one leaf.

    Attributes:
      path: its name.
      view: how it makes matrices.
      layout: how it lies.
      dtype: the dtype to exchange and compute in, by name.
      strategy: 'auto', or the strategy that the user asks for.
      home: where the results go, if they go whole to every device that had a slice, as in ZeRO-1.
    """

    path: str
    view: BoundView
    layout: Layout
    dtype: str
    strategy: str = "auto"
    home: Layout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        return self.layout.shape

    @property
    def batch_axes(self) -> Axes:
        """Mesh axes over which whole matrices are spread."""
        return self.layout.axes_of(self.view.batch_axes)

    @property
    def shard_axes(self) -> Axes:
        """Mesh axes that cut matrices."""
        return self.layout.axes_of(self.view.stack_axes)

    @property
    def count(self) -> int:
        """Matrices that a device has a part of."""
        return self.view.batch // self.layout.count(self.batch_axes)

    @property
    def sides(self) -> tuple[tuple[int, Axes], ...]:
        """Size and mesh axes of each dim of a stacked matrix."""
        axes = self.view.stack_axes
        return tuple((self.shape[a], self.layout.type_key[a]) for a in axes)

    @property
    def key(self) -> tuple:
        """What leaves must share to be handled together: all but the sizes of batch axes."""
        return (self.view.matrix_key, self.sides, *self._rest_of_key)

    def key_across(self, solver: NewtonSchulz | None) -> tuple:
        """What a leaf also shares with those that lie across it, whose transposes it can join.

        Queries and outputs of attention lie across each other. A transpose's polar factor is the
        polar factor's transpose.
        """
        if not self._may_turn(solver):
            return self.key
        return (tuple(sorted(self.sides)), *self._rest_of_key)

    @property
    def _rest_of_key(self) -> tuple:
        layout = self.layout
        batch = frozenset(x for a in self.view.batch_axes for x in layout.type_key[a])
        lies = (layout.mesh, batch, layout.free, layout.manual, layout.is_known)
        return (*lies, self.dtype, self.strategy, self.home is None)

    def _may_turn(self, solver: NewtonSchulz | None) -> bool:
        """Whether its transposes may be orthogonalised instead, and could be of use."""
        # AOL norms are those of rows, and a user's function may do anything.
        is_symmetric = solver is not None and solver.schedule.preconditioning != "aol"
        is_plain = len(self.sides) == 2 and len(self.view.block_sizes) == 1
        return is_symmetric and is_plain and bool(self.shard_axes) and self.home is None


@dataclasses.dataclass(frozen=True)
class Share:
    """Some matrices of a bucket, and what is done with them.

    Attributes:
      start, count: which of the bucket's matrices.
      strategy: how they are brought together.
      axes: replicating axes that divide the work.
      offset: the first owner, where there are fewer matrices than owners; see `rest_owners`.
      chunk: how many matrices are exchanged at once.
      cost: bytes, FLOPs and seconds.
      reason: why this strategy.
      added: FLOPs that it adds to the busiest device, the buckets before it counted in.
      skips: whether devices without a matrix go on to the next share; if not, they work on zeros.
        Skipping takes a branch, whose products hide less of the exchange, so it must gain time.
    """

    start: int
    count: int
    strategy: Strategy
    axes: Axes
    offset: int
    chunk: int
    cost: Cost
    reason: str
    added: int = 0
    skips: bool = False

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
      shares: what is done with them.
    """

    members: tuple[int, ...]
    leaf: Leaf
    shares: tuple[Share, ...]

    @property
    def chunks(self) -> Iterator[tuple[Share, int, int]]:
        """(share, start, count) of each exchange."""
        for share in self.shares:
            for start, count in share.chunks:
                yield share, start, count


def group_leaves(
    leaves: Mapping[int, Leaf], works: Mapping[tuple, Work], solver: NewtonSchulz | None
) -> list[tuple[int, ...]]:
    """Indices of the leaves of each bucket.

    Leaves that lie across each other are one bucket if either kind would leave a round of owners
    incomplete; else turning them gains nothing.

    Args:
      leaves: by index.
      works: what the cost depends on, by `Leaf.key`.
      solver: the Newton-Schulz that runs; None for a function of the user's.

    Returns:
      The indices, in tuples that stand for one bucket each.
    """
    across: dict[tuple, dict[tuple, list[int]]] = {}
    for i, leaf in leaves.items():
        across.setdefault(leaf.key_across(solver), {}).setdefault(leaf.key, []).append(i)
    buckets: list[tuple[int, ...]] = []
    for by_key in across.values():
        counts = {key: sum(leaves[i].count for i in group) for key, group in by_key.items()}
        if any(count % works[key].owners for key, count in counts.items()):
            buckets.append(tuple(itertools.chain(*by_key.values())))
        else:
            buckets += map(tuple, by_key.values())
    return buckets
