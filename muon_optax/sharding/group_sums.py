"""What groups of neighbouring devices combine, in exchanges between pairs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muon_optax.orthogonalization.normalize import inverse_power_of_two, scaled
from muon_optax.sharding.triangle import from_lower_triangle, lower_triangle

__all__ = ["Group", "Swap", "add", "larger"]

# The other device's array for this one's.
Swap = Callable[[jax.Array], jax.Array]

# The largest entry is brought near this, so that float16, which ends at 65,504, has its eleven bits
# for all that is not below 2^-27 of it: of aligned rows the entries far from the diagonal matter.
_NEAR = 2.0**13


class Group(NamedTuple):
    """Groups of devices that follow one another along mesh axes, inside a `shard_map`.

    Attributes:
      axes: the mesh axes, or the axis of a `vmap`.
      devices: how many there are along them.
      size: devices of a group, a power of two.
    """

    axes: tuple[str, ...] | str
    devices: int
    size: int

    def over(self, x: jax.Array, combine: Callable[[jax.Array, Swap], jax.Array]) -> jax.Array:
        """What `combine` makes of the arrays of a group, to the same bits on all its devices.

        It commutes. With each exchange twice as many are combined.
        """
        distance = 1
        while distance < self.size:
            pairs = [(i, i ^ distance) for i in range(self.devices)]
            x = combine(x, functools.partial(jax.lax.ppermute, axis_name=self.axes, perm=pairs))
            distance *= 2
        return x

    def total_gram(self, a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The sum of Gram matrices, whose triangles are sent.

        Args:
          a: (..., m, m), Hermitian.
          dtype: that of what is sent: float16, or that of `a`.

        Returns:
          The sum over the group, like `a`.
        """
        combine = add if dtype == a.dtype else add_in_float16
        return from_lower_triangle(self.over(lower_triangle(a), combine), a.shape[-1])


def add(x: jax.Array, swap: Swap) -> jax.Array:
    """The sum of both devices' arrays."""
    return x + swap(x)


def larger(x: jax.Array, swap: Swap) -> jax.Array:
    """The larger of both devices' entries."""
    return jnp.maximum(x, swap(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def add_in_float16(x: jax.Array, swap: Swap) -> jax.Array:
    """The sum of both devices' arrays, each rounded to float16 and to a power of two's multiple.

    The one that stays is rounded too, so that both devices get the same bits. Derivatives are those
    of the sum, and sent as they are: of any size, they would over- or underflow in float16.

    Args:
      x: (..., k), float32; (..., k) is one array.
      swap: sends an array to the other device, and receives its.

    Returns:
      An array like `x`.

    Example:
      >>> print(add_in_float16(jnp.array([1.0, 2.0**-20]), lambda x: x))
      [2.0000000e+00 1.9073486e-06]
    """
    factor = inverse_power_of_two(jnp.max(jnp.abs(x), -1, keepdims=True))
    info = jnp.finfo(jnp.float16)
    # Not by astype and back: XLA takes that for no change where it may keep precision.
    own = jax.lax.reduce_precision(scaled(x, factor) * _NEAR, info.nexp, info.nmant)
    other = swap(own.astype(jnp.float16)).astype(x.dtype)
    return own / _NEAR / factor + other / _NEAR / swap(factor)


@add_in_float16.defjvp
def _sum_of_derivatives(
    swap: Swap, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return add_in_float16(*primals, swap), add(*tangents, swap)
