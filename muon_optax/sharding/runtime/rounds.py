"""A plan as chunks of matrices, and the rounds in which they pass through the pipeline."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.buckets import Bucket, WorkSlice
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies import LOCAL, Strategy
from muon_optax.sharding.strategies.flat_exchange import FlatExchange
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices

__all__ = [
    "AnyChunk",
    "Chunk",
    "Index",
    "Piece",
    "Round",
    "SharedChunk",
    "chunks_of",
    "rounds_of",
    "runs",
]

Index = int | jax.Array  # in a loop an array


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some matrices of a leaf, one after the other.

    Attributes:
      leaf: its index.
      start: the first of them.
      count: how many.
      is_transposed: whether it is the transposes that are sharded like the bucket's others.
    """

    leaf: int
    start: Index
    count: int
    is_transposed: bool

    def transposed(self, x: jax.Array) -> jax.Array:
        """Matrices of the leaf as the bucket has them, or back."""
        return x.mT if self.is_transposed else x

    def moved(self, by: Index) -> "Piece":
        """The piece that begins `by` times its size further on."""
        return dataclasses.replace(self, start=self.start + by * self.count)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Matrices that are sent at once.

    Attributes:
      strategy: how they are brought together.
      matrices: how the devices have them.
      pieces: which they are.
      bytes: that a device receives.
    """

    strategy: Strategy
    matrices: ShardedMatrices
    pieces: tuple[Piece, ...]
    bytes: float

    def pick(self, x: jax.Array) -> jax.Array:
        """As `Strategy.pick`."""
        return self.strategy.pick(self.matrices, x)

    @property
    def kinds(self) -> "tuple[Chunk, ...]":
        """Itself: its matrices are of one shape."""
        return (self,)

    def receive(self, picked: Sequence[jax.Array]) -> jax.Array:
        """As `Strategy.receive`, of one array."""
        (x,) = picked
        return self.strategy.receive(self.matrices, x)

    def orthogonalize(self, x: jax.Array, orthogonalizer: Orthogonalizer) -> jax.Array:
        """As `Strategy.orthogonalize`."""
        return self.strategy.orthogonalize(self.matrices, x, orthogonalizer)

    def send(self, y: jax.Array) -> tuple[jax.Array, ...]:
        """As `Strategy.send`, one array."""
        return (self.strategy.send(self.matrices, y),)

    def moved(self, by: Index) -> "Chunk":
        """The same of the pieces that begin `by` times their size further on."""
        return dataclasses.replace(self, pieces=tuple(p.moved(by) for p in self.pieces))


@dataclasses.dataclass(frozen=True)
class SharedChunk:
    """Matrices of several shapes that are sent at once.

    Attributes:
      kinds: those of each shape, all of one strategy.
    """

    kinds: tuple[Chunk, ...]

    @property
    def strategy(self) -> Strategy:
        """How they are brought together."""
        return self.kinds[0].strategy

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Which they are."""
        return tuple(piece for kind in self.kinds for piece in kind.pieces)

    @property
    def bytes(self) -> float:
        """Bytes that a device receives."""
        return sum(kind.bytes for kind in self.kinds)

    def receive(self, picked: Sequence[jax.Array]) -> jax.Array:
        """As `FlatExchange.receive`."""
        return self._exchange.receive(picked)

    def orthogonalize(self, x: jax.Array, orthogonalizer: Orthogonalizer) -> jax.Array:
        """As `FlatExchange.orthogonalize`."""
        return self._exchange.orthogonalize(x, orthogonalizer)

    def send(self, y: jax.Array) -> tuple[jax.Array, ...]:
        """As `FlatExchange.send`."""
        return self._exchange.send(y)

    def moved(self, by: Index) -> "SharedChunk":
        """The same of the pieces that begin `by` times their size further on."""
        return SharedChunk(tuple(kind.moved(by) for kind in self.kinds))

    @property
    def _exchange(self) -> FlatExchange:
        return self.strategy.shared(tuple(kind.matrices for kind in self.kinds))


