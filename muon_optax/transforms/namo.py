"""NAMO: the orthogonalised momentum, sized by the momentum's norm beside the gradient's."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax.checks import check_choice, check_decay, check_flag
from muon_optax.dtypes import wide_dtype
from muon_optax.momentum import Momentum, MuonState, combine
from muon_optax.partition import Views
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.placement import place
from muon_optax.transform import scale_by_muon
from muon_optax.transforms.binding import bind_leaves
from muon_optax.transforms.matrix_sums import MatrixSums, Role, quotient, squares
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage, as_stage
from muon_optax.transforms.standalone import (
    check_state_type,
    moments_of,
    moving_average,
    restored,
    standalone,
    zero_sums,
)
from muon_optax.tree_paths import graft

__all__ = ["NamoState", "NamoUnits", "scale_by_namo"]

NamoUnits = Literal["matrix", "input"]
_SUMMED: dict[str, tuple[Role, ...]] = {"matrix": ("reduction", "output"), "input": ("output",)}


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
      then: what is done to the direction before it is multiplied, as scale and decay.
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
    check_decay("beta2", beta2)
    check_decay("eps", eps, below=math.inf)
    check_choice("each", each, get_args(NamoUnits))
    if not 0 < clamp <= 1:
        raise ValueError(f"clamp must be in (0, 1], got {clamp!r}")
    check_flag("bias_correction", bias_correction)
    momentum = Momentum(beta, mu_dtype, nesterov, False, "ema")
    direction = scale_by_muon(
        beta=beta,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
        bias_correction=False,
        weight_dimension_numbers=weight_dimension_numbers,
        param_shardings=param_shardings,
        mu_shardings=mu_shardings,
        **options,
    )
    last = as_stage(optax.identity() if then is None else then)
    factor = _Factor(momentum, beta2, eps, each, clamp, bias_correction)
    namo = _Namo(factor, as_stage(direction), last, mu_shardings)
    return standalone(Stage(namo.init, namo.update), weight_dimension_numbers, param_shardings)


@dataclasses.dataclass(frozen=True)
class _Factor:
    """What NAMO multiplies by.

    Attributes:
      momentum: how the mix is formed of momentum and gradient.
      beta2, eps, each, clamp, bias_correction: as in `scale_by_namo`.
    """

    momentum: Momentum
    beta2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    each: NamoUnits
    clamp: float
    bias_correction: bool

    def sums(self, leaf: BoundLeaf) -> MatrixSums:
        """What sums over all that has one factor."""
        return MatrixSums(leaf, _SUMMED[self.each])

    def of(self, leaf: BoundLeaf, of_mix: jax.Array, nu: jax.Array, count: jax.Array) -> jax.Array:
        """The factor of a leaf, of the mix's sums of squares and the new moving average."""
        factor = quotient(jnp.sqrt(of_mix), jnp.sqrt(nu) + jnp.asarray(self.eps, nu.dtype))
        if self.each == "input":
            inputs = MatrixSums(leaf, ("reduction",))
            mean = inputs.spread(inputs.of(factor) / inputs.counts.astype(nu.dtype))
            factor = jnp.clip(factor, self.clamp * mean, mean / self.clamp)
        if self.bias_correction:
            t = count.astype(nu.dtype)
            one_less, one_less2 = (
                1 - jnp.asarray(x, nu.dtype) ** t for x in (self.momentum.beta, self.beta2)
            )
            factor = factor * (jnp.sqrt(one_less2) / (one_less + 1e-12))
        return self.sums(leaf).spread(factor)


@dataclasses.dataclass(frozen=True)
class _Namo:
    """A direction, what follows it, and the factor that multiplies both."""

    factor: _Factor
    direction: Stage
    then: Stage
    mu_shardings: Any

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
        of_mix, of_grads = self._sums_of_squares(updates, state.muon, muon.count, leaves)
        old = moments_of(state.nu, updates, [x.shape for x in of_grads])
        pairs = zip(old, of_grads, strict=True)
        new = [moving_average(self.factor.beta2, nu, x) for nu, x in pairs]
        rows = zip(leaves, of_mix, new, strict=True)
        factors = [self.factor.of(*row, muon.count) for row in rows]
        arrays, treedef = jax.tree.flatten(direction)
        results = [
            (x.astype(wide_dtype(x.dtype)) * f).astype(x.dtype)
            for x, f in zip(arrays, factors, strict=True)
        ]
        nu = restored(new, updates, state.nu)
        return treedef.unflatten(results), NamoState(muon, nu, then)

    def _sums_of_squares(
        self, updates: Any, old: MuonState, count: jax.Array, leaves: Leaves
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Those of the mix that is orthogonalised, and of the gradient."""
        grads, of_momentum = place(updates, self.mu_shardings), leaves
        if self.mu_shardings is not None:
            views = jax.tree.structure(updates).unflatten([leaf.view for leaf in leaves])
            of_momentum = bind_leaves(grads, views, self.mu_shardings)
        weights = self.factor.momentum.weights(count).mix
        of_mix, of_grads = [], []
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(graft(old.mu, updates)), strict=True)
        for leaf, (grad, mu) in zip(of_momentum, pairs, strict=True):
            sums = self.factor.sums(leaf)
            of_mix.append(sums.of(squares(combine(weights, mu, grad))))
            of_grads.append(sums.of(squares(grad)))
        if self.mu_shardings is None:
            return of_mix, of_grads
        dims = [self.factor.sums(leaf).dims for leaf in leaves]
        ends = [x.layout.without(x.layout.axes_of(d)) for x, d in zip(leaves, dims, strict=True)]
        return place(of_mix, ends), place(of_grads, ends)
