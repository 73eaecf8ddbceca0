"""Axes of weights by the names of Flax's layers, where shapes agree with them."""

import math
from collections.abc import Sequence

from muon_optax.partition import Shape
from muon_optax.views.evidence import conv_roles
from muon_optax.views.weights import Roles, Weight

__all__ = [
    "by_name",
    "conv_by_name",
    "has_inputs_first",
    "is_conv_like",
    "is_conv_name",
    "is_fused_name",
    "is_matmul_name",
    "is_of_attention",
    "may_transpose",
    "with_heads_merged",
    "with_parts_apart",
]

_INTO_HEADS = {"query", "key", "value", "queries", "keys", "values", "q", "k", "v", "qkv", "kv"}
_INTO_HEADS |= {f"w{name}" for name in ("q", "k", "v", "qkv", "kv")}
_OUT_OF_HEADS = {"out", "o", "output", "post", "wo"}
_FUSED = {"qkv": 3, "wqkv": 3, "kv": 2, "wkv": 2}
_GATES = {"gate", "gated", "gating", "glu", "swiglu", "geglu", "wi", "up", "in", "fused"}
_ATTENTION = {"attn", "attention"}
_EXPERTS = {"expert", "experts", "moe"}
_MATMULS = {"dense", "linear", "einsum", "mlp", "ffn", "ff", "feed", "feedforward", "wi", "wo"}
_MATMULS |= {"gate", "gating", "up", "down"} | _ATTENTION | _EXPERTS | _INTO_HEADS
_WIDEST = 8  # heads x head_dim over the width of the model, 4 at most in known models
_ODD_WINDOWS = {3, 5, 7, 9, 11}
_LARGE_WINDOW = 8
_CONV_LIKE = {"stem", "patch", "patches", "patchify", "downsample", "shortcut"}


def is_conv_name(tokens: frozenset[str]) -> bool:
    """Whether a layer's name says that it is a convolution."""
    return any(t.startswith(("conv", "depthwise")) or t.endswith("conv") for t in tokens)


def is_conv_like(weight: Weight) -> bool:
    """Whether a layer has a convolution's name, or one that mostly stands for one in two dims."""
    tokens = weight.layer_tokens
    return is_conv_name(tokens) or (weight.rank > 3 and not _CONV_LIKE.isdisjoint(tokens))


def conv_by_name(weight: Weight) -> list[Roles]:
    """[*window, in, out] of a layer called convolution, where the window is one.

    Sides of a window are equal, or 1. Other sizes may be a stack of convolutions of fewer dims, and
    so may sizes that all the leaves around have at this place. PyTorch and Equinox have windows
    last.
    """
    window = weight.shape[:-2]
    is_window = len({*window} - {1}) < 2 and len(window) <= 3 and not _has_window_last(weight.shape)
    may_be_stack = not weight.stack_places.isdisjoint(range(len(window))) and len(window) > 1
    return [conv_roles(weight.rank)] if is_window and not may_be_stack else []


def _has_window_last(shape: Shape) -> bool:
    """Whether the last axes look like a window: odd, equal, and smaller than the first ones."""
    last, first = {*shape[2:]}, shape[:1] if len(shape) == 3 else shape[:2]
    is_window = len(last) == 1 and last <= _ODD_WINDOWS
    return is_window and max(first) > max(_LARGE_WINDOW, *last)


def has_inputs_first(weight: Weight) -> bool:
    """Whether a weight is [in, ...] or [heads, in, ...]: keys and values, or a layer of Flax's."""
    tokens = weight.layer_tokens
    is_into = not tokens.isdisjoint(_INTO_HEADS)
    return is_into or (weight.is_kernel and tokens.isdisjoint(_OUT_OF_HEADS))


def is_fused_name(weight: Weight) -> bool:
    """Whether a name allows an axis for query, key and value, or for gate and up."""
    return not weight.layer_tokens.isdisjoint(_GATES | set(_FUSED))


def may_transpose(weight: Weight) -> bool:
    """Whether a weight may be [out, in], as gate and up of Gemma are: outside of Flax's layers."""
    return not weight.is_kernel and not weight.layer_tokens.isdisjoint(_GATES)


