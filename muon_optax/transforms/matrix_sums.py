"""Sums over the matrices of a leaf, right however the leaf is sharded, stacked or fused.

A norm of an array isn't the norm of its matrices: a leaf may be a stack, may hold several fused
blocks side by side, and inside a shard_map it is one device's block of a larger array. Every piece
that needs norms or means of matrices takes them from here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from muon_optax._internal.dtypes import wide_dtype
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.specs import LeafSharding
from muon_optax.sharding.trace_context import varying_axes

__all__ = ["AxisSums", "MatrixSums", "Role", "Sums", "products", "quotient", "squares"]

Role = Literal["reduction", "output"]


def squares(x: jax.Array) -> jax.Array:
    """Squared absolute values, real and float32 at least.

    Example:
      >>> squares(jnp.array([3 + 4j], "complex64")).tolist()
      [25.0]
    """
    return products(x, x)


def products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Entries of the real inner product of two arrays, float32 at least.

    Example:
      >>> products(jnp.array([1j], "complex64"), jnp.array([3 + 4j], "complex64")).tolist()
      [4.0]
    """
    dtype = wide_dtype(x.dtype, y.dtype)
    return (x.astype(dtype) * y.astype(dtype).conj()).real


def quotient(x: jax.typing.ArrayLike, y: jax.Array) -> jax.Array:
    """The quotient, but 0 where the divisor is, as for the unit matrix of a zero matrix.

    Example:
      >>> quotient(3.0, jnp.array([2.0, 0.0])).tolist()
      [1.5, 0.0]
    """
    is_zero = y == 0
    return jnp.where(is_zero, 0, x / jnp.where(is_zero, 1, y))


class Sums(Protocol):
    """Sums over some axes of a leaf, one for each matrix or one for other groups of its entries."""

    def of(self, x: jax.Array) -> jax.Array:
        """The sums of `x`."""
        ...

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sums of an array of this shape."""
        ...

    def spread(self, sums: jax.Array) -> jax.Array:
        """Values for each sum, as an array that broadcasts against the leaf."""
        ...


@dataclasses.dataclass(frozen=True)
class MatrixSums:
    """Sums over some of the matrix axes of one leaf.

    Sums have the leaf's dims, those that are summed over as 1. Where fused blocks are side by side
    along a summed axis, a last dim has one entry for each block. They are all-reduced over exactly
    the mesh axes that shard the summed dims, and never over replicas.

    Attributes:
      leaf: the leaf.
      over: the roles of the axes that are summed over.

    Example:
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> from muon_optax.views.matrix_view import MatrixView
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
        return _all_reduced(self.leaf.sharding, x, self.dims, self._block_sums)

    def _block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
        """The sums over one device's block, where the sharding has Manual axes."""
        dims = self.dims
        if not self._sums_blocks:
            return jnp.sum(x, dims, keepdims=True)
        # The axes beside the fused one first: the product with the mask is small then.
        x = jnp.sum(x, [d for d in dims if d not in self._fused_dims], keepdims=True)
        mask = self._mask(sharding, x.dtype)
        return jnp.sum(x[..., None] * mask, self._fused_dims, keepdims=True)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sums of an array of this shape."""
        kept = tuple(1 if d in self.dims else n for d, n in enumerate(shape))
        return (*kept, len(self.leaf.view.block_sizes)) if self._sums_blocks else kept

    def spread(self, sums: jax.Array) -> jax.Array:
        """Values for each sum, as an array that broadcasts against the leaf."""
        if not self._sums_blocks:
            return sums
        return jnp.sum(sums * self._mask(self.leaf.sharding, sums.dtype), -1)

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
    def dims(self) -> tuple[int, ...]:
        """The axes that are summed over."""
        view = self.leaf.view
        axes = {"reduction": view.reduction_axes, "output": view.output_axes}
        return tuple(sorted(a for role in self.over for a in axes[role]))

    @property
    def _fused_dims(self) -> tuple[int, ...]:
        view = self.leaf.view
        return view.reduction_axes if view.cut == 1 else view.output_axes

    @property
    def _sums_blocks(self) -> bool:
        """Whether fused blocks are along an axis that is summed over."""
        is_fused = len(self.leaf.view.block_sizes) > 1
        return is_fused and ("reduction" if self.leaf.view.cut == 1 else "output") in self.over

    def _mask(self, sharding: LeafSharding, dtype: jnp.dtype) -> jax.Array:
        """1 where a place along the fused axes belongs to a block, (..., blocks)."""
        count = len(self.leaf.view.block_sizes)
        block_of_place = np.asarray(self.leaf.view.per_block(range(count)))
        mask = (block_of_place[..., None] == np.arange(count)).astype(dtype)
        return sharding.block_of(jnp.asarray(mask))


@dataclasses.dataclass(frozen=True)
class AxisSums:
    """Sums over some axes of a leaf, whatever its matrices are; their dims are kept as 1.

    Attributes:
      leaf: the leaf.
      dims: the axes that are summed over.

    Example:
      >>> from muon_optax.views.matrix_view import MuonDimensionNumbers
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> x = jnp.arange(8.0).reshape(2, 2, 2)
      >>> (leaf,) = bind_leaves(x, MuonDimensionNumbers(1, 2))
      >>> AxisSums(leaf, (0, 1, 2)).of(x).tolist()
      [[[28.0]]]
    """

    leaf: BoundLeaf
    dims: tuple[int, ...]

    def of(self, x: jax.Array) -> jax.Array:
        """The sums of `x`, an array of the leaf's shape (a block of it inside a shard_map)."""
        sums = lambda sharding, x: jnp.sum(x, self.dims, keepdims=True)  # noqa: E731
        return _all_reduced(self.leaf.sharding, x, self.dims, sums)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sums of an array of this shape."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(shape))

    def spread(self, sums: jax.Array) -> jax.Array:
        """The sums, which broadcast against the leaf as they are."""
        return sums


