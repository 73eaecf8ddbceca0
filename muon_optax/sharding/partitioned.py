"""Work whose sharding is left to the partitioner, on any mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, auto_axes

__all__ = ["partitioned"]


def partitioned(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Calls a function of arrays in Auto mode, where no operation has to say how it is sharded.

    Args:
      function: gives arrays that are the same on every device, as sums and norms are.
      *arrays: arrays or tracers, of any sharding on one mesh.

    Returns:
      The function's result, replicated.

    Example:
      >>> partitioned(lambda x: x.sum(), jax.numpy.ones((2, 3))).item()
      6.0
    """
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if mesh.empty or not mesh.explicit_axes:
        return function(*arrays)
    replicated = NamedSharding(mesh, PartitionSpec())
    return auto_axes(function, axes=mesh.explicit_axes, out_sharding=replicated)(*arrays)
