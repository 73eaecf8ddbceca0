"""Momentum: the buffer that is kept, and the mix of buffer and gradient that is orthogonalised."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax.checks import check_choice, check_decay, check_flag, check_float_dtype
from muon_optax.dtypes import wide_dtype
from muon_optax.leaf_kinds import is_float_leaf
from muon_optax.sharding.placement import is_abstract, is_on_host, to_device, to_host
from muon_optax.tree_paths import leaves_with_segments, path_name, present_leaves, raise_together

__all__ = [
    "Momentum",
    "MomentumForm",
    "MuonState",
    "Weights",
    "check_belongs",
    "combine",
    "is_moments",
    "map_moments",
    "moment_dtype",
    "zeros_like_parameter",
]

MomentumForm = Literal["ema", "sum"]


class MuonState(NamedTuple):
    """State of Muon.

    Attributes:
      count: number of updates so far, an int32 scalar.
      mu: the momentum, one buffer a leaf, in the parameter's layout.

    Example:
      >>> from muon_optax import scale_by_momentum
      >>> state = scale_by_momentum(mu_dtype="bfloat16").init({"w": jnp.ones((4, 8))})
      >>> int(state.count), state.mu["w"].dtype.name
      (0, 'bfloat16')
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Updates


class Weights(NamedTuple):
    """Scalars of one step, as (of the old buffer, of the gradient).

    Attributes:
      keep: what makes the new buffer.
      mix: what makes the direction.
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
      bias_correction: divide by what the zero start leaves out, as optax does.
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
        raise_together(bad, "momentum needs floating-point leaves:")
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
    raise_together(
        problems, "Muon's state doesn't belong to these updates (was a leaf's optimizer changed?):"
    )


def is_moments(x: Any) -> bool:
    """Whether `x` is a state of Muon's or AdamW's moments."""
    return isinstance(x, MuonState | optax.ScaleByAdamState)


def map_moments(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Maps a function over the trees of moments, `mu` and `nu`, in a state.

    Args:
      function: gets a tree of moments, and those at its place in the other states.
      state: the state of any chain of optax transformations.
      others: states of the same structure but for the trees of moments.

    Returns:
      The state with the function's results; all else is as in `state`.
    """

    def mapped(x: Any, *rest: Any) -> Any:
        names = [name for name in ("mu", "nu") if is_moments(x) and name in x._fields]
        new = {n: function(getattr(x, n), *(getattr(r, n) for r in rest)) for n in names}
        return x._replace(**new) if new else x

    return jax.tree.map(mapped, state, *others, is_leaf=is_moments)


def moment_dtype(wanted: Any, own: Any) -> jnp.dtype:
    """The dtype to keep a moment in: the wanted one, complex where the parameter's own is."""
    is_complex = jnp.issubdtype(own, jnp.complexfloating)
    dtype = wide_dtype(wanted, jnp.complex64) if is_complex else jnp.finfo(wanted).dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def zeros_like_parameter(param: Any, dtype: Any) -> Any:
    """Zeros sharded like the parameter, also under `jit` on a mesh without a context.

    In host memory too, where the parameter is offloaded; a shape struct where it is one.

    `jnp.zeros_like` forgets the sharding there; a result that depends on the parameter's value
    keeps it. NaN and infinity don't get through the `where`.
    """
    if is_abstract(param):
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)
    if isinstance(param, jax.Array):
        zeros = jnp.where(False, to_device(param), jnp.zeros((), param.dtype)).astype(dtype)
        return to_host(zeros) if is_on_host(param) else zeros
    return jnp.zeros(param.shape, dtype)
