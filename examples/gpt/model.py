"""A small GPT over bytes."""

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["GPT"]


class Attention(nnx.Module):
    """Causal self-attention with heads of 32 dims."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        heads = (*x.shape[:2], -1, 32)
        q, k, v = (f(x).reshape(heads) for f in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    """Two layers, four times as wide in the middle, with a squared ReLU."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        return self.down(jnp.square(nnx.relu(self.up(x))))


class Block(nnx.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = MLP(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """A decoder-only transformer over bytes.

    Args:
      layers: the number of blocks.
      width: the residual stream's width, a multiple of 32.
      context: the longest input, in bytes.
      rngs: for the initial weights.
    """

    def __init__(self, layers: int, width: int, context: int, *, rngs: nnx.Rngs):
        self.tok_embed = nnx.Embed(256, width, rngs=rngs)
        self.pos_embed = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.lm_head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Maps bytes (batch, time) to the logits of the byte after each: (batch, time, 256)."""
        x = self.tok_embed(text) + self.pos_embed(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))
