"""Which axes of a parameter the dims of an intermediate array are.

A weight is cast, transposed, reshaped, sliced or scanned over before it meets an activation. A
`Weight` follows it through these steps, so that the axes of the matmul are axes of the parameter.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from muon_optax.partition import Shape

__all__ = ["Dim", "Factor", "Weight", "whole"]


class Factor(NamedTuple):
    """A factor of an axis: reshaping 12 to (3, 4) gives factors of 3 (stride 4) and 4 (stride 1).

    Attributes:
      axis: the parameter's axis.
      size: the factor's size.
      stride: how far apart, along the axis, neighbours in this factor are.
    """

    axis: int
    size: int
    stride: int


Dim = tuple[Factor, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array that holds one parameter's values, perhaps normalised or masked.

    Attributes:
      leaf: the parameter's index.
      dims: the factors that each dim of the array merges, outermost first; none for a dim that the
        parameter was broadcast along.
      batch: factors of which the array holds one place only: a loop's, an index's.
      cut: (axis, start, stop) where the array holds a slice of the parameter.
    """

    leaf: int
    dims: tuple[Dim, ...]
    batch: frozenset[Factor] = frozenset()
    cut: tuple[int, int, int] | None = None

    def factors_of(self, dims: Sequence[int]) -> Dim:
        """The factors of some dims."""
        return tuple(f for i in dims for f in self.dims[i])

    def permuted(self, order: Sequence[int]) -> "Weight":
        """The array transposed."""
        return dataclasses.replace(self, dims=tuple(self.dims[i] for i in order))

    def broadcast(self, places: Sequence[int], rank: int) -> "Weight":
        """The array broadcast to another rank, its dims going to these places."""
        dims: list[Dim] = [()] * rank
        for place, dim in zip(places, self.dims, strict=True):
            dims[place] = dim
        return dataclasses.replace(self, dims=tuple(dims))

    def indexed(self, dims: Sequence[int]) -> "Weight":
        """One place along these dims, which are dropped."""
        gone = {f for i in dims for f in self.dims[i]}
        kept = tuple(dim for i, dim in enumerate(self.dims) if i not in dims)
        return dataclasses.replace(self, dims=kept, batch=self.batch | gone)

    def sliced(self, dim: int, start: int, stop: int, size: int) -> "Weight":
        """Places start to stop along a dim of this size, which is kept."""
        if stop - start == size:
            return self
        if stop - start == 1:
            dims = tuple(() if i == dim else d for i, d in enumerate(self.dims))
            return dataclasses.replace(
                self, dims=dims, batch=self.batch | frozenset(self.dims[dim])
            )
        factors = self.dims[dim]
        is_axis = len(factors) == 1 and factors[0].stride == 1 and factors[0].size == size
        cut = (factors[0].axis, start, stop) if is_axis and self.cut is None else self.cut
        return dataclasses.replace(self, cut=cut)

    def reshaped(self, old: Shape, new: Shape) -> "Weight | None":
        """The array reshaped; None where a dim is split that isn't made of whole factors."""
        pieces = [
            piece for dim, size in zip(self.dims, old, strict=True) for piece in _cut(dim, size)
        ]
        dims: list[Dim] = []
        for size in new:
            dim = _take(pieces, size)
            if dim is None:
                return None
            dims.append(dim)
        return dataclasses.replace(self, dims=tuple(dims))


def whole(leaf: int, shape: Shape) -> Weight:
    """The parameter itself."""
    return Weight(leaf, tuple((Factor(axis, size, 1),) for axis, size in enumerate(shape)))


class _Piece(NamedTuple):
    size: int
    factors: Dim


def _cut(dim: Dim, size: int) -> list[_Piece]:
    """A dim in pieces of one factor, or whole if it holds a part of its factors only."""
    if len(dim) > 1 and math.prod(f.size for f in dim) == size:
        return [_Piece(f.size, (f,)) for f in dim]
    return [_Piece(size, dim)]


def _take(pieces: list[_Piece], size: int) -> Dim | None:
    """Takes pieces of this size in all from the front, splitting the last of them if need be."""
    found: Dim = ()
    while size > 1:
        while pieces and pieces[0].size == 1:
            pieces.pop(0)
        if not pieces:
            return None
        if size % pieces[0].size:
            outer = _split(pieces.pop(0), size)
            if outer is None:
                return None
            pieces[:0] = outer
        piece = pieces.pop(0)
        found, size = found + piece.factors, size // piece.size
    return found


def _split(piece: _Piece, size: int) -> list[_Piece] | None:
    """A piece as an outer one of this size and the rest."""
    if piece.size % size:
        return None
    rest = piece.size // size
    if not piece.factors:
        return [_Piece(size, ()), _Piece(rest, ())]
    (factor,) = piece.factors if len(piece.factors) == 1 else (None,)
    if factor is None or factor.size != piece.size:
        return None
    axis, _, stride = factor
    return [
        _Piece(size, (Factor(axis, size, stride * rest),)),
        _Piece(rest, (Factor(axis, rest, stride),)),
    ]
