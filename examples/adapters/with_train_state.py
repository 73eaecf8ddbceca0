"""Flax Linen's `TrainState`: attention over the rows of an image, its heads read by `model_rules`.

Run it with `python examples/adapters/with_train_state.py`.
"""

import flax.linen as nn
import jax
import optax
from digits import batches, check_loss
from flax.training.train_state import TrainState

from muon_optax import model_rules, muon, report


class Reader(nn.Module):
    """One block over the eight rows of an image."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, (batch, 10), for images of (batch, 8, 8)."""
        places = self.param("pos_embed", nn.initializers.normal(0.1), (8, 32))
        x = nn.Dense(32)(images) + places
        x = x + nn.MultiHeadAttention(4, use_bias=False, name="attention")(nn.RMSNorm()(x))
        x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.RMSNorm()(x))))
        return nn.Dense(10, name="head")(x.mean(1))


@jax.jit
def step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Reader()
inputs = jax.ShapeDtypeStruct((128, 8, 8), "float32")
params = jax.jit(model.init)(jax.random.key(0), jax.numpy.ones(inputs.shape))["params"]
tx = muon(0.02, adam_learning_rate=0.01, partition=model_rules(model, inputs))
print(report(tx, params))
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for images, labels in batches(70):
    state, loss = step(state, images, labels)
    losses.append(float(loss))
check_loss("Flax TrainState", losses, below=0.6)
