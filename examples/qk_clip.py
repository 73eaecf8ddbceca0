"""QK-clip: attention logits that stay below a bound (MuonClip of Kimi K2).

A small attention model learns to reverse sequences of digits, and the logits of its heads grow as
attention gets sharper. With QK-clip they don't pass the bound by more than one step adds. The
module sows the largest logit of each head, and the update takes them. Run it with
`python examples/qk_clip.py`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from muon_optax import Attention, HeadWeight, clip_qk, flax_matrix_views, recipes

HEADS, WIDTH, LENGTH, STEPS, TAU = 4, 32, 12, 81, 20.0
# Flax's kernels of queries and keys are [width, heads, dims].
WEIGHTS = {"query/kernel": HeadWeight("query", 1), "key/kernel": HeadWeight("key", 1)}
QK_HEADS = {"attention": Attention(HEADS, WEIGHTS)}
Transformation = optax.GradientTransformationExtraArgs


class Model(nn.Module):
    """Scores the ten digits at every place, and sows the largest logit of each head."""

    @nn.compact
    def __call__(self, digits: jax.Array) -> jax.Array:
        """Scores, (batch, length, 10), for digits of (batch, length)."""

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            logits = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
            self.sow("intermediates", "max_logits", jnp.max(logits, (0, 2, 3)))
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value)

        places = self.param("pos_embed", nn.initializers.normal(1.0), (LENGTH, WIDTH))
        x = nn.Embed(10, WIDTH, name="embed")(digits) + places
        attention = nn.MultiHeadDotProductAttention(
            HEADS, use_bias=False, attention_fn=attend, name="attention"
        )
        x = x + attention(nn.RMSNorm()(x))
        return nn.Dense(10, use_bias=False, name="head")(nn.RMSNorm()(x))


model = Model()


@jax.jit
def loss_fn(params: optax.Params, digits: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """The mean cross-entropy in nats, and the largest logits: {'attention': (heads,)}."""
    variables: Any = {"params": params}
    scores, sown = model.apply(variables, digits, mutable="intermediates")
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, digits[:, ::-1]).mean()
    (max_logits,) = sown["intermediates"]["max_logits"]  # one for each call
    return loss, {"attention": max_logits}


@functools.partial(jax.jit, static_argnames="tx")
def train_step(tx: Transformation, params: Any, state: Any, digits: jax.Array) -> Any:
    """One step; an optimizer without QK-clip has no use for `max_logits`."""
    (loss, max_logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, digits)
    updates, state = tx.update(grads, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state, loss, max_logits["attention"]


def make_batch(step: int) -> jax.Array:
    """Random digits, (batch, length)."""
    return jax.random.randint(jax.random.key(step), (64, LENGTH), 0, 10)


def train(name: str, tx: Transformation) -> Any:
    """Trains from the same start, and prints the largest logit of each head on the way."""
    print(name)
    params = jax.jit(model.init)(jax.random.key(0), make_batch(0))["params"]
    state = tx.init(params)
    for step in range(STEPS):
        params, state, loss, logits = train_step(tx, params, state, make_batch(step))
        if step % 20 == 0:
            print(f"step {step:2}  loss {loss:.4f}  max logits {shown(logits)}")
    return params


def shown(logits: jax.Array) -> str:
    """One number for each head."""
    return " ".join(f"{logit:7.2f}" for logit in logits)


options = {"weight_decay": 0.0, "muon_weight_dimension_numbers": flax_matrix_views}
rate = optax.linear_schedule(0.1, 0.0, STEPS)
plain = train("without QK-clip:", recipes.moonlight(rate, **options))
clip = recipes.muonclip(rate, heads=QK_HEADS, tau=TAU, **options)
train(f"\nwith QK-clip at {TAU}:", clip)

print("\nthe weights that were trained without it, before and after `clip_qk`:")
before, max_logits = loss_fn(plain, make_batch(0))
clipped = clip_qk(plain, max_logits, TAU, heads=QK_HEADS)
after, new_logits = loss_fn(clipped, make_batch(0))
print(f"before   loss {before:.4f}  max logits {shown(max_logits['attention'])}")
print(f"after    loss {after:.4f}  max logits {shown(new_logits['attention'])}")
