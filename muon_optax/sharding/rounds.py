"""A plan as chunks of matrices, and the rounds in which they pass through the pipeline."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax

from muon_optax.sharding.buckets import Bucket, Leaf
from muon_optax.sharding.execute import Exchange, exchange_for

__all__ = ["Chunk", "Index", "Piece", "Round", "chunks_of", "rounds_of", "runs"]

Index = int | jax.Array  # in a loop an array


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some matrices of a leaf, one after the other.

    Attributes:
      leaf: its index.
      start: the first of them.
      count: how many.
      is_across: whether the leaf lies across the bucket's others, and is transposed.
    """

    leaf: int
    start: Index
    count: int
    is_across: bool

    def turned(self, x: jax.Array) -> jax.Array:
        """Matrices of the leaf as the bucket has them, or back."""
        return x.mT if self.is_across else x

    def moved(self, by: Index) -> "Piece":
        """The piece that lies `by` times its size further on."""
        return dataclasses.replace(self, start=self.start + by * self.count)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Matrices that are exchanged at once.

    Attributes:
      exchange: how.
      pieces: which.
      bytes: that a device receives.
    """

    exchange: Exchange
    pieces: tuple[Piece, ...]
    bytes: float

    def moved(self, by: Index) -> "Chunk":
        """The same of the pieces that lie `by` times their size further on."""
        return dataclasses.replace(self, pieces=tuple(p.moved(by) for p in self.pieces))


class Round(NamedTuple):
    """What happens at the same time; None where no chunk has come yet, or all have passed.

    Attributes:
      coming: the chunk that is formed and received.
      here: the one that is orthogonalised.
      leaving: the one that is sent back.
    """

    coming: Chunk | None
    here: Chunk | None
    leaving: Chunk | None

    @property
    def leaves(self) -> set[int]:
        """The leaves that it reads or writes."""
        return {piece.leaf for chunk in self if chunk for piece in chunk.pieces}

    def moved(self, by: Index) -> "Round":
        """The same of the pieces that lie `by` times their size further on."""
        return Round(*(chunk and chunk.moved(by) for chunk in self))

    def goes_on_in(self, other: "Round") -> bool:
        """Whether the other differs only in that its pieces lie right after these."""
        return self.moved(1) == other


def chunks_of(buckets: Iterable[Bucket], leaves: Sequence[Leaf]) -> list[Chunk]:
    """The chunks of buckets, the cheapest last and the next cheapest first.

    What is exchanged at the ends has no products to run under. Of equally cheap chunks those at the
    ends already are taken, so that a stack stays in order.
    """
    chunks = [chunk for bucket in buckets for chunk in _chunks(bucket, leaves)]
    last = chunks.pop(min(range(len(chunks)), key=lambda k: (chunks[k].bytes, -k)))
    first = min(chunks, key=lambda chunk: chunk.bytes, default=None)
    return [*sorted(chunks, key=lambda chunk: chunk is not first), last]


def _chunks(bucket: Bucket, leaves: Sequence[Leaf]) -> Iterator[Chunk]:
    """The bucket's matrices are those of its leaves one after the other; a chunk is a run."""
    for share, start, count in bucket.chunks:
        pieces, low = [], start  # `low` counts from the leaf's first matrix
        for i in bucket.members:
            first, stop = max(low, 0), min(low + count, leaves[i].count)
            is_across = leaves[i].sides != bucket.leaf.sides
            pieces += [Piece(i, first, stop - first, is_across)] * (first < stop)
            low -= leaves[i].count
        exchange = exchange_for(share, bucket.leaf, count)
        yield Chunk(exchange, tuple(pieces), share.cost.bytes * count / share.count)


def rounds_of(chunks: Sequence[Chunk]) -> list[Round]:
    """The rounds in which chunks pass, from stage to stage."""
    late = [(*chunks, None, None), (None, *chunks, None), (None, None, *chunks)]
    return [Round(*each) for each in zip(*late, strict=True)]


def runs(rounds: Iterable[Round]) -> Iterator[list[Round]]:
    """Rounds in runs that differ only in how far on their pieces lie: each can be a loop."""
    run: list[Round] = []
    for each in rounds:
        if run and not run[-1].goes_on_in(each):
            yield run
            run = []
        run.append(each)
    yield run