def _all_reduced(
    sharding: LeafSharding,
    x: jax.Array,
    dims: Sequence[int],
    block_sums: Callable[[LeafSharding, jax.Array], jax.Array],
) -> jax.Array:
    """Sums over dims of a leaf, of which `block_sums` gives those of one device's block.

    Along Manual axes this is one psum. Along others JAX places the all-reduce. Where several dims
    are sharded, the partitioner would reduce over the mesh axes of one dim after those of another;
    a shard_map makes it one all-reduce, which XLA merges with those of other leaves.
    """
    open_axes = set(sharding.known) - set(sharding.manual)
    sharded = [d for d in dims if x.shape[d] > 1 and open_axes.intersection(sharding.axes_of([d]))]
    if len(sharded) > 1 and _takes_shard_map(sharding, x):
        inner = dataclasses.replace(sharding, manual=(*sharding.manual, *open_axes))
        spec = (*sharding.partition_spec, *[None] * (x.ndim - len(sharding.partition_spec)))
        ins = PartitionSpec(*(None if n == 1 else a for n, a in zip(x.shape, spec, strict=True)))
        outs = PartitionSpec(*(None if d in dims else a for d, a in enumerate(ins)))
        return jax.shard_map(
            lambda x: _all_reduced(inner, x, dims, block_sums),
            mesh=sharding.mesh,
            in_specs=ins,
            out_specs=outs,
            axis_names=open_axes,
        )(x)
    sums = block_sums(sharding, x)
    axes = tuple(a for a in sharding.axes_of(dims) if a in sharding.manual) + _axes_of_size_1(sums)
    return jax.lax.psum(sums, axes) if axes else sums


def _axes_of_size_1(x: jax.Array) -> tuple[str, ...]:
    """Manual axes of size 1 over which an array varies by its type.

    `LeafSharding` leaves them out, but the type of the sums must not vary over them either:
    the user's shard_map checks it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    varying = varying_axes(x)
    return tuple(a for a in mesh.manual_axes if a in varying and mesh.shape[a] == 1)


def _takes_shard_map(sharding: LeafSharding, x: jax.Array) -> bool:
    """Whether an array can be given to a shard_map over its mesh, and it costs nothing."""
    mesh = sharding.mesh
    is_elsewhere = (
        mesh is not None and mesh.explicit_axes and jax.typeof(x).sharding.mesh.empty
    )  # as the placeholders of `eval_shape`
    # Outside of jit a shard_map would be compiled anew, operation by operation, in every step.
    return isinstance(x, Tracer) and not is_elsewhere
