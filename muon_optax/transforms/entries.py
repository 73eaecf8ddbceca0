"""AdaMuon: each entry of an update is divided by the root of its second moment."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_decay, check_number
from muon_optax._internal.dtypes import wide_dtype
from muon_optax.partition import Views
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import MatrixSums, quotient, squares
from muon_optax.transforms.moments import holds_moments
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage
from muon_optax.transforms.standalone import (
    check_state_type,
    moments_of,
    moving_average,
    restored,
    standalone,
    zero_moments,
)

__all__ = ["EntryState", "scale_by_entry"]


@holds_moments("nu")
class EntryState(NamedTuple):
    """Second moments of AdaMuon.

    Attributes:
      nu: for each leaf an array of the parameter's shape, in float32 at least.

    Example:
      >>> state = scale_by_entry().init({"w": jnp.ones((4, 8), "bfloat16")})
      >>> state.nu["w"].shape, state.nu["w"].dtype.name
      ((4, 8), 'float32')
    """

    nu: optax.Updates


def scale_by_entry(
    beta2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    rms: jax.typing.ArrayLike | None = 0.2,
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """AdaMuon (arXiv 2507.11005): divides each entry by the root of its second moment.

    Stands after orthogonalisation, in place of the scale by shape. Without bias correction, which
    the rescaling would undo.

    AdaMuon's authors orthogonalise the signs of the momentum, and use the momentum's decay rate for
    `beta2`: `optax.chain(scale_by_momentum(0.95, bias_correction=False), optax.scale_by_sign(),
    orthogonalize(), scale_by_entry(0.95))`. timm does without the signs, and Emerging-Optimizers
    also without the rescaling, with a scale by shape after it.

    Args:
      beta2: decay rate of the second moment, in [0, 1).
      eps: keeps the divisors from zero.
      rms: the root mean square of the entries that each matrix is brought to; None leaves it.
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A transformation with an `EntryState`. Updates keep their dtype, and are formed in float32 at
      least. Zero updates stay zero.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> tx = scale_by_entry(rms=0.2)
      >>> direction = jnp.array([[3.0, -1.0]])
      >>> (5 * tx.update(direction, tx.init(direction))[0]).round(3).tolist()
      [[1.0, -1.0]]
    """
    check_decay("beta2", beta2)
    check_decay("eps", eps, below=math.inf)
    if rms is not None:
        check_number("rms", rms)
    scaling = _EntryScaling(beta2, eps, rms)
    return standalone(
        Stage(scaling.init, scaling.update), weight_dimension_numbers, param_shardings
    )


@dataclasses.dataclass(frozen=True)
class _EntryScaling:
    """The arguments of `scale_by_entry`, once checked."""

    beta2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    rms: jax.typing.ArrayLike | None

    def init(self, params: Any, leaves: Leaves) -> EntryState:
        del leaves
        return EntryState(jax.tree.map(zero_moments, params))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Leaves, **extra_args: Any
    ) -> tuple[Any, EntryState]:
        del params, extra_args
        check_state_type(state, EntryState)
        arrays, treedef = jax.tree.flatten(updates)
        moments = moments_of(state.nu, updates, [x.shape for x in arrays])
        found = [self._scaled(*row) for row in zip(arrays, moments, strict=True)]
        results = self._rescaled([x for x, _ in found], leaves)
        cast = [new.astype(x.dtype) for new, x in zip(results, arrays, strict=True)]
        nu = restored([nu for _, nu in found], updates, state.nu)
        return treedef.unflatten(cast), EntryState(nu)

    def _scaled(self, x: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide, squared = x.astype(wide_dtype(x.dtype)), squares(x)
        nu = moving_average(self.beta2, nu, squared)
        divisor = jnp.sqrt(nu) + jnp.asarray(self.eps, nu.dtype)
        return jnp.where(divisor == 0, 0, wide / jnp.where(divisor == 0, 1, divisor)), nu

    def _rescaled(self, scaled: list[jax.Array], leaves: Leaves) -> list[jax.Array]:
        """Matrices with the root mean square that is wanted."""
        if self.rms is None:
            return scaled
        found = [MatrixSums(leaf) for leaf in leaves]
        of_squares = all_sums([(sums, squares(x)) for sums, x in zip(found, scaled, strict=True)])
        results = []
        for sums, x, squared in zip(found, scaled, of_squares, strict=True):
            rms, eps = (jnp.asarray(value, squared.dtype) for value in (self.rms, self.eps))
            root = jnp.sqrt(sums.counts.astype(squared.dtype))
            results.append(x * sums.broadcast(quotient(rms * root, jnp.sqrt(squared) + eps)))
        return results
