"""Chooses slices of arrays by their scores, gathers them, and puts them back between zeros."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["gathered", "largest", "largest_of_each", "places_of", "scattered"]


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


def largest_of_each(
    rows: Sequence[tuple[jax.Array, int]],
) -> list[tuple[jax.Array, jax.Array]]:
    """`largest` and `places_of` of several scores, of which equal ones are handled at once.

    Each would be a sort of its own, which takes XLA long to compile.

    Args:
      rows: scores (..., n) and counts.

    Returns:
      Indices (..., count), and places (..., n).

    Example:
      >>> rows = [(jnp.array([1.0, 3.0, 2.0]), 2), (jnp.array([[3.0, 1.0, 2.0]]), 2)]
      >>> [(indices.tolist(), places.tolist()) for indices, places in largest_of_each(rows)]
      [([1, 2], [-1, 0, 1]), ([[0, 2]], [[0, -1, 1]])]
    """
    groups: dict[tuple, list[int]] = {}
    for i, (scores, count) in enumerate(rows):
        # Joined scores would vary over the same Manual mesh axes, and so would results.
        varying = frozenset(jax.typeof(scores).manual_axis_type.varying)
        groups.setdefault((scores.shape[-1], count, scores.dtype, varying), []).append(i)
    found = {}
    for (size, count, *_), members in groups.items():
        if len(members) == 1:  # whatever the types of its dims on an Explicit mesh
            (i,) = members
            indices = largest(rows[i][0], count)
            found[i] = indices, places_of(indices, size)
            continue
        leads = [rows[i][0].shape[:-1] for i in members]
        joined = jnp.concatenate([rows[i][0].reshape(-1, size) for i in members])
        indices = largest(joined, count)
        places = places_of(indices, size)
        ends = np.cumsum([math.prod(lead) for lead in leads])[:-1]
        parts = zip(jnp.split(indices, ends), jnp.split(places, ends), leads, members, strict=True)
        for own, own_places, lead, i in parts:
            found[i] = own.reshape(*lead, count), own_places.reshape(*lead, size)
    return [found[i] for i in range(len(rows))]


def places_of(indices: jax.Array, size: int) -> jax.Array:
    """For each of `size` indices, where among `indices` (..., count) it is, or -1: (..., size).

    Example:
      >>> places_of(jnp.array([0, 2]), 4).tolist()
      [0, -1, 1, -1]
    """

    def places_of_line(indices: jax.Array) -> jax.Array:
        # Made of the indices, so that it varies over the same Manual mesh axes.
        nowhere = jnp.where(False, indices[:1], -1).astype(jnp.int32)
        order = jax.lax.iota(jnp.int32, indices.size)
        return jnp.broadcast_to(nowhere, (size,)).at[indices].set(order)

    # `put_along_axis` fails where a vmap maps over an Explicit mesh axis (JAX 0.10.2).
    for _ in indices.shape[1:]:
        places_of_line = jax.vmap(places_of_line)
    return places_of_line(indices)


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