AnyChunk = Chunk | SharedChunk


class Round(NamedTuple):
    """The chunks that are handled at once; None where no chunk has come yet, or all have passed.

    Attributes:
      coming: the chunk that is formed and received.
      here: the one that is orthogonalised.
      leaving: the one that is sent back.
    """

    coming: AnyChunk | None
    here: AnyChunk | None
    leaving: AnyChunk | None

    @property
    def leaves(self) -> set[int]:
        """The leaves that it reads or writes."""
        return {piece.leaf for chunk in self if chunk for piece in chunk.pieces}

    def moved(self, by: Index) -> "Round":
        """The same of the pieces that begin `by` times their size further on."""
        return Round(*(chunk and chunk.moved(by) for chunk in self))

    def continues_in(self, other: "Round") -> bool:
        """Whether the other differs only in that its pieces begin where these end."""
        return self.moved(1) == other


def chunks_of(buckets: Iterable[Bucket], leaves: Sequence[BoundLeaf]) -> list[AnyChunk]:
    """The chunks of buckets, the cheapest last and the next cheapest first.

    Chunks sent at the ends have no matmuls to run under. Of equally cheap chunks those at the ends
    already are taken, so that a stack stays in order.
    """
    chunks: list[AnyChunk] = []
    shared: dict[int, list[Chunk]] = {}
    for bucket in buckets:
        for work_slice, chunk in _chunks(bucket, leaves):
            if work_slice.round is None:
                chunks.append(chunk)
            else:
                shared.setdefault(work_slice.round, []).append(chunk)
    chunks += [SharedChunk(tuple(kinds)) for kinds in shared.values()]
    last = chunks.pop(min(range(len(chunks)), key=lambda k: (chunks[k].bytes, -k)))
    first = min(chunks, key=lambda chunk: chunk.bytes, default=None)
    return [*sorted(chunks, key=lambda chunk: chunk is not first), last]


def _chunks(bucket: Bucket, leaves: Sequence[BoundLeaf]) -> Iterator[tuple[WorkSlice, Chunk]]:
    """Each chunk, and the slice that it is of.

    The bucket's matrices are those of its leaves one after the other; a chunk is a run.
    """
    for work_slice, start, count in bucket.chunks:
        pieces, low = [], start  # `low` counts from the leaf's first matrix
        for i in bucket.members:
            first, stop = max(low, 0), min(low + count, leaves[i].count)
            is_transposed = leaves[i].sides != bucket.leaf.sides
            pieces += [Piece(i, first, stop - first, is_transposed)] * (first < stop)
            low -= leaves[i].count
        received = work_slice.cost.bytes * count / work_slice.count
        yield work_slice, Chunk(*_way(work_slice, bucket.leaf, count), tuple(pieces), received)


def _way(work_slice: WorkSlice, leaf: BoundLeaf, count: int) -> tuple[Strategy, ShardedMatrices]:
    """The strategy of a chunk, and its matrices."""
    matrices = ShardedMatrices(
        leaf,
        count,
        work_slice.replica_axes,
        work_slice.first_owner,
        work_slice.skips,
        work_slice.repeats,
        work_slice.strategy.group_size,
    )
    # Matrices that one device has whole need no collective, whatever strategy was asked for.
    is_alone = matrices.shards * matrices.replicas == 1
    return LOCAL if is_alone else work_slice.strategy, matrices


def rounds_of(chunks: Sequence[AnyChunk]) -> list[Round]:
    """The rounds in which chunks pass, from stage to stage."""
    late = [(*chunks, None, None), (None, *chunks, None), (None, None, *chunks)]
    return [Round(*each) for each in zip(*late, strict=True)]


def runs(rounds: Iterable[Round]) -> Iterator[list[Round]]:
    """Rounds in runs that differ only in where their pieces begin: each can be a loop."""
    run: list[Round] = []
    for each in rounds:
        if run and not run[-1].continues_in(each):
            yield run
            run = []
        run.append(each)
    yield run
