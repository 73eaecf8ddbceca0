"""Flax NNX: bfloat16 weights, whose float32 master copy is in host memory, with `nnx.Optimizer`.

A step of Muon at a rate of 0.001 is smaller than the spacing of bfloat16 around a weight, and would
be rounded away. So the optimizer steps a float32 copy, and the model gets that copy, rounded.
`with_master` wraps any optax transformation. Run it with
`python examples/adapters/with_nnx_master.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from digits import batches, check_loss
from flax import nnx

from muon_optax import muon, report


class MasterState(NamedTuple):
    """The float32 copy of the parameters, and the wrapped transformation's state."""

    master: optax.Params
    inner: optax.OptState


def with_master(
    inner: optax.GradientTransformation, space: jax.memory.Space = jax.memory.Space.Host
) -> optax.GradientTransformation:
    """Lets `inner` step a float32 copy of half-precision parameters.

    Args:
      inner: a transformation, such as `muon(...)`. It sees float32 parameters and gradients.
      space: where the copy is between steps.

    Returns:
      A transformation of float32 updates: `optax.apply_updates` adds them to the parameters in
      float32 and rounds the sum, which is the copy, once.
    """

    def init(params: optax.Params) -> MasterState:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return MasterState(jax.device_put(wide, space), inner.init(wide))

    def update(grads: Any, state: MasterState, params: Any = None) -> tuple[Any, MasterState]:
        master = jax.device_put(state.master, jax.memory.Space.Device)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner_state = inner.update(wide, state.inner, master)
        master = optax.apply_updates(master, updates)
        change = jax.tree.map(lambda new, old: new - old.astype(jnp.float32), master, params)
        return change, MasterState(jax.device_put(master, space), inner_state)

    return optax.GradientTransformation(init, update)


class Classifier(nnx.Module):
    """Three layers in bfloat16."""

    def __init__(self, rngs: nnx.Rngs):
        options = {"param_dtype": jnp.bfloat16, "rngs": rngs}
        self.first = nnx.Linear(64, 128, **options)
        self.second = nnx.Linear(128, 128, **options)
        self.head = nnx.Linear(128, 10, **options)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, (batch, 10), for images of (batch, 64)."""
        return self.head(nnx.gelu(self.second(nnx.gelu(self.first(images)))))


@nnx.jit
def step(
    model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(model: Classifier) -> jax.Array:
        logits = model(images.reshape(-1, 64)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model = Classifier(nnx.Rngs(0))
tx = muon(0.001, adam_learning_rate=0.01)
print(report(tx, nnx.state(model, nnx.Param)))
optimizer = nnx.Optimizer(model, with_master(tx), wrt=nnx.Param)
losses = []
for images, labels in batches(100):
    losses.append(float(step(model, optimizer, images, labels)))

weight = model.second.kernel.get_value()
master = optimizer.opt_state.master["second"]["kernel"].get_value()
assert weight.dtype == jnp.bfloat16
assert master.dtype == jnp.float32
assert master.sharding.memory_kind == "pinned_host"
assert jnp.array_equal(weight, jnp.asarray(jax.device_get(master)).astype(jnp.bfloat16))
print("the weights are the master copy, rounded; it is in", master.sharding.memory_kind)
check_loss("NNX with a master copy", losses, below=0.4)
