"""Trains a model with many processes; a run that was stopped goes on from its last checkpoint.

Under SLURM and Open MPI and on TPU pods the processes find each other; elsewhere say where, with
--coordinator, --processes and --process-id. See docs/multiprocess.md.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from gpt.corpus import Corpus, load_corpus, sample_windows
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import check_state, muon, state_shardings

BATCH, CONTEXT, WIDTH = 64, 8, 128
SHAPES = {
    "embedding": (256, WIDTH // CONTEXT),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "head": (WIDTH, 256),
}
ROWS = P(("replica", "fsdp"))  # each device has some of the batch's rows
TrainState = dict[str, Any]


def make_params() -> dict[str, jax.Array]:
    """Makes the initial weights."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def next_byte_loss(params: dict[str, jax.Array], text: jax.Array) -> jax.Array:
    """The mean cross-entropy of each row's last byte, in nats; text is (batch, context + 1)."""
    params = jax.sharding.reshard(params, P())  # gathered for the step, as FSDP does
    x = params["embedding"].at[text[:, :-1]].get(out_sharding=ROWS).reshape(len(text), WIDTH)
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


def open_checkpoints(folder: Path, save_every: int) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints, of which the last three are kept."""
    return ocp.CheckpointManager(
        folder.absolute(),
        options=ocp.CheckpointManagerOptions(save_interval_steps=save_every, max_to_keep=3),
        item_handlers=ocp.StandardCheckpointHandler(),
    )


def load_or_init(
    checkpoints: ocp.CheckpointManager, tx: optax.GradientTransformation, where: Any
) -> tuple[int, TrainState]:
    """Reads the last checkpoint and its step, or makes a new state where there is none."""

    def new_state() -> TrainState:
        params = make_params()
        return {"params": params, "state": tx.init(params)}

    state = state_shardings(tx, jax.eval_shape(make_params), where)
    init = jax.jit(new_state, out_shardings={"params": where, "state": state})
    step = checkpoints.latest_step()
    if step is None:
        return 0, init()
    wanted = jax.eval_shape(init)
    check_state(tx, wanted["params"], checkpoints.item_metadata(step)["state"])
    return step, checkpoints.restore(step, args=ocp.args.StandardRestore(wanted))


def make_step(tx: optax.GradientTransformation) -> Any:
    """Makes the compiled training step."""

    def step(train_state: TrainState, text: jax.Array) -> tuple[TrainState, jax.Array]:
        params = train_state["params"]
        loss, grads = jax.value_and_grad(next_byte_loss)(params, text)
        updates, state = tx.update(grads, train_state["state"], params)
        return {"params": optax.apply_updates(params, updates), "state": state}, loss

    return jax.jit(step, donate_argnums=0)


def make_batch(corpus: Corpus, step: int, mesh: Mesh) -> jax.Array:
    """The text of a step, the same on any mesh; each process takes what its devices need."""
    text = sample_windows(corpus.train, np.random.default_rng(step), BATCH, CONTEXT + 1)
    sharding = NamedSharding(mesh, ROWS)
    return jax.make_array_from_callback(text.shape, sharding, lambda index: text[index])


def train(options: argparse.Namespace) -> None:
    """Trains until the last step, or fails, when all is saved, as the cluster ends the job."""
    corpus = load_corpus(options.data, CONTEXT + 1)
    shards = options.fsdp or jax.device_count()
    mesh = jax.make_mesh((jax.device_count() // shards, shards), ("replica", "fsdp"))
    jax.set_mesh(mesh)
    where = {name: NamedSharding(mesh, P("fsdp")) for name in SHAPES}
    tx = muon(0.02, adam_learning_rate=0.003, weight_decay=0.01)
    with open_checkpoints(options.checkpoints, options.save_every) as checkpoints:
        first, train_state = load_or_init(checkpoints, tx, where)
        train_step = make_step(tx)
        for step in range(first + 1, options.steps + 1):
            train_state, loss = train_step(train_state, make_batch(corpus, step, mesh))
            if jax.process_index() == 0:
                print(f"step {step}  loss {float(loss):.8f}", flush=True)
            args = ocp.args.StandardSave(train_state)
            checkpoints.save(step, args=args, force=step == options.steps)
            if checkpoints.reached_preemption(step):
                raise SystemExit(f"told to end; step {step} is saved, start again to go on")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="of process 0, which listens there")
    add("--processes", type=int, help="how many there are")
    add("--process-id", type=int, help="which one this is, from 0")
    add("--heartbeat", type=int, default=100, help="seconds until a silent process counts as dead")
    add("--fsdp", type=int, help="devices that share one copy of the weights; None: all")
    add("--checkpoints", type=Path, required=True, help="a folder that all processes share")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--steps", type=int, default=1000, help="the last step")
    add("--data", type=Path, help="a folder of text; None: Python's library")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_options()
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process_id,
        heartbeat_timeout_seconds=options.heartbeat,
    )
    train(options)
