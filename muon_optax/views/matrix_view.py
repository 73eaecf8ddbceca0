"""Leaf <-> matrices: which axes of a parameter make the matrices that Muon orthogonalises.

A *view* (optax's `MuonDimensionNumbers`, or a `MatrixView` with fused blocks) is declared by
the user; a `BoundView` is a view checked against one leaf's shape. Axes that are neither reduction
nor output axes are batch axes: layers, experts or heads, whose matrices never mix.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from muon_optax._internal.reshaping import reshaped

__all__ = [
    "BoundView",
    "MatrixView",
    "MuonDimensionNumbers",
    "View",
    "bind_view",
    "is_view",
    "shardings_in_views",
]


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A matrix view whose merged axis may hold several fused matrices.

    Each block is orthogonalised and scaled by itself, as if it were a leaf of its own.

    Attributes:
      reduction_axis: the axis, or axes merged in the order given, that the layer sums over
        (fan-in).
      output_axis: the axis or axes of the layer's output (fan-out).
      split: sizes of the blocks along the merged `axis`, as (64, 8, 8) for a fused query, key and
        value.
      heads: number of equal blocks, instead of `split`.
      groups: how often the pattern of blocks repeats along the axis. The blocks of one place in all
        groups make one matrix, as in Megatron's grouped QKV; interleaved gate and up rows are
        `split=(1, 1), groups=F`.
      axis: which merged axis is cut: 'output', or 'reduction' for an output projection by heads.

    Raises:
      ValueError: if both `split` and `heads` are given, or a size is not positive, or `axis` is
        unknown.

    Example:
      >>> view = MatrixView(0, 1, split=(64, 8, 8))  # [model, q + k + v]
      >>> [matrices.shape for matrices in bind_view(view, (32, 80)).split(jnp.ones((32, 80)))]
      [(1, 32, 64), (1, 32, 8), (1, 32, 8)]
    """

    reduction_axis: int | tuple[int, ...] = 0
    output_axis: int | tuple[int, ...] = 1
    split: tuple[int, ...] | None = None
    heads: int | None = None
    groups: int = 1
    axis: Literal["output", "reduction"] = "output"

    def __post_init__(self) -> None:
        if self.split is not None and self.heads is not None:
            raise ValueError(
                "MatrixView takes split or heads, not both: got "
                f"split={self.split}, heads={self.heads}"
            )
        if self.axis not in ("output", "reduction"):
            raise ValueError(f"MatrixView axis must be 'output' or 'reduction', got {self.axis!r}")
        if _is_int(self.split):
            raise ValueError(f"MatrixView split must be a tuple of sizes, got {self.split}")
        for name in ("reduction_axis", "output_axis", "split"):
            value = getattr(self, name)
            if _is_int(value):
                object.__setattr__(self, name, int(value))
            elif isinstance(value, Iterable):
                object.__setattr__(self, name, tuple(value))  # lists too: a view must be hashable
            elif value is not None:
                raise ValueError(f"MatrixView {name} must be integers, got {value!r}")
        sizes = (*(self.split or ()), self.groups, *(() if self.heads is None else (self.heads,)))
        if self.split == () or not all(_is_int(size) and size > 0 for size in sizes):
            raise ValueError(
                "MatrixView split, heads and groups must be positive integers, got "
                f"split={self.split}, heads={self.heads}, groups={self.groups}"
            )


