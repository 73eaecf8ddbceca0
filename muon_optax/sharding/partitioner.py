"""The cost of an update whose shardings the trace can't see: XLA's partitioner places collectives.

The figures are those of programs that XLA compiled for CPU, which tests compare. Other versions of
it may do otherwise, and so does this one, by a factor of up to two, for large matrices of a stack
that is sharded along more devices than a turn of its loop has matrices.

A matrix is m x n (m <= n), its short side over M devices and its long side over N. With p passes
over the matrix, and q small matmuls whose operands are gathered, a device receives

    2 p m n / N (M - 1)/M     all-gathers of the matrix, for both of a pass's matmuls
    q m^2 (M - 1)/M           all-gathers of operands of small matmuls
    2 p m^2 / M (N - 1)/N     all-reduces of Gram matrices
"""

import math

import jax.numpy as jnp

from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.costs import Cost
from muon_optax.sharding.planning.device_models import DeviceModel

__all__ = ["partitioner_cost"]


def partitioner_cost(
    leaf: BoundLeaf, count: int, loops: int, newton_schulz: NewtonSchulz | None, device: DeviceModel
) -> Cost:
    """Cost of matrices that are left to the partitioner.

    Args:
      leaf: stands for the leaves they come from, sharded as they are.
      count: number of matrices that a device has a slice of, or whole.
      loops: in how many turns of a loop they are orthogonalised. Each would cut some matrices from
        a stack, so the partitioner all-gathers a sharded batch dim in each.
      newton_schulz: the iteration that runs; None for a function of the user's, which is counted as
        the default iteration.
      device: the device model.

    Returns:
      The cost.
    """
    shards = leaf.sharding.count(leaf.batch_axes)
    itemsize = jnp.dtype(leaf.dtype).itemsize
    received, flops = _one_matrix(leaf, newton_schulz or NewtonSchulz(resolve_schedule()))
    if loops > 1 and shards > 1:
        count *= shards
        slices = math.prod(leaf.shape[a] for a in leaf.view.stack_axes) * itemsize
        received += loops * slices // leaf.sharding.count(leaf.shard_axes) * (shards - 1) // shards
    received, flops = count * received, count * flops
    axes = (*leaf.batch_axes, *leaf.shard_axes)
    mesh = leaf.sharding.mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    seconds = flops / device.rate(itemsize) + received / device.bandwidth_over(axes, sizes)
    return Cost(received, flops, seconds)


def _one_matrix(leaf: BoundLeaf, newton_schulz: NewtonSchulz) -> tuple[int, int]:
    """Bytes that a device receives, and its FLOPs, for the blocks of one (fused) matrix."""
    view, sharding = leaf.view, leaf.sharding
    by_role = ((view.fan_in, view.reduction_axes), (view.fan_out, view.output_axes))
    # Of a square matrix the rows are multiplied with each other, as of a wide one.
    (_, short_axes), (_, long_axes) = sorted(by_role, key=lambda side: side[0])
    short, long = (sharding.count(sharding.axes_of(axes)) for axes in (short_axes, long_axes))
    received = flops = 0
    for number, rows, columns in view.matrices:
        m, n = sorted((rows, columns))
        number //= view.batch
        passes, small, small_itemsize = _matmuls(newton_schulz, m, n, leaf.dtype)
        itemsize = jnp.dtype(leaf.dtype).itemsize
        gathered = 2 * passes * m * n * itemsize // long + small * m * m * small_itemsize
        reduced = 2 * passes * m * m * small_itemsize * (long - 1) // (short * long)
        received += number * (gathered * (short - 1) // short + reduced)
        of_matrix = 4 * passes * m * m * n
        of_small = newton_schulz.flops(m, n, leaf.dtype) - of_matrix
        flops += number * (of_matrix // (short * long) + of_small // short)
    return received, flops


def _matmuls(newton_schulz: NewtonSchulz, m: int, n: int, dtype: str) -> tuple[int, int, int]:
    """Passes over the matrix, small matmuls with gathered operands, and bytes of their elements."""
    steps, passes = len(newton_schulz.schedule.rows), newton_schulz.schedule.passes
    itemsize = jnp.dtype(dtype).itemsize
    if newton_schulz.chosen_method(m, n, dtype) == "gram":
        return passes, 4 * (steps - passes), max(4, itemsize)  # float32, in half precision too
    return steps, steps, itemsize
