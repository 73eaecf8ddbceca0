"""Recipes of Muon's variants as their sources run them, from NorMuon to MuonClip and Dion2."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice
from muon_optax.alias import muon
from muon_optax.partition.systems import Blocks
from muon_optax.recipes.systems import Transformation, dion, keller_jordan, megatron, moonlight
from muon_optax.transforms.dion2_slices import Dion2
from muon_optax.transforms.entries import scale_by_entry
from muon_optax.transforms.namo import Namo
from muon_optax.transforms.neurons import scale_by_neuron
from muon_optax.transforms.qk_clip import Attention, qk_clip
from muon_optax.transforms.spheres import hyperball
from muon_optax.transforms.weight_decay import add_cautious_weight_decay, coupled_decay

__all__ = [
    "AdaptiveMethod",
    "adamuon",
    "dion2",
    "dion_normuon",
    "emerging_optimizers",
    "modded_nanogpt",
    "muonclip",
    "muonh",
    "nordion2",
    "normuon",
]

ScalarOrSchedule = optax.ScalarOrSchedule
AdaptiveMethod = Literal["adamuon", "normuon", "namo"]


def normuon(
    learning_rate: ScalarOrSchedule = 0.02, *, weight_decay: ScalarOrSchedule = 0.0, **options: Any
) -> Transformation:
    """NorMuon of its authors, github.com/zichongli5/NorMuon: `NorMuonWithAuxAdam`.

    `keller_jordan`, and after orthogonalisation a second moment of each output neuron with beta2
    0.95 and epsilon 1e-10; each matrix gets its norm back. The source keeps these moments in the
    parameter's dtype, this in float32.

    Args:
      learning_rate: a number or a schedule; AdamW has its own, `adam_learning_rate`.
      weight_decay: for Muon's leaves.
      **options: any argument of `muon`.

    Example:
      >>> state = normuon().init(jnp.eye(2)).inner_states["muon"].inner_state
      >>> state[-1].nu.shape
      (1, 2)
    """
    settings = {"after_orthogonalization": scale_by_neuron(0.95, 1e-10)}
    return keller_jordan(learning_rate, weight_decay=weight_decay, **(settings | options))


def dion_normuon(
    learning_rate: ScalarOrSchedule = 0.01,
    *,
    weight_decay: ScalarOrSchedule = 0.01,
    split_sizes: Mapping[str, Blocks] | None = None,
    **options: Any,
) -> Transformation:
    """NorMuon of Dion, github.com/microsoft/dion, dion/normuon.py.

    `dion`, and after orthogonalisation a second moment of each output neuron with beta2 0.95. Its
    `cautious_wd=True` is `weight_decay_kind="cautious"`. Where a matrix is sharded, the source
    brings back the norm of each shard; this always does the matrix's.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      split_sizes: as in `dion`.
      **options: any argument of `muon`.

    Raises:
      ValueError: as in `dion`.

    Example:
      >>> tx = dion_normuon(split_sizes={"query": 4}, weight_decay_kind="cautious")
      >>> state = tx.init({"query": jnp.ones((4, 16))}).inner_states["muon"].inner_state
      >>> state[-1].nu["query"].shape
      (1, 16)
    """
    settings = {"after_orthogonalization": scale_by_neuron()}
    return dion(
        learning_rate, weight_decay=weight_decay, split_sizes=split_sizes, **(settings | options)
    )


def dion2(
    learning_rate: ScalarOrSchedule = 0.01,
    *,
    fraction: float = 0.25,
    weight_decay: ScalarOrSchedule = 0.01,
    split_sizes: Mapping[str, Blocks] | None = None,
    **options: Any,
) -> Transformation:
    """Dion2 of github.com/microsoft/dion, dion/dion2.py; arXiv 2512.16928.

    `dion`, but in each step only the largest quarter of the rows or columns of each momentum, along
    its shorter side, is orthogonalised, and decays by 0.95. Where a matrix is sharded, the source
    takes those of the sharded axis, by default as many of each shard; its
    `selection_scope="global"` chooses among all of them, as this always does.

    Args:
      learning_rate: a number or a schedule.
      fraction: of the rows or columns of each matrix.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      split_sizes: as in `dion`.
      **options: any argument of `muon`; `beta` is `ef_decay` there.

    Raises:
      ValueError: as in `dion`, and for a fraction out of range.

    Example:
      >>> tx, params = dion2(), {"up": jnp.diag(jnp.arange(1.0, 9.0))}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> (abs(jnp.diag(updates["up"])) > 5e-3).tolist()
      [False, False, False, False, False, False, True, True]
    """
    settings = {"dion2": Dion2(fraction)}
    return dion(
        learning_rate, weight_decay=weight_decay, split_sizes=split_sizes, **(settings | options)
    )


def nordion2(
    learning_rate: ScalarOrSchedule = 0.01,
    *,
    fraction: float = 0.25,
    weight_decay: ScalarOrSchedule = 0.01,
    split_sizes: Mapping[str, Blocks] | None = None,
    **options: Any,
) -> Transformation:
    """NorDion2, or Dion3, of github.com/microsoft/dion, dion/nordion2.py.

    `dion2` of output neurons, and after orthogonalisation the second moment of each chosen one with
    beta2 0.95. The norm that comes back is that of the chosen neurons of a matrix together.

    Args:
      learning_rate: a number or a schedule.
      fraction: of the output neurons of each matrix.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      split_sizes: as in `dion`.
      **options: any argument of `muon`; `beta` is `mu` there.

    Raises:
      ValueError: as in `dion2`.

    Example:
      >>> tx, params = nordion2(0.1, fraction=0.5), {"up": jnp.ones((2, 4))}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> (state.inner_states["muon"].inner_state[-1].nu["up"] > 0).tolist()
      [[True, True, False, False]]
    """
    settings = {
        "dion2": Dion2(fraction, each="output"),
        "after_orthogonalization": scale_by_neuron(skip_zeros=True),
    }
    return dion(
        learning_rate, weight_decay=weight_decay, split_sizes=split_sizes, **(settings | options)
    )


def emerging_optimizers(
    learning_rate: ScalarOrSchedule = 3e-4,
    *,
    method: AdaptiveMethod = "adamuon",
    weight_decay: ScalarOrSchedule = 0.01,
    **options: Any,
) -> Transformation:
    """`AdaptiveMuon` of NVIDIA's Emerging-Optimizers, orthogonalized_optimizers/adaptive_muon.py.

    `megatron`, and after orthogonalisation, before the scale, one of three: a second moment of each
    entry ('adamuon', without the signs and the rescaling of AdaMuon's authors), of each place of
    the longer side ('normuon'), or of the gradient's norm ('namo', without bias correction); beta2
    0.95, epsilon 1e-8. Megatron-Core multiplies by the scale twice, which this does not.

    Args:
      learning_rate: a number or a schedule.
      method: `moment2_method` there.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      **options: any argument of `megatron` or `muon`.

    Raises:
      ValueError: for an unknown method.

    Example:
      >>> tx = emerging_optimizers(method="normuon")
      >>> state = tx.init(jnp.ones((2, 4))).inner_states["muon"].inner_state
      >>> state[-1].nu.shape
      (1, 4)
    """
    check_choice("method", method, get_args(AdaptiveMethod))
    settings: dict[str, Any] = {}
    if method == "adamuon":
        settings["after_orthogonalization"] = scale_by_entry(rms=None)
    elif method == "normuon":
        settings["after_orthogonalization"] = scale_by_neuron(each="longer", guard="clamp")
    else:
        settings["namo"] = Namo(beta2=0.95, bias_correction=False)
    return megatron(learning_rate, weight_decay=weight_decay, **(settings | options))


def adamuon(
    learning_rate: ScalarOrSchedule = 6e-4, *, weight_decay: ScalarOrSchedule = 0.1, **options: Any
) -> Transformation:
    """AdaMuon of its authors, github.com/Chongjie-Si/AdaMuon, gpt2/models/optimizers/adamuon.py.

    EMA momentum of 0.95 with Nesterov; the signs of the mix go through jordan x 5 in bfloat16; each
    entry is divided by the root of its second moment, whose decay rate is the momentum's, and each
    matrix brought to an RMS of 0.2, so that AdamW's learning rates fit. Decoupled weight decay;
    AdamW with betas (0.9, 0.95) and the same learning rate and decay for the rest.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      **options: any argument of `muon`.

    Example:
      >>> tx = adamuon(adam_learning_rate=3e-4)
      >>> state = tx.init(jnp.ones((2, 4))).inner_states["muon"].inner_state
      >>> state[-1].nu.shape
      (2, 4)
    """
    settings = {
        "weight_decay": weight_decay,
        "adam_weight_decay": weight_decay,
        "after_orthogonalization": scale_by_entry(options.get("beta", 0.95)),
        "sign": True,
        "scale": "none",
        "adam_b2": 0.95,
    }
    return _half(learning_rate, settings, options)


def muonh(
    learning_rate: ScalarOrSchedule = 0.018,
    *,
    adam_learning_rate: ScalarOrSchedule = 0.01,
    **options: Any,
) -> Transformation:
    """MuonH of modded-nanogpt, records/track_3_optimization, 2026-04-30; arXiv 2606.16899.

    EMA momentum of 0.95 with Nesterov, (2, -1.5, 0.5) x 12 in bfloat16, and steps of a fixed share
    of the weights' norm along the sphere that they are on; no scale and no weight decay. AdamW with
    betas (0.8, 0.95) and epsilon 1e-10; the record has rates of their own for table and head (see
    docs/per_leaf.md). Weights that begin with zeros need another optimizer: `init` lists them. The
    paper keeps the initial norm: `step=hyperball(0.018)`.

    Args:
      learning_rate: of Muon's leaves, the step's norm as a share of the weights'; a number or a
        schedule.
      adam_learning_rate: of the others.
      **options: any argument of `muon`.

    Example:
      >>> params = jnp.ones((2, 4))
      >>> updates, _ = muonh().update(params, muonh().init(params), params)
      >>> new = params + updates
      >>> bool(abs(jnp.linalg.norm(new) / jnp.linalg.norm(params) - 1) < 1e-6)
      True
    """
    settings = {
        "step": hyperball(learning_rate, radius="current"),
        "scale": "none",
        "ns_coeffs": ((2.0, -1.5, 0.5),) * 12,
        "adam_b1": 0.8,
        "adam_b2": 0.95,
        "eps": 1e-10,
    }
    return _half(adam_learning_rate, settings, options)


def muonclip(
    learning_rate: ScalarOrSchedule = 2e-4,
    *,
    heads: Mapping[str, Attention],
    weight_decay: ScalarOrSchedule = 0.1,
    tau: jax.typing.ArrayLike = 100.0,
    alpha: float = 0.5,
    **options: Any,
) -> Transformation:
    """MuonClip of Kimi K2, arXiv 2507.20534, algorithm 1.

    `moonlight` at the learning rate and weight decay of K2's training, and `qk_clip` behind it. Its
    update takes the largest logit of each head: `tx.update(grads, state, params,
    max_logits=...)`. The report's listing has no Nesterov momentum, which the code of Moonlight,
    the same authors' optimizer before it, has: `nesterov=False` follows the listing.

    Args:
      learning_rate: a number or a schedule.
      heads: the attentions by their paths, as in `clip_qk`.
      weight_decay: for all leaves; `adam_weight_decay` sets AdamW's apart.
      tau: the bound of the logits.
      alpha: the part of the scaling that queries take, as in `clip_qk`.
      **options: any argument of `muon`.

    Raises:
      ValueError, TypeError: as in `clip_qk`.

    Example:
      >>> from muon_optax import HeadWeight
      >>> heads = {"": Attention(1, {"q": HeadWeight("query", 1), "k": HeadWeight("key", 1)})}
      >>> tx, params = muonclip(0.0, heads=heads), {"q": jnp.eye(2), "k": jnp.eye(2)}
      >>> logits = {"": jnp.array([400.0])}
      >>> updates, _ = tx.update(params, tx.init(params), params, max_logits=logits)
      >>> (params["k"] + updates["k"]).tolist()
      [[0.5, 0.0], [0.0, 0.5]]
    """
    clip = qk_clip(tau, alpha, heads=heads, param_shardings=options.get("param_shardings"))
    return optax.chain(moonlight(learning_rate, weight_decay=weight_decay, **options), clip)


def modded_nanogpt(
    learning_rate: ScalarOrSchedule = 0.023,
    *,
    weight_decay: ScalarOrSchedule = 1.2,
    adam_learning_rate: ScalarOrSchedule = 0.008,
    adam_weight_decay: ScalarOrSchedule = 0.005,
    **options: Any,
) -> Transformation:
    """NorMuon of modded-nanogpt's speedrun, train_gpt.py: `NorMuonAndAdam`.

    EMA momentum of 0.95 with Nesterov, modded_nanogpt x 5 in bfloat16, second moments of the longer
    side with beta2 0.9, clamped at 1e-10, sqrt(max(1, out / in)); cautious weight decay by the
    square of the learning rate, times the scale. Adam with betas (0.9, 0.99) and epsilon 1e-10,
    decay by the square of its rate. The source has multipliers of rate and decay and other betas
    for tables, head, gates and scalars (see docs/per_leaf.md), and Adam's decay is cautious there.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: for Muon's leaves, times the square of the rate.
      adam_learning_rate: of the others.
      adam_weight_decay: of the others, times the square of their rate.
      **options: any argument of `muon`.

    Example:
      >>> state = modded_nanogpt().init(jnp.ones((4, 2))).inner_states["muon"].inner_state
      >>> state[-1][0].nu_input.shape
      (4, 1)
    """
    decay = coupled_decay(weight_decay, learning_rate, 1.0)
    # Before the scale by shape, which so multiplies decay as well.
    decayed = add_cautious_weight_decay(decay, options.pop("weight_decay_mask", None))
    settings = {
        "ns_coeffs": "modded_nanogpt",
        "after_orthogonalization": (
            scale_by_neuron(0.9, 1e-10, each="longer", guard="clamp"),
            decayed,
        ),
        "adam_learning_rate": adam_learning_rate,
        "adam_weight_decay": coupled_decay(adam_weight_decay, adam_learning_rate, 1.0),
        "adam_b2": 0.99,
        "eps": 1e-10,
    }
    return _half(learning_rate, settings, options)


def _half(
    learning_rate: ScalarOrSchedule, settings: dict[str, Any], options: dict[str, Any]
) -> Transformation:
    """`muon` with settings under the caller's options, orthogonalising in bfloat16."""
    common = {"ns_dtype": jnp.bfloat16, "bias_correction": False, "adam_nesterov": False}
    return muon(learning_rate, **(common | settings | options))
