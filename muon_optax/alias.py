"""`muon`: the whole optimizer, composed of optax's pieces and ours."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax.checks import check_choice, check_decay, check_flag, check_mask, check_number
from muon_optax.dispatch import dispatch
from muon_optax.momentum import MomentumForm
from muon_optax.partition import Partition, Views
from muon_optax.polar import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.scaling import Scale
from muon_optax.sharding.cost import DeviceModel
from muon_optax.sharding.distribute import StrategyRules
from muon_optax.sharding.local import Orthogonalizer
from muon_optax.sharding.options import ShardingOptions, Shardings
from muon_optax.sharding.placement import in_its_place
from muon_optax.transform import scale_by_muon, scale_by_shape
from muon_optax.wrappers import (
    chain_in_order,
    decayed_weights,
    in_float32,
    in_parameter_layout,
    widened,
)

__all__ = ["WeightDecayKind", "muon"]

WeightDecayKind = Literal["decoupled", "l2", "independent"]
ScalarOrSchedule = optax.ScalarOrSchedule


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: ScalarOrSchedule = 0.0,
    adam_weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_nesterov: bool | None = None,
    muon_weight_dimension_numbers: Views = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    bias_correction: bool = True,
    momentum: MomentumForm = "ema",
    weight_decay_kind: WeightDecayKind = "decoupled",
    scale: Scale | None = None,
    scale_factor: jax.typing.ArrayLike = 1.0,
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    ns_precision: PrecisionName | None = None,
    orthogonalizer: Orthogonalizer | None = None,
    partition: Partition = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Muon for the weight matrices, AdamW for the rest.

    Takes the place of `optax.contrib.muon`: the same arguments, and the same numbers on hidden
    matrices. Embeddings, heads, LoRA factors, depthwise kernels, biases and leaves without a matrix
    view get AdamW.

    Args:
      learning_rate: a number, an array or a schedule of the update count.
      ns_coeffs: Newton-Schulz coefficients: a schedule's name, one triple for each step, or a table
        of triples.
      ns_steps: number of Newton-Schulz steps; None is the schedule's own.
      beta: decay rate of Muon's momentum, in [0, 1).
      eps: AdamW's epsilon; Muon's normalisation is scale-invariant and needs none.
      weight_decay: decay of Muon's leaves, a number or a schedule.
      weight_decay_mask: a tree of bools (or a prefix of one), or a function that returns one: which
        of Muon's leaves decay.
      mu_dtype: dtype of the momentum, AdamW's first moment included; None is the parameter's.
      nesterov: Nesterov momentum, for both optimizers.
      adaptive: scale each matrix by its dual norm (arXiv 2409.20325).
      preconditioning: how a matrix is brought into range; None is the schedule's own.
      adam_b1: AdamW's decay rate of the first moment.
      adam_b2: AdamW's decay rate of the second moment.
      adam_eps_root: AdamW's epsilon under the root.
      adam_weight_decay: AdamW's weight decay, always decoupled.
      adam_weight_decay_mask: as `weight_decay_mask`, which of AdamW's leaves decay; one tree for
        the whole model serves both.
      adam_learning_rate: AdamW's learning rate; None is `learning_rate`.
      adam_nesterov: Nesterov momentum for AdamW; None is `nesterov`. PyTorch's systems pair Muon's
        with a plain AdamW.
      muon_weight_dimension_numbers: which axes make the matrices: a view (`MuonDimensionNumbers`,
        `MatrixView`), a tree of views (or a prefix of one) with None for AdamW, or a function of
        the parameters that returns one; a function that returns None sends all to AdamW. Views beat
        `partition`; a warning at `init` names the leaves of which it says otherwise.
      consistent_rms: scale by this times sqrt(max(fan-in, fan-out)); not with `scale`.
      bias_correction: False is the convention of torch, Keller Jordan, Dion and Megatron.
      momentum: 'ema', m = beta m + (1 - beta) g, or 'sum', m = beta m + g (Dion, Moonlight,
        XTuner).
      weight_decay_kind: 'decoupled' (learning rate times decay), 'l2' (added to the gradient) or
        'independent' (not times the learning rate); for Muon's leaves.
      scale: 'shape_scaling' (default), 'match_rms_adamw', 'spectral', 'unit_rms_norm' or 'none';
        see `scale_by_shape`.
      scale_factor: multiplies any scale.
      ns_method: 'standard', 'gram', or 'auto', the one with fewer operations.
      ns_dtype: dtype to orthogonalise in; None is the momentum's.
      ns_precision: precision of the products, as in `jax.lax.dot`. The default means TF32 for
        float32 on recent GPUs and bfloat16 inputs on TPUs.
      orthogonalizer: a function on (batch, m, n) used instead of Newton-Schulz.
      partition: ordered rules, or labels as `optax.partition` takes them; None is
        `default_rules()`.
      param_shardings: how the parameters are sharded: a tree (or a prefix of one) of NamedSharding,
        PartitionSpec or arrays, or a function of the parameters that returns one, called at `init`
        and at each trace of `update`. None reads Flax's metadata, if there is any. Needed on Auto
        meshes and inside a shard_map; on Explicit meshes it is in the arrays' types.
      mu_shardings: how Muon's momentum is sharded, if not like the parameter: as in ZeRO-1, or in
        host memory, with `memory_kind='pinned_host'`. A tree or a function, as above.
      strategy: how sharded matrices are brought together: 'auto', 'gather', 'all_to_all', 'gram'
        or 'local', or (pattern, strategy) pairs with patterns as in `Rule`.
      max_workspace_bytes: bound of one exchange's workspace on a device; None is the larger of
        256 MiB and six times the largest matrix.
      device: an accelerator's name or a `DeviceModel`, for the choice of strategies.

    Returns:
      A transformation whose state is optax's `PartitionState` with 'muon' and 'adam' (and 'frozen'
      where `partition` may say so). Updates keep the gradient's dtype and are formed in float32 at
      least.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that can't be what they
        were declared, listing all of them with their paths.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}}
      >>> tx = muon(0.02, weight_decay=0.01)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> kernel = updates["mlp"]["kernel"]
      >>> kernel.shape, round(float(jnp.linalg.norm(kernel, 2)), 4)
      ((4, 16), 0.0295)
    """
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    schedulable = {
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "adam_learning_rate": adam_learning_rate,
        "adam_weight_decay": adam_weight_decay,
    }
    for name, value in schedulable.items():
        check_number(name, value, schedule=True)
    for name, value in {"adam_b1": adam_b1, "adam_b2": adam_b2}.items():
        check_decay(name, value)
    for name, value in {"eps": eps, "adam_eps_root": adam_eps_root}.items():
        check_decay(name, value, below=math.inf)
    if adam_nesterov is not None:
        check_flag("adam_nesterov", adam_nesterov)
    check_mask("weight_decay_mask", weight_decay_mask)
    check_mask("adam_weight_decay_mask", adam_weight_decay_mask)
    check_choice("weight_decay_kind", weight_decay_kind, get_args(WeightDecayKind))

    def muon_half(views: Views, shardings: Shardings) -> optax.GradientTransformation:
        direction = scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=views,
            bias_correction=bias_correction,
            momentum=momentum,
            ns_method=ns_method,
            ns_dtype=ns_dtype,
            ns_precision=ns_precision,
            orthogonalizer=orthogonalizer,
            param_shardings=shardings.params,
            mu_shardings=shardings.momentum,
            strategy=strategy,
            max_workspace_bytes=max_workspace_bytes,
            device=device,
            update_dtype=jnp.float32,
        )
        shape = scale_by_shape(
            views,
            consistent_rms,
            scale=scale,
            scale_factor=scale_factor,
            param_shardings=shardings.params,
        )
        return _with_decay_and_rate(
            direction, shape, weight_decay, weight_decay_mask, weight_decay_kind, learning_rate
        )

    declared = ShardingOptions(param_shardings, mu_shardings)
    muon_half(None, Shardings())  # checks the options now; leaves are checked at init
    adam = _adamw(
        adam_learning_rate,
        adam_weight_decay,
        adam_weight_decay_mask,
        mu_dtype,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        nesterov=nesterov if adam_nesterov is None else adam_nesterov,
    )
    whole = dispatch(
        # Decay in the gradient needs it wide; else the momentum is formed of it as it comes.
        lambda views, shardings: in_float32(
            muon_half(views, shardings), takes_half=weight_decay_kind != "l2"
        ),
        in_float32(adam),
        muon_weight_dimension_numbers,
        partition,
        declared,
    )
    return in_its_place(whole)


