"""The arrays of one leaf on its way through the pipeline.

Each kind of `Buffers` is a fixed description with pure functions on `arrays`, a pytree that only it
reads: `start` makes it of the operands, `keep` and `put` return it with something replaced, and
`finish` takes the results out of it. A leaf that passes as a whole stays as it is. One that is cut
into chunks is stacked, (matrices, ...).
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.runtime.barriers import materialized
from muon_optax.sharding.runtime.rounds import Index

__all__ = ["Arrays", "Buffers", "Elementwise", "make_buffers"]

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """The elementwise work on a leaf's operands, on the shards, before any communication.

    Attributes:
      prepare: (scalars, *operands) -> the array to orthogonalise; its result replaces the first
        operand.
      keep: (scalars, *operands) -> the arrays that replace the other operands.
    """

    prepare: Callable[..., jax.Array]
    keep: Callable[..., Arrays]


@dataclasses.dataclass(frozen=True)
class Buffers(abc.ABC):
    """How a leaf's operands become results.

    Attributes:
      leaf: the leaf.
      elementwise: the operations on its shards.
    """

    leaf: BoundLeaf
    elementwise: Elementwise

    @property
    def writes_results(self) -> bool:
        """Whether results are written into one of the arrays, chunk after chunk."""
        return False

    @abc.abstractmethod
    def start(self, operands: Arrays) -> Any:
        """The arrays of the leaf, made of its operands."""

    @abc.abstractmethod
    def form(self, arrays: Any, scalars: Any, start: Index, count: int) -> jax.Array:
        """The blocks to orthogonalise of `count` matrices from `start` on, (count, *block)."""

    @abc.abstractmethod
    def keep(self, arrays: Any, scalars: Any, start: Index, count: int) -> Any:
        """Replaces all operands of these matrices but the first."""

    @abc.abstractmethod
    def put(self, arrays: Any, results: jax.Array, start: Index) -> Any:
        """Replaces the first operand by results (count, *block), the first of matrix `start`."""

    @abc.abstractmethod
    def finish(self, arrays: Any, scalars: Any) -> Arrays:
        """The result, and the other operands."""

    def _mixed(self, scalars: Any, operands: Sequence[jax.Array]) -> jax.Array:
        return self.elementwise.prepare(scalars, *operands).astype(self.leaf.dtype)

    def _kept(self, scalars: Any, operands: Sequence[jax.Array]) -> Arrays:
        kept = self.elementwise.keep(scalars, *operands)
        return tuple(new.astype(old.dtype) for new, old in zip(kept, operands[1:], strict=True))

    def _unstacked_result(self, results: jax.Array) -> jax.Array:
        block = (self.leaf.result_sharding or self.leaf.sharding).block
        return self.leaf.view.unstack(results, block)


class _Whole(Buffers):
    """A leaf that passes in one chunk: its arrays are the operands, or have replaced them."""

    def start(self, operands: Arrays) -> Arrays:
        return operands

    def form(self, arrays: Arrays, scalars: Any, start: Index, count: int) -> jax.Array:
        del start, count
        return self.leaf.view.stack(self._mixed(scalars, arrays))

    def keep(self, arrays: Arrays, scalars: Any, start: Index, count: int) -> Arrays:
        del start, count
        return (arrays[0], *self._kept(scalars, arrays))

    def put(self, arrays: Arrays, results: jax.Array, start: Index) -> Arrays:
        del start
        return (self._unstacked_result(results), *arrays[1:])

    def finish(self, arrays: Arrays, scalars: Any) -> Arrays:
        del scalars
        return arrays


class _Stacks(NamedTuple):
    """Arrays of a leaf whose results are written in place.

    Attributes:
      operands: stacked, (matrices, ...).
      results: where results have an array of their own; None before the first ones come.
    """

    operands: Arrays
    results: jax.Array | None = None


class _InPlace(Buffers):
    """A leaf that is cut into chunks, none of which takes memory of its own.

    Results are written over the first operand, or, where that has another dtype or sharding, into
    an array that is made when the first ones come.
    """

    @property
    def writes_results(self) -> bool:
        return True

    def start(self, operands: Arrays) -> _Stacks:
        return _Stacks(tuple(map(self.leaf.view.stack, operands)))

    def form(self, arrays: _Stacks, scalars: Any, start: Index, count: int) -> jax.Array:
        return self._mixed(scalars, _cut(arrays.operands, start, count))

    def keep(self, arrays: _Stacks, scalars: Any, start: Index, count: int) -> _Stacks:
        first, *others = arrays.operands
        kept = self._kept(scalars, _cut(arrays.operands, start, count))
        pairs = zip(others, kept, strict=True)
        written = [_written(old, materialized(new), start) for old, new in pairs]
        return arrays._replace(operands=(first, *written))

    def put(self, arrays: _Stacks, results: jax.Array, start: Index) -> _Stacks:
        if self._replaces_first(arrays):
            first, *others = arrays.operands
            return arrays._replace(operands=(_written(first, results, start), *others))
        place = arrays.results
        if place is None:
            place = _zeros_like_results(results, self.leaf.count)
        return arrays._replace(results=_written(place, results, start))

    def finish(self, arrays: _Stacks, scalars: Any) -> Arrays:
        del scalars
        first, *others = arrays.operands
        results = first if self._replaces_first(arrays) else arrays.results
        assert results is not None
        block = self.leaf.sharding.block
        kept = (self.leaf.view.unstack(x, block) for x in others)
        return self._unstacked_result(results), *kept

    def _replaces_first(self, arrays: _Stacks) -> bool:
        return self.leaf.result_sharding is None and arrays.operands[0].dtype == self.leaf.dtype


class _Parts(NamedTuple):
    """Arrays of a leaf whose parts are joined at the end.

    Attributes:
      operands: as they came.
      stacks: the same, stacked.
      results: by the index of their first matrix, which is a number: no loop here.
    """

    operands: Arrays
    stacks: Arrays
    results: dict[Any, jax.Array]


class _Joined(Buffers):
    """A leaf that is cut into chunks, whose results are concatenated at the end.

    XLA on CPU keeps to no order of chunks, and would copy an array for each write into it.
    """

    def start(self, operands: Arrays) -> _Parts:
        return _Parts(operands, tuple(map(self.leaf.view.stack, operands)), {})

    def form(self, arrays: _Parts, scalars: Any, start: Index, count: int) -> jax.Array:
        return self._mixed(scalars, _cut(arrays.stacks, start, count))

    def keep(self, arrays: _Parts, scalars: Any, start: Index, count: int) -> _Parts:
        del scalars, start, count
        return arrays

    def put(self, arrays: _Parts, results: jax.Array, start: Any) -> _Parts:
        return arrays._replace(results={**arrays.results, start: results})

    def finish(self, arrays: _Parts, scalars: Any) -> Arrays:
        results = jnp.concatenate([arrays.results[start] for start in sorted(arrays.results)])
        return self._unstacked_result(results), *self._kept(scalars, arrays.operands)


def make_buffers(
    leaf: BoundLeaf, elementwise: Elementwise, *, is_cut: bool, is_ordered: bool
) -> Buffers:
    """The buffers of a leaf, cut into chunks or not, for a compiler that keeps an order or not."""
    kind = (_InPlace if is_ordered else _Joined) if is_cut else _Whole
    return kind(leaf, elementwise)


def _cut(stacks: Sequence[jax.Array], start: Index, count: int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, start, count) for x in stacks]


def _written(stack: jax.Array, new: jax.Array, start: Index) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stack, new, start, 0)


def _zeros_like_results(results: jax.Array, count: int) -> jax.Array:
    """Zeros for `count` results that are sharded like one: also where a `vmap` hides a mesh axis.

    `jnp.zeros` would have the type of an array that is on no mesh.
    """
    one = results[(slice(1),) * results.ndim]
    return jnp.broadcast_to(jnp.where(False, one, 0), (count, *results.shape[1:]))
