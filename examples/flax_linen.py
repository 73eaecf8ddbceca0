"""A Flax Linen transformer: layers stacked by `nn.scan`, trained with a `TrainState`.

The model learns to reverse a sequence of digits. `flax_matrix_views` says which axes make the
matrices: in a stack each layer's, in attention all heads together. Run it with
`python examples/flax_linen.py`.
"""

import functools

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState

from muon_optax import flax_matrix_views, muon, report

LAYERS, WIDTH, LENGTH = 2, 32, 8


class Block(nn.Module):
    """Attention and an MLP, with the signature that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Adds to the stream, (batch, length, width)."""
        x = x + nn.MultiHeadAttention(4, use_bias=False, name="attention")(nn.RMSNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, name="up")(nn.RMSNorm()(x)))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(hidden), None


class Transformer(nn.Module):
    """Scores the ten digits at every place."""

    @nn.compact
    def __call__(self, digits: jax.Array) -> jax.Array:
        """Logits, (batch, length, 10), for digits of (batch, length)."""
        places = self.param("pos_embed", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        x = nn.Embed(10, WIDTH, name="embed")(digits) + places
        stack = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(10, use_bias=False, name="head")(nn.RMSNorm()(x))


@jax.jit
def train_step(state: TrainState, digits: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, digits)
        return optax.softmax_cross_entropy_with_integer_labels(logits, digits[:, ::-1]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def make_batch(step: int) -> jax.Array:
    """Random digits, (batch, length)."""
    return jax.random.randint(jax.random.key(step), (64, LENGTH), 0, 10)


model = Transformer()
params = jax.jit(model.init)(jax.random.key(0), make_batch(0))["params"]
views = functools.partial(flax_matrix_views, scanned="layers")
tx = muon(0.02, adam_learning_rate=0.003, muon_weight_dimension_numbers=views)
print(report(tx, params))
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
for step in range(61):
    state, loss = train_step(state, make_batch(step))
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
