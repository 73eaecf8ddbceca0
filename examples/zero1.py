"""ZeRO-1 under HSDP: each gradient goes by one reduce-scatter to where its momentum is.

Replicas hold the same shards of every weight and train on their own part of the batch. Weights of
the type `reduced={"replica"}` leave their gradients unreduced over the replicas: each device has a
summand. `muon` shards the moments over the replicas, too, has each sum where its moments are, and
sends the updates to all replicas. Run it with `python examples/zero1.py`; on CPU it makes the 8
devices itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from muon_optax import muon, plan, state_shardings

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
jax.set_mesh(mesh)

SHAPES = {"embed": (8, 64), "up": (64, 128), "down": (128, 64), "head": (64, 8)}
Params = dict[str, jax.Array]

# A bias stays plain: what is reduced may meet what is sharded in matmuls alone.
where = dict.fromkeys(SHAPES, P("fsdp", reduced=frozenset({"replica"}))) | {"bias": P()}
whole = P(reduced=frozenset({"replica", "fsdp"}))
keys = jax.random.split(jax.random.key(0), len(SHAPES))
params: Params = {
    name: jax.random.normal(key, shape) / np.sqrt(shape[0])
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
}
params["bias"] = jnp.zeros(128)
params = {
    name: jax.device_put(p, jax.NamedSharding(mesh, where[name])) for name, p in params.items()
}
tx = muon(0.02, adam_learning_rate=0.003)


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    """Mean squared error; x is sharded over all devices, and weights are gathered for it."""
    embed, up, down, head = (jax.sharding.reshard(params[name], whole) for name in SHAPES)
    stream = x @ embed
    stream += jax.nn.gelu(stream @ up + params["bias"]) @ down
    return jnp.mean((stream @ head - jnp.sort(x)) ** 2)


@jax.jit
def train_step(params: Params, state: optax.OptState, x: jax.Array):
    """One step; the types say all that the optimizer has to know."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


print(plan(tx, params))  # the gradients' reduce-scatter is a row
state = jax.jit(tx.init)(params)
moments = state_shardings(tx, params).inner_states["adam"].inner_state[0].mu
print(f"moments of the embedding: {moments['embed'].spec}, of the bias: {moments['bias'].spec}")
for step in range(61):
    batch = jax.random.normal(jax.random.key(step), (256, 8))
    batch = jax.device_put(batch, jax.NamedSharding(mesh, P(("replica", "fsdp"))))
    params, state, loss = train_step(params, state, batch)
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
