"""Momentum: the buffer that is kept, and the mix of buffer and gradient that is orthogonalised."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice, check_decay, check_flag, check_float_dtype
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import (
    cast_like,
    leaves_with_segments,
    path_name,
    present_leaves,
    raise_all,
    restructured_like,
)
from muon_optax.sharding.placement import keeping_placement
from muon_optax.transforms.moments import moment_dtype, zeros_like_parameter
from muon_optax.transforms.momentum_state import MuonState
from muon_optax.transforms.wrappers import passing_over, summing

__all__ = [
    "Momentum",
    "MomentumForm",
    "Weights",
    "check_belongs",
    "combine",
    "scale_by_momentum",
]

MomentumForm = Literal["ema", "sum"]


class Weights(NamedTuple):
    """Scalars of one step, as (of the old buffer, of the gradient).

    Attributes:
      keep: weights of the sum that is the new buffer.
      mix: weights of the sum that is the direction.
    """

    keep: tuple[jax.Array, jax.Array]
    mix: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Momentum:
    """One convention of momentum.

    Attributes:
      beta: decay rate, in [0, 1).
      dtype: dtype of the buffer; None is the parameter's. Complex parameters keep a complex buffer.
      nesterov: look one step ahead.
      bias_correction: divide by 1 - beta^t, since the buffer starts from zero, as optax does.
      form: 'ema', m = beta m + (1 - beta) g, or 'sum', m = beta m + g.
    """

    beta: jax.typing.ArrayLike
    dtype: Any
    nesterov: bool
    bias_correction: bool
    form: MomentumForm

    def __post_init__(self) -> None:
        check_decay("beta", self.beta)
        check_float_dtype("mu_dtype", self.dtype)
        check_flag("nesterov", self.nesterov)
        check_flag("bias_correction", self.bias_correction)
        check_choice("momentum", self.form, get_args(MomentumForm))

    def init_state(self, params: optax.Params) -> MuonState:
        """The state before the first update, abstract where the parameters are.

        Raises:
          ValueError: listing the leaves that aren't floating point.
        """
        bad = [
            f"{path_name(path)}: got dtype {leaf.dtype}"
            for path, leaf in leaves_with_segments(params)
            if not is_float_leaf(leaf)
        ]
        raise_all(bad, "momentum needs floating-point leaves:")
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(self.init, params))

    def init(self, param: Any) -> Any:
        """A zero buffer, sharded like the parameter; a shape struct where the parameter is one."""
        dtype = param.dtype if self.dtype is None else self.dtype
        return zeros_like_parameter(param, moment_dtype(dtype, param.dtype))

    def weights(self, count: jax.Array) -> Weights:
        """The scalars of step `count` (1 at the first update).

        The bias-corrected Nesterov mix divides the new buffer by 1 - beta^(t+1), as optax and
        Keras' Nadam do.
        """
        dtype = jnp.result_type(float)
        beta, t = jnp.asarray(self.beta, dtype), count.astype(dtype)
        one = jnp.ones_like(beta)
        gain = 1 - beta if self.form == "ema" else one
        of_new, of_grad = (beta, gain) if self.nesterov else (one, 0 * one)
        new_sum = grad_sum = one
        if self.bias_correction:
            new_sum, grad_sum = 1 - beta ** (t + 1 if self.nesterov else t), 1 - beta**t
            if self.form == "sum":
                of_new, of_grad = (1 - beta) * of_new, (1 - beta) * of_grad
        # Quotients come last: XLA computes one once, but a product again in each leaf's kernel.
        mix_grad = (of_new * gain * grad_sum + of_grad * new_sum) / (new_sum * grad_sum)
        return Weights((beta, gain), (of_new * beta / new_sum, mix_grad))


def combine(weights: tuple[jax.Array, jax.Array], buffer: jax.Array, grad: jax.Array) -> jax.Array:
    """The sum of buffer and gradient with their weights, in at least float32."""
    dtype = wide_dtype(grad.dtype, buffer.dtype)
    of_buffer, of_grad = (w.astype(dtype) for w in weights)
    return of_buffer * buffer.astype(dtype) + of_grad * grad.astype(dtype)


def check_belongs(state: Any, updates: optax.Updates) -> None:
    """Raises for a state that isn't of these updates, as after a leaf changed its optimizer.

    Raises:
      TypeError: for another transformation's state.
      ValueError: listing the leaves that only one has, or that have another shape.
    """
    if not isinstance(state, MuonState):
        raise TypeError(
            f"the state must be a MuonState of muon_optax, got {type(state).__name__}; make one "
            "with init, or convert optax's with muon_optax.interop.from_optax(state, params)"
        )
    have, want = (present_leaves(tree, updates) for tree in (state.mu, updates))
    problems = [f"{path_name(p)}: in the state only" for p in have if p not in want]
    problems += [f"{path_name(p)}: in the updates only" for p in want if p not in have]
    problems += [
        f"{path_name(p)}: momentum {have[p].shape}, update {want[p].shape}"
        for p in want
        if p in have and have[p].shape != want[p].shape
    ]
    raise_all(
        problems, "Muon's state doesn't belong to these updates (was a leaf's optimizer changed?):"
    )


def scale_by_momentum(
    beta: jax.typing.ArrayLike = 0.95,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    bias_correction: bool = True,
    momentum: MomentumForm = "ema",
) -> optax.GradientTransformation:
    """Replaces updates by their momentum mix, which Muon orthogonalises.

    Args:
      beta: decay rate, in [0, 1).
      mu_dtype: dtype of the buffer; None keeps the parameter's.
      nesterov: mix the next step's momentum in.
      bias_correction: divide by 1 - beta^t (by 1 - beta^(t+1) for the buffer under Nesterov), as
        optax does; False is the convention of torch, Keller Jordan, Dion and Megatron.
      momentum: 'ema', m = beta m + (1 - beta) g, or 'sum', m = beta m + g.

    Returns:
      A transformation with a `MuonState`. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for options out of range.

    Example:
      >>> tx = scale_by_momentum(0.5, nesterov=False, bias_correction=False)
      >>> updates, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))
      >>> updates.tolist()
      [0.5, 0.5]
    """
    buffer = Momentum(beta, mu_dtype, nesterov, bias_correction, momentum)

    def update(updates, state, params=None):
        del params
        check_belongs(state, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        weights = buffer.weights(count)
        mu = restructured_like(state.mu, updates)
        new = jax.tree.map(functools.partial(combine, weights.keep), mu, updates)
        mixed = jax.tree.map(functools.partial(combine, weights.mix), mu, updates)
        return cast_like(mixed, updates), MuonState(count, cast_like(new, state.mu))

    whole = passing_over(optax.GradientTransformation(buffer.init_state, update))
    return keeping_placement(summing(whole))
