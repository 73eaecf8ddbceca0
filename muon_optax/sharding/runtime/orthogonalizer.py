"""Orthogonalises the matrices that one device has, whole or as slices."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from muon_optax._internal.checks import check_choice, check_flag, check_static
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.slices import gathered, largest, places_of, scattered
from muon_optax.orthogonalization import (
    Coefficients,
    GramCollectives,
    Method,
    NewtonSchulz,
    PrecisionName,
    Preconditioning,
    resolve_schedule,
)
from muon_optax.views.matrix_view import BoundView

__all__ = [
    "OrthogonalizeFunction",
    "Orthogonalizer",
    "group_size",
    "loop_turns",
    "make_orthogonalizer",
]

OrthogonalizeFunction = Callable[[jax.Array], jax.Array]

# Leaves whose results are cut from one array, at least. XLA on CPU compiles one kernel for each
# place of a cut (about 15 ms), and groups of one size share them; smaller groups make more loops.
_GROUP_LEAVES = 16


@dataclasses.dataclass(frozen=True)
class Orthogonalizer:
    """How each matrix is orthogonalised.

    Attributes:
      function: a function on (batch, m, n).
      adaptive: multiply the result by its inner product with the input, the dual norm.
      batch_elements: elements of the matrices that are multiplied in one batch, about: stacks of
        more go through a loop of batches. None is no loop. The device's model has the number.
    """

    function: OrthogonalizeFunction
    adaptive: bool = False
    batch_elements: int | None = None

    @property
    def newton_schulz(self) -> NewtonSchulz | None:
        """The iteration, where it is ours."""
        return self.function if isinstance(self.function, NewtonSchulz) else None

    def whole(self, stacked: jax.Array, view: BoundView) -> jax.Array:
        """Orthogonalises whole matrices, stacked by `BoundView.stack`."""
        parts = zip(view.split_stack(stacked), view.dense_matrices, strict=True)
        return view.merge_stack([self._dense(x, (m, n)) for x, (_, m, n) in parts])

    def slices(
        self,
        x: jax.Array,
        axis: Literal[-1, -2],
        collectives: GramCollectives,
        all_reduce: Callable[[jax.Array], jax.Array],
        method: Literal["standard", "gram"] = "gram",
    ) -> jax.Array:
        """Orthogonalises this device's slices of matrices.

        Args:
          x: (..., m, n), sharded along `axis`.
          axis: the long axis of the matrices.
          collectives: how the devices sum Gram matrices and get the results.
          all_reduce: sums an array over the devices that have slices of the same matrices.
          method: as in `NewtonSchulz.on_slices`.

        Returns:
          The slices of the results.
        """
        assert self.newton_schulz is not None
        y = self.newton_schulz.on_slices(x, collectives, axis=axis, method=method)
        if not self.adaptive:
            return y
        return _times(y, all_reduce(_inner(x, y)))

    def _dense(self, x: jax.Array, sizes: tuple[int, int]) -> jax.Array:
        """Orthogonalises (batch, m, n) without the zero rows or columns that these sizes leave out.

        The polar factor of the rest, with the same zeros, is that of the whole.
        """
        axis = next((i for i, n in enumerate(sizes, 1) if n < x.shape[i]), None)
        if axis is None:
            return self._in_batches(x)
        # No row that isn't zero has a smaller sum than one that is.
        sums = jnp.sum(jnp.abs(x).astype(wide_dtype(x.real.dtype)), 3 - axis)
        indices = largest(sums, sizes[axis - 1])
        places = jnp.expand_dims(places_of(indices, x.shape[axis]), 3 - axis)
        dense = gathered(x, jnp.expand_dims(indices, 3 - axis), axis)
        return scattered(self._in_batches(dense), places, axis)

    def _in_batches(self, x: jax.Array) -> jax.Array:
        """Applies the function to (batch, m, n) in batches whose size suits the device."""
        count, m, n = x.shape
        batch = _batch_size(count, m * n, self.batch_elements or x.size)
        if batch == count:
            return self._apply(x)

        def orthogonalize_batch(i: jax.Array, x: jax.Array) -> jax.Array:
            y = self._apply(jax.lax.dynamic_slice_in_dim(x, i * batch, batch))
            return jax.lax.dynamic_update_slice_in_dim(x, y, i * batch, 0)

        # In place: the outputs of a map would first be filled with zeros, and copied.
        return jax.lax.fori_loop(0, count // batch, orthogonalize_batch, x)

    def _apply(self, x: jax.Array) -> jax.Array:
        if self.newton_schulz is not None and x.shape[0] == 1:
            y = self.function(x[0])[None]  # a matmul without a batch dim is faster on CPU
        else:
            y = _checked(self.function(x), x)
        if self.adaptive:
            y = _times(y, _inner(x, y))
        return y.astype(x.dtype)


def make_orthogonalizer(
    ns_coeffs: Coefficients,
    ns_steps: int | None,
    *,
    preconditioning: Preconditioning | None,
    method: Method,
    orthogonalizer: OrthogonalizeFunction | None,
    precision: PrecisionName | None = None,
    adaptive: bool = False,
) -> Orthogonalizer:
    """The orthogonalizer of the options. All are checked, those too that `orthogonalizer` replaces.

    Raises:
      ValueError, TypeError: for options out of range.
    """
    check_flag("adaptive", adaptive)
    check_choice("ns_method", method, get_args(Method))
    if precision is not None and not isinstance(precision, jax.lax.Precision):
        check_choice("ns_precision", precision, get_args(PrecisionName))
    schedule = resolve_schedule(ns_coeffs, ns_steps, preconditioning)
    iteration = NewtonSchulz(schedule, method, precision=precision)
    if orthogonalizer is None:
        return Orthogonalizer(iteration, adaptive)
    check_static("orthogonalizer", orthogonalizer)
    if not callable(orthogonalizer):
        raise TypeError(f"orthogonalizer must be a function, got {orthogonalizer!r}")
    return Orthogonalizer(orthogonalizer, adaptive)


def group_size(count: int, elements: int, batch_elements: int) -> int:
    """In how large equal groups to join `count` leaves of one matrix each.

    Of two batches or more: groups that need no loop took 1.1 times a step's time on CPU, and 1.7
    times its workspace.

    Args:
      count: how many leaves.
      elements: of a matrix.
      batch_elements: as the device's model has it.

    Returns:
      A divisor of `count`.

    Example:
      >>> [group_size(48, n * n, 2**18) for n in (1024, 64)], group_size(12, 1024 * 1024, 2**18)
      ([16, 48], 12)
    """
    batch = _batch_size(count, elements, batch_elements)
    least = max(_GROUP_LEAVES, 2 * batch)
    sizes = (n for n in range(least, count) if count % n == 0 and n % batch == 0)
    return next(sizes, count)


def loop_turns(count: int, elements: int, batch_elements: int) -> int:
    """In how many turns of a loop `count` stacked matrices are orthogonalised.

    Args:
      count: how many matrices.
      elements: of a matrix.
      batch_elements: as the device's model has it.

    Returns:
      The number of turns.

    Example:
      >>> loop_turns(16, 64 * 256, 2**18), loop_turns(16, 128 * 1024, 2**18)
      (1, 8)
    """
    return count // _batch_size(count, elements, batch_elements) if count else 0


def _batch_size(count: int, elements: int, batch_elements: int) -> int:
    """How many of `count` matrices are multiplied at once: a divisor of `count`."""
    limit = max(1, batch_elements // elements)
    return next(d for d in range(min(count, limit), 0, -1) if count % d == 0)


def _checked(y: Any, x: jax.Array) -> jax.Array:
    """Raises where a function of the user's returned another shape or dtype."""
    if not isinstance(y, jax.Array) or y.shape != x.shape:
        got = f"shape {y.shape}" if isinstance(y, jax.Array) else f"a {type(y).__name__}"
        raise TypeError(f"orthogonalizer must return an array of shape {x.shape}, got {got}")
    if jnp.iscomplexobj(y) and not jnp.iscomplexobj(x):
        raise TypeError(f"orthogonalizer must return {x.dtype} for {x.dtype}, got {y.dtype}")
    return y


def _inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """The inner product of each pair of matrices, (batch, 1, 1)."""
    wide = wide_dtype(x.dtype)
    return jnp.sum(x.astype(wide).conj() * y.astype(wide), axis=(-2, -1), keepdims=True)


def _times(y: jax.Array, factor: jax.Array) -> jax.Array:
    return (factor * y.astype(factor.dtype)).astype(y.dtype)
