"""Reshapes that JAX takes on every mesh."""

import math
from collections.abc import Iterator, Sequence

import jax

__all__ = ["reshaped"]

Sizes = tuple[int, ...]


def reshaped(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """`x.reshape(sizes)`, where one dim is merged or split after the other.

    JAX refuses to do several at once where a `vmap` maps over an Explicit mesh axis.

    Args:
      x: the array.
      sizes: sizes of all dims; none is -1.

    Returns:
      The array, reshaped. XLA makes one reshape of them.

    Example:
      >>> reshaped(jax.numpy.ones((2, 3, 4, 5)), (6, 20)).shape
      (6, 20)
    """
    if not x.size or x.size != math.prod(sizes):  # the latter is JAX's to refuse
        return x.reshape(sizes)
    done = 0
    for old, new in _groups(x.shape, tuple(sizes)):
        lead, rest = x.shape[:done], x.shape[done + len(old) :]
        x = x.reshape(*lead, math.prod(old), *rest).reshape(*lead, *new, *rest)
        done += len(new)
    return x


def _groups(old: Sizes, new: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """The shortest runs of dims that hold the same elements."""
    while old or new:
        i = j = 1
        while (have := math.prod(old[:i])) != (want := math.prod(new[:j])):
            i, j = (i + 1, j) if have < want else (i, j + 1)
        yield old[:i], new[:j]
        old, new = old[i:], new[j:]
