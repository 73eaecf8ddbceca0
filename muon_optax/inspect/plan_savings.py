"""Bytes that sharding the moments over replicas would save, as ZeRO-1 does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.config import MuonConfig
from muon_optax.inspect.plan_rows import Planned, plan_rows
from muon_optax.inspect.tables import quantity
from muon_optax.sharding.declared import Axes
from muon_optax.sharding.execution import Prepared
from muon_optax.sharding.reductions import reduced_axes, summation
from muon_optax.sharding.resharding import summing_bytes

__all__ = ["advice_on_moments"]


def advice_on_moments(config: MuonConfig, params: Any, planned: Planned) -> str | None:
    """Bytes that `shard_moments_over` would save, where gradients are summed over replicas.

    Their sum belongs to the backward pass and is in no row. Its all-reduce takes twice the
    bytes of results that replicas receive.

    Args:
      config: the optimizer's configuration.
      params: as in `plan_rows`.
      planned: its result.

    Returns:
      A sentence; None where nothing would be saved, or where the user has decided.
    """
    is_typed = any(map(reduced_axes, jax.tree.leaves(params)))  # then the sums are in rows
    axes = () if is_typed or config.declared.has_axes else _replica_axes(planned.prepared)
    if not axes:
        return None
    other = dataclasses.replace(config, declared=config.declared.over(axes))
    try:
        moved = plan_rows(other, params)
    except ValueError:  # as where a strategy is asked for that can't be had then
        return None
    now, then = (
        round(each.bytes) + _bytes_of_sums(each.prepared, axes) for each in (planned, moved)
    )
    if then >= now:
        return None
    named = repr(axes[0] if len(axes) == 1 else axes)
    over = ", ".join(axes)
    return (
        f"where gradients are summed over {over}, a device receives {quantity(now, 'B')} for their "
        f"sums and the update, and {quantity(then, 'B')} with shard_moments_over={named}"
    )


def _replica_axes(prepared: Prepared) -> Axes:
    """Mesh axes that replicate parameters and their momentum."""
    axes: set[str] = set()
    for leaf, result in zip(prepared.leaves, prepared.result_shardings, strict=True):
        if result is not None and leaf.sharding.known:
            axes.update(set(result.free) & set(leaf.sharding.free))
    mesh = next((leaf.sharding.mesh for leaf in prepared.leaves if leaf.sharding.mesh), None)
    return () if mesh is None else tuple(a for a in mesh.axis_names if a in axes)


def _bytes_of_sums(prepared: Prepared, axes: Axes) -> int:
    """Bytes that a device receives to sum the gradients over axes."""
    grads = jax.tree.leaves(prepared.updates)
    received = 0
    for x, leaf, result in zip(grads, prepared.leaves, prepared.result_shardings, strict=True):
        if result is not None:
            over, rank = [a for a in axes if a in result.free], len(result.shape)
            how = summation(result.type_key, over, leaf.sharding.type_key, rank)
            received += sum(summing_bytes(result, how, jnp.dtype(x.dtype).itemsize))
    return received
