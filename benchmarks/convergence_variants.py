"""The demo's model trained with Muon's variants, each at its best learning rate, over three seeds.

    python benchmarks/convergence_variants.py --output benchmarks/results

Rates are tuned by factors of two, on a seed that isn't among the three, until the best one is at
neither end. All else is as in `convergence.py`: the AdamW leaves' rate, batches, warm-up, decay,
clipping and weight decay. What the output holds of other variants is kept.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
from rich.console import Console

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from gpt.config import Config
from gpt.corpus import load_corpus
from gpt.curves import Curve
from gpt.layout import make_mesh
from train_gpt import train, warmup_cosine

from benchmarks.convergence import RATES, SEEDS, summarize, table
from muon_optax import (
    BlockPeriodic,
    Dion2,
    Namo,
    hyperball,
    muon,
    scale_by_entry,
    scale_by_neuron,
)

TUNING_SEED = 10
BASE = "muon"
# The peak rate to begin with, and options of `muon` made of the schedule.
Options = Callable[[optax.Schedule], dict[str, Any]]
SUM = {"momentum": "sum", "nesterov": False, "bias_correction": False}  # as Dion2 wants it
VARIANTS: dict[str, tuple[float, Options]] = {
    BASE: (0.02, lambda lr: {}),
    "cautious decay": (0.02, lambda lr: {"weight_decay_kind": "cautious"}),
    "normuon": (0.02, lambda lr: {"after_orthogonalization": scale_by_neuron()}),
    "adamuon": (
        0.008,
        lambda lr: {"sign": True, "after_orthogonalization": scale_by_entry(), "scale": "none"},
    ),
    "namo": (0.02, lambda lr: {"namo": Namo(), "bias_correction": False}),
    "namo_d": (0.02, lambda lr: {"namo": Namo(each="input"), "bias_correction": False}),
    "muonh": (0.02, lambda lr: {"step": hyperball(lr), "scale": "none", "weight_decay": 0.0}),
    "dion2, 1/2": (0.02, lambda lr: {"dion2": Dion2(0.5), **SUM}),
    "muonbp, 4 x 1": (0.02, lambda lr: {"block_periodic": BlockPeriodic((4, 1))}),
}


def optimizer(name: str, rate: float, config: Config) -> optax.GradientTransformation:
    """A variant at a peak rate, with the rest of the demo's optimizer."""
    schedule = warmup_cosine(rate, config.steps)
    options = {"weight_decay": config.weight_decay} | VARIANTS[name][1](schedule)
    tx = muon(
        schedule,
        adam_learning_rate=warmup_cosine(config.adamw_lr, config.steps),
        adam_b2=0.95,
        adam_weight_decay=config.weight_decay,
        **options,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def tuned(start: float, loss_at: Callable[[float], float]) -> dict[float, float]:
    """The losses of rates around the best one, which is at no end."""
    losses = {rate: loss_at(rate) for rate in (start / 2, start, start * 2)}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        rate = best / 2 if best == min(losses) else best * 2
        losses[rate] = loss_at(rate)
    return dict(sorted(losses.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    console, mesh = Console(), make_mesh({"fsdp": 1})
    config = dataclasses.replace(Config(steps=args.steps), **RATES)
    corpus = load_corpus(None, config.context + 1)

    def run(name: str, rate: float, seed: int) -> Curve:
        seeded = dataclasses.replace(config, seed=seed)
        tx = optimizer(name, rate, seeded)
        curve = train(tx, seeded, corpus, mesh, on_step=lambda *_: None)
        console.print(f"{name} at {rate:g}, seed {seed}: {curve.val_loss[-1]:.4f}")
        return curve

    path = args.output / "convergence_variants.json"
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.variants:
        losses = tuned(
            VARIANTS[name][0], lambda rate, n=name: run(n, rate, TUNING_SEED).val_loss[-1]
        )
        best = min(losses, key=losses.__getitem__)
        runs = [dataclasses.asdict(run(name, best, seed)) for seed in SEEDS]
        keep(path, config, {name: {"rate": best, "losses_while_tuning": losses, "curves": runs}})
    found = json.loads(path.read_text())["variants"]
    curves = {
        f"{name} at {found[name]['rate']:g}": [Curve(**c) for c in found[name]["curves"]]
        for name in VARIANTS
        if name in found
    }
    base = next(iter(curves))
    console.print(table(summarize(curves, base), base))


def keep(path: Path, config: Config, new: dict[str, Any]) -> None:
    """Writes a variant's record beside those of others, all of them of one configuration."""
    record = {"config": dataclasses.asdict(config), "seeds": SEEDS, "tuning_seed": TUNING_SEED}
    record = json.loads(json.dumps(record))
    old = json.loads(path.read_text()) if path.exists() else {**record, "variants": {}}
    if {**old, "variants": {}} != {**record, "variants": {}}:
        raise ValueError(f"{path} has runs of another configuration: {old['config']}")
    record["variants"] = old["variants"] | new
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
