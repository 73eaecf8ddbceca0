"""LoRA fine-tuning: a frozen base, and low-rank factors that AdamW or Muon trains.

Factors named lora_* get AdamW by default; a rule before the default ones gives them to Muon. A
frozen leaf has no state and its update is zero. A new layer, trained whole, gets Muon. Run it with
`python examples/lora.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax import Rule, default_rules, muon, report

WIDTH, RANK = 64, 4
FREEZE = Rule("base", "frozen", "pretrained")
BY_ADAMW = (FREEZE, *default_rules())
BY_MUON = (FREEZE, Rule("lora_*", "muon", "LoRA factor"), *default_rules())


def normal(seed: int, *shape: int) -> jax.Array:
    """Random weights [in, out] that keep a signal's size."""
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])


def make_params() -> dict:
    """A pretrained layer with factors beside it, the second of them zero, and a new layer."""
    return {
        "layer": {
            "base": normal(0, WIDTH, WIDTH),
            "lora_a": normal(1, WIDTH, RANK),
            "lora_b": jnp.zeros((RANK, WIDTH)),
        },
        "new": jnp.eye(WIDTH),
    }


def apply(params: dict, x: jax.Array) -> jax.Array:
    """The network's output, (batch, width)."""
    layer = params["layer"]
    return jnp.tanh(x @ layer["base"] + x @ layer["lora_a"] @ layer["lora_b"]) @ params["new"]


def make_task() -> dict:
    """The network to be learned: the base changed by a matrix of low rank, and another layer."""
    task = make_params()
    task["layer"]["lora_b"] = normal(2, RANK, WIDTH)
    return task | {"new": normal(3, WIDTH, WIDTH)}


@functools.partial(jax.jit, static_argnames="tx")
def train_step(tx: optax.GradientTransformation, params: dict, state: optax.OptState, x: jax.Array):
    """One step; the compiler leaves out the gradient of the base, which nothing uses."""
    target = apply(make_task(), x)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - target) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def fine_tune(tx: optax.GradientTransformation) -> dict:
    """Trains the factors and prints the loss."""
    params = make_params()
    state = tx.init(params)
    for step in range(101):
        batch = jax.random.normal(jax.random.key(step), (128, WIDTH))
        params, state, loss = train_step(tx, params, state, batch)
        if step % 25 == 0:
            print(f"step {step:3}  loss {loss:.5f}")
    return params


for rules in (BY_ADAMW, BY_MUON):
    tx = muon(0.02, adam_learning_rate=0.01, partition=rules)
    print(report(tx, make_params()))
    params = fine_tune(tx)
    base = make_params()["layer"]["base"]
    print(f"the base is as it was: {np.array_equal(params['layer']['base'], base)}\n")
