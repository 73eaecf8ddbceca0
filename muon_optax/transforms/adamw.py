"""The step of AdamW's leaves: optax's AdamW, in float32 at least, sharded like the parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import check_decay, check_float_dtype, check_mask, check_number
from muon_optax.transforms.moments import moment_dtype, zeros_like_parameter
from muon_optax.transforms.stage import as_stage, bound_transformation, in_order
from muon_optax.transforms.weight_decay import decayed_weights
from muon_optax.transforms.wrappers import in_float32, widened

__all__ = ["adamw_step"]


def adamw_step(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None,
    mu_dtype: Any,
    *,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    eps_root: jax.typing.ArrayLike,
    nesterov: bool,
) -> optax.GradientTransformation:
    """Optax's AdamW, with moments sharded like the parameters, and complex where those are.

    It forms them in float32 at least: optax would multiply half-precision ones by decay rates of
    that dtype, and bfloat16 rounds 0.999 to 1.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: a number or a schedule.
      weight_decay_mask: which leaves decay, as optax takes it.
      mu_dtype: dtype of the first moment; None is the parameter's.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the root of the second moment.
      eps_root: added under the root.
      nesterov: whether the first moment is mixed with the gradient once more.

    Returns:
      The transformation; its state is a tuple, as that of `optax.chain`, moments first.

    Raises:
      ValueError, TypeError: for options out of range, under the names that `muon` gives them.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = adamw_step(0.1, 0, None, None, b1=0.9, b2=0.99, eps=0, eps_root=0, nesterov=False)
      >>> print(tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0].round(3))
      [-0.1 -0.1]
    """
    check_number("adam_learning_rate", learning_rate, schedule=True)
    check_number("adam_weight_decay", weight_decay, schedule=True)
    check_mask("adam_weight_decay_mask", weight_decay_mask)
    check_float_dtype("mu_dtype", mu_dtype)
    for name, value in {"adam_b1": b1, "adam_b2": b2}.items():
        check_decay(name, value)
    for name, value in {"eps": eps, "adam_eps_root": eps_root}.items():
        check_decay(name, value, below=math.inf)
    options = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "nesterov": nesterov}

    stages = {
        "moments": as_stage(_scale_by_adam(mu_dtype, options)),
        "weight_decay": as_stage(decayed_weights(weight_decay, weight_decay_mask)),
        "learning_rate": as_stage(optax.scale_by_learning_rate(learning_rate)),
    }
    chain = bound_transformation(in_order(stages, tuple(stages)), [])

    def update_wide(updates, state, params=None):
        # optax raises a Python float to an int32 count, which strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, widened(state), params)

    return in_float32(optax.GradientTransformation(chain.init, update_wide))


def _scale_by_adam(mu_dtype: Any, options: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` of each leaf by itself, with moments sharded like the parameters.

    Adam's update of a leaf is some twenty operations, and a model has hundreds of biases and norms
    of a few shapes. JAX traces the function of an inner `jax.jit` once for each kind of argument
    and then only refers to it, so a tree of 500 biases takes a fifth of the time to trace, and its
    program is shorter to lower. XLA inlines the calls before it fuses, so the same program runs.

    The state is optax's `ScaleByAdamState`, but not by optax's `init`: its `zeros_like` loses the
    sharding under `jit`, where it raises on Explicit meshes without a context and puts all on
    device 0 on Auto ones. Moments of complex parameters are complex, and those of real ones real,
    whatever `mu_dtype` is.
    """
    adam = optax.scale_by_adam(**options)

    @jax.jit
    def update_leaf(grad, mu, nu, count):
        update, new = adam.update(grad, optax.ScaleByAdamState(count, mu, nu))
        _, mu, nu = jax.tree.leaves(new)
        return update, mu, nu

    def init(params):
        def zeros(dtype):
            return jax.tree.map(
                lambda p: zeros_like_parameter(p, moment_dtype(dtype or p.dtype, p.dtype)), params
            )

        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(mu_dtype), zeros(None))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if not isinstance(state.count, Tracer):  # JAX keeps the program of each operation then
            return adam.update(updates, state, params)
        grads, treedef = jax.tree.flatten(updates)
        moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu), strict=True)
        rows = [
            update_leaf(g, *of_leaf, state.count) for g, of_leaf in zip(grads, moments, strict=True)
        ]
        new, mu, nu = (treedef.unflatten([row[i] for row in rows]) for i in range(3))
        count = optax.safe_increment(state.count)
        return new, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
