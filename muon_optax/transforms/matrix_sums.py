"""Sums over the matrices of a leaf, right however the leaf is sharded, stacked or fused.

A norm of an array isn't the norm of its matrices: a leaf may be a stack, may hold several fused
blocks side by side, and inside a shard_map it is one device's block of a larger array. Every piece
that needs norms or means of matrices takes them from here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from muon_optax._internal.dtypes import wide_dtype
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.placement import place
from muon_optax.sharding.specs import LeafSharding
from muon_optax.sharding.trace_context import as_varying, varying_axes
from muon_optax.transforms.block_sums import BlockSums, all_sums

__all__ = [
    "AxisSums",
    "MatrixSums",
    "Role",
    "Sums",
    "WholeSums",
    "products",
    "quotient",
    "squares",
    "sums_across",
    "sums_and_moments",
]

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


class Sums(BlockSums, Protocol):
    """Sums over some axes of a leaf, one for each matrix or one for other groups of its entries."""

    def of(self, x: jax.Array) -> jax.Array:
        """The sums of `x`."""
        ...

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sums of an array of this shape."""
        ...

    def broadcast(self, sums: jax.Array) -> jax.Array:
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
      ([[[4.0, 24.0]]], [[[2.0, 6.0]]])
      >>> blocks.broadcast(blocks.of(x)).tolist()
      [[4.0, 24.0, 24.0, 24.0]]
    """

    leaf: BoundLeaf
    over: tuple[Role, ...] = ("reduction", "output")

    def of(self, x: jax.Array) -> jax.Array:
        """The sums of `x`, an array of the leaf's shape (a block of it inside a shard_map)."""
        return all_sums([(self, x)])[0]

    def block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
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

    def broadcast(self, sums: jax.Array) -> jax.Array:
        """Values for each sum, as an array that broadcasts against the leaf."""
        if not self._sums_blocks:
            return sums
        return jnp.sum(sums * self._mask(self.leaf.sharding, sums.dtype), -1)

    @property
    def counts(self) -> np.ndarray:
        """How many entries each sum has, at least 1: a scalar, or an array with the sums' dims.

        The mean of an empty matrix's entries, which a state keeps, is then 0 and not NaN.
        """
        view = self.leaf.view
        sizes = {"reduction": view.fan_in, "output": view.fan_out}
        whole = float(np.prod([sizes[role] for role in self.over]))
        if not self._sums_blocks:
            return np.asarray(max(whole, 1.0))
        share = np.asarray(view.block_sizes) / sum(view.block_sizes)
        return np.maximum(whole * share, 1.0).reshape(*[1] * len(view.shape), -1)

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that are summed over."""
        view = self.leaf.view
        axes = {"reduction": view.reduction_axes, "output": view.output_axes}
        return tuple(sorted(a for role in self.over for a in axes[role]))

    @property
    def result_leaf(self) -> BoundLeaf:
        """A leaf that is sharded as results are."""
        return self.leaf

    @property
    def sharding(self) -> LeafSharding:
        """How sums are sharded: like the leaf along the axes that are left."""
        return _without_dims(self.leaf.sharding, self.dims)

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
        return all_sums([(self, x)])[0]

    def block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
        """The sums over one device's block, where the sharding has Manual axes."""
        del sharding
        return jnp.sum(x, self.dims, keepdims=True)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sums of an array of this shape."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(shape))

    def broadcast(self, sums: jax.Array) -> jax.Array:
        """The sums, which broadcast against the leaf as they are."""
        return sums


