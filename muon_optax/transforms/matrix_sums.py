"""Sums over the matrices of a leaf, right however the leaf is sharded, stacked or fused.

A norm of an array isn't the norm of its matrices: a leaf may be a stack, may hold several fused
blocks side by side, and inside a shard_map it is one device's block of a larger array. Every piece
that needs norms or means of matrices takes them from here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from muon_optax._internal.dtypes import wide_dtype
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.specs import LeafSharding
from muon_optax.sharding.trace_context import varying_axes

__all__ = [
    "AxisSums",
    "BlockSums",
    "MatrixSums",
    "Role",
    "Sums",
    "all_sums",
    "products",
    "quotient",
    "squares",
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


class BlockSums(Protocol):
    """What the devices that share a leaf each sum over their block, to be summed over them."""

    @property
    def leaf(self) -> BoundLeaf:
        """The leaf."""
        ...

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that are summed over."""
        ...

    def block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
        """The sums over one device's block, where the sharding has Manual axes."""
        ...


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


def all_sums(rows: Sequence[tuple[BlockSums, jax.Array]]) -> list[jax.Array]:
    """The sums of several arrays, in one all-reduce for all that are over the same mesh axes.

    Pieces ask for the sums of all their leaves at once. XLA would merge the all-reduces of one
    piece, but where two pieces follow each other it merges a leaf's second with the next leaf's
    first, after which the rest can't be merged: 12 leaves would take 13 all-reduces, not two.

    Args:
      rows: sums and what is summed: an array of the leaf's shape (a block of it inside a
        shard_map).

    Returns:
      The sums of each row.

    Example:
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> (leaf,) = bind_leaves(jnp.ones((2, 3)))
      >>> [float(x[0, 0]) for x in all_sums([(MatrixSums(leaf), jnp.ones((2, 3)))] * 2)]
      [6.0, 6.0]
    """
    shardings = [sums.leaf.sharding for sums, _ in rows]
    # Along Manual axes there is a psum; along others JAX places the all-reduce. Where several dims
    # are sharded, the partitioner would reduce over the mesh axes of one dim after those of
    # another. A shard_map makes it one all-reduce.
    least = 2 if len(rows) == 1 else 1
    groups: dict[tuple[frozenset[str], Any], list[int]] = {}
    for i, (sums, x) in enumerate(rows):
        open_axes = frozenset(shardings[i].known) - set(shardings[i].manual)
        sharded = [
            d
            for d in sums.dims
            if x.shape[d] > 1 and open_axes.intersection(shardings[i].axes_of([d]))
        ]
        is_mapped = len(sharded) >= least and _takes_shard_map(shardings[i], x)
        kind = (open_axes, shardings[i].mesh) if is_mapped else (frozenset(), None)
        groups.setdefault(kind, []).append(i)
    results: dict[int, jax.Array] = {}
    for (open_axes, _), members in groups.items():
        of_group = [rows[i] for i in members]
        found = (
            _mapped_sums(of_group, set(open_axes))
            if open_axes
            else _reduced(of_group, [shardings[i] for i in members])
        )
        results |= dict(zip(members, found, strict=True))
    return [results[i] for i in range(len(rows))]


def _mapped_sums(
    rows: Sequence[tuple[BlockSums, jax.Array]], open_axes: set[str]
) -> Sequence[jax.Array]:
    """The sums, in a shard_map over mesh axes that aren't Manual yet."""
    inner, ins, outs = [], [], []
    for sums, x in rows:
        sharding = sums.leaf.sharding
        spec = (*sharding.partition_spec, *[None] * (x.ndim - len(sharding.partition_spec)))
        spec = [None if n == 1 else a for n, a in zip(x.shape, spec, strict=True)]
        ins.append(PartitionSpec(*spec))
        outs.append(PartitionSpec(*(None if d in sums.dims else a for d, a in enumerate(spec))))
        inner.append(dataclasses.replace(sharding, manual=(*sharding.manual, *open_axes)))
    return jax.shard_map(
        lambda *arrays: tuple(
            _reduced([(s, x) for (s, _), x in zip(rows, arrays, strict=True)], inner)
        ),
        mesh=rows[0][0].leaf.sharding.mesh,
        in_specs=tuple(ins),
        out_specs=tuple(outs),
        axis_names=open_axes,
    )(*[x for _, x in rows])


def _reduced(
    rows: Sequence[tuple[BlockSums, jax.Array]], shardings: Sequence[LeafSharding]
) -> list[jax.Array]:
    """The sums, psummed over the Manual axes of the dims: one psum for each set of axes."""
    results, groups = [], {}
    for i, ((sums, x), sharding) in enumerate(zip(rows, shardings, strict=True)):
        results.append(sums.block_sums(sharding, x))
        axes = tuple(a for a in sharding.axes_of(sums.dims) if a in sharding.manual)
        axes += _axes_of_size_1(results[i])
        if axes:
            kind = (axes, results[i].dtype, frozenset(varying_axes(results[i])))
            groups.setdefault(kind, []).append(i)
    for (axes, *_), members in groups.items():
        flat = [results[i].reshape(-1) for i in members]
        reduced = jax.lax.psum(jnp.concatenate(flat) if len(flat) > 1 else flat[0], axes)
        parts = jnp.split(reduced, np.cumsum([x.size for x in flat])[:-1])
        for i, part in zip(members, parts, strict=True):
            results[i] = part.reshape(results[i].shape)
    return results


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
