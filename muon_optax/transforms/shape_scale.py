"""How large an orthogonalised update is: one factor a matrix, from its fan-in and fan-out."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice, check_number
from muon_optax._internal.dtypes import scaled, wide_dtype
from muon_optax.partition import Views
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.specs import LeafSharding
from muon_optax.transforms.binding import binder
from muon_optax.transforms.stage import MatrixTransformation, Stage, matrix_transformation
from muon_optax.views.matrix_view import BoundView

__all__ = [
    "Scale",
    "Scaling",
    "factor_of_leaf",
    "resolve_scaling",
    "scale_by_shape",
    "scaled",
    "shape_scale_stage",
]

Scale = Literal["shape_scaling", "match_rms_adamw", "spectral", "unit_rms_norm", "none"]

_FACTORS: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/; optax's and torch's default.
    "shape_scaling": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    # Moonlight, arXiv 2502.16982, with the 0.2 that matches AdamW's usual update RMS.
    "match_rms_adamw": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    # Megatron-LM and AReaL; Dion calls sqrt(fan_out / fan_in) "spectral_norm", which is another
    # thing.
    "spectral": lambda fan_in, fan_out: math.sqrt(max(fan_in, fan_out)),
    # The operator norm between RMS norms, arXiv 2409.20325, as muP wants it.
    "unit_rms_norm": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "none": lambda fan_in, fan_out: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The factor of a mode, times a multiplier that may be traced.

    Attributes:
      mode: a `Scale`.
      multiplier: `scale_factor`, or `consistent_rms`.
    """

    mode: Scale
    multiplier: jax.typing.ArrayLike

    @property
    def is_bare(self) -> bool:
        """Whether the multiplier is known to change nothing."""
        return isinstance(self.multiplier, int | float) and self.multiplier == 1

    def base(self, fan_in: int, fan_out: int) -> float:
        """The mode's static factor of one matrix; 1 for an empty one."""
        return _FACTORS[self.mode](fan_in, fan_out) if fan_in and fan_out else 1.0


def resolve_scaling(
    scale: Scale | None,
    scale_factor: jax.typing.ArrayLike,
    consistent_rms: jax.typing.ArrayLike | None,
) -> Scaling:
    """Merges the three scale options.

    Raises:
      TypeError: for a factor that isn't a number.
      ValueError: for an unknown mode, or both `scale` and `consistent_rms`.

    Example:
      >>> resolve_scaling("match_rms_adamw", 1.0, None).base(4, 16)
      0.8
    """
    if scale is not None:
        check_choice("scale", scale, get_args(Scale))
    check_number("scale_factor", scale_factor)
    if consistent_rms is None:
        return Scaling(scale or "shape_scaling", scale_factor)
    check_number("consistent_rms", consistent_rms)
    if scale is not None:
        raise ValueError(
            f"give scale or consistent_rms, not both: got scale={scale!r} and "
            f"consistent_rms={consistent_rms!r}"
        )
    return Scaling("spectral", consistent_rms * scale_factor)


def scale_by_shape(
    weight_dimension_numbers: Views = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    *,
    scale: Scale | None = None,
    scale_factor: jax.typing.ArrayLike = 1.0,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """Scales each matrix by a factor of its fan-in and fan-out, each fused block by its own.

    Args:
      weight_dimension_numbers: as in `orthogonalize`.
      consistent_rms: scale by this times sqrt(max(fan-in, fan-out)), as optax does.
      scale: 'shape_scaling' sqrt(max(1, out / in)), the default; 'match_rms_adamw' 0.2 sqrt(max(in,
        out)); 'spectral' sqrt(max(in, out)); 'unit_rms_norm' sqrt(out / in); 'none'.
      scale_factor: multiplies any mode.
      param_shardings: as in `orthogonalize`; only needed inside a shard_map.

    Returns:
      A stateless transformation. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for an unknown mode, or both `scale` and `consistent_rms`.

    Example:
      >>> tx = scale_by_shape()
      >>> tx.update(jnp.ones((1, 4)), tx.init(jnp.zeros((1, 4))))[0].tolist()
      [[2.0, 2.0, 2.0, 2.0]]
    """
    stage = shape_scale_stage(resolve_scaling(scale, scale_factor, consistent_rms))
    bind = binder(weight_dimension_numbers, ShardingOptions(param_shardings))
    return matrix_transformation(stage, bind)


def shape_scale_stage(scaling: Scaling) -> Stage:
    """The stage of `scale_by_shape`."""

    def init(params, leaves):
        del params, leaves
        return optax.EmptyState()

    def update(updates, state, params, leaves, **extra_args):
        del params, extra_args
        arrays, treedef = jax.tree.flatten(updates)
        factor_of = functools.cache(functools.partial(_factor, scaling))  # of many equal leaves
        found = [
            scaled(x, factor_of(leaf.view, leaf.sharding, wide_dtype(x.dtype)))
            for x, leaf in zip(arrays, leaves, strict=True)
        ]
        return treedef.unflatten(found), state

    return Stage(init, update)


def _factor(
    scaling: Scaling, view: BoundView, sharding: LeafSharding, wide: jnp.dtype
) -> jax.Array | None:
    """The factor of a leaf, or of a block of one; None where that is 1."""
    base = [scaling.base(m, n) for _, m, n in view.matrices]
    if set(base) == {1.0} and scaling.is_bare:
        return None
    factor = factor_of_leaf(base, view, sharding, wide)
    return factor * jnp.asarray(scaling.multiplier, factor.dtype)


def factor_of_leaf(
    values: Sequence[float], view: BoundView, sharding: LeafSharding, wide: jnp.dtype
) -> jax.Array:
    """One value for each entry of the view's `matrices`, to multiply the leaf at hand by."""
    factor = jnp.asarray(view.per_block(values), jnp.finfo(wide).dtype)
    # Inside a shard_map a block has a part of the fused axis.
    return sharding.block_of(factor) if factor.ndim else factor