@dataclasses.dataclass(frozen=True)
class WholeSums:
    """Sums over one side of matrices, of which each device gets those of the whole leaf.

    Where both sides are sharded, a value made of all the sums of a matrix, as its norm of its
    neurons', would take a second all-reduce after that of the sums. Here each device adds its part
    between zeros, at its place of an array that is whole, and one all-reduce over the mesh axes of
    both sides gives every device all sums.

    Attributes:
      sums: over one side.
      dims: the axes of the leaf along which results are whole.
      is_summed: whether the rows given are sums already, as a moving average of them.

    Example:
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> (leaf,) = bind_leaves(jnp.ones((2, 3)))
      >>> columns = WholeSums(MatrixSums(leaf, ("reduction",)), leaf.view.stack_axes)
      >>> all_sums([(columns, jnp.ones((2, 3)))])[0].tolist()
      [[2.0, 2.0, 2.0]]
    """

    sums: MatrixSums
    dims: tuple[int, ...]
    is_summed: bool = False

    @property
    def leaf(self) -> BoundLeaf:
        """The leaf."""
        return self.sums.leaf

    @property
    def result_leaf(self) -> BoundLeaf:
        """A leaf that is sharded as results are: not at all."""
        return dataclasses.replace(self.leaf, sharding=LeafSharding(self.leaf.shape))

    def block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
        """This device's part of all sums."""
        summed = self.sums.dims
        if self.is_summed:
            x = _on_first_device(x, sharding.manual_axes_of(summed))
        else:
            x = self.sums.block_sums(sharding, x)
        for dim in self.dims:
            axes = () if dim in summed else sharding.manual_axes_of([dim])
            if axes:
                shape = (*x.shape[:dim], sharding.shape[dim], *x.shape[dim + 1 :])
                zeros = as_varying(jnp.zeros(shape, x.dtype), varying_axes(x))
                start = jax.lax.axis_index(axes) * x.shape[dim]
                x = jax.lax.dynamic_update_slice_in_dim(zeros, x, start, dim)
        return x

    def blocks_of(self, whole: jax.Array, leaf: BoundLeaf | None = None) -> jax.Array:
        """Values for each sum of the whole leaf, sharded as sums over the leaf are.

        Args:
          whole: the values made of the sums.
          leaf: the leaf as it is sharded elsewhere, as its parameter under ZeRO-1; None is here.
        """
        here = self.leaf.sharding
        target = self.sums if leaf is None else dataclasses.replace(self.sums, leaf=leaf)
        if here.mesh is None:
            return whole
        others = [d for d in range(len(here.shape)) if d not in self.dims]
        block = _without_dims(target.sharding, others).block_of(whole)
        if not set(here.known).difference(here.manual):
            return block
        ends = [_without_dims(here, self.dims), target.sharding]
        # Without the first, the partitioner would shard the operands of the values, and reduce
        # them a second time.
        for sharding in ends if isinstance(block, Tracer) else ends[1:]:
            spec = sharding.written or PartitionSpec()
            block = place(block, [NamedSharding(here.mesh, spec)])
        return block


def sums_across(sums: Sequence[MatrixSums], *, of_norms: bool) -> list[MatrixSums | WholeSums]:
    """Sums over one side of matrices, which with all that is made of them take one all-reduce.

    Args:
      sums: a row for each leaf.
      of_norms: whether norms of the whole matrices are made of the sums.

    Returns:
      Sums of the whole leaf where both sides are sharded and one all-reduce wouldn't do: for norms,
      or where leaves are sharded the other way round and the mesh axes to reduce over differ.
    """
    across = {
        i: axes
        for i, x in enumerate(sums)
        if (axes := x.leaf.sharding.axes_of(x.dims))
        and x.leaf.sharding.axes_of([d for d in x.leaf.view.stack_axes if d not in x.dims])
    }
    if not of_norms and len(set(across.values())) < 2:
        return list(sums)
    return [WholeSums(x, x.leaf.view.stack_axes) if i in across else x for i, x in enumerate(sums)]


def sums_and_moments(
    asked: Sequence[MatrixSums | WholeSums],
    entries: Sequence[Sequence[jax.Array]],
    moments: Sequence[jax.Array],
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """Sums, and moving averages of them that are sharded likewise, in one all-reduce.

    Args:
      asked: a kind of sums for each leaf.
      entries: the arrays of each leaf that are summed.
      moments: the moving averages of each leaf, sharded as its `MatrixSums` are.

    Returns:
      The sums of each leaf's arrays, and the averages, whole where sums are.
    """
    rows = [(sums, x) for sums, arrays in zip(asked, entries, strict=True) for x in arrays]
    wholes = [i for i, sums in enumerate(asked) if isinstance(sums, WholeSums)]
    also = [(dataclasses.replace(asked[i], is_summed=True), moments[i]) for i in wholes]
    found = iter(all_sums([*rows, *also]))
    summed = [[next(found) for _ in arrays] for arrays in entries]
    gathered = dict(zip(wholes, found, strict=True))
    return summed, [gathered.get(i, x) for i, x in enumerate(moments)]


def _on_first_device(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The values of all devices along mesh axes, on the first of them; zeros on the others."""
    return jnp.where(jax.lax.axis_index(axes) == 0, x, 0) if axes else x


def _without_dims(sharding: LeafSharding, dims: Sequence[int]) -> LeafSharding:
    """The sharding with no mesh axes on dims, not even those of size 1."""
    return sharding.without(tuple(a for d in dims for a in sharding.type_key[d]))
