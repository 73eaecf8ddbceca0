"""Sums over the matrices of a leaf, right however the leaf is sharded, stacked or fused.

A norm of an array isn't the norm of its matrices: a leaf may be a stack, may hold several fused
blocks side by side, and inside a shard_map it is one device's block of a larger array. Every piece
that needs norms or means of matrices takes them from here.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from muon_optax.dtypes import wide_dtype
from muon_optax.sharding.bound_leaf import BoundLeaf

__all__ = ["MatrixSums", "Role", "squares"]

Role = Literal["reduction", "output"]


def squares(x: jax.Array) -> jax.Array:
    """Squared absolute values, real and float32 at least.

    Example:
      >>> squares(jnp.array([3 + 4j], "complex64")).tolist()
      [25.0]
    """
    x = x.astype(wide_dtype(x.dtype))
    return (x * x.conj()).real


@dataclasses.dataclass(frozen=True)
class MatrixSums:
    """Sums over some of the matrix axes of one leaf.

    Sums have the leaf's dims, those that are summed over as 1. Where fused blocks lie side by side
    along a summed axis, a last dim has one entry for each block. On Explicit and Auto axes JAX
    places the all-reduce; over Manual ones it is one psum, over exactly the axes that shard what is
    summed over, and never over replicas.

    Attributes:
      leaf: the leaf.
      over: the roles of the axes that are summed over.

    Example:
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> from muon_optax.matrix_view import MatrixView
      >>> x = jnp.arange(8.0).reshape(2, 4)
      >>> (leaf,) = bind_leaves(x, MatrixView(0, 1, split=(1, 3)))
      >>> blocks = MatrixSums(leaf, ("reduction", "output"))
      >>> blocks.of(x).tolist(), blocks.counts.tolist()
      ([[[4.0, 24.0]]], [2.0, 6.0])
      >>> blocks.spread(blocks.of(x)).tolist()
      [[4.0, 24.0, 24.0, 24.0]]
    """

    leaf: BoundLeaf
    over: tuple[Role, ...] = ("reduction", "output")

    def of(self, x: jax.Array) -> jax.Array:
        """The sums of `x`, an array of the leaf's shape (a block of it inside a shard_map)."""
        dims = self._dims
        if self._sums_blocks:
            # The axes beside the fused one first: what is multiplied by the mask is small then.
            x = jnp.sum(x, [d for d in dims if d not in self._fused_dims], keepdims=True)
            x = jnp.sum(x[..., None] * self._mask(x.dtype), self._fused_dims, keepdims=True)
        else:
            x = jnp.sum(x, dims, keepdims=True)
        axes = tuple(a for a in self.leaf.layout.axes_of(dims) if a in self.leaf.layout.manual)
        return jax.lax.psum(x, axes) if axes else x

    def spread(self, sums: jax.Array) -> jax.Array:
        """Values for each sum, as an array that broadcasts against the leaf."""
        if not self._sums_blocks:
            return sums
        return jnp.sum(sums * self._mask(sums.dtype), -1)

    @property
    def counts(self) -> np.ndarray:
        """How many entries each sum has: a scalar, or one for each fused block."""
        view = self.leaf.view
        sizes = {"reduction": view.fan_in, "output": view.fan_out}
        whole = float(np.prod([sizes[role] for role in self.over]))
        if not self._sums_blocks:
            return np.asarray(whole)
        share = np.asarray(view.block_sizes) / sum(view.block_sizes)
        return whole * share

    @property
    def _dims(self) -> tuple[int, ...]:
        view = self.leaf.view
        axes = {"reduction": view.reduction_axes, "output": view.output_axes}
        return tuple(sorted(a for role in self.over for a in axes[role]))

    @property
    def _fused_dims(self) -> tuple[int, ...]:
        view = self.leaf.view
        return view.reduction_axes if view.cut == 1 else view.output_axes

    @property
    def _sums_blocks(self) -> bool:
        """Whether fused blocks lie along what is summed over."""
        is_fused = len(self.leaf.view.block_sizes) > 1
        return is_fused and ("reduction" if self.leaf.view.cut == 1 else "output") in self.over

    def _mask(self, dtype: jnp.dtype) -> jax.Array:
        """1 where a place along the fused axes belongs to a block, (..., blocks)."""
        count = len(self.leaf.view.block_sizes)
        block_of_place = np.asarray(self.leaf.view.per_block(range(count)))
        mask = (block_of_place[..., None] == np.arange(count)).astype(dtype)
        return self.leaf.layout.block_of(jnp.asarray(mask))