def by_name(weight: Weight, beside: Sequence[Weight]) -> set[Roles]:
    """The roles by the names of attention's layers, where no size contradicts them.

    Args:
      weight: a weight of three dims or more.
      beside: the weights of the same module, this one among them.
    """
    tokens, shape = weight.layer_tokens, weight.shape
    into, out = not tokens.isdisjoint(_INTO_HEADS), not tokens.isdisjoint(_OUT_OF_HEADS)
    if len(set(shape)) == 1 or (into and out) or weight.stack_places:
        return set()
    if into and len(shape) == 4:
        return _fused_attention(weight)
    alike = [w for w in beside if w.rank == 3]
    inner = [w.shape for w in alike if not w.layer_tokens.isdisjoint(_INTO_HEADS)]
    outer = [w for w in alike if not w.layer_tokens.isdisjoint(_OUT_OF_HEADS)]
    if into and len(shape) == 3:
        return _into_heads(weight, inner, outer)
    if out and len(shape) == 3:
        return _out_of_heads(weight, inner)
    return set()


def _into_heads(weight: Weight, inner: Sequence[Shape], outer: Sequence[Weight]) -> set[Roles]:
    """[in, heads, head_dim], or in einsums also [heads, in, head_dim].

    A stack of layers' [in, out] has the same rank, but other sizes: its number of layers would be a
    model's width, and its heads are too wide. Where the projection back is known, the number of
    heads tells.
    """
    roles = Roles((), (0,), (1, 2))
    counts = {w.shape[0] for w in outer}
    if weight.shape[1] in counts:
        return {roles}
    transposed = {w.shape for w in outer if not w.is_kernel}
    if outer and counts.isdisjoint(shape[1] for shape in inner) and transposed.isdisjoint(inner):
        return set()
    options = [(roles, 0)]
    if "einsum" in weight.layer_tokens:
        options += [(Roles((0,), (1,), (2,)), 1)]
    return _likely(weight.shape, options)


def _out_of_heads(weight: Weight, inner: Sequence[Shape]) -> set[Roles]:
    """[heads, head_dim, out], or outside of Flax's layers also [out, heads, head_dim]."""
    options = [(conv_roles(3), 2)]
    if not weight.is_kernel:
        options += [(Roles((), (1, 2), (0,)), 0)]
    if inner and weight.shape[0] not in {shape[1] for shape in inner}:
        options = options[1:] if weight.shape in inner else []
    is_told = bool(inner) or not weight.tokens.isdisjoint(_ATTENTION)
    return _likely(weight.shape, options) if is_told else set()


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
    return inner <= _WIDEST * width


def is_of_attention(weight: Weight) -> bool:
    """Whether a weight is below a module called attention."""
    return not weight.tokens.isdisjoint(_ATTENTION)


def is_matmul_name(weight: Weight) -> bool:
    """Whether names say that a weight isn't a convolution, of square windows more surely."""
    square = weight.rank > 3 and len({*weight.shape[:-2]}) == 1
    telling = (_EXPERTS | _ATTENTION | {"einsum"}) if square else _MATMULS
    return not (weight.tokens.isdisjoint(telling) or is_conv_name(weight.tokens))


def with_parts_apart(weight: Weight, roles: Roles) -> Roles:
    """Query, key and value as three matrices, where they have an output axis of their own."""
    counts = [_FUSED[token] for token in weight.layer_tokens if token in _FUSED]
    fused = [axis for axis in roles.output[:-1] if weight.shape[axis] in counts]
    if len(fused) != 1:
        return roles
    output = tuple(axis for axis in roles.output if axis != fused[0])
    return Roles(tuple(sorted((*roles.batch, *fused))), roles.reduction, output)


def with_heads_merged(weight: Weight, roles: Roles) -> Roles:
    """Heads as output or input axes, in Gemma's einsums [heads, in, head_dim].

    They are batch axes by their sizes, as those of experts are.
    """
    tokens = weight.layer_tokens
    is_into = not tokens.isdisjoint(_INTO_HEADS)
    counts = {_FUSED[token] for token in tokens if token in _FUSED}
    batch = [axis for axis in roles.batch if axis > 0 or weight.shape[axis] not in counts]
    is_attention = "einsum" in tokens and (is_into or not tokens.isdisjoint(_ATTENTION))
    if not is_attention or len(batch) != 1 or len(roles.reduction + roles.output) > 2:
        return roles
    heads = batch[0]
    rest = tuple(axis for axis in roles.batch if axis != heads)
    if is_into:
        return Roles(rest, roles.reduction, (heads, *roles.output))
    return Roles(rest, (heads, *roles.reduction), roles.output)
