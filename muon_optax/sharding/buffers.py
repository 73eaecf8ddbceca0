"""The arrays of one leaf while it passes through the pipeline.

A leaf that passes whole stays as it is. One that is cut in chunks is stacked, (matrices, ...). What
becomes of a chunk is written over what it was made of, so that it takes no memory of its own. XLA
on CPU drops the barriers that would order reads and writes, and would copy the whole stack for each
chunk; there the parts are joined at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.sharding.buckets import Leaf

__all__ = ["Arrays", "Buffers", "Elementwise"]

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """What is done with a leaf's operands where they lie.

    Attributes:
      scalars: a tree of scalars for both functions, at least one: a chunk is held back by them.
      prepare: (scalars, *operands) -> what is orthogonalised and then replaces the first operand.
      keep: (scalars, *operands) -> what replaces the other operands.
    """

    scalars: Any
    prepare: Callable[..., jax.Array]
    keep: Callable[..., Arrays]


class Buffers:
    """A leaf's operands, and what becomes of them.

    Attributes:
      arrays: the operands, or what has replaced them.
      is_written: whether results are written into one of the arrays, chunk after chunk.
    """

    def __init__(
        self,
        leaf: Leaf,
        operands: Arrays,
        elementwise: Elementwise,
        *,
        is_cut: bool,
        in_place: bool,
    ):
        self._leaf, self._elementwise = leaf, elementwise
        self._is_cut, self._is_joined = is_cut, is_cut and not in_place
        self.is_written = is_cut and in_place
        self._result_block = (leaf.home or leaf.layout).block
        self.arrays = [leaf.view.stack(x) for x in operands] if is_cut else list(operands)
        self._operands, self._result = len(operands), 0  # where results are among the arrays
        self._parts: dict[int, jax.Array] = {}
        fits_first = not leaf.home and operands[0].dtype == leaf.dtype
        if self.is_written and not fits_first:
            self._result = len(operands)
            self.arrays.append(leaf.view.stack(jnp.zeros(self._result_block, leaf.dtype)))

    def form(self, scalars: Any, start: int, stop: int) -> jax.Array:
        """What is orthogonalised, (stop - start, *block)."""
        x = self._elementwise.prepare(scalars, *self._taken(start, stop)).astype(self._leaf.dtype)
        return x if self._is_cut else self._leaf.view.stack(x)

    def keep(self, scalars: Any, start: int, stop: int) -> None:
        """Replaces all operands but the first."""
        if not self._is_joined:
            self._keep(scalars, start, stop)

    def put(self, result: jax.Array, start: int) -> None:
        """Replaces the first operand by results (count, *block)."""
        if self._is_joined:
            self._parts[start] = result
        elif self._is_cut:
            self._write(self._result, result, start)
        else:
            self._write(0, self._leaf.view.unstack(result, self._result_block), start)

    def finished(self, scalars: Any) -> Arrays:
        """The result, and the other operands."""
        if self._is_joined:
            self._keep(scalars, 0, self._leaf.count)
            self.arrays[0] = jnp.concatenate([self._parts[start] for start in sorted(self._parts)])
        arrays = [self.arrays[self._result], *self.arrays[1 : self._operands]]
        if not self._is_cut:
            return tuple(arrays)
        blocks = [self._result_block, *[self._leaf.layout.block] * (len(arrays) - 1)]
        return tuple(map(self._leaf.view.unstack, arrays, blocks))

    def _taken(self, start: int, stop: int) -> list[jax.Array]:
        """The operands' matrices from `start` to `stop`; uncut, the operands as they are."""
        operands = self.arrays[: self._operands]
        return [x[start:stop] for x in operands] if self._is_cut else operands

    def _keep(self, scalars: Any, start: int, stop: int) -> None:
        kept = self._elementwise.keep(scalars, *self._taken(start, stop))
        for k, new in enumerate(kept, start=1):
            self._write(k, new.astype(self.arrays[k].dtype), start)

    def _write(self, k: int, new: jax.Array, start: int) -> None:
        if self._is_cut and len(new) < len(self.arrays[k]):
            new = jax.lax.dynamic_update_slice_in_dim(self.arrays[k], new, start, 0)
        self.arrays[k] = new
