"""The arrays of one leaf while it passes through the pipeline.

A leaf that passes whole stays as it is. One that is cut in chunks is stacked, (matrices, ...).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.sharding.buckets import Leaf
from muon_optax.sharding.ordering import apart
from muon_optax.sharding.rounds import Index

__all__ = ["Arrays", "Buffers", "Elementwise", "make_buffers"]

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """What is done with a leaf's operands where they lie.

    Attributes:
      prepare: (scalars, *operands) -> what is orthogonalised and then replaces the first operand.
      keep: (scalars, *operands) -> what replaces the other operands.
    """

    prepare: Callable[..., jax.Array]
    keep: Callable[..., Arrays]


class Buffers:
    """A leaf's operands, and what becomes of them, where the leaf passes whole.

    Attributes:
      arrays: the operands, or what has replaced them.
      is_written: whether results are written into one of the arrays, chunk after chunk.
    """

    is_written = False

    def __init__(self, leaf: Leaf, operands: Arrays, elementwise: Elementwise):
        self._leaf, self._elementwise = leaf, elementwise
        self._result_block = (leaf.home or leaf.layout).block
        self.arrays = list(operands)

    def form(self, scalars: Any, start: Index, count: int) -> jax.Array:
        """What is orthogonalised of `count` matrices from `start` on, (count, *block)."""
        del start, count
        return self._leaf.view.stack(self._mixed(scalars, self.arrays))

    def keep(self, scalars: Any, start: Index, count: int) -> None:
        """Replaces all operands but the first."""
        del start, count
        self.arrays[1:] = self._kept(scalars, self.arrays)

    def put(self, results: jax.Array, start: Index) -> None:
        """Replaces the first operand by results (count, *block), the first of matrix `start`."""
        del start
        self.arrays[0] = self._leaf.view.unstack(results, self._result_block)

    def finished(self, scalars: Any) -> Arrays:
        """The result, and the other operands."""
        del scalars
        return tuple(self.arrays)

    def _mixed(self, scalars: Any, operands: Sequence[jax.Array]) -> jax.Array:
        return self._elementwise.prepare(scalars, *operands).astype(self._leaf.dtype)

    def _kept(self, scalars: Any, operands: Sequence[jax.Array]) -> list[jax.Array]:
        kept = self._elementwise.keep(scalars, *operands)
        return [new.astype(old.dtype) for new, old in zip(kept, operands[1:], strict=True)]


class _Written(Buffers):
    """The same of a leaf that is cut: a chunk takes no memory of its own.

    What becomes of it is written over what it was made of, or, where the first operand has another
    dtype or place than the results, into an array that is added to the operands.
    """

    is_written = True

    def __init__(self, leaf: Leaf, operands: Arrays, elementwise: Elementwise):
        super().__init__(leaf, tuple(map(leaf.view.stack, operands)), elementwise)
        fits_first = not leaf.home and operands[0].dtype == leaf.dtype
        self._operands = len(operands)
        self._result = 0 if fits_first else len(operands)  # where results are among the arrays

    def form(self, scalars: Any, start: Index, count: int) -> jax.Array:
        return self._mixed(scalars, _cut(self.arrays[: self._operands], start, count))

    def keep(self, scalars: Any, start: Index, count: int) -> None:
        operands = _cut(self.arrays[: self._operands], start, count)
        for k, new in enumerate(self._kept(scalars, operands), start=1):
            self._write(k, apart(new), start)

    def put(self, results: jax.Array, start: Index) -> None:
        if self._result == len(self.arrays):
            self.arrays.append(_zeros_like_results(results, self._leaf.count))
        self._write(self._result, results, start)

    def finished(self, scalars: Any) -> Arrays:
        unstack, block = self._leaf.view.unstack, self._leaf.layout.block
        kept = (unstack(x, block) for x in self.arrays[1 : self._operands])
        return unstack(self.arrays[self._result], self._result_block), *kept

    def _write(self, k: int, new: jax.Array, start: Index) -> None:
        self.arrays[k] = jax.lax.dynamic_update_slice_in_dim(self.arrays[k], new, start, 0)


class _Joined(Buffers):
    """The same for a compiler that keeps to no order, as XLA on CPU, and would copy written arrays.

    The parts are joined at the end.
    """

    def __init__(self, leaf: Leaf, operands: Arrays, elementwise: Elementwise):
        super().__init__(leaf, operands, elementwise)
        self._stacks = [leaf.view.stack(x) for x in operands]
        self._parts: dict[Any, jax.Array] = {}  # by start, a number: no loop here

    def form(self, scalars: Any, start: Index, count: int) -> jax.Array:
        return self._mixed(scalars, _cut(self._stacks, start, count))

    def keep(self, scalars: Any, start: Index, count: int) -> None:
        pass

    def put(self, results: jax.Array, start: Index) -> None:
        self._parts[start] = results

    def finished(self, scalars: Any) -> Arrays:
        results = jnp.concatenate([self._parts[start] for start in sorted(self._parts)])
        kept = self._kept(scalars, self.arrays)
        return self._leaf.view.unstack(results, self._result_block), *kept


def make_buffers(
    leaf: Leaf, operands: Arrays, elementwise: Elementwise, *, is_cut: bool, in_order: bool
) -> Buffers:
    """The buffers of a leaf, cut in chunks or not, for a compiler that keeps to an order or not."""
    kind = (_Written if in_order else _Joined) if is_cut else Buffers
    return kind(leaf, operands, elementwise)


def _cut(stacks: Sequence[jax.Array], start: Index, count: int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, start, count) for x in stacks]


def _zeros_like_results(results: jax.Array, count: int) -> jax.Array:
    """A place for `count` results that lies like one: also where a `vmap` hides a mesh axis."""
    one = results[(slice(1),) * results.ndim]
    return jnp.broadcast_to(jnp.where(False, one, 0), (count, *results.shape[1:]))
