"""All-reduces over groups of neighbouring devices, by recursive doubling: exchanges in pairs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muon_optax.orthogonalization.normalize import inverse_power_of_two, scaled
from muon_optax.sharding.strategies.triangle import from_lower_triangle, lower_triangle

__all__ = ["DeviceGroups", "Exchange", "add", "maximum"]

# Sends an array to the other device of a pair, and returns the other's.
Exchange = Callable[[jax.Array], jax.Array]

# The largest entry is scaled to between this and twice as much. float16 ends at 65,504, and so has
# its eleven bits for every entry above 2^-27 of the largest: where rows are nearly parallel, small
# entries far from the diagonal matter.
_LARGEST = 2.0**13


class DeviceGroups(NamedTuple):
    """The devices along mesh axes in groups of neighbours, inside a `shard_map`.

    Attributes:
      axes: the mesh axes, or the axis of a `vmap`.
      devices: the number of devices along them.
      size: the number of devices in a group, a power of two.
    """

    axes: tuple[str, ...] | str
    devices: int
    size: int

    def all_reduce(
        self, x: jax.Array, combine: Callable[[jax.Array, Exchange], jax.Array]
    ) -> jax.Array:
        """All-reduces an array over each group, to the same bits on all its devices.

        Args:
          x: this device's array.
          combine: combines the arrays of a pair, as `add` does: from this device's array and the
            exchange, with one result on both. Each exchange doubles the arrays combined so far.

        Returns:
          An array like `x`.
        """
        distance = 1
        while distance < self.size:
            pairs = [(i, i ^ distance) for i in range(self.devices)]
            exchange = functools.partial(jax.lax.ppermute, axis_name=self.axes, perm=pairs)
            x = combine(x, exchange)
            distance *= 2
        return x

    def all_reduce_gram(self, a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Sums Gram matrices over each group; only their lower triangles are sent.

        Args:
          a: (..., m, m), Hermitian.
          dtype: the dtype that triangles are sent in: float16, or that of `a`.

        Returns:
          The sums, like `a`.
        """
        combine = add if dtype == a.dtype else add_in_float16
        return from_lower_triangle(self.all_reduce(lower_triangle(a), combine), a.shape[-1])


def add(x: jax.Array, exchange: Exchange) -> jax.Array:
    """The sum of both devices' arrays."""
    return x + exchange(x)


def maximum(x: jax.Array, exchange: Exchange) -> jax.Array:
    """The larger of both devices' entries."""
    return jnp.maximum(x, exchange(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def add_in_float16(x: jax.Array, exchange: Exchange) -> jax.Array:
    """The float32 sum of both devices' arrays, each scaled by a power of two and sent in float16.

    A device rounds its own array too, so that both get the same bits. Derivatives are those of the
    sum, and sent as they are: of any size, they would over- or underflow in float16.

    Args:
      x: (..., k), float32; each row of k entries has a scale of its own.
      exchange: sends an array to the other device, and returns the other's.

    Returns:
      An array like `x`.

    Example:
      >>> print(add_in_float16(jnp.array([1.0, 2.0**-20]), lambda x: x))
      [2.0000000e+00 1.9073486e-06]
    """
    scale = inverse_power_of_two(jnp.max(jnp.abs(x), -1, keepdims=True))
    info = jnp.finfo(jnp.float16)
    # Not rounded by astype and back: XLA may drop such a pair, as it is free to keep precision.
    own = jax.lax.reduce_precision(scaled(x, scale) * _LARGEST, info.nexp, info.nmant)
    other = exchange(own.astype(jnp.float16)).astype(x.dtype)
    return own / _LARGEST / scale + other / _LARGEST / exchange(scale)


@add_in_float16.defjvp
def _sum_of_derivatives(
    exchange: Exchange, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return add_in_float16(*primals, exchange), add(*tangents, exchange)
