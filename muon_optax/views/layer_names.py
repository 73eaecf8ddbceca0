"""What the names of Flax's layers tell about the axes of their weights, where shapes agree."""

import math
from collections.abc import Sequence

from muon_optax.rules import Shape
from muon_optax.views.evidence import WIDEST, conv_roles
from muon_optax.views.weights import Roles, Weight

__all__ = [
    "by_name",
    "conv_by_name",
    "is_conv_name",
    "settle",
    "with_heads_merged",
    "with_parts_apart",
]

_INTO_HEADS = {"query", "key", "value", "queries", "keys", "values", "q", "k", "v", "qkv", "kv"}
_INTO_HEADS |= {f"w{name}" for name in ("q", "k", "v", "qkv", "kv")}
_OUT_OF_HEADS = {"out", "o", "output", "wo"}
_FUSED = {"qkv": 3, "wqkv": 3, "kv": 2, "wkv": 2}
_EXPERTS = {"expert", "experts", "moe"}
_MATMULS = {"dense", "linear", "einsum", "mlp", "ffn", "ff", "feed", "feedforward", "wi", "wo"}
_MATMULS |= {"gate", "gating", "attn", "attention", "up", "down"} | _EXPERTS | _INTO_HEADS
_CONV_LIKE = {"stem", "patch", "patches", "patchify", "downsample", "shortcut"}


def is_conv_name(tokens: frozenset[str]) -> bool:
    """Whether a layer's name says that it is a convolution."""
    return any(token.startswith("conv") or token.endswith("conv") for token in tokens)


def conv_by_name(weight: Weight) -> set[Roles]:
    """[*window, in, out], where the name says convolution and the window is one.

    Sides of a window are equal, or 1. Other sizes may be a stack of convolutions of fewer dims.
    """
    tokens, window = weight.layer_tokens, weight.shape[:-2]
    is_named = is_conv_name(tokens) or (len(window) > 1 and not _CONV_LIKE.isdisjoint(tokens))
    return {conv_roles(weight.rank)} if is_named and len({*window} - {1}) < 2 else set()


def by_name(weight: Weight, beside: Sequence[Weight]) -> set[Roles]:
    """What the names of attention's layers and of experts say, where no size speaks against it.

    Args:
      weight: a weight of three dims or more.
      beside: the weights of the same module, this one among them.
    """
    tokens, shape = weight.layer_tokens, weight.shape
    into, out = not tokens.isdisjoint(_INTO_HEADS), not tokens.isdisjoint(_OUT_OF_HEADS)
    if len(set(shape)) == 1 or (into and out):
        return set()
    if into and len(shape) == 4:
        return _fused_attention(weight)
    if (into or out) and len(shape) == 3:
        return _attention(weight, beside, out)
    is_expert = not weight.tokens.isdisjoint(_EXPERTS)
    is_plain = "einsum" not in tokens and not is_conv_name(weight.tokens)
    return {Roles((0,), (1,), (2,))} if is_expert and is_plain and len(shape) == 3 else set()


def _attention(weight: Weight, beside: Sequence[Weight], is_out: bool) -> set[Roles]:
    """[in, heads, head_dim] or [heads, head_dim, out], if what is beside it has as many heads.

    A stack of layers' [in, out] has the same rank, but other sizes: where its number of layers
    would be a model's width, its heads are too wide.
    """
    inner = [w.shape for w in beside if w.rank == 3 and not w.layer_tokens.isdisjoint(_INTO_HEADS)]
    outer = [
        w.shape for w in beside if w.rank == 3 and not w.layer_tokens.isdisjoint(_OUT_OF_HEADS)
    ]
    if inner and outer and not {i[1] for i in inner} & {o[0] for o in outer}:
        return set()
    if is_out:
        is_told = bool(inner) or not weight.tokens.isdisjoint(("attn", "attention"))
        heads, head_dim, width = weight.shape
        return {conv_roles(3)} if is_told and _is_width(width, heads * head_dim) else set()
    options = [(Roles((), (0,), (1, 2)), 0)]
    if "einsum" in weight.layer_tokens:
        options += [(Roles((0,), (1,), (2,)), 1)]
    return _likely(weight.shape, options)


def _fused_attention(weight: Weight) -> set[Roles]:
    """Query, key and value, or key and value, in one: [in, 3, heads, head_dim] and its orders."""
    counts = [_FUSED[token] for token in weight.layer_tokens if token in _FUSED]
    options = [
        (Roles((1,), (0,), (2, 3)), 0, 1),
        (Roles((2,), (0,), (1, 3)), 0, 2),
        (Roles((0,), (1,), (2, 3)), 1, 0),
        (Roles((0, 1), (2,), (3,)), 2, 0),
    ]
    options = [(roles, width) for roles, width, fused in options if weight.shape[fused] in counts]
    return _likely(weight.shape, options, fused=counts[0] if counts else 1)


def _likely(shape: Shape, options: Sequence[tuple[Roles, int]], fused: int = 1) -> set[Roles]:
    """The readings whose inputs, at the given axis, are as many as a model's width may be."""
    size = math.prod(shape) // fused
    return {r for r, axis in options if _is_width(shape[axis], size // shape[axis])}


def _is_width(width: int, inner: int) -> bool:
    """Whether a model may have this width and as many values in all the heads of one layer."""
    return inner <= WIDEST * width


def settle(weight: Weight, readings: set[Roles], beside: Sequence[Weight]) -> Roles | None:
    """The one of several readings that fit by their sizes that the names tell, if they do."""
    if len(readings) < 2:
        return next(iter(readings), None)
    conv = conv_roles(weight.rank)
    stacks = readings - {conv}
    named = by_name(weight, beside) & readings
    if len(named) == 1:
        return next(iter(named))
    if conv in readings and len(stacks) == 1 and not is_conv_name(weight.tokens):
        square = weight.rank > 3 and len({*weight.shape[:-2]}) == 1
        telling = (_EXPERTS | {"einsum", "attn", "attention"}) if square else _MATMULS
        return next(iter(stacks)) if not weight.tokens.isdisjoint(telling) else None
    return None


def with_parts_apart(weight: Weight, roles: Roles) -> Roles:
    """Query, key and value as three matrices, where they have an output axis of their own."""
    counts = [_FUSED[token] for token in weight.layer_tokens if token in _FUSED]
    fused = [axis for axis in roles.output if weight.shape[axis] in counts]
    if len(fused) != 1 or len(roles.output) < 2 or not roles.reduction:
        return roles
    output = tuple(axis for axis in roles.output if axis != fused[0])
    return Roles(tuple(sorted((*roles.batch, *fused))), roles.reduction, output)


def with_heads_merged(weight: Weight, roles: Roles) -> Roles:
    """Heads as output or input axes, in Gemma's einsums [heads, in, head_dim].

    They are batch axes by their sizes, as those of experts are.
    """
    tokens = weight.layer_tokens
    is_attention = not tokens.isdisjoint(_INTO_HEADS | {"attn", "attention"})
    if "einsum" not in tokens or not is_attention or not roles.batch:
        return roles
    *batch, heads = roles.batch
    if tokens.isdisjoint(_INTO_HEADS):
        return Roles(tuple(batch), (heads, *roles.reduction), roles.output)
    return Roles(tuple(batch), roles.reduction, (heads, *roles.output))
