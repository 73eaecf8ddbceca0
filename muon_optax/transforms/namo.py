"""NAMO: the orthogonalised momentum, sized by the momentum's norm beside the gradient's."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import check_choice, check_decay, check_flag, check_number
from muon_optax._internal.dtypes import scaled
from muon_optax._internal.tree_paths import restructured_like
from muon_optax.partition import Views
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.execution import ExecutionOptions
from muon_optax.sharding.placement import place
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.direction import scale_by_muon
from muon_optax.transforms.matrix_sums import (
    MatrixSums,
    Role,
    WholeSums,
    quotient,
    squares,
    sums_across,
    sums_and_moments,
)
from muon_optax.transforms.moments import holds_moments
from muon_optax.transforms.momentum import Momentum, combine
from muon_optax.transforms.momentum_state import MuonState
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage, as_stage
from muon_optax.transforms.standalone import (
    check_state_type,
    moments_of,
    moving_average,
    restored,
    standalone,
    zero_sums,
)

__all__ = ["Namo", "NamoState", "NamoUnits", "namo_stage", "scale_by_namo"]

NamoUnits = Literal["matrix", "input"]
_SUMMED: dict[str, tuple[Role, ...]] = {"matrix": ("reduction", "output"), "input": ("output",)}


@dataclasses.dataclass(frozen=True)
class Namo:
    """NAMO's factor: the momentum mix's norm beside the gradients' (arXiv 2602.17080).

    For `muon(namo=Namo())`, and behind `scale_by_namo`, which says more.

    Attributes:
      beta2: decay rate of the gradients' squared norms, in [0, 1).
      eps: keeps the divisor from zero.
      each: a factor for each 'matrix', NAMO, or for each 'input', NAMO-D.
      clamp: factors of inputs are kept between this times their mean, and their mean divided by it.
      bias_correction: multiply by Adam's sqrt(1 - beta2^t) / (1 - beta^t).

    Example:
      >>> Namo(each="input").clamp
      0.75
    """

    beta2: jax.typing.ArrayLike = 0.99
    eps: jax.typing.ArrayLike = 1e-8
    each: NamoUnits = "matrix"
    clamp: float = 0.75
    bias_correction: bool = True

    def __post_init__(self) -> None:
        check_decay("beta2", self.beta2)
        check_decay("eps", self.eps, below=math.inf)
        check_choice("each", self.each, get_args(NamoUnits))
        check_number("clamp", self.clamp)
        if not isinstance(self.clamp, Tracer) and not 0 < self.clamp <= 1:
            raise ValueError(f"clamp must be in (0, 1], got {self.clamp!r}")
        check_flag("bias_correction", self.bias_correction)

    def sums(self, leaf: BoundLeaf) -> MatrixSums:
        """The reduction over all that has one factor."""
        return MatrixSums(leaf, _SUMMED[self.each])

    def of(
        self,
        leaves: Sequence[BoundLeaf],
        of_mix: Sequence[jax.Array],
        nu: Sequence[jax.Array],
        count: jax.Array,
        beta: jax.typing.ArrayLike,
    ) -> list[jax.Array]:
        """The factors of leaves, of the mix's sums of squares and the new moving averages."""
        factors = [
            quotient(jnp.sqrt(squared), jnp.sqrt(x) + jnp.asarray(self.eps, x.dtype))
            for squared, x in zip(of_mix, nu, strict=True)
        ]
        if self.each == "input":
            factors = self._clamped(leaves, factors)
        if not self.bias_correction:
            return factors
        corrected = []
        for factor in factors:
            t = count.astype(factor.dtype)
            rest, rest2 = (1 - jnp.asarray(x, factor.dtype) ** t for x in (beta, self.beta2))
            corrected.append(factor * (jnp.sqrt(rest2) / (rest + 1e-12)))
        return corrected

    def _clamped(
        self, leaves: Sequence[BoundLeaf], factors: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Factors of inputs, near the mean of their matrix."""
        inputs = [MatrixSums(leaf, ("reduction",)) for leaf in leaves]
        found = zip(inputs, factors, all_sums(list(zip(inputs, factors, strict=True))), strict=True)
        clamped = []
        for sums, factor, total in found:
            mean = sums.broadcast(total / sums.counts.astype(total.dtype))
            clamped.append(jnp.clip(factor, self.clamp * mean, mean / self.clamp))
        return clamped


@holds_moments("nu")
class NamoState(NamedTuple):
    """State of NAMO.

    Attributes:
      muon: the momentum, as `scale_by_muon` keeps it.
      nu: moving averages of the gradients' squared norms, in float32 at least: for each leaf an
        array with the leaf's dims, those that a norm is over as 1; where blocks are fused along
        those, a last dim has an entry for each block.
      then: the state of `then`.

    Example:
      >>> state = scale_by_namo(each="input").init({"w": jnp.ones((4, 8))})
      >>> state.muon.mu["w"].shape, state.nu["w"].shape
      ((4, 8), (4, 1))
    """

    muon: MuonState
    nu: optax.Updates
    then: Any


def scale_by_namo(
    beta: jax.typing.ArrayLike = 0.95,
    beta2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: Any = None,
    *,
    each: NamoUnits = "matrix",
    clamp: float = 0.75,
    nesterov: bool = True,
    bias_correction: bool = True,
    then: optax.GradientTransformation | None = None,
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    **options: Any,
) -> MatrixTransformation:
    """NAMO and NAMO-D (arXiv 2602.17080): Muon's direction times a factor of norms.

    Takes the place of `scale_by_muon`. With X the momentum mix that is orthogonalised and nu the
    moving average of the gradient's squared norm, the factor is |X| / (sqrt(nu) + eps), times
    Adam's bias correction sqrt(1 - beta2^t) / (1 - beta^t). NAMO-D has one for each input, clamped
    to stay near the mean of its matrix. As the size of gradients enters it, so does their clipping.

    The authors also multiply weight decay by the factor: `scale_by_namo(then=optax.chain(
    scale_by_shape(scale='match_rms_adamw'), optax.add_decayed_weights(0.1)))`. They clamp learning
    rate times factor (times scale) to 1, which isn't done here. Emerging-Optimizers scales and
    decays outside, without bias correction.

    Args:
      beta: as in `scale_by_momentum`.
      beta2: decay rate of the squared norms, in [0, 1).
      eps: keeps the divisor from zero.
      mu_dtype: as in `scale_by_momentum`.
      each: a factor for each 'matrix', NAMO, or for each 'input', NAMO-D.
      clamp: factors of inputs are kept between this times their mean, and their mean divided by it.
      nesterov: as in `scale_by_momentum`.
      bias_correction: of the factor; the momentum has none.
      then: the stages between the direction and its factor, as scale and decay.
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`.
      mu_shardings: as in `scale_by_muon`.
      **options: the other arguments of `scale_by_muon`; its momentum is 'ema'.

    Returns:
      A transformation with a `NamoState`. Where the momentum is zero, so are updates.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> tx = scale_by_namo(eps=0.0, ns_coeffs="tight")
      >>> gradient = jnp.diag(jnp.array([1.0, 100.0]))
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> bool(jnp.allclose(update, (1 - 0.95**2) / (1 - 0.95) * jnp.eye(2), atol=0.1))
      True
    """
    factor = Namo(beta2, eps, each, clamp, bias_correction)
    momentum = Momentum(beta, mu_dtype, nesterov, False, "ema")
    direction = scale_by_muon(
        beta=beta,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
        bias_correction=False,
        momentum="ema",
        weight_dimension_numbers=weight_dimension_numbers,
        param_shardings=param_shardings,
        mu_shardings=mu_shardings,
        **options,
    )
    stage = namo_stage(factor, momentum, direction.stage, then)
    return standalone(stage, weight_dimension_numbers, param_shardings, mu_shardings)


def namo_stage(
    factor: Namo,
    momentum: Momentum,
    direction: Stage,
    then: optax.GradientTransformation | None = None,
) -> Stage:
    """The stage of `scale_by_namo`.

    Args:
      factor: the factor of the direction.
      momentum: how the momentum mix is formed: 'ema', without bias correction.
      direction: the stage that forms and orthogonalises it.
      then: the stages between the direction and its factor.

    Returns:
      A stage in the place of the direction's.

    Raises:
      ValueError: for a momentum of another form, or with bias correction.
    """
    if momentum.form != "ema":
        raise ValueError(f"NAMO needs momentum='ema', got {momentum.form!r}")
    if momentum.bias_correction:
        raise ValueError(
            "NAMO corrects the bias in its factor, and would correct that of the momentum twice; "
            "give bias_correction=False"
        )
    last = as_stage(optax.identity() if then is None else then)
    namo = _Namo(factor, momentum, direction, last)
    return Stage(namo.init, namo.update)


@dataclasses.dataclass(frozen=True)
class _Namo:
    """A direction, the stages that follow it, and the factor that multiplies the result."""

    factor: Namo
    momentum: Momentum
    direction: Stage
    then: Stage

    def init(self, params: Any, leaves: Leaves) -> NamoState:
        arrays, treedef = jax.tree.flatten(params)
        rows = zip(leaves, arrays, strict=True)
        nu = treedef.unflatten([zero_sums(self.factor.sums(leaf), x) for leaf, x in rows])
        return NamoState(self.direction.init(params, leaves), nu, self.then.init(params, leaves))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Leaves, **extra_args: Any
    ) -> tuple[Any, NamoState]:
        check_state_type(state, NamoState)
        direction, muon = self.direction.update(updates, state.muon, params, leaves, **extra_args)
        direction, then = self.then.update(direction, state.then, params, leaves, **extra_args)
        asked, summed, old = self._summed(updates, state, params, muon.count, leaves)
        new = [
            moving_average(self.factor.beta2, nu, of_grad)
            for nu, (_, of_grad) in zip(old, summed, strict=True)
        ]
        of_mix = [squared for squared, _ in summed]
        spaces = [sums.result_leaf for sums in asked]
        found = self.factor.of(spaces, of_mix, new, muon.count, self.momentum.beta)
        factors = []
        for i, (leaf, sums) in enumerate(zip(leaves, asked, strict=True)):
            if isinstance(sums, WholeSums):
                found[i], new[i] = (sums.blocks_of(x, leaf) for x in (found[i], new[i]))
            factors.append(self.factor.sums(leaf).broadcast(found[i]))
        arrays, treedef = jax.tree.flatten(direction)
        results = [scaled(x, f) for x, f in zip(arrays, factors, strict=True)]
        nu = restored(new, updates, state.nu)
        return treedef.unflatten(results), NamoState(muon, nu, then)

    def _summed(
        self, updates: Any, old: NamoState, params: Any, count: jax.Array, leaves: Leaves
    ) -> tuple[list[MatrixSums | WholeSums], list[list[jax.Array]], list[jax.Array]]:
        """Per leaf: the reduction, its sums of squares of mix and gradient, the old averages."""
        mu = restructured_like(old.muon.mu, updates)
        like = updates if params is None else restructured_like(params, updates)
        ready = ExecutionOptions().prepare(updates, mu, like, leaves, None)
        shapes = [
            self.factor.sums(leaf).shape(x.shape)
            for leaf, x in zip(leaves, jax.tree.leaves(updates), strict=True)
        ]
        moments = moments_of(old.nu, updates, shapes)
        weights = self.momentum.weights(count).mix
        mine = [self.factor.sums(leaf) for leaf in ready.leaves]
        asked: list[MatrixSums | WholeSums] = [*mine]
        if self.factor.each == "input":
            asked = sums_across(mine, of_norms=True)
        entries = []
        rows = zip(jax.tree.leaves(ready.updates), jax.tree.leaves(mu), strict=True)
        for i, (grad, buffer) in enumerate(rows):
            if ready.moves[i] is not None:
                # Under ZeRO-1 sums are sharded like the momentum, the averages like parameters.
                moments[i] = place(moments[i], [mine[i].sharding])
                asked[i] = WholeSums(mine[i], tuple(range(len(leaves[i].shape))))
            entries.append([squares(combine(weights, buffer, grad)), squares(grad)])
        return asked, *sums_and_moments(asked, entries, moments)
