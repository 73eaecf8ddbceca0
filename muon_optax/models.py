"""Shapes of real models by name, to plan and measure an update without their weights.

Kernels are [in, out] and [*window, in, out], as Flax keeps them, and paths have Flax's names, so
that `default_rules()` names AdamW's leaves.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax._internal.checks import check_choice, is_float_dtype
from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers

__all__ = ["MODELS", "ModelShapes", "as_trained", "model_shapes"]

Tree = dict[str, Any]
Repeat = Callable[[Tree, int], Any]
_View = MuonDimensionNumbers | MatrixView | None


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """A model's parameters, as shapes, and which of their axes make matrices.

    Attributes:
      params: a tree of `jax.ShapeDtypeStruct`.
      views: a tree like it for `muon_weight_dimension_numbers`: a view for each of Muon's leaves,
        None for AdamW's.
      source: where the sizes are published.
    """

    params: Any
    views: Any
    source: str

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    shape: tuple[int, ...]
    view: _View = None


def _linear(
    fan_in: int, fan_out: int, *, bias: bool = False, split: tuple[int, ...] = (), groups: int = 1
) -> Tree:
    fused = MatrixView(0, 1, split=split, groups=groups) if split else MuonDimensionNumbers(0, 1)
    return _layer("kernel", _Leaf((fan_in, fan_out), fused), bias)


def _head(fan_in: int, fan_out: int, *, bias: bool = False) -> Tree:
    return _layer("kernel", _Leaf((fan_in, fan_out)), bias)


def _conv(window: int, fan_in: int, fan_out: int, *, bias: bool = False) -> Tree:
    view = MuonDimensionNumbers((0, 1, 2), 3)
    return _layer("kernel", _Leaf((window, window, fan_in, fan_out), view), bias)


def _norm(size: int, *, bias: bool = False) -> Tree:
    return _layer("scale", _Leaf((size,)), bias)


def _layer(name: str, weight: _Leaf, bias: bool) -> Tree:
    return {name: weight, "bias": _Leaf(weight.shape[-1:])} if bias else {name: weight}


def _stack(tree: Tree, count: int) -> Tree:
    """`count` of them in one, along a new first axis."""
    return jax.tree.map(lambda x: _Leaf((count, *x.shape), _shifted(x.view)), tree)


def _list(tree: Tree, count: int) -> list[Tree]:
    return [tree] * count


def _shifted(view: _View) -> _View:
    if view is None:
        return None
    names = ("reduction_axis", "output_axis")
    axes = {name: _plus_one(getattr(view, name)) for name in names}
    if isinstance(view, MatrixView):
        return dataclasses.replace(view, **axes)
    return view._replace(**axes)


def _plus_one(axes: Any) -> Any:
    return axes + 1 if isinstance(axes, int) else tuple(a + 1 for a in axes)


def _gpt2(repeat: Repeat, *, width: int, layers: int, vocabulary: int, context: int) -> Tree:
    block = {
        "ln_1": _norm(width, bias=True),
        "attn": {
            "c_attn": _linear(width, 3 * width, bias=True, split=(width, width, width)),
            "c_proj": _linear(width, width, bias=True),
        },
        "ln_2": _norm(width, bias=True),
        "mlp": {
            "c_fc": _linear(width, 4 * width, bias=True),
            "c_proj": _linear(4 * width, width, bias=True),
        },
    }
    return {
        "wte": {"embedding": _Leaf((vocabulary, width))},
        "wpe": {"embedding": _Leaf((context, width))},
        "blocks": repeat(block, layers),
        "ln_f": _norm(width, bias=True),
    }


def _llama(
    repeat: Repeat, *, width: int, layers: int, hidden: int, kv_width: int, vocabulary: int
) -> Tree:
    block = {
        "attn_norm": _norm(width),
        "attn": {
            "q": _linear(width, width),
            "k": _linear(width, kv_width),
            "v": _linear(width, kv_width),
            "o": _linear(width, width),
        },
        "mlp_norm": _norm(width),
        "mlp": _gated(width, hidden),
    }
    return {
        "embed_tokens": {"embedding": _Leaf((vocabulary, width))},
        "blocks": repeat(block, layers),
        "norm": _norm(width),
        "lm_head": _head(width, vocabulary),
    }


def _gated(width: int, hidden: int) -> Tree:
    return {
        "gate": _linear(width, hidden),
        "up": _linear(width, hidden),
        "down": _linear(hidden, width),
    }


def _deepseek(
    repeat: Repeat,
    *,
    width: int,
    dense_layers: int,
    moe_layers: int,
    dense_hidden: int,
    expert_hidden: int,
    experts: int,
    vocabulary: int,
) -> Tree:
    def block(mlp: Tree) -> Tree:
        norms = {"attn_norm": _norm(width), "mlp_norm": _norm(width)}
        return {**norms, "attn": _latent_attention(width), "mlp": mlp}

    mixture = {
        "router": {**_linear(width, experts), "bias": _Leaf((experts,))},
        "experts": _stack(_gated(width, expert_hidden), experts),
        "shared": _gated(width, expert_hidden),
    }
    return {
        "embed_tokens": {"embedding": _Leaf((vocabulary, width))},
        "dense_blocks": repeat(block(_gated(width, dense_hidden)), dense_layers),
        "moe_blocks": repeat(block(mixture), moe_layers),
        "norm": _norm(width),
        "lm_head": _head(width, vocabulary),
    }


def _olmoe(
    repeat: Repeat, *, width: int, layers: int, hidden: int, experts: int, vocabulary: int
) -> Tree:
    block = {
        "attn_norm": _norm(width),
        "attn": {
            **{name: _linear(width, width) for name in ("q", "k", "v", "o")},
            **{name: _norm(width) for name in ("q_norm", "k_norm")},
        },
        "mlp_norm": _norm(width),
        "mlp": {
            "router": _linear(width, experts),
            "experts": _stack(_gated(width, hidden), experts),
        },
    }
    return {
        "embed_tokens": {"embedding": _Leaf((vocabulary, width))},
        "blocks": repeat(block, layers),
        "norm": _norm(width),
        "lm_head": _head(width, vocabulary),
    }


def _latent_attention(
    width: int,
    heads: int = 128,
    q_rank: int = 1536,
    kv_rank: int = 512,
    nope: int = 128,
    rope: int = 64,
    value: int = 128,
) -> Tree:
    return {
        "q_a": _linear(width, q_rank),
        "q_a_norm": _norm(q_rank),
        "q_b": _linear(q_rank, heads * (nope + rope)),
        "kv_a": _linear(width, kv_rank + rope, split=(kv_rank, rope)),
        "kv_a_norm": _norm(kv_rank),
        "kv_b": _linear(kv_rank, heads * (nope + value), split=(nope, value), groups=heads),
        "o": _linear(heads * value, width),
    }


def _vit(
    repeat: Repeat, *, width: int, layers: int, hidden: int, patch: int, patches: int, classes: int
) -> Tree:
    block = {
        "ln_1": _norm(width, bias=True),
        "attn": {
            "qkv": _linear(width, 3 * width, bias=True, split=(width, width, width)),
            "out": _linear(width, width, bias=True),
        },
        "ln_2": _norm(width, bias=True),
        "mlp": {
            "up": _linear(width, hidden, bias=True),
            "down": _linear(hidden, width, bias=True),
        },
    }
    return {
        "patch_embed": _conv(patch, 3, width, bias=True),
        "cls_token": _Leaf((1, 1, width)),
        "pos_embedding": _Leaf((1, patches + 1, width)),
        "blocks": repeat(block, layers),
        "norm": _norm(width, bias=True),
        "head": _head(width, classes, bias=True),
    }


def _resnet(repeat: Repeat, *, depths: tuple[int, ...], classes: int) -> Tree:
    stages = {}
    fan_in, width = 64, 64
    for i, depth in enumerate(depths, 1):
        shortcut = {
            "shortcut": _conv(1, fan_in, 4 * width),
            "shortcut_norm": _norm(4 * width, bias=True),
        }
        first = {**_bottleneck(fan_in, width), **shortcut}
        others = repeat(_bottleneck(4 * width, width), depth - 1)
        stages[f"stage_{i}"] = {"first": first, "blocks": others}
        fan_in, width = 4 * width, 2 * width
    return {
        "stem": {"conv": _conv(7, 3, 64), "norm": _norm(64, bias=True)},
        **stages,
        "head": _head(fan_in, classes, bias=True),
    }


def _bottleneck(fan_in: int, width: int) -> Tree:
    return {
        "conv_1": _conv(1, fan_in, width),
        "norm_1": _norm(width, bias=True),
        "conv_2": _conv(3, width, width),
        "norm_2": _norm(width, bias=True),
        "conv_3": _conv(1, width, 4 * width),
        "norm_3": _norm(4 * width, bias=True),
    }


_LLAMA_SOURCE = "The Llama 3 Herd of Models, arXiv:2407.21783, table 3"
_MODELS: dict[str, tuple[Callable[..., Tree], dict[str, Any], str]] = {
    "gpt2-124m": (
        _gpt2,
        {"width": 768, "layers": 12, "vocabulary": 50257, "context": 1024},
        "config.json of openai-community/gpt2 (Radford et al. 2019)",
    ),
    "llama3-8b": (
        _llama,
        {"width": 4096, "layers": 32, "hidden": 14336, "kv_width": 1024, "vocabulary": 128256},
        _LLAMA_SOURCE,
    ),
    "llama3-70b": (
        _llama,
        {"width": 8192, "layers": 80, "hidden": 28672, "kv_width": 1024, "vocabulary": 128256},
        _LLAMA_SOURCE,
    ),
    "deepseek-v3": (
        _deepseek,
        {
            "width": 7168,
            "dense_layers": 3,
            "moe_layers": 58,
            "dense_hidden": 18432,
            "expert_hidden": 2048,
            "experts": 256,
            "vocabulary": 129280,
        },
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2; without the MTP module",
    ),
    "olmoe-7b": (
        _olmoe,
        {"width": 2048, "layers": 16, "hidden": 1024, "experts": 64, "vocabulary": 50304},
        "OLMoE, arXiv:2409.02060, table 2; config.json of allenai/OLMoE-1B-7B-0924",
    ),
    "vit-l": (
        _vit,
        {
            "width": 1024,
            "layers": 24,
            "hidden": 4096,
            "patch": 16,
            "patches": 196,
            "classes": 1000,
        },
        "An Image is Worth 16x16 Words, arXiv:2010.11929, table 1; as torchvision's vit_l_16",
    ),
    "resnet-50": (
        _resnet,
        {"depths": (3, 4, 6, 3), "classes": 1000},
        "Deep Residual Learning, arXiv:1512.03385, table 1; as torchvision's resnet50",
    ),
}
MODELS = tuple(_MODELS)


def model_shapes(name: str, *, scanned: bool = False, dtype: Any = "bfloat16") -> ModelShapes:
    """The shapes of a model's parameters.

    Experts are stacked, [experts, in, out], as every JAX implementation keeps them. Fused weights
    in the published model are fused here, with a view that says so: GPT-2's and ViT's queries, keys
    and values, DeepSeek's compressed keys and values.

    Args:
      name: one of `MODELS`.
      scanned: whether equal blocks are one stack, [layers, ...], as `lax.scan` takes them.
      dtype: of all parameters.

    Returns:
      Parameters, views and source.

    Raises:
      ValueError: for an unknown name.

    Example:
      >>> llama = model_shapes("llama3-8b", scanned=True)
      >>> llama.params["blocks"]["mlp"]["up"]["kernel"].shape, f"{llama.size:,}"
      ((32, 4096, 14336), '8,030,261,248')
      >>> llama.views["blocks"]["mlp"]["up"]["kernel"]
      MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    """
    check_choice("model", name, MODELS)
    build, sizes, source = _MODELS[name]
    leaves = build(_stack if scanned else _list, **sizes)
    kind = jnp.dtype(dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kind), leaves)
    return ModelShapes(params, jax.tree.map(lambda x: x.view, leaves), source)


def as_trained(params: Any, dtype: Any) -> Any:
    """The shapes of parameters in the dtype that they are trained in, to plan and report it.

    A published file may hold float8 weights beside their scales, which nobody trains as they are.

    Args:
      params: arrays or shape structs.
      dtype: of all floating-point leaves, real and of 16 bits or more. Others keep theirs.

    Returns:
      A tree of `jax.ShapeDtypeStruct` with the shardings of `params`.

    Raises:
      TypeError: for another dtype.

    Example:
      >>> saved = {"w": jnp.ones((2, 3), "float8_e4m3fn"), "steps": jnp.zeros((), "int32")}
      >>> {name: str(x.dtype) for name, x in as_trained(saved, "bfloat16").items()}
      {'steps': 'int32', 'w': 'bfloat16'}
    """
    if dtype is None or not is_float_dtype(dtype, jnp.floating):  # NumPy takes None for float64
        raise TypeError(f"dtype must be a real one of 16 bits or more, got {dtype!r}")

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.dtype(dtype) if is_float_leaf(x) else x.dtype
        return jax.ShapeDtypeStruct(x.shape, kind, sharding=getattr(x, "sharding", None))

    return jax.tree.map(struct, params)
