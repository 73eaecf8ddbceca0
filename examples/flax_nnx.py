"""A Flax NNX model on a mesh: weights in rows over 8 devices (FSDP), trained with `nnx.Optimizer`.

The model learns to add modulo 16. Run it with `python examples/flax_nnx.py`; on CPU it makes the
8 devices itself.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from muon_optax import muon, plan, report

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
jax.set_mesh(mesh)

N, WIDTH = 16, 64
rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))


class Adder(nnx.Module):
    """Scores every sum of two numbers below N."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(2 * N, WIDTH, embedding_init=rows, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=rows, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=rows, rngs=rngs)
        self.head = nnx.Linear(WIDTH, N, kernel_init=rows, rngs=rngs)

    def __call__(self, pairs: jax.Array) -> jax.Array:
        """Logits of the sums, (batch, N), for pairs of (batch, 2)."""
        x = self.embed(pairs + jnp.array([0, N])).sum(1)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


@nnx.jit
def train_step(model: Adder, optimizer: nnx.Optimizer, pairs: jax.Array) -> jax.Array:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(model: Adder) -> jax.Array:
        labels = pairs.sum(1) % N
        return optax.softmax_cross_entropy_with_integer_labels(model(pairs), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model = Adder(nnx.Rngs(0))
params = nnx.state(model, nnx.Param)
# On Auto axes a trace can't see how arrays are sharded: the variables' metadata says it.
tx = muon(0.02, adam_learning_rate=0.01)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
print(report(params))  # who gets Muon, and why
print(plan(params))  # what each device receives and computes

pairs = jnp.stack(jnp.meshgrid(jnp.arange(N), jnp.arange(N)), -1).reshape(-1, 2)
pairs = jax.device_put(pairs, P("fsdp"))
for step in range(41):
    loss = train_step(model, optimizer, pairs)
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
