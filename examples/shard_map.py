"""Muon inside your own `shard_map`: FSDP by hand, in plain JAX.

Each device holds a block of every weight, gathers whole weights for its part of the batch, and gets
its block of the summed gradient back. In there the optimizer sees blocks too, so it is told how
they make up the matrices, by `param_shardings`; without it, it refuses to take a block for a
matrix. Run it with `python examples/shard_map.py`; on CPU it makes the 8 devices itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import muon, plan, state_shardings

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("fsdp",))

SHAPES = {"embed": (8, 64), "up": (64, 128), "down": (128, 64), "head": (64, 8)}
SPECS = {"embed": P(None, "fsdp"), "up": P("fsdp"), "down": P(None, "fsdp"), "head": P("fsdp")}
Params = dict[str, jax.Array]

rows = NamedSharding(mesh, P("fsdp"))
where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
keys = jax.random.split(jax.random.key(0), len(SHAPES))
params = {
    name: jax.random.normal(key, shape) / np.sqrt(shape[0])
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
}
params = jax.device_put(params, where)
tx = muon(0.02, adam_learning_rate=0.003, param_shardings=SPECS)


def gather(block: jax.Array, spec: P) -> jax.Array:
    """The whole weight; the gradient goes the other way, summed and cut in blocks."""
    return jax.lax.all_gather(block, "fsdp", axis=spec.index("fsdp"), tiled=True)


def loss_fn(blocks: Params, x: jax.Array) -> jax.Array:
    """This device's share of the mean squared error; x is its part of the batch."""
    whole = jax.tree.map(gather, blocks, SPECS)
    stream = x @ whole["embed"]
    stream += jax.nn.gelu(stream @ whole["up"]) @ whole["down"]
    error = stream @ whole["head"] - jnp.sort(x)
    return jnp.mean(error**2) / mesh.size


state_where = state_shardings(tx, params)
state_specs = jax.tree.map(lambda sharding: sharding.spec, state_where)


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(SPECS, state_specs, P("fsdp")),
    out_specs=(SPECS, state_specs, P()),
)
def train_step(blocks: Params, state: optax.OptState, x: jax.Array):
    """One step on each device: its blocks of parameters and state, and the loss of all."""
    share, grads = jax.value_and_grad(loss_fn)(blocks, x)
    updates, state = tx.update(grads, state, blocks)
    return optax.apply_updates(blocks, updates), state, jax.lax.psum(share, "fsdp")


print(plan(tx, params))  # what each device receives and computes
state = jax.jit(tx.init, out_shardings=state_where)(params)
for step in range(61):
    batch = jax.random.normal(jax.random.key(step), (256, 8))
    params, state, loss = train_step(params, state, jax.device_put(batch, rows))
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
