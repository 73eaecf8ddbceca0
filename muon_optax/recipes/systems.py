"""Recipes of other systems' Muon, AdamW and choice of leaves."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from muon_optax.alias import muon
from muon_optax.partition import Rule
from muon_optax.partition.systems import (
    Blocks,
    fused_rules,
    is_vector_in_disguise,
    named_like,
    with_default_rules,
)
from muon_optax.views.matrix_view import MatrixView

__all__ = [
    "areal",
    "dion",
    "keller_jordan",
    "llama_factory",
    "megatron",
    "moonlight",
    "optax_muon",
    "torch_muon",
    "transformer_engine",
    "xtuner",
]

ScalarOrSchedule = optax.ScalarOrSchedule
Transformation = optax.GradientTransformationExtraArgs

_HALF: dict[str, Any] = {"ns_dtype": jnp.bfloat16, "bias_correction": False}
_SYSTEMS: dict[str, dict[str, Any]] = {
    "torch": _HALF | {"adam_weight_decay": 0.01},
    "keller_jordan": _HALF | {"adam_learning_rate": 3e-4, "adam_b2": 0.95, "eps": 1e-10},
    "moonlight": _HALF | {"momentum": "sum", "scale": "match_rms_adamw", "adam_b2": 0.95},
    "xtuner": _HALF
    | {"momentum": "sum", "ns_coeffs": "dion", "scale": "match_rms_adamw", "adam_b2": 0.95},
    "areal": _HALF | {"scale": "spectral", "adam_b2": 0.95, "eps": 1e-10},
    "megatron": _HALF | {"ns_coeffs": "dion", "scale": "spectral", "nesterov": False},
    "transformer_engine": {"bias_correction": False, "ns_coeffs": "dion", "scale": "spectral"},
    "dion": _HALF
    | {
        "momentum": "sum",
        "ns_coeffs": "modded_nanogpt",
        "scale": "unit_rms_norm",
        "nesterov": False,
        "adam_b2": 0.95,
    },
}
# The leaves of XTuner's experts, of which a model has one kind at least.
_EXPERTS = re.compile(r"(?is)(?:.*[/.])?fused_w(?:1w3|2)(?:[/.].*)?")


def torch_muon(
    learning_rate: ScalarOrSchedule = 1e-3, *, weight_decay: ScalarOrSchedule = 0.1, **options: Any
) -> Transformation:
    """`torch.optim.Muon`, torch 2.9 and later, beside `torch.optim.AdamW`.

    m <- beta m + (1 - beta) g with beta 0.95; (1 - beta) g + beta m goes through jordan x 5 in
    bfloat16; scale sqrt(max(1, out / in)), which torch calls 'original'
    (`scale="match_rms_adamw"` is its other one); p <- p (1 - lr wd), not scaled. torch takes 2-D
    parameters and leaves it to the caller to keep embeddings and heads out; here `default_rules()`
    do, and AdamW has torch's defaults but for the learning rate, which is the same.

    torch <= 2.13 normalises in place, so with `nesterov=False` and bfloat16 gradients it writes the
    normalised matrix into its momentum. This doesn't.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> tx = torch_muon(0.02, adam_learning_rate=3e-4)
      >>> state = tx.init({"up": jnp.ones((4, 8)), "lm_head": jnp.ones((8, 4))})
      >>> state.inner_states["muon"].inner_state[0].mu["up"].shape
      (4, 8)
    """
    return _recipe("torch", learning_rate, weight_decay, options)


def keller_jordan(
    learning_rate: ScalarOrSchedule = 0.02, *, weight_decay: ScalarOrSchedule = 0.0, **options: Any
) -> Transformation:
    """Keller Jordan's Muon, github.com/KellerJordan/Muon: `MuonWithAuxAdam`.

    EMA momentum of 0.95 with Nesterov, jordan x 5 in bfloat16, sqrt(max(1, out / in)), decoupled
    weight decay; AdamW at 3e-4 with betas (0.9, 0.95) and epsilon 1e-10 for all but the hidden
    matrices, without decay. Convolutions are flattened to matrices: declare them with
    `muon_weight_dimension_numbers=flax_matrix_views(params)`. The source reads their scale from
    kernel height and width; this reads it from the flattened matrix.

    Args:
      learning_rate: a number or a schedule; AdamW has its own, `adam_learning_rate`.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> tx = keller_jordan(optax.linear_schedule(0.02, 0.0, 1000))
      >>> tx.init(jnp.eye(2)).inner_states["muon"].inner_state[0].mu.shape
      (2, 2)
    """
    return _recipe("keller_jordan", learning_rate, weight_decay, options)


def moonlight(
    learning_rate: ScalarOrSchedule = 1e-3, *, weight_decay: ScalarOrSchedule = 0.1, **options: Any
) -> Transformation:
    """Moonlight's Muon, github.com/MoonshotAI/Moonlight, examples/toy_train.py.

    M <- mu M + g with mu 0.95; g + mu M goes through jordan x 5 in bfloat16; scale 0.2
    sqrt(max(in, out)), so that AdamW's learning rates fit; decoupled weight decay. The caller
    splits, here `default_rules()`; the rest gets AdamW with betas (0.9, 0.95) and the same learning
    rate and decay.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      **options: any argument of `muon`.

    Example:
      >>> tx = moonlight(2e-3, beta=0.9)
      >>> tx.init(jnp.eye(2)).inner_states["muon"].inner_state[0].mu.shape
      (2, 2)
    """
    return _recipe("moonlight", learning_rate, weight_decay, options, decays_all=True)


def llama_factory(
    learning_rate: ScalarOrSchedule = 1e-3, *, weight_decay: ScalarOrSchedule = 0.1, **options: Any
) -> Transformation:
    """LLaMA-Factory v1's Muon, src/llamafactory/v1/plugins/trainer_plugins/optimizers.

    `moonlight`, with its own choice of leaves: Muon gets leaves of two dims with none of embed,
    lm_head, wte, wpe and lora anywhere in its path, as parts of names too, ignoring case.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      **options: any argument of `muon`.

    Example:
      >>> state = llama_factory().init({"reembedded": jnp.ones((4, 8)), "up": jnp.ones((4, 8))})
      >>> state.inner_states["adam"].inner_state[0].mu["reembedded"].shape
      (4, 8)
    """
    who = (named_like("embed", "lm_head", "wte", "wpe", "lora"),)
    return _recipe("moonlight", learning_rate, weight_decay, options, who, decays_all=True)


def xtuner(
    learning_rate: ScalarOrSchedule = 1e-5,
    *,
    weight_decay: ScalarOrSchedule = 0.1,
    num_experts: int | None = None,
    split_sizes: Mapping[str, Blocks] | None = None,
    **options: Any,
) -> Transformation:
    """XTuner's Muon, xtuner/v1/optim/muon.py as its `MuonConfig` builds it.

    Sum momentum of 0.95 with Nesterov, dion x 5 in bfloat16, 0.2 sqrt(max(in, out)) ('rms_norm'
    there), decoupled weight decay; AdamW with betas (0.9, 0.95) and the same learning rate and
    decay. Muon gets leaves of two dims above one with neither embed_tokens nor lm_head in the path,
    as parts of names too, ignoring case. Leaves of three or more dims need a matrix view.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      num_experts: how many experts are side by side along the output axis of the leaves with
        fused_w1w3 (two matrices an expert) and fused_w2 (one) in their path.
      split_sizes: for leaves whose path matches a pattern as in `Rule`, the sizes of the blocks
        along the output axis, or the number of equal ones. Sizes that don't sum to the axis are an
        error, unlike in the source.
      **options: any argument of `muon`.

    Raises:
      ValueError: at `init`, for a pattern that matches no leaf, or blocks that don't fill the axis.

    Example:
      >>> tx = xtuner(num_experts=2, split_sizes={"qkv": (8, 2, 2)})
      >>> params = {"experts": {"fused_w1w3": jnp.ones((4, 16))}, "qkv": jnp.ones((4, 12))}
      >>> tx.init(params).inner_states["muon"].inner_state[0].mu["qkv"].shape
      (4, 12)
    """
    rules = (
        named_like("embed_tokens", "lm_head"),
        Rule(is_vector_in_disguise, "adam", "one dim above 1", optional=True),
    )
    fused = fused_rules(split_sizes or {})
    if num_experts is not None:
        experts = {"fused_w1w3": 2 * num_experts, "fused_w2": num_experts}
        any_of = Rule(_EXPERTS, "muon", "experts side by side")  # one of them must be there
        fused += (*fused_rules(experts, optional=True), any_of)
    who = (*rules, *fused)
    return _recipe("xtuner", learning_rate, weight_decay, options, who, decays_all=True)


def areal(
    learning_rate: ScalarOrSchedule, *, weight_decay: ScalarOrSchedule = 0.0, **options: Any
) -> Transformation:
    """AReaL's Muon under FSDP, areal/engine/fsdp_utils/muon.py and pull request 1270.

    EMA momentum of 0.95 with Nesterov, jordan x 5 in bfloat16, decoupled weight decay, and the
    scales of Megatron: 'spectral' with the extra factor 0.2 that matches AdamW, 'unit_rms_norm' or
    'shape_scaling' with 1 (`scale_factor` overrides either). AdamW with betas (0.9, 0.95) and
    epsilon 1e-10 for embeddings, heads and leaves of fewer than two dims.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> tx = areal(1e-3, scale="unit_rms_norm")
      >>> tx.init(jnp.eye(2)).inner_states["muon"].inner_state[0].mu.shape
      (2, 2)
    """
    matches_adamw = options.get("scale", "spectral") == "spectral"
    options = {"scale_factor": 0.2 if matches_adamw else 1.0} | options
    return _recipe("areal", learning_rate, weight_decay, options)


def megatron(
    learning_rate: ScalarOrSchedule = 3e-4,
    *,
    weight_decay: ScalarOrSchedule = 0.01,
    qkv_split: tuple[int, ...] | None = None,
    query_groups: int = 1,
    **options: Any,
) -> Transformation:
    """Megatron-Core's Muon, which is `Muon` of NVIDIA's Emerging-Optimizers.

    EMA momentum of 0.95, without Nesterov unless asked for, 'quintic' (dion here) x 5 on float32
    input with matmuls of 'medium' precision, which is bfloat16, and sqrt(max(in, out)) x 1.
    `scale_factor=0.2` matches AdamW's update; `scale` may be 'unit_rms_norm' or 'shape_scaling' as
    well. `weight_decay_kind` is decoupled, 'independent' or 'l2'. Linear weights get Muon; the rest
    gets Adam with the same learning rate and decay.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      qkv_split: output sizes of query, key and value in one query group, for leaves with
        linear_qkv in their path. Each of the three is one matrix over all groups.
      query_groups: how often that pattern repeats along the output axis.
      **options: any argument of `muon`. `ns_coeffs` names of the source: 'simple' is 'jordan',
        'quintic' is 'dion', 'deepseekv4' is 'deepseek_v4'; a schedule longer or shorter than its
        table is an error here and cycles there.

    Raises:
      ValueError: at `init`, where no leaf has linear_qkv in its path, or the blocks don't fill it.

    Example:
      >>> tx = megatron(qkv_split=(8, 2, 2), query_groups=2)
      >>> params = {"linear_qkv": {"kernel": jnp.ones((4, 24))}}
      >>> state = tx.init(params)
      >>> state.inner_states["muon"].inner_state[0].mu["linear_qkv"]["kernel"].shape
      (4, 24)
    """
    who = None
    if qkv_split is not None:
        view = MatrixView(-2, -1, split=qkv_split, groups=query_groups)
        who = with_default_rules((Rule("linear_qkv", "muon", "fused matrices", view),))
    return _recipe("megatron", learning_rate, weight_decay, options, who, decays_all=True)


def transformer_engine(
    learning_rate: ScalarOrSchedule = 3e-4, *, weight_decay: ScalarOrSchedule = 0.01, **options: Any
) -> Transformation:
    """TransformerEngine's `MuonOptimizer`, as in its pull request 2920.

    EMA momentum of 0.95 with Nesterov (`g.lerp(m, beta)`), 'quintic' (dion here) x 5 in the
    parameter's dtype, sqrt(max(in, out)) x 1; decoupled weight decay, or with
    `weight_decay_kind="l2"` added to the gradient. Its partition_dim is the parameter's own
    sharding here: 0 is P(None, axis) on an [in, out] kernel, 1 is P(axis), none is P(). The caller
    splits, here `default_rules()`.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> tx = transformer_engine(weight_decay_kind="l2")
      >>> tx.init(jnp.eye(2)).inner_states["muon"].inner_state[0].mu.shape
      (2, 2)
    """
    return _recipe("transformer_engine", learning_rate, weight_decay, options)


def dion(
    learning_rate: ScalarOrSchedule = 0.01,
    *,
    weight_decay: ScalarOrSchedule = 0.01,
    split_sizes: Mapping[str, Blocks] | None = None,
    **options: Any,
) -> Transformation:
    """The Muon of github.com/microsoft/dion, dion/muon.py.

    Sum momentum of 0.95, without Nesterov unless asked for, Polar Express x 5 with safety 1.02
    (modded_nanogpt here) in bfloat16, sqrt(out / in) ('spectral_norm' there, 'unit_rms_norm' here;
    its 'rms_norm' is 'match_rms_adamw'), decoupled weight decay; AdamW with betas (0.9, 0.95) and
    the same learning rate and decay. The caller groups the parameters, here `default_rules()` do.
    Its cautious weight decay has no counterpart here.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      split_sizes: for leaves whose path matches a pattern as in `Rule`, the sizes of the blocks
        along the output axis, or the number of equal ones (num_heads there).
      **options: any argument of `muon`.

    Raises:
      ValueError: at `init`, for a pattern that matches no leaf, or blocks that don't fill the axis.

    Example:
      >>> tx = dion(split_sizes={"query": 4})
      >>> params = {"query": jnp.ones((4, 16))}
      >>> tx.init(params).inner_states["muon"].inner_state[0].mu["query"].shape
      (4, 16)
    """
    who = with_default_rules(fused_rules(split_sizes)) if split_sizes else None
    return _recipe("dion", learning_rate, weight_decay, options, who, decays_all=True)


def optax_muon(
    learning_rate: ScalarOrSchedule, *, weight_decay: ScalarOrSchedule = 0.0, **options: Any
) -> Transformation:
    """`optax.contrib.muon` without its dimension numbers: every 2-D leaf gets Muon.

    `muon` has optax's conventions already; this has its choice of leaves too, embeddings and heads
    included, and so goes on from its states (`muon_optax.interop.from_optax`). AdamW has Nesterov
    momentum where Muon has, as in optax.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> state = optax_muon(0.02).init({"embed": jnp.ones((4, 8))})
      >>> state.inner_states["muon"].inner_state[0].mu["embed"].shape
      (4, 8)
    """
    return muon(learning_rate, **({"weight_decay": weight_decay, "partition": ()} | options))


def _recipe(
    system: str,
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule,
    options: dict[str, Any],
    who: tuple[Rule, ...] | None = None,
    *,
    decays_all: bool = False,
) -> Transformation:
    """`muon` with a system's settings, under the caller's options; no AdamW there is Nesterov's.

    Raises:
      ValueError: for rules or views beside names of fused leaves.
    """
    settings: dict[str, Any] = {"adam_nesterov": False, "weight_decay": weight_decay}
    settings |= _SYSTEMS[system]
    if decays_all:
        settings["adam_weight_decay"] = weight_decay
    given = [
        n for n in ("partition", "muon_weight_dimension_numbers") if options.get(n) is not None
    ]
    fused = [rule.pattern for rule in who or () if isinstance(rule.view, MatrixView)]
    if given and fused:
        raise ValueError(
            f"{given[0]} would replace the views of {fused}; give these as MatrixView in "
            "muon_weight_dimension_numbers instead"
        )
    if who is not None and not given:
        settings["partition"] = who
    return muon(learning_rate, **(settings | options))
