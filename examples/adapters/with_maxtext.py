"""MaxText's parameter tree: layers are scanned over axis 1, and functions of paths give the views.

MaxText hands `optax.contrib.muon` dimension numbers that it makes from the paths of its parameters.
`muon` takes the same. The tree here has MaxText's names and axes: query [embed, layers, heads,
head_dim], out [heads, layers, head_dim, embed], wi [embed, layers, mlp], wo [mlp, layers, embed].
Run it with `python examples/adapters/with_maxtext.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import batches, check_loss

from muon_optax import MuonDimensionNumbers, flax_matrix_views, muon, report

LAYERS, EMBED, HEADS, MLP = 2, 32, 4, 128
SHAPES = {
    "token_embedder": {"kernel": (8, EMBED)},  # of rows of pixels, where MaxText has token ids
    "decoder": {
        "layers": {
            "pre_self_attention_layer_norm": {"scale": (EMBED, LAYERS)},
            "self_attention": {
                "query": {"kernel": (EMBED, LAYERS, HEADS, EMBED // HEADS)},
                "key": {"kernel": (EMBED, LAYERS, HEADS, EMBED // HEADS)},
                "value": {"kernel": (EMBED, LAYERS, HEADS, EMBED // HEADS)},
                "out": {"kernel": (HEADS, LAYERS, EMBED // HEADS, EMBED)},
            },
            "post_self_attention_layer_norm": {"scale": (EMBED, LAYERS)},
            "mlp": {
                "wi_0": {"kernel": (EMBED, LAYERS, MLP)},
                "wi_1": {"kernel": (EMBED, LAYERS, MLP)},
                "wo": {"kernel": (MLP, LAYERS, EMBED)},
            },
        },
        "logits_dense": {"kernel": (EMBED, 10)},
    },
}


def dimension_numbers(path: tuple[str, ...]) -> MuonDimensionNumbers | None:
    """The axes of a parameter by MaxText's names; None for AdamW's."""
    if path[-1] == "scale" or "token_embedder" in path or "logits_dense" in path:
        return None
    if "MoeBlock_0" in path:  # [experts, layers, in, out]
        return MuonDimensionNumbers(-2, -1)
    if "out" in path:
        return MuonDimensionNumbers((0, -2), -1)
    if {"query", "key", "value", "wq_b", "wkv_b"}.intersection(path):
        return MuonDimensionNumbers(0, (-2, -1))
    return MuonDimensionNumbers(0, -1)


def views_of(params: Any) -> Any:
    """A tree of views like the parameters, as MaxText makes it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: dimension_numbers(tuple(key.key for key in path)), params
    )


def make_params() -> Any:
    """Random kernels that keep a signal's size; scales of one."""
    rng = np.random.default_rng(0)

    def make(path: Any, shape: tuple[int, ...]) -> jax.Array:
        names = {key.key for key in path}
        if "scale" in names:
            return jnp.ones(shape)
        fan_in = EMBED if "out" in names else shape[0]
        return jnp.array(rng.normal(size=shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree_util.tree_map_with_path(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square over the last axis."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    """Attention and a gated MLP, each added to the stream (batch, rows, embed)."""
    y = norm(x, layer["pre_self_attention_layer_norm"]["scale"])
    attention = layer["self_attention"]
    q, k, v = (
        jnp.einsum("bte,ehd->bthd", y, attention[name]["kernel"])
        for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(q, k, v)
    x = x + jnp.einsum("bthd,hde->bte", y, attention["out"]["kernel"])
    y = norm(x, layer["post_self_attention_layer_norm"]["scale"])
    mlp = layer["mlp"]
    gate = jax.nn.silu(y @ mlp["wi_0"]["kernel"]) * (y @ mlp["wi_1"]["kernel"])
    return x + gate @ mlp["wo"]["kernel"], None


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy in nats, for images of (batch, 8, 8), whose rows are tokens."""
    x = images @ params["token_embedder"]["kernel"]
    layers = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params["decoder"]["layers"])
    x, _ = jax.lax.scan(block, x, layers)
    # Rows are told apart by weights that grow with the place, since there are no positions.
    x = jnp.einsum("bte,t->be", x, jnp.linspace(-1, 1, 8))
    logits = x @ params["decoder"]["logits_dense"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def step(
    params: Any, state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[Any, optax.OptState, jax.Array]:
    """One step: gradients, the optimizer's updates, new parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = make_params()
tx = muon(0.02, adam_learning_rate=0.01, muon_weight_dimension_numbers=views_of)
print(report(tx, params))

# Without MaxText's function, the scales of norms and the weights beside show the same matrices.
found = muon(0.02, muon_weight_dimension_numbers=flax_matrix_views)
for row, same in zip(report(tx, params).rows, report(found, params).rows, strict=True):
    if row.optimizer == "muon":
        assert row.matrices == same.matrices, row.path

state, losses = jax.jit(tx.init)(params), []
for images, labels in batches(60):
    params, state, loss = step(params, state, images, labels)
    losses.append(float(loss))
check_loss("MaxText's tree", losses, below=0.6)
