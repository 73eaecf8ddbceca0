"""Views of the parameters of Flax NNX's own modules."""

from typing import Any

import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import oracle
import pytest
from flax import nnx
from model_reading import check_outer, said

from muon_optax import model_rules

KEY = jax.random.key(0)


def params_of(model: nnx.Module) -> Any:
    return nnx.state(model, nnx.Param)


def read(model: nnx.Module, *inputs: Any, **options: Any) -> dict[str, Any]:
    return said(model_rules(model, *inputs, **options), params_of(model))


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


BIAS = {"bias": "bias of LinearGeneral"}
MODULES = {
    "Linear": (
        lambda r: nnx.Linear(4, 6, rngs=r),
        {"kernel": [(1, 4, 6)], "bias": "bias of Linear"},
    ),
    "LinearGeneral": (
        lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=r),
        {"kernel": [(1, 6, 20)], **BIAS},
    ),
    "LinearGeneral, batched": (
        lambda r: nnx.LinearGeneral(3, (4, 5), batch_axis={0: 2}, rngs=r),
        {"kernel": [(2, 3, 20)], **BIAS},
    ),
    "Einsum": (
        lambda r: nnx.Einsum("btd,ndh->btnh", (2, 6, 3), (2, 3), rngs=r),
        {"kernel": [(1, 6, 6)], "bias": "bias of Einsum"},
    ),
    "Einsum of experts": (
        lambda r: nnx.Einsum("etd,edf->etf", (4, 3, 5), rngs=r),
        {"kernel": [(4, 3, 5)]},
    ),
    "Gemma's qkv_einsum": (
        lambda r: nnx.Einsum("BTD,SNDH->SBTNH", (3, 4, 64, 16), rngs=r),
        {"kernel": [(3, 64, 64)]},
    ),
    "Gemma's kv_einsum": (
        lambda r: nnx.Einsum("BSD,CKDH->CBSKH", (2, 2, 64, 16), rngs=r),
        {"kernel": [(2, 64, 32)]},
    ),
    "Conv": (
        lambda r: nnx.Conv(4, 6, (3, 2), rngs=r),
        {"kernel": [(1, 24, 6)], "bias": "bias of Conv"},
    ),
    "Conv of grey images": (
        lambda r: nnx.Conv(1, 6, (3, 3), use_bias=False, rngs=r),
        {"kernel": [(1, 9, 6)]},
    ),
    "Conv, grouped": (
        lambda r: nnx.Conv(4, 6, (3,), feature_group_count=2, use_bias=False, rngs=r),
        {"kernel": [(2, 6, 3)]},
    ),
    "Conv, depthwise": (
        lambda r: nnx.Conv(4, 8, (3,), feature_group_count=4, use_bias=False, rngs=r),
        {"kernel": "depthwise kernel of Conv"},
    ),
    "ConvTranspose": (
        lambda r: nnx.ConvTranspose(4, 6, (3,), use_bias=False, rngs=r),
        {"kernel": [(1, 12, 6)]},
    ),
    "ConvTranspose, transposed": (
        lambda r: nnx.ConvTranspose(4, 6, (3,), use_bias=False, transpose_kernel=True, rngs=r),
        {"kernel": [(1, 12, 6)]},
    ),
    "Embed": (lambda r: nnx.Embed(9, 4, rngs=r), {"embedding": "embedding table of Embed"}),
    "LayerNorm": (
        lambda r: nnx.LayerNorm(4, rngs=r),
        {n: "norm of LayerNorm" for n in ("scale", "bias")},
    ),
    "BatchNorm": (
        lambda r: nnx.BatchNorm(4, rngs=r),
        {n: "norm of BatchNorm" for n in ("scale", "bias")},
    ),
    "GroupNorm": (
        lambda r: nnx.GroupNorm(4, 2, rngs=r),
        {n: "norm of GroupNorm" for n in ("scale", "bias")},
    ),
    "InstanceNorm": (
        lambda r: nnx.InstanceNorm(4, rngs=r),
        {n: "norm of InstanceNorm" for n in ("scale", "bias")},
    ),
    "RMSNorm": (lambda r: nnx.RMSNorm(4, rngs=r), {"scale": "norm of RMSNorm"}),
    "LoRA": (
        lambda r: nnx.LoRA(4, 2, 6, base_module=nnx.Linear(4, 6, use_bias=False, rngs=r), rngs=r),
        {
            "base_module/kernel": [(1, 4, 6)],
            "lora_a": "LoRA factor of LoRA",
            "lora_b": "LoRA factor of LoRA",
        },
    ),
    "LSTMCell": (
        lambda r: nnx.LSTMCell(4, 6, rngs=r),
        {f"{g}/kernel": [(1, 4, 6)] for g in ("ii", "if_", "ig", "io")}
        | {f"h{g}/kernel": [(1, 6, 6)] for g in "ifgo"}
        | {f"h{g}/bias": "bias of Linear" for g in "ifgo"},
    ),
    "OptimizedLSTMCell": (
        lambda r: nnx.OptimizedLSTMCell(4, 6, rngs=r),
        {
            "dense_i/kernel": [(4, 4, 6)],
            "dense_h/kernel": [(4, 6, 6)],
            "dense_h/bias": "bias of Linear",
        },
    ),
    "GRUCell": (
        lambda r: nnx.GRUCell(4, 6, rngs=r),
        {
            "dense_i/kernel": [(3, 4, 6)],
            "dense_h/kernel": [(3, 6, 6)],
            "dense_i/bias": "bias of Linear",
        },
    ),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 6, 8, use_bias=False, rngs=r),
        {f"{n}/kernel": [(1, 6, 8)] for n in ("query", "key", "value")}
        | {"out/kernel": [(1, 8, 6)]},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, expected = MODULES[name]
    assert read(nnx.eval_shape(lambda: make(rngs()))) == expected


# The input's shape, and the input of one position as the layer's matrix takes it.
ONE_POSITION = {
    "LinearGeneral": ((1, 1, 2, 3), lambda x: x[0, 0].reshape(-1)),
    "Gemma's kv_einsum": ((1, 1, 64), lambda x: x[0, 0]),
    "Conv": ((1, 3, 2, 4), lambda x: x.reshape(-1)),
    "Conv, grouped": ((1, 3, 4), lambda x: x[0].reshape(3, 2, 2).swapaxes(0, 1).reshape(2, 6)),
    "ConvTranspose": ((1, 3, 4), lambda x: x.reshape(-1)),
    "ConvTranspose, transposed": ((1, 3, 4), lambda x: x[0, ::-1].reshape(-1)),
}


@pytest.mark.parametrize("name", ONE_POSITION)
def test_views_by_what_the_layer_computes(name):
    """The oracle of `model_reading`, of the only output of a window or of one token."""
    make, _ = MODULES[name]
    shape, taken = ONE_POSITION[name]
    x = oracle.gaussian(*shape).astype(np.float32)

    def loss(model: Any) -> Any:
        y = model(x)
        middle = tuple((n - 1) // 2 for n in y.shape[1:-1]) if "Conv" in name else ()
        y = y[(0, *middle)]
        return (y * oracle.gaussian(*y.shape, seed=1)).sum()

    gradient = jax.jit(lambda: nnx.grad(loss)(make(rngs())).kernel[...])()
    model = nnx.eval_shape(lambda: make(rngs()))
    view = model_reading.views_of(model_rules(model), params_of(model))["kernel"]
    check_outer(view, gradient, taken(x))
