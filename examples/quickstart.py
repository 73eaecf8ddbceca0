"""Muon in a training loop: a small network learns to multiply two numbers."""

import jax
import jax.numpy as jnp
import optax

from muon_optax import muon

Params = dict[str, jax.Array]

shapes = {"embed": (2, 64), "hidden": (64, 64), "head": (64, 1)}
params = {
    name: jax.random.normal(jax.random.key(i), shape) / jnp.sqrt(shape[0])
    for i, (name, shape) in enumerate(shapes.items())
}
tx = muon(0.02, adam_learning_rate=0.003)  # Muon for 'hidden', AdamW for 'embed' and 'head'


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    """The mean squared error of the product that the network learns."""
    hidden = jax.nn.gelu(jax.nn.gelu(x @ params["embed"]) @ params["hidden"])
    return jnp.mean((hidden @ params["head"] - x[:, :1] * x[:, 1:]) ** 2)


@jax.jit
def train_step(params: Params, opt_state: optax.OptState, x: jax.Array):
    """One step: gradients, the optimizer's updates, new parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


opt_state = tx.init(params)
for step in range(101):
    batch = jax.random.normal(jax.random.key(step), (256, 2))
    params, opt_state, loss = train_step(params, opt_state, batch)
    if step % 20 == 0:
        print(f"step {step:3}  loss {loss:.4f}")
