"""Haiku: what `hk.transform` returns, and example inputs, are all that `model_rules` needs.

Run it with `python examples/adapters/with_haiku.py`; `pip install dm-haiku` brings Haiku.
"""

import haiku as hk
import jax
import optax
from digits import batches, check_loss

from muon_optax import model_rules, muon, report

model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 128, 10])(x)))
inputs = jax.ShapeDtypeStruct((128, 64), "float32")
tx = muon(0.02, adam_learning_rate=0.01, partition=model_rules(model, inputs))


@jax.jit
def step(
    params: hk.Params, state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[hk.Params, optax.OptState, jax.Array]:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(params: hk.Params) -> jax.Array:
        logits = model.apply(params, images.reshape(-1, 64))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = model.init(jax.random.key(0), jax.numpy.ones(inputs.shape))
print(report(tx, params))
state, losses = tx.init(params), []
for images, labels in batches(60):
    params, state, loss = step(params, state, images, labels)
    losses.append(float(loss))
check_loss("Haiku", losses, below=0.2)
