"""Equinox: the model is a pytree of arrays and functions; `model_rules` reads its layers.

Equinox keeps weights as [out, in], and a scale depends on it: `model_rules` reads it from the
modules. Run it with `python examples/adapters/with_equinox.py`.
"""

import equinox as eqx
import jax
import optax
from digits import batches, check_loss

from muon_optax import model_rules, muon, report

model = eqx.nn.MLP(64, 10, 128, 2, key=jax.random.key(0))
tx = muon(0.02, adam_learning_rate=0.01, partition=model_rules(model))
params = eqx.filter(model, eqx.is_inexact_array)
print(report(tx, params))


@eqx.filter_jit
def step(
    model: eqx.nn.MLP, state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[eqx.nn.MLP, optax.OptState, jax.Array]:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(model: eqx.nn.MLP) -> jax.Array:
        logits = jax.vmap(model)(images.reshape(-1, 64))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


state, losses = tx.init(params), []
for images, labels in batches(60):
    model, state, loss = step(model, state, images, labels)
    losses.append(float(loss))
check_loss("Equinox", losses, below=0.2)
