"""Trains a byte-level GPT on the source of Python's standard library, with Muon and with AdamW."""

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
from flax import nnx
from gpt.config import Config, parse_options
from gpt.corpus import Corpus, load_corpus, sample_windows, spread_windows
from gpt.curves import Curve, compare, plot_curves, save_curves
from gpt.layout import make_mesh, shard_batch, shard_parameters
from gpt.model import GPT
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from muon_optax import muon, plan, report


def make_optimizer(name: str, config: Config, mesh: Mesh) -> optax.GradientTransformation:
    """Makes 'muon' or 'adamw', with the same clipping, warm-up, decay and weight decay."""
    adamw_lr = warmup_cosine(config.adamw_lr, config.steps)
    if name == "adamw":
        tx = optax.adamw(adamw_lr, b2=0.95, weight_decay=config.weight_decay)
    else:
        tx = muon(
            warmup_cosine(config.lr, config.steps),
            config.schedule,
            weight_decay=config.weight_decay,
            adam_learning_rate=adamw_lr,
            adam_b2=0.95,
            adam_weight_decay=config.weight_decay,
            param_shardings=shard_parameters(abstract_parameters(config), mesh),
        )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def warmup_cosine(peak: float, steps: int) -> optax.Schedule:
    """Rises to the peak over a tenth of the steps, then falls to zero along a cosine."""
    return optax.warmup_cosine_decay_schedule(peak / 10, peak, steps // 10, steps)


def make_model(config: Config) -> GPT:
    """Makes the model with its initial weights."""
    return GPT(config.layers, config.width, config.context, rngs=nnx.Rngs(config.seed))


def abstract_parameters(config: Config) -> nnx.State:
    """The shapes and dtypes of the model's parameters."""
    return nnx.state(nnx.eval_shape(lambda: make_model(config)), nnx.Param)


def create_state(
    config: Config, tx: optax.GradientTransformation, mesh: Mesh
) -> tuple[GPT, nnx.Optimizer]:
    """Makes the model and the optimizer, sharded over the mesh."""
    model = make_model(config)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(params, shard_parameters(params, mesh)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def next_byte_loss(model: GPT, text: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next byte, in nats; text has shape (batch, time + 1)."""
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    """Updates the model in place and returns the loss it had; text has shape (batch, time + 1)."""
    loss, grads = nnx.value_and_grad(next_byte_loss)(model, text)
    optimizer.update(model, grads)
    return loss


def train(
    tx: optax.GradientTransformation,
    config: Config,
    corpus: Corpus,
    mesh: Mesh,
    on_step: Callable[[int, float, float], None],
) -> Curve:
    """Trains a model.

    Args:
      tx: the optimizer.
      config: what to train and how.
      corpus: the text.
      mesh: the devices to train on.
      on_step: called after each step with its number, its loss and the training seconds so far.

    Returns:
      The learning curve, with about forty evaluations.
    """
    model, optimizer = create_state(config, tx, mesh)
    batches = training_batches(corpus, config, mesh)
    compiled_step = train_step.lower(model, optimizer, next(batches)).compile()
    validate = make_validation(corpus, config, mesh)
    curve, losses, seconds = Curve(), [], 0.0
    evaluate_every = max(1, config.steps // 40)
    for step, text in enumerate(itertools.islice(batches, config.steps), start=1):
        started = time.perf_counter()
        losses.append(float(compiled_step(model, optimizer, text)))
        seconds += time.perf_counter() - started
        on_step(step, losses[-1], seconds)
        if step % evaluate_every == 0 or step == config.steps:
            curve.record(step, float(np.mean(losses)), validate(model), seconds)
            losses.clear()
    return curve


def training_batches(corpus: Corpus, config: Config, mesh: Mesh) -> Iterator[jax.Array]:
    """Yields random windows of the training text: int32 of shape (batch, context + 1)."""
    rng = np.random.default_rng(config.seed)
    while True:
        windows = sample_windows(corpus.train, rng, config.batch, config.context + 1)
        yield jax.device_put(windows, shard_batch(mesh))


def make_validation(corpus: Corpus, config: Config, mesh: Mesh) -> Callable[[GPT], float]:
    """Makes a function that gives a model's loss on eight fixed batches of the held-out text."""
    windows = spread_windows(corpus.held_out, 8 * config.batch, config.context + 1)
    batches = windows.reshape(8, config.batch, -1)
    rows = NamedSharding(mesh, PartitionSpec(None, *shard_batch(mesh).spec))
    texts = jax.device_put(batches, rows)

    @nnx.jit
    def loss(model: GPT, texts: jax.Array) -> jax.Array:
        return jax.lax.map(lambda text: next_byte_loss(model, text), texts).mean()

    return lambda model: float(loss(model, texts))


def make_progress(console: Console) -> Progress:
    """Makes a display of progress bars with loss and speed."""
    return Progress(
        TextColumn("{task.description:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


def add_bar(progress: Progress, name: str, config: Config) -> Callable[[int, float, float], None]:
    """Adds a bar to the display; returns the function that moves it."""
    bar = progress.add_task(name, total=config.steps, loss=math.nan, speed=0)

    def on_step(step: int, loss: float, seconds: float) -> None:
        tokens = step * config.batch * config.context
        progress.update(bar, completed=step, loss=loss, speed=tokens / seconds)

    return on_step


def main() -> None:
    """Trains as the command line says; shows how it goes and writes the learning curves."""
    options = parse_options(__doc__)
    config, console = options.config, Console(width=None if sys.stdout.isatty() else 120)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus(options.data, window=config.context + 1)
        mesh = make_mesh(options.mesh)
        optimizers = {name: make_optimizer(name, config, mesh) for name in options.optimizers}
    except (OSError, ValueError) as error:
        raise SystemExit(f"train_gpt.py: error: {error}") from None

    show_setup(config, corpus, mesh, console)
    with make_progress(console) as progress:
        curves = {
            name: train(tx, config, corpus, mesh, add_bar(progress, name, config))
            for name, tx in optimizers.items()
        }
    show_results(curves, console)
    context = {
        "corpus": corpus.name,
        "config": dataclasses.asdict(config),
        "mesh": options.mesh,
    }
    save_curves(options.output / "curves.json", curves, **context)
    plot_curves(options.output / "curves.png", curves)
    console.print(f"Learning curves: {options.output / 'curves.png'} and curves.json beside it")


def show_setup(config: Config, corpus: Corpus, mesh: Mesh, console: Console) -> None:
    """Prints what each parameter gets, what an update does on the mesh, and what to learn."""
    params = abstract_parameters(config)
    tx = make_optimizer("muon", config, mesh)
    console.print(report(tx, params))
    console.print(plan(tx, params))
    console.print(str(corpus))


def show_results(curves: dict[str, Curve], console: Console) -> None:
    """Prints the final losses and, where both optimizers ran, how much sooner Muon got there."""
    for name, curve in curves.items():
        console.print(f"{name}: final validation loss {curve.val_loss[-1]:.3f} nats a byte")
    if curves.keys() >= {"muon", "adamw"}:
        console.print(str(compare(curves["muon"], curves["adamw"])))


if __name__ == "__main__":
    main()
