"""Moving a run from `optax.contrib.muon`: its state goes on, with the same losses.

`from_optax` converts the state, and `recipes.optax_muon` gives each leaf the optimizer that optax
gave it. Here optax goes on as well, to compare. Run it with `python examples/from_optax.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax import recipes
from muon_optax.interop import from_optax

Params = dict[str, jax.Array]
SHAPES = {"w1": (8, 64), "w2": (64, 64), "w3": (64, 8), "bias": (8,)}
schedule = optax.cosine_decay_schedule(0.02, 100)


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    """The mean squared error of a network that sorts eight numbers."""
    hidden = jax.nn.gelu(jax.nn.gelu(x @ params["w1"]) @ params["w2"])
    return jnp.mean((hidden @ params["w3"] + params["bias"] - jnp.sort(x)) ** 2)


@functools.partial(jax.jit, static_argnames="tx")
def train_step(
    tx: optax.GradientTransformation, params: Params, state: optax.OptState, x: jax.Array
):
    """One step: gradients, the optimizer's updates, new parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(tx: optax.GradientTransformation, params: Params, state: optax.OptState, steps: range):
    """Trains for some steps; returns parameters, state and the losses."""
    losses = []
    for step in steps:
        batch = jax.random.normal(jax.random.key(step), (256, 8))
        params, state, loss = train_step(tx, params, state, batch)
        losses.append(float(loss))
    return params, state, losses


params = {
    name: jax.random.normal(jax.random.key(i), shape) / np.sqrt(8 if name == "w1" else 64)
    for i, (name, shape) in enumerate(SHAPES.items())
}
old = optax.contrib.muon(schedule)
params, state, losses = train(old, params, old.init(params), range(50))
print(f"step  0  loss {losses[0]:.4f}")

# All that changes: the optimizer, and once, its state.
new = recipes.optax_muon(schedule)
_, _, ours = train(new, params, from_optax(state, params), range(50, 101))
_, _, theirs = train(old, params, state, range(50, 101))
for step in range(50, 101, 10):
    print(f"step {step}  loss {ours[step - 50]:.7f}  with optax {theirs[step - 50]:.7f}")
