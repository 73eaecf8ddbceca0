"""Layers in a stack under `lax.scan`, on a mesh of FSDP x tensor parallelism, in plain JAX.

The mesh has Explicit axes, so the optimizer sees how every weight is sharded and needs to be told
only that the first axis of a stack counts layers. Run it with `python examples/scanned_layers.py`;
on CPU it makes the 8 devices itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from muon_optax import MuonDimensionNumbers, muon, plan, report

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
jax.set_mesh(mesh)

LAYERS, WIDTH = 4, 32
SHAPES = {
    "embed": (8, WIDTH),
    "layers": {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)},
    "head": (WIDTH, 8),
}
SPECS = {
    "embed": P(None, "fsdp"),
    "layers": {"up": P(None, "fsdp", "tp"), "down": P(None, "tp", "fsdp")},
    "head": P("fsdp"),
}
VIEWS = {"embed": None, "layers": MuonDimensionNumbers(1, 2), "head": None}  # None: AdamW


def make_params() -> optax.Params:
    """Makes the initial weights, each in its place."""
    shapes, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    weights = [
        jax.random.normal(key, shape) / np.sqrt(shape[-2])
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return jax.device_put(
        tree.unflatten(weights), jax.tree.map(lambda s: NamedSharding(mesh, s), SPECS)
    )


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """A residual MLP: weights are gathered over fsdp, the hidden units stay divided over tp."""
    up, down = reshard(weights["up"], P(None, "tp")), reshard(weights["down"], P("tp", None))
    hidden = jax.nn.gelu(x @ up)
    return x + jnp.matmul(hidden, down, out_sharding=P("fsdp")), None


def loss_fn(params: optax.Params, x: jax.Array) -> jax.Array:
    """The mean squared error of a network that sorts eight numbers."""
    stream, _ = jax.lax.scan(layer, x @ reshard(params["embed"], P()), params["layers"])
    return jnp.mean((stream @ reshard(params["head"], P()) - jnp.sort(x)) ** 2)


tx = muon(0.02, adam_learning_rate=0.003, muon_weight_dimension_numbers=VIEWS)


@jax.jit
def train_step(params: optax.Params, state: optax.OptState, x: jax.Array):
    """One step: gradients, the optimizer's updates, new parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = make_params()
print(report(tx, params))
print(plan(tx, params))
state = jax.jit(tx.init)(params)
for step in range(61):
    batch = jax.random.normal(jax.random.key(step), (256, 8))
    params, state, loss = train_step(params, state, jax.device_put(batch, P("fsdp")))
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
