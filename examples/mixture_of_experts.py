"""A mixture of experts on a mesh of experts x FSDP, in plain JAX.

Every expert is a matrix of its own: the views say that the first axis counts experts. The mesh
divides them over that axis, and so only the rows of an expert's own weights are brought together.
Run it with `python examples/mixture_of_experts.py`; on CPU it makes the 8 devices itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import MuonDimensionNumbers, muon, plan, report

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("expert", "fsdp"), axis_types=(AxisType.Auto,) * 2)

EXPERTS, WIDTH, ACTIVE = 8, 32, 2
EXPERT = MuonDimensionNumbers(1, 2)
# Shape, layout and matrix view of each weight; None is AdamW.
WEIGHTS = {
    "embed": ((8, WIDTH), P(), None),
    "router": ((WIDTH, EXPERTS), P(), None),
    "up": ((EXPERTS, WIDTH, 2 * WIDTH), P("expert", "fsdp"), EXPERT),
    "down": ((EXPERTS, 2 * WIDTH, WIDTH), P("expert", "fsdp"), EXPERT),
    "head": ((WIDTH, 8), P(), None),
}
Params = dict[str, jax.Array]


def make_params() -> Params:
    """Makes the initial weights, each in its place."""
    keys = jax.random.split(jax.random.key(0), len(WEIGHTS))
    return {
        name: jax.device_put(
            jax.random.normal(key, shape) / np.sqrt(shape[-2]), NamedSharding(mesh, spec)
        )
        for key, (name, (shape, spec, _)) in zip(keys, WEIGHTS.items(), strict=True)
    }


def gates(params: Params, x: jax.Array) -> jax.Array:
    """How much each token takes of each expert, (batch, experts); zero but for the best few."""
    scores = jax.nn.softmax(x @ params["router"])
    least = jax.lax.top_k(scores, ACTIVE)[0][:, -1:]
    return jnp.where(scores >= least, scores, 0.0)


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    """The mean squared error of a network that sorts eight numbers.

    For brevity every expert sees every token, and the gates drop what isn't wanted.
    """
    stream = x @ params["embed"]
    hidden = jax.nn.gelu(jnp.einsum("bi,eih->ebh", stream, params["up"]))
    outputs = jnp.einsum("ebh,eho->ebo", hidden, params["down"])
    stream += jnp.einsum("be,ebo->bo", gates(params, stream), outputs)
    return jnp.mean((stream @ params["head"] - jnp.sort(x)) ** 2)


@jax.jit
def train_step(params: Params, state: optax.OptState, x: jax.Array):
    """One step: gradients, the optimizer's updates, new parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = make_params()
views = {name: view for name, (_, _, view) in WEIGHTS.items()}
tx = muon(
    0.02,
    adam_learning_rate=0.003,
    muon_weight_dimension_numbers=views,
    param_shardings=params,  # on Auto axes a trace can't see how arrays are sharded
)
print(report(params, muon_weight_dimension_numbers=views))
print(plan(params, params, muon_weight_dimension_numbers=views))
state = jax.jit(tx.init)(params)
for step in range(61):
    batch = jax.random.normal(jax.random.key(step), (256, 8))
    params, state, loss = train_step(params, state, batch)
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.4f}")
