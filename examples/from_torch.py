"""Moving a run from PyTorch: weights and optimizer states go on in JAX.

torch trains a model with `torch.optim.Muon` and AdamW for a while; then both sides go on with the
same batches, to compare. torch's Muon computes in bfloat16, and so the losses agree to its
rounding. Run it with `python examples/from_torch.py`; docs/torch.md says more.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax import recipes
from muon_optax.interop import torch as interop

try:
    import torch
except ImportError:
    sys.exit("this example needs PyTorch: pip install 'muon-optax[torch]'")

RATE = 0.02


def make_batch(step: int) -> np.ndarray:
    """Random numbers, eight in a row, that the models learn to sort."""
    return np.random.default_rng(step).standard_normal((256, 8), np.float32)


# The run in torch: Muon has the weights, AdamW the biases.
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU("tanh"), torch.nn.Linear(64, 8))
weights = {name: p for name, p in model.named_parameters() if p.ndim == 2}
biases = {name: p for name, p in model.named_parameters() if p.ndim < 2}
optimizers = [
    torch.optim.Muon(weights.values(), RATE, weight_decay=0.0),
    torch.optim.AdamW(biases.values(), RATE, weight_decay=0.0),
]


def torch_step(step: int) -> float:
    """One step of all optimizers; returns the loss before it."""
    x = torch.from_numpy(make_batch(step))
    loss = torch.nn.functional.mse_loss(model(x), x.sort(1).values)
    model.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


losses = [torch_step(step) for step in range(20)]
print(f"step  0  loss {losses[0]:.4f}")

# The same model in Flax; a layout says what its layers are called in torch.
network = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(8)])
like = jax.eval_shape(network.init, jax.random.key(0), make_batch(0))["params"]
layout = interop.TorchLayout(rename=((r"layers_(\d+)", r"\1"),))
params = interop.from_state_dict(model.state_dict(), like, layout)
tx = recipes.torch_muon(RATE, weight_decay=0.0)
state = interop.from_optimizer_state(
    tx.init(params),
    params,
    [optimizer.state_dict() for optimizer in optimizers],
    count=20,  # torch's Muon doesn't keep it
    names=[list(weights), list(biases)],
    layout=layout,
)


@jax.jit
def jax_step(params: optax.Params, state: optax.OptState, x: jax.Array):
    """One step: gradients, the optimizer's updates, new parameters."""

    def loss_fn(params: optax.Params) -> jax.Array:
        return jnp.mean((network.apply({"params": params}, x) - jnp.sort(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for step in range(20, 41):
    params, state, loss = jax_step(params, state, make_batch(step))
    theirs = torch_step(step)
    if step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}  with torch {theirs:.4f}")