def _is_int(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


@dataclasses.dataclass(frozen=True)
class BoundView:
    """A view bound to a shape, the form that every later stage works with.

    Attributes:
      shape: the leaf's shape.
      batch_axes, reduction_axes, output_axes: a partition of the leaf's axes.
      block_sizes: sizes of the blocks that repeat along the cut axis; one block where nothing is
        fused.
      groups: how often they repeat.
      cut: 1 where the (batch, reduction, output) array is cut along reduction, 2 along output.
      tiles: in how many equal parts each matrix is cut along reduction and along output, each of
        which is then a matrix of its own, as in MuonBP's block steps.
      nonzero: where most rows or columns of matrices are zero, as those that Dion2 doesn't choose,
        the sizes (fan-in, fan-out) of matrices without them, for each entry of `matrices`;
        empty where matrices are full.
    """

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    block_sizes: tuple[int, ...]
    groups: int
    cut: Literal[1, 2]
    tiles: tuple[int, int] = (1, 1)
    nonzero: tuple[tuple[int, int], ...] = ()

    @property
    def batch(self) -> int:
        """Number of whole (fused) matrices in the leaf."""
        return math.prod(self.shape[a] for a in self.batch_axes)

    @property
    def fan_in(self) -> int:
        """Size of the merged reduction axes."""
        return math.prod(self.shape[a] for a in self.reduction_axes)

    @property
    def fan_out(self) -> int:
        """Size of the merged output axes."""
        return math.prod(self.shape[a] for a in self.output_axes)

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes (batch, fan-in, fan-out) that `split` gives, in its order."""
        if self.is_even:
            return (self._block_shape(self.batch * len(self.block_sizes), self.block_sizes[0]),)
        return tuple(self._block_shape(self.batch, size) for size in self.block_sizes)

    @property
    def dense_matrices(self) -> tuple[tuple[int, int, int], ...]:
        """`matrices` without the rows and columns that are known to be zero."""
        if not self.nonzero:
            return self.matrices
        pairs = zip(self.matrices, self.nonzero, strict=True)
        return tuple((batch, *sizes) for (batch, _, _), sizes in pairs)

    @property
    def matrix_key(self) -> tuple:
        """Leaves of one key have matrices that can be stacked: it has all but the batch axes."""
        sizes = tuple(self.shape[a] for a in self.stack_axes)
        reduction = len(self.reduction_axes)
        blocks = self.block_sizes, self.groups, self.cut, self.tiles, self.nonzero
        return sizes, self._matrix_order, reduction, *blocks

    @property
    def is_even(self) -> bool:
        """Whether all blocks are of one size."""
        return len(set(self.block_sizes)) == 1

    def _block_shape(self, batch: int, size: int) -> tuple[int, int, int]:
        length, (rows, columns) = size * self.groups, self.tiles
        m, n = (length, self.fan_out) if self.cut == 1 else (self.fan_in, length)
        return batch * rows * columns, m // rows, n // columns

    def stack(self, x: jax.Array) -> jax.Array:
        """Brings the batch axes of `x`, a leaf or a shard of one, to the front and merges them."""
        x = x.transpose(self._stack_order)
        lead = len(self.batch_axes)
        return x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:])

    def unstack(self, stacked: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `stack` for a leaf or shard of the given shape."""
        x = stacked.reshape(tuple(shape[a] for a in self._stack_order))
        return x.transpose(np.argsort(self._stack_order))

    @property
    def stack_axes(self) -> tuple[int, ...]:
        """The leaf's matrix axes in the order in which `stack` leaves them."""
        return self._stack_order[len(self.batch_axes) :]

    @property
    def _stack_order(self) -> tuple[int, ...]:
        matrix_axes = tuple(sorted((*self.reduction_axes, *self.output_axes)))
        return (*self.batch_axes, *matrix_axes)

    def split(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Cuts a whole leaf into arrays (batch, fan-in, fan-out), one for each block size."""
        return self.split_stack(self.stack(x))

    def merge(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """Undoes `split`."""
        return self.unstack(self.merge_stack(matrices), self.shape)

    def split_stack(self, stacked: jax.Array) -> tuple[jax.Array, ...]:
        """`split` for stacked whole matrices, of any batch size."""
        order = self._matrix_order
        x = stacked.transpose(0, *(1 + o for o in order))
        x = reshaped(x, (x.shape[0], self.fan_in, self.fan_out))
        if len(self.block_sizes) == 1:
            return (self._tiled(x),)
        x = jnp.moveaxis(x, self.cut, 1)  # (batch, cut, rest)
        x = x.reshape(x.shape[0], self.groups, sum(self.block_sizes), x.shape[2])
        return tuple(self._tiled(jnp.moveaxis(block, 1, self.cut)) for block in self._cut(x))

    def merge_stack(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """Undoes `split_stack`."""
        matrices = [self._untiled(x) for x in matrices]
        if len(self.block_sizes) == 1:
            (x,) = matrices
        else:
            x = self._join([jnp.moveaxis(block, self.cut, 1) for block in matrices])
            x = jnp.moveaxis(x.reshape(x.shape[0], -1, x.shape[3]), 1, self.cut)
        sizes = tuple(self.shape[a] for a in (*self.reduction_axes, *self.output_axes))
        x = reshaped(x, (x.shape[0], *sizes))
        return x.transpose(0, *(1 + o for o in np.argsort(self._matrix_order)))

    @property
    def _matrix_order(self) -> tuple[int, ...]:
        native = sorted((*self.reduction_axes, *self.output_axes))
        return tuple(native.index(a) for a in (*self.reduction_axes, *self.output_axes))

    def _cut(self, x: jax.Array) -> list[jax.Array]:
        """(batch, groups, blocks, rest) -> (batch, block, rest); equal blocks share one array."""
        batch, groups, _, rest = x.shape
        if self.is_even:
            x = x.reshape(batch, groups, len(self.block_sizes), -1, rest).swapaxes(1, 2)
            length = groups * self.block_sizes[0]
            return [reshaped(x, (batch * len(self.block_sizes), length, rest))]
        ends = np.cumsum(self.block_sizes)[:-1]
        blocks = jnp.split(x, ends, axis=2)
        return [b.reshape(batch, groups * b.shape[2], rest) for b in blocks]

    def _join(self, blocks: Sequence[jax.Array]) -> jax.Array:
        """Undoes `_cut`."""
        rest = blocks[0].shape[2]
        if self.is_even:
            (x,) = blocks
            size, count = self.block_sizes[0], len(self.block_sizes)
            batch = x.shape[0] // count
            x = reshaped(x, (batch, count, self.groups, size, rest)).swapaxes(1, 2)
            return x.reshape(batch, self.groups, count * size, rest)
        parts = [b.reshape(b.shape[0], self.groups, -1, rest) for b in blocks]
        return jnp.concatenate(parts, axis=2)

    def _tiled(self, x: jax.Array) -> jax.Array:
        """Matrices -> their tiles, (batch * tiles, m, n)."""
        rows, columns = self.tiles
        if rows == columns == 1:
            return x
        batch, m, n = x.shape
        x = reshaped(x, (batch, rows, m // rows, columns, n // columns)).swapaxes(2, 3)
        return x.reshape(batch * rows * columns, m // rows, n // columns)

    def _untiled(self, x: jax.Array) -> jax.Array:
        """Undoes `_tiled`."""
        rows, columns = self.tiles
        if rows == columns == 1:
            return x
        count, m, n = x.shape
        batch = count // (rows * columns)
        x = x.reshape(batch, rows, columns, m, n).swapaxes(2, 3)
        return reshaped(x, (batch, rows * m, columns * n))

    def per_block(self, values: Sequence[float]) -> float | np.ndarray:
        """Spreads one value for each entry of `matrices` over the leaf.

        Returns:
          A float where one value serves the whole leaf, else a float64 array that broadcasts
          against the leaf.
        """
        if len(set(values)) == 1:
            return values[0]
        line = np.tile(np.repeat(values, self.block_sizes), self.groups)
        axes = self.reduction_axes if self.cut == 1 else self.output_axes
        line = line.reshape([self.shape[a] for a in axes])
        order = np.argsort(axes)
        sizes = [self.shape[a] if a in axes else 1 for a in range(len(self.shape))]
        return line.transpose(order).reshape(sizes)


View = MuonDimensionNumbers | MatrixView | BoundView

# MaxText's own `MuonDimensionNumbers` has a third field.
_FIELDS = MuonDimensionNumbers._fields, (*MuonDimensionNumbers._fields, "sharding")


def is_view(x: object) -> bool:
    """Whether `x` is a matrix view, and so a leaf of a tree of views.

    So is a named tuple of another package with optax's fields, or with MaxText's, whose third one
    is a sharding.
    """
    is_ours = isinstance(x, MuonDimensionNumbers | MatrixView | BoundView)
    return is_ours or getattr(x, "_fields", None) in _FIELDS


def shardings_in_views(views: Any) -> Any:
    """The tree of the shardings that views carry beside their axes; None where none does.

    Args:
      views: a view, a tree of views, or None.

    Returns:
      A tree like `views` with a `NamedSharding` or None for each view.

    Example:
      >>> shardings_in_views({"up": MuonDimensionNumbers(0, 1)}) is None
      True
    """
    found = jax.tree.map(
        lambda x: getattr(x, "sharding", None) if is_view(x) else None, views, is_leaf=is_view
    )
    return found if jax.tree.leaves(found) else None


def bind_view(view: View, shape: tuple[int, ...]) -> BoundView:
    """Checks a view against a leaf's shape.

    Args:
      view: the declared view.
      shape: the leaf's shape, of two dims or more.

    Returns:
      The view with its axes counted from the front and its block sizes known.

    Raises:
      ValueError: if axes are out of range, empty or shared, or blocks don't fill the axis.

    Example:
      >>> bind_view(MuonDimensionNumbers(0, (1, 2)), (64, 8, 16)).matrices
      ((1, 64, 128),)
    """
    if isinstance(view, BoundView):
        if view.shape != shape:
            raise ValueError(f"the view is bound to shape {view.shape}, the leaf has {shape}")
        return view
    if len(shape) < 2:
        raise ValueError(f"a matrix needs two dims or more, got shape {shape}")
    reduction = _axes(view.reduction_axis, shape, "reduction")
    output = _axes(view.output_axis, shape, "output")
    if set(reduction) & set(output):
        raise ValueError(
            f"reduction axes {reduction} and output axes {output} must be disjoint "
            f"for shape {shape}"
        )
    batch = tuple(a for a in range(len(shape)) if a not in (*reduction, *output))
    cut, sizes, groups = _blocks(view, shape, reduction, output)
    return BoundView(shape, batch, reduction, output, sizes, groups, cut)


def _axes(axes: int | Sequence[int], shape: tuple[int, ...], role: str) -> tuple[int, ...]:
    """Axes as non-negative integers; unlike a modulo, out of range is an error."""
    given = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    rank = len(shape)
    if not given or not all(_is_int(a) and -rank <= a < rank for a in given):
        raise ValueError(
            f"{role} axes must be one or more integers in [{-rank}, {rank - 1}] "
            f"for shape {shape}, got {axes!r}"
        )
    found = tuple(int(a) % rank for a in given)
    if len(set(found)) < len(found):
        raise ValueError(f"{role} axes must differ, got {axes} for shape {shape}")
    return found


def _blocks(
    view: MuonDimensionNumbers | MatrixView,
    shape: tuple[int, ...],
    reduction: tuple[int, ...],
    output: tuple[int, ...],
) -> tuple[Literal[1, 2], tuple[int, ...], int]:
    """Which axis is cut (1 reduction, 2 output), its block sizes, and how often they repeat."""
    if not isinstance(view, MatrixView):
        return 2, (math.prod(shape[a] for a in output),), 1
    cut = 2 if view.axis == "output" else 1
    length = math.prod(shape[a] for a in (output if cut == 2 else reduction))
    count = view.heads or 1
    each, rest = divmod(length, view.groups * count)
    sizes = view.split or (each,) * count
    if (view.split is None and rest) or sum(sizes) * view.groups != length:
        asked = f"split={view.split}" if view.split else f"heads={count}"
        raise ValueError(
            f"{asked}, groups={view.groups} must fill the merged {view.axis} axis of size {length} "
            f"exactly, for shape {shape}"
        )
    return cut, sizes, view.groups
