"""QK-clip on the parameter trees of Flax's own attention, whose logits the modules compute."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from flax import nnx
from running import apply_compiled, first_update

from muon_optax import Attention, HeadWeight, clip_qk, flax_matrix_views, muon, qk_clip

HEADS, DIMS, WIDTH, LAYERS, ALPHA = 4, 6, 24, 2, 0.3
# Kernels are [..., width, heads, dims] and biases [..., heads, dims].
WEIGHTS = {
    "query/kernel": HeadWeight("query", -2),
    "query/bias": HeadWeight("query", -2),
    "key/kernel": HeadWeight("key", -2),
    "key/bias": HeadWeight("key", -2),
}
INPUTS = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)


def logits_of(query: jax.Array, key: jax.Array) -> jax.Array:
    """All logits (batch, heads, queries, keys), as an `attention_fn` is to form them."""
    key = jnp.repeat(key, query.shape[-2] // key.shape[-2], -2)
    return jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5


def random_like(params: Any) -> Any:
    """Parameters whose biases aren't zero."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    return treedef.unflatten(
        [np.asarray(rng.normal(size=x.shape) / WIDTH**0.4, np.float32) for x in leaves]
    )


class LinenBlock(nn.Module):
    """One attention of Linen, with the signature that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        def attend(query, key, value):
            self.sow("intermediates", "logits", logits_of(query, key))
            return value

        features = HEADS * DIMS
        nn.MultiHeadDotProductAttention(
            HEADS, qkv_features=features, attention_fn=attend, name="attn"
        )(x)
        return x, None


class LinenStack(nn.Module):
    """Layers in one leaf."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes: Any = {"params": 0, "intermediates": 0}
        layers = nn.scan(LinenBlock, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        return layers(name="layers")(x, None)[0]


def linen(model: nn.Module, *path: str) -> tuple[Any, Callable[[Any], jax.Array]]:
    """Parameters, and what computes their logits."""
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), INPUTS)["params"])

    def logits(params: Any) -> jax.Array:
        found: Any = model.apply({"params": params}, INPUTS, mutable="intermediates")[1]
        for name in ("intermediates", *path):
            found = found[name]
        return found["logits"][0]

    return params, jax.jit(logits)


class NnxBlock(nnx.Module):
    """One attention of NNX."""

    def __init__(self, rngs: nnx.Rngs, key_heads: int) -> None:
        self.attn = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            HEADS * DIMS,
            num_kv_heads=key_heads,
            decode=False,
            attention_fn=self.attend,
            rngs=rngs,
        )

    @staticmethod
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
        SEEN.append(logits_of(query, key))
        return query


SEEN: list[jax.Array] = []


def nnx_logits(model: Any) -> jax.Array:
    """The logits of the attention of one layer."""
    model.attn(INPUTS)
    return SEEN.pop()


def nnx_params(key_heads: int, *, stacked: bool) -> tuple[Any, Callable[[Any], jax.Array]]:
    """The parameters as a state of NNX, and what computes their logits."""
    make = lambda rngs: NnxBlock(rngs, key_heads)  # noqa: E731
    if stacked:
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(make, in_axes=0, out_axes=0))
    graph, params, rest = nnx.split(nnx.jit(make)(nnx.Rngs(0)), nnx.Param, ...)

    def logits(params: Any) -> jax.Array:
        of_layer = lambda params, rest: nnx_logits(nnx.merge(graph, params, rest))  # noqa: E731
        return jax.vmap(of_layer)(params, rest) if stacked else of_layer(params, rest)

    return random_like(params), jax.jit(logits)


CASES: dict[str, Any] = {
    "Linen": (lambda: linen(LinenBlock()), "attn", HEADS),
    "Linen, nn.scan": (lambda: linen(LinenStack(), "layers"), "layers/attn", HEADS),
    "NNX": (lambda: nnx_params(HEADS, stacked=False), "attn", HEADS),
    "NNX, GQA": (lambda: nnx_params(2, stacked=False), "attn", 2),
    "NNX, nnx.vmap": (lambda: nnx_params(HEADS, stacked=True), "attn", HEADS),
    "NNX, GQA, nnx.vmap": (lambda: nnx_params(2, stacked=True), "attn", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_the_module_are_scaled(name):
    """By g in every pair of tokens, so that the largest of a clipped head is at the bound."""
    make, path, key_heads = CASES[name]
    params, logits = make()
    before = np.asarray(logits(params))
    largest = before.max((-4, -2, -1))
    of_keys = largest.reshape(*largest.shape[:-1], key_heads, -1).max(-1)
    tau = float(of_keys.min() + of_keys.max()) / 2  # between the heads
    heads = {path: Attention(HEADS, WEIGHTS, key_heads)}
    clip = jax.jit(lambda params: clip_qk(params, {path: largest}, tau, ALPHA, heads=heads))
    after = np.asarray(logits(clip(params)))
    g = np.repeat(np.minimum(1, tau / of_keys.astype(np.float64)), HEADS // key_heads, -1)
    assert g.min() < 0.9
    assert g.max() == 1
    want = np.expand_dims(g, (-4, -2, -1)) * before
    np.testing.assert_allclose(after, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.max(), tau, rtol=1e-5)


def test_an_optimizer_of_nnx_hands_the_logits_on():
    """`nnx.Optimizer.update` passes `max_logits` to the chain."""
    model, logits = nnx.jit(NnxBlock, static_argnums=1)(nnx.Rngs(0), HEADS), nnx.jit(nnx_logits)
    largest = np.asarray(logits(model)).max((0, 2, 3))
    tau, heads = float(largest.min() / 2), {"attn": Attention(HEADS, WEIGHTS)}
    plain: Any = muon(0.1, sharded.FAST, muon_weight_dimension_numbers=flax_matrix_views)
    params = nnx.state(model, nnx.Param)
    moved = apply_compiled(params, first_update(plain, params, jit=True))
    graph = nnx.graphdef(model)
    unclipped = logits(nnx.merge(graph, moved, nnx.state(model, nnx.Not(nnx.Param))))
    optimizer = nnx.Optimizer(model, optax.chain(plain, qk_clip(tau, heads=heads)), wrt=nnx.Param)
    nnx.jit(lambda model, optimizer: optimizer.update(model, params, max_logits={"attn": largest}))(
        model, optimizer
    )
    want = (tau / largest)[:, None, None] * unclipped
    np.testing.assert_allclose(logits(model), want, rtol=1e-5, atol=1e-5)
