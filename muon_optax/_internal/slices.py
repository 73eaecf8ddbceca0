"""Chooses slices of arrays by their scores, gathers them, and puts them back between zeros."""

import jax
import jax.numpy as jnp

__all__ = ["gathered", "largest", "places_of", "scattered"]


def largest(scores: jax.Array, count: int) -> jax.Array:
    """Where the largest scores are along the last axis; of equal ones the first are taken.

    Args:
      scores: real numbers (..., n).
      count: how many, at most n.

    Returns:
      Indices (..., count), in ascending order.

    Example:
      >>> largest(jnp.array([1.0, 3.0, 2.0, 2.0]), 2).tolist()
      [1, 2]
    """
    return jnp.sort(jax.lax.top_k(scores, count)[1], axis=-1)


def places_of(indices: jax.Array, size: int) -> jax.Array:
    """For each of `size` indices, where among `indices` (..., count) it is, or -1: (..., size).

    Example:
      >>> places_of(jnp.array([0, 2]), 4).tolist()
      [0, -1, 1, -1]
    """
    order = jax.lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    # Made of the indices, so that it varies over the same Manual mesh axes.
    nowhere = jnp.where(False, indices[..., :1], -1).astype(jnp.int32)
    places = jnp.broadcast_to(nowhere, (*indices.shape[:-1], size))
    return jnp.put_along_axis(places, indices, order, axis=-1, inplace=False)


def gathered(x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
    """The slices of `x` with these indices along an axis.

    Args:
      x: the array.
      indices: of the dims of `x`, of which each is of its size or 1, but for `axis`.
      axis: the axis, counted from the front.

    Returns:
      The slices, in the order of the indices.

    Example:
      >>> gathered(jnp.array([[1, 2], [3, 4]]), jnp.array([[1]]), 0).tolist()
      [[3, 4]]
    """
    # Without bounds checks, which would fill in NaN; dims of size 1 are gathered as a whole.
    return jnp.take_along_axis(x, indices, axis, mode="promise_in_bounds")


def scattered(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """Undoes `gathered`: each slice goes where it was, and zeros go where none was taken.

    It is a gather and a select, since accelerators are slow at scattering whole slices.

    Args:
      x: the slices.
      places: the place of each index among the slices, or -1, in the dims of `x` as there.
      axis: the axis, counted from the front.

    Returns:
      The array.

    Example:
      >>> scattered(jnp.array([5.0, 6.0]), jnp.array([0, -1, 1]), 0).tolist()
      [5.0, 0.0, 6.0]
    """
    return jnp.where(places >= 0, gathered(x, jnp.maximum(places, 0), axis), 0)
