"""`muon`: the whole optimizer, composed of optax's pieces and ours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import (
    check_choice,
    check_flag,
    check_instance,
    check_mask,
    check_number,
)
from muon_optax.config import MuonConfig
from muon_optax.orthogonalization import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.partition import Partition, Views
from muon_optax.partition.dispatch import dispatch
from muon_optax.sharding.execution import ExecutionOptions, StrategyRules
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import keeping_placement
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.runtime.orthogonalizer import OrthogonalizeFunction, make_orthogonalizer
from muon_optax.transforms.adamw import adamw_step
from muon_optax.transforms.block_periodic import BlockPeriodic
from muon_optax.transforms.dion2_slices import Dion2
from muon_optax.transforms.direction import Direction
from muon_optax.transforms.momentum import Momentum, MomentumForm
from muon_optax.transforms.namo import Namo, namo_stage
from muon_optax.transforms.shape_scale import Scale, resolve_scaling, shape_scale_stage
from muon_optax.transforms.stage import (
    Stage,
    as_stage,
    in_order,
    slot_stage,
    stage_in_float32,
)
from muon_optax.transforms.weight_decay import (
    add_cautious_weight_decay,
    decayed_weights,
    may_decay,
)
from muon_optax.transforms.wrappers import with_params_like_updates

__all__ = ["WeightDecayKind", "muon"]

WeightDecayKind = Literal["decoupled", "l2", "independent", "cautious"]
Slot = optax.GradientTransformation | Sequence[optax.GradientTransformation] | None
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
    orthogonalizer: OrthogonalizeFunction | None = None,
    partition: Partition = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    shard_moments_over: str | Sequence[str] | None = None,
    sign: bool = False,
    namo: Namo | None = None,
    block_periodic: BlockPeriodic | None = None,
    dion2: Dion2 | None = None,
    after_orthogonalization: Slot = None,
    step: optax.GradientTransformation | None = None,
    last: Slot = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Muon for the weight matrices, AdamW for the rest.

    Takes the place of `optax.contrib.muon`: the same arguments, and the same numbers on hidden
    matrices. Embeddings, heads, norms, LoRA factors, depthwise kernels, biases and leaves of three
    dims or more without a matrix view get AdamW, as names and shapes of the whole tree tell.

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
        `partition`; a warning at `init` names the leaves of which it says otherwise. MaxText's
        views may carry shardings, which count where `param_shardings` isn't given.
      consistent_rms: scale by this times sqrt(max(fan-in, fan-out)); not with `scale`.
      bias_correction: False is the convention of torch, Keller Jordan, Dion and Megatron.
      momentum: 'ema', m = beta m + (1 - beta) g, or 'sum', m = beta m + g (Dion, Moonlight,
        XTuner).
      weight_decay_kind: 'decoupled' (learning rate times decay), 'l2' (added to the gradient) or
        'independent' (not times the learning rate), or 'cautious' (decoupled, of the entries whose
        step is towards zero anyway, as in `add_cautious_weight_decay`); for Muon's leaves.
      scale: 'shape_scaling' (default), 'match_rms_adamw', 'spectral', 'unit_rms_norm' or 'none';
        see `scale_by_shape`.
      scale_factor: multiplies any scale.
      ns_method: 'standard', 'gram', or 'auto': as in `newton_schulz`.
      ns_dtype: dtype to orthogonalise in; None is the momentum's.
      ns_precision: precision of the matmuls, as in `jax.lax.dot`. The default means TF32 for
        float32 on recent GPUs and bfloat16 inputs on TPUs.
      orthogonalizer: a function on (batch, m, n) used instead of Newton-Schulz; not with the
        strategy 'gram'.
      partition: ordered rules, or labels as `optax.partition` takes them; None is
        `default_rules()`.
      param_shardings: how the parameters are sharded: a tree (or a prefix of one) of NamedSharding,
        PartitionSpec or arrays, or a function of the parameters that returns one, called at `init`
        and at each trace of `update`. None reads Flax's metadata, if there is any. Needed on Auto
        meshes and inside a shard_map; on Explicit meshes it is in the arrays' types.
      mu_shardings: how Muon's momentum is sharded, if not like the parameter: as in ZeRO-1, or in
        host memory, with `memory_kind='pinned_host'`. A tree or a function, as above.
      shard_moments_over: mesh axes to shard all moments over, AdamW's too, beyond how parameters
        are sharded: ZeRO-1, where these axes are those of data-parallel replicas. None is the axes
        that a parameter's type is reduced over, along which its gradient is summed; () is none.
        Each axis goes to the first dim that it divides; `mu_shardings` comes first.
      sign: orthogonalise the signs of the momentum mix, as AdaMuon does.
      namo: multiply each orthogonalised matrix by NAMO's factor, as in `scale_by_namo`; needs
        `bias_correction=False`.
      block_periodic: orthogonalise blocks of matrices in most steps and whole matrices in every
        few, as MuonBP does: `BlockPeriodic((4, 1), period=5)`.
      dion2: orthogonalise the largest rows or columns of the momentum alone, as in
        `scale_by_dion2`: `Dion2(0.25)`; `beta` is then their factor in the momentum. Needs
        `momentum="sum"`, `nesterov=False` and `bias_correction=False`.
      after_orthogonalization: a transformation of Muon's orthogonalised matrices, before they are
        scaled by shape, or a sequence of several: pieces of this package, which then need no
        arguments of their own for views and shardings, such as `scale_by_neuron()`, or any of
        optax.
      step: a transformation of scaled matrices to Muon's updates, in place of weight decay and
        `learning_rate`, which is AdamW's alone then: `hyperball(0.01)`.
      last: a transformation of Muon's updates, after all else, or a sequence of several.
      strategy: how sharded matrices are brought together: 'auto', 'gather', 'all_to_all', 'gram'
        or 'local', or (pattern, strategy) pairs with patterns as in `Rule`.
      max_workspace_bytes: bound of one round's workspace on a device; None is the larger of
        256 MiB and six times the largest matrix.
      device: an accelerator's name or a `DeviceModel`, for the choice of strategies.

    Returns:
      A transformation whose state is optax's `PartitionState` with 'muon' and 'adam' (and 'frozen'
      where `partition` may say so). Updates keep the gradient's dtype and are formed in float32 at
      least.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that don't fit their
        declaration, listing all of them with their paths.

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
    check_number("learning_rate", learning_rate, schedule=True)
    check_number("weight_decay", weight_decay, schedule=True)
    check_mask("weight_decay_mask", weight_decay_mask)
    check_flag("sign", sign)
    check_choice("weight_decay_kind", weight_decay_kind, get_args(WeightDecayKind))
    check_instance("namo", namo, Namo)
    check_instance("step", step, optax.GradientTransformation)
    if adam_nesterov is not None:
        check_flag("adam_nesterov", adam_nesterov)

    of_adam = adamw_step(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_weight_decay,
        adam_weight_decay_mask,
        mu_dtype,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        nesterov=nesterov if adam_nesterov is None else adam_nesterov,
    )
    scaling = resolve_scaling(scale, scale_factor, consistent_rms)
    config = MuonConfig(
        Direction(
            Momentum(beta, mu_dtype, nesterov, bias_correction, momentum),
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
            update_dtype=jnp.float32,
            sign=sign,
            block_periodic=block_periodic,
            scaling=scaling,
            dion2=dion2,
        ),
        scaling,
        ShardingOptions(param_shardings, mu_shardings, shard_moments_over),
        muon_weight_dimension_numbers,
        partition,
    )
    kind = weight_decay_kind
    if step is not None:
        _check_no_decay(weight_decay)
        kind = "decoupled"  # the step flips signs, whatever the kind
    rate = optax.scale_by_learning_rate(learning_rate, flip_sign=kind != "independent")
    stages = {
        "momentum": _direction_stage(config.direction, namo),
        "shape_scale": shape_scale_stage(config.scaling),
        "weight_decay": _decay_stage(weight_decay, weight_decay_mask, kind),
        "learning_rate": as_stage(rate if step is None else step),
        "sign": as_stage(optax.scale(-1.0)),
        "after_orthogonalization": slot_stage("after_orthogonalization", after_orthogonalization),
        "last": slot_stage("last", last),
    }
    of_muon = _muon_step(stages, kind)
    return keeping_placement(dispatch(of_muon, of_adam, config))


# The order in which updates pass the stages of Muon's step, for each kind of weight decay. A slot
# that nothing is given for is left out.
_ORDERS: dict[WeightDecayKind, tuple[str, ...]] = {
    # w - rate (direction + decay w)
    "decoupled": (
        "momentum",
        "after_orthogonalization",
        "shape_scale",
        "weight_decay",
        "learning_rate",
        "last",
    ),
    # The gradient passes the decay first, and so it enters the momentum.
    "l2": (
        "weight_decay",
        "momentum",
        "after_orthogonalization",
        "shape_scale",
        "learning_rate",
        "last",
    ),
    # w - rate direction - decay w: the sign flips last.
    "independent": (
        "momentum",
        "after_orthogonalization",
        "shape_scale",
        "learning_rate",
        "weight_decay",
        "sign",
        "last",
    ),
}
_ORDERS["cautious"] = _ORDERS["decoupled"]


def _muon_step(stages: Mapping[str, Stage | None], kind: WeightDecayKind) -> Stage:
    """The stages of Muon's leaves, in the order of the kind of weight decay."""
    # States are in the order of `stages`: first those that optax's Muon has, so that code which
    # takes them by their places finds them there.
    order = [name for name in _ORDERS[kind] if stages[name] is not None]
    found = {name: stage for name, stage in stages.items() if stage is not None and name in order}
    # Decay in the gradient needs it wide; else the momentum is formed of it as it comes.
    return stage_in_float32(in_order(found, order), takes_half=kind != "l2")


def _direction_stage(direction: Direction, namo: Namo | None) -> Stage:
    """Momentum and orthogonalisation, multiplied by NAMO's factor if there is one."""
    if namo is None:
        return direction.stage
    if direction.dion2 is not None:
        raise ValueError("namo needs the norm of the orthogonalised momentum: leave out dion2")
    return namo_stage(namo, direction.momentum, direction.stage)


def _decay_stage(weight_decay: ScalarOrSchedule, mask: Any, kind: WeightDecayKind) -> Stage:
    decayed = add_cautious_weight_decay if kind == "cautious" else decayed_weights
    decay = decayed(weight_decay, mask)
    if kind == "l2":  # of gradients, which may be where the momentum is
        decay = with_params_like_updates(decay)
    return as_stage(decay)


def _check_no_decay(weight_decay: ScalarOrSchedule) -> None:
    """Raises for weight decay beside a step that leaves no place for it."""
    if callable(weight_decay) or (may_decay(weight_decay) and not isinstance(weight_decay, Tracer)):
        raise ValueError(
            "step takes the place of Muon's weight decay and learning rate; leave out "
            f"weight_decay={weight_decay!r}"
        )
