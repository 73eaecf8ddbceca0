"""Distributed Gram: slices stay where they are, and only Gram matrices are communicated."""

import dataclasses

import jax

from muon_optax.orthogonalization import GramCollectives, NewtonSchulz
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices, padded
from muon_optax.sharding.trace_context import as_varying

__all__ = ["Gram"]


class Gram(Strategy):
    """Gram matrices are reduce-scattered to owners, iterated there, and all-gathered.

    For L matrices of m x n, m <= n, with n over N shards and r restarts of the Gram iteration:
    2 (1 + r) ceil(L/N) m^2 4 (N - 1) bytes, since Gram matrices are float32 both ways, and the
    matmuls with X divided by N, besides those of the ceil(L/N) owned Gram matrices.
    """

    name = "gram"
    needs_newton_schulz = True

    def why_impossible(self, leaf: BoundLeaf, newton_schulz: NewtonSchulz | None) -> str | None:
        view = leaf.view
        long = view.output_axes if view.fan_out >= view.fan_in else view.reduction_axes
        if newton_schulz is None:
            return "a function of the user's needs whole matrices"
        if newton_schulz.schedule.preconditioning == "spectral":
            return "the spectral norm needs whole matrices"
        if len(view.block_sizes) > 1 or view.tiles != (1, 1):
            return "fused blocks are cut from whole matrices"
        if not leaf.shard_axes or leaf.sharding.axes_of(long) != leaf.shard_axes:
            return "the long side of a matrix, and that alone, must be sharded"
        if leaf.sharding.is_mapped:
            return "JAX can't reduce-scatter under a vmap over an Explicit mesh axis"
        return None

    def is_candidate(self, leaf: BoundLeaf, workload: Workload) -> bool:
        """Where the Gram method takes fewer FLOPs, unless the standard one is asked for.

        One accelerator takes the standard method where float32 matmuls round, since these are
        faster. Here slices stay where they are, and that saves more: results then differ from those
        of one device by the rounding of the matmuls.
        """
        del leaf
        iteration = workload.newton_schulz
        if iteration is None:
            return False
        if iteration.method != "auto":
            return iteration.method == "gram"
        return iteration.gram_has_fewer_flops(
            workload.rows, workload.columns, is_half=workload.itemsize < 4
        )

    def received_bytes(self, count: int, workload: Workload) -> int:
        owned = -(-count // workload.shards)
        gram_bytes = workload.rows**2 * max(4, workload.itemsize)
        return 2 * workload.schedule.passes * owned * gram_bytes * (workload.shards - 1)

    def flops(self, count: int, workload: Workload) -> int:
        """The matmuls with X on slices, and the steps of the owned Gram matrices."""
        iteration, shards = workload.newton_schulz, workload.shards
        assert iteration is not None
        is_half = workload.itemsize < 4
        with_slices, steps = iteration.gram_flops(workload.rows, workload.columns, is_half=is_half)
        return count * with_slices // shards + -(-count // shards) * steps

    def collectives(self, count: int, workload: Workload) -> int:
        """In and out for each pass, the largest entries and the scales; and any results."""
        return 2 * workload.schedule.passes + 2 + bool(workload.gathered_axes)

    def round_size(self, workload: Workload) -> int:
        return workload.owners

    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        return "Gram matrices are smaller than the matrices"

    def orthogonalize(
        self, matrices: ShardedMatrices, x: jax.Array, orthogonalizer: Orthogonalizer
    ) -> jax.Array:
        axes, view, count = matrices.leaf.shard_axes, matrices.leaf.view, x.shape[0]
        rounded = -(-count // matrices.shards) * matrices.shards  # Gram matrices alone are padded
        block = dataclasses.replace(view, shape=matrices.leaf.sharding.block)
        block = dataclasses.replace(block, block_sizes=(block.fan_out,))
        collectives = GramCollectives(
            maximum=lambda v: jax.lax.pmax(jax.lax.stop_gradient(v), axes),
            # Of a sum over all axes JAX asks that its type varies over each, or over none.
            reduce=lambda r: jax.lax.psum_scatter(
                as_varying(padded(r, rounded), axes), axes, tiled=True
            ),
            to_all=lambda q: jax.lax.all_gather(q, axes, tiled=True)[:count],
        )
        (slices,) = block.split_stack(x)
        axis = -1 if view.fan_in <= view.fan_out else -2
        y = orthogonalizer.slices(slices, axis, collectives, lambda v: jax.lax.psum(v, axes))
        return block.merge_stack([y])

    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        return matrices.all(matrices.gathered(y))