def _with_decay_and_rate(
    direction: optax.GradientTransformation,
    shape: optax.GradientTransformation,
    weight_decay: ScalarOrSchedule,
    mask: Any,
    kind: WeightDecayKind,
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformation:
    """Chains the pieces, the direction first in every kind: its state has one place."""
    decay = decayed_weights(weight_decay, mask)
    rate = optax.scale_by_learning_rate(learning_rate)
    if kind == "l2":  # the gradient passes the decay first
        return chain_in_order((direction, shape, decay, rate), (2, 0, 1, 3))
    if kind == "independent":  # -(rate * direction + decay * weights): the sign comes last
        step = optax.scale_by_learning_rate(learning_rate, flip_sign=False)
        return optax.chain(direction, shape, step, decay, optax.scale(-1.0))
    return optax.chain(direction, shape, decay, rate)


def _adamw(
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule,
    mask: Any,
    mu_dtype: Any,
    **options: Any,
) -> optax.GradientTransformation:
    """Optax's AdamW, with moments in the parameters' layout, and complex where those are.

    It forms them in float32 at least: optax would multiply half-precision ones by decay rates of
    that dtype, and bfloat16 rounds 0.999 to 1.
    """

    def chain(dtype: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(mu_dtype=dtype, **options),
            decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    # Only init knows the dtype, which `in_float32` then keeps: optax would cast a complex moment.
    init = in_parameter_layout(chain(mu_dtype)).init

    def update(updates, state, params=None):
        return chain(None).update(updates, widened(state), params)

    return optax.GradientTransformation(init, update)
