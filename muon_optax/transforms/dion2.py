"""Dion2: a fraction of the momentum's rows or columns is orthogonalised in each step."""

from typing import Any

import jax

from muon_optax._internal.checks import check_decay, check_float_dtype
from muon_optax.orthogonalization import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.partition import Views
from muon_optax.sharding.execution import ExecutionOptions, StrategyRules
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.runtime.orthogonalizer import OrthogonalizeFunction, make_orthogonalizer
from muon_optax.sharding.selected import SlicesOf
from muon_optax.transforms.binding import binder
from muon_optax.transforms.dion2_slices import Dion2
from muon_optax.transforms.direction import Direction
from muon_optax.transforms.momentum import Momentum
from muon_optax.transforms.stage import MatrixTransformation, matrix_transformation

__all__ = ["scale_by_dion2"]


def scale_by_dion2(
    fraction: float = 0.25,
    ef_decay: jax.typing.ArrayLike = 0.95,
    mu_dtype: Any = None,
    *,
    each: SlicesOf = "shorter",
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    adaptive: bool = False,
    preconditioning: Preconditioning | None = None,
    weight_dimension_numbers: Views = None,
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    ns_precision: PrecisionName | None = None,
    orthogonalizer: OrthogonalizeFunction | None = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
    update_dtype: Any = None,
) -> MatrixTransformation:
    """Dion2's direction (arXiv 2512.16928): the largest slices of the momentum, orthogonalised.

    Takes the place of `scale_by_muon`. The gradient is added to the momentum. Of each matrix the
    rows or columns of largest L1 norm are orthogonalised, as a matrix of their own, and multiplied
    by `ef_decay` in the momentum; all else stays in the momentum, and its update is zero. The
    scale by shape that follows is the whole matrix's. With a fraction of 1 it is Muon, with the
    momentum 'sum' and without Nesterov.

    The choice is made among all slices of a matrix, and so is the same on every mesh, up to the
    rounding of float32 sums. Each matrix of a stack and each fused block chooses by itself.
    Communication shrinks with the fraction where the axis that slices are along isn't sharded: with
    `each='output'` where fan-in is, as under FSDP along the first axis of a [fan-in, fan-out]
    kernel. Where it is sharded, and where blocks are fused along the other axis, slices that aren't
    chosen are sent as zeros, and only FLOPs shrink, but not with the strategy 'gram'.

    Args:
      fraction: of the slices of each matrix, in (0, 1]: of n, max(1, ceil(fraction * n)) are
        chosen, of equal ones the first.
      ef_decay: the factor of chosen slices of the momentum, in [0, 1).
      mu_dtype: as in `scale_by_momentum`.
      each: a slice belongs to one 'output' neuron, to one 'input', or to a place of the
        'shorter' side (to an output where both are equal).
      ns_coeffs: as in `orthogonalize`.
      ns_steps: as in `orthogonalize`.
      adaptive: as in `orthogonalize`.
      preconditioning: as in `orthogonalize`.
      weight_dimension_numbers: as in `orthogonalize`.
      ns_method: as in `orthogonalize`.
      ns_dtype: as in `scale_by_muon`.
      ns_precision: as in `orthogonalize`.
      orthogonalizer: as in `orthogonalize`; it gets the chosen slices.
      param_shardings: as in `orthogonalize`.
      mu_shardings: as in `scale_by_muon`.
      strategy: as in `orthogonalize`.
      max_workspace_bytes: as in `orthogonalize`.
      device: as in `orthogonalize`.
      update_dtype: as in `scale_by_muon`.

    Returns:
      A transformation with a `MuonState`. Zero gradients give zero updates.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_dion2(0.5, 0.9, ns_coeffs="tight")
      >>> gradient = jnp.diag(jnp.array([1.0, 100.0]))
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> update.round(1).tolist(), state.mu.tolist()
      ([[0.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 90.0]])
    """
    check_decay("ef_decay", ef_decay)
    check_float_dtype("update_dtype", update_dtype)
    direction = Direction(
        Momentum(ef_decay, mu_dtype, False, False, "sum"),
        make_orthogonalizer(
            ns_coeffs,
            ns_steps,
            preconditioning=preconditioning,
            method=ns_method,
            precision=ns_precision,
            orthogonalizer=orthogonalizer,
            adaptive=adaptive,
        ),
        ExecutionOptions(strategy, max_workspace_bytes, device),
        ns_dtype,
        update_dtype,
        dion2=Dion2(fraction, each),
    )
    bind = binder(weight_dimension_numbers, ShardingOptions(param_shardings, mu_shardings))
    return matrix_transformation(direction.stage, bind)
