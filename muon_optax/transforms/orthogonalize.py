"""Orthogonalisation of the updates themselves, without momentum."""

from typing import Any

import jax
import numpy as np
import optax

from muon_optax._internal.checks import check_float_dtype
from muon_optax._internal.dtypes import compute_dtype
from muon_optax._internal.tree_paths import cast_like
from muon_optax.orthogonalization import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.partition import Views
from muon_optax.sharding.execution import ExecutionOptions, StrategyRules
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.runtime.buffers import Elementwise
from muon_optax.sharding.runtime.orthogonalizer import OrthogonalizeFunction, make_orthogonalizer
from muon_optax.transforms.binding import binder
from muon_optax.transforms.stage import MatrixTransformation, Stage, matrix_transformation

__all__ = ["orthogonalize"]


def orthogonalize(
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    *,
    adaptive: bool = False,
    preconditioning: Preconditioning | None = None,
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    ns_precision: PrecisionName | None = None,
    orthogonalizer: OrthogonalizeFunction | None = None,
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> MatrixTransformation:
    """Replaces each matrix of the updates by (nearly) its polar factor.

    Args:
      ns_coeffs: a schedule's name, one triple, or a table of triples; see `newton_schulz`.
      ns_steps: number of Newton-Schulz steps; None is the schedule's own.
      adaptive: multiply each matrix by its inner product with the input, the dual norm (arXiv
        2409.20325).
      preconditioning: how the matrix is brought into range; None is the schedule's own.
      ns_method: 'standard', 'gram', or 'auto': as in `newton_schulz`.
      ns_dtype: dtype to compute in; None is the update's.
      ns_precision: precision of the matmuls, as in `jax.lax.dot`.
      orthogonalizer: a function on (batch, m, n), used instead of Newton-Schulz; not with the
        strategy 'gram'.
      weight_dimension_numbers: a view, a tree of views, or a function that returns one; None takes
        every leaf for a [fan-in, fan-out] matrix.
      param_shardings: how the parameters are sharded: a tree (or a prefix of one) of NamedSharding,
        PartitionSpec or arrays, or a function of the parameters that returns one. None reads Flax's
        metadata. Explicit meshes don't need it.
      strategy: how sharded matrices are brought together: 'auto', 'gather', 'all_to_all', 'gram'
        or 'local', or (pattern, strategy) pairs with patterns as in `Rule`.
      max_workspace_bytes: bound of one round's workspace on a device; None is the larger of
        256 MiB and six times the largest matrix.
      device: an accelerator's name or a `DeviceModel`, for the choice of strategies.

    Returns:
      A stateless transformation. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = orthogonalize("polar_express", 8)
      >>> updates, _ = tx.update(5 * jnp.eye(2), tx.init(jnp.zeros((2, 2))))
      >>> updates.round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    check_float_dtype("ns_dtype", ns_dtype)
    options = ExecutionOptions(strategy, max_workspace_bytes, device)
    iteration = make_orthogonalizer(
        ns_coeffs,
        ns_steps,
        preconditioning=preconditioning,
        method=ns_method,
        precision=ns_precision,
        orthogonalizer=orthogonalizer,
        adaptive=adaptive,
    )
    options.check_orthogonalizer(iteration)

    def init(params, leaves):
        del params
        options.check_patterns(leaves)
        return optax.EmptyState()

    def update(updates, state, params, leaves, **extra_args):
        del params, extra_args
        arrays, treedef = jax.tree.flatten(updates)
        dtypes = [compute_dtype(ns_dtype, x.dtype) for x in arrays]
        planned = options.planned(leaves, dtypes)
        found = options.run(planned, iteration, _UNCHANGED, np.float32(1), [(x,) for x in arrays])
        results = treedef.unflatten([result for (result,) in found])
        return cast_like(results, updates), state

    bind = binder(weight_dimension_numbers, ShardingOptions(param_shardings))
    return matrix_transformation(Stage(init, update), bind)


# The factor of one changes nothing: a chunk that isn't due yet is held back by it.
_UNCHANGED = Elementwise(prepare=lambda one, x: one.astype(x.dtype) * x, keep=lambda *_: ())
