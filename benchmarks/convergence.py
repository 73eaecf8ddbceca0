"""The demo's model trained with every preset, with optax's Muon and with AdamW, over three seeds.

    python benchmarks/convergence.py --output benchmarks/results

All have the rates that `demo_grid.py` found best for Muon and AdamW, and the same batches, warm-up,
decay, clipping and weight decay; optax's Muon gets the leaves that ours gets. One device. Seconds
are those of the steps, so they tell something only where nothing else runs.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from gpt.config import Config
from gpt.corpus import load_corpus
from gpt.curves import Curve
from gpt.layout import make_mesh
from train_gpt import abstract_parameters, make_optimizer, train, warmup_cosine

from muon_optax import MuonDimensionNumbers, muon, report
from muon_optax._internal.tree_paths import leaves_with_segments, path_name

SEEDS = (0, 1, 2)
RATES = {"lr": 0.02, "adamw_lr": 0.008}
BASE = "optax.contrib.muon"
Curves = Mapping[str, Sequence[Curve]]


def optimizers(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], Any]]:
    """What makes each optimizer, by name."""

    def ours(schedule: str) -> Any:
        return make_optimizer("muon", dataclasses.replace(config, schedule=schedule), mesh)

    return {
        "muon_optax jordan": lambda: ours("jordan"),
        "muon_optax tight": lambda: ours("tight"),
        "muon_optax fast": lambda: ours("fast"),
        BASE: lambda: optax_muon(config),
        "optax.adamw": lambda: make_optimizer("adamw", config, mesh),
    }


def optax_muon(config: Config) -> optax.GradientTransformation:
    """The demo's optimizer with optax's Muon, which gets the leaves that ours gets."""
    rows = report(muon(1.0), abstract_parameters(config)).rows
    of_muon = {row.path for row in rows if row.optimizer == "muon"}

    def views(tree: Any) -> Any:
        # By path: NNX changes the containers between calls, and optax masks leaves.
        names = [path_name(path) for path, _ in leaves_with_segments(tree)]
        found = [MuonDimensionNumbers(0, 1) if name in of_muon else None for name in names]
        return jax.tree.structure(tree).unflatten(found)

    tx = optax.contrib.muon(
        warmup_cosine(config.lr, config.steps),
        weight_decay=config.weight_decay,
        adam_learning_rate=warmup_cosine(config.adamw_lr, config.steps),
        adam_b2=0.95,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=views,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def summarize(curves: Curves, base_name: str) -> list[dict[str, Any]]:
    """Final losses of all seeds, their differences from those of one, and the time they took."""
    base = [curve.val_loss[-1] for curve in curves[base_name]]
    rows = []
    for name, runs in curves.items():
        final = [curve.val_loss[-1] for curve in runs]
        differences = [x - b for x, b in zip(final, base, strict=True)]
        rows.append(
            {
                "optimizer": name,
                "final_losses": final,
                "mean": float(np.mean(final)),
                "difference": [min(differences), max(differences)],
                "seconds": float(np.median([curve.seconds[-1] for curve in runs])),
            }
        )
    return rows


def table(summary: Sequence[Mapping[str, Any]], base_name: str) -> Table:
    found = Table("optimizer", "final validation losses", "mean", f"from {base_name}", "seconds")
    for row in summary:
        losses = " ".join(f"{x:.3f}" for x in row["final_losses"])
        low, high = row["difference"]
        cells = (f"{row['mean']:.3f}", f"{low:+.3f} to {high:+.3f}", f"{row['seconds']:.0f}")
        found.add_row(row["optimizer"], losses, *cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    console, mesh = Console(), make_mesh({"fsdp": 1})
    config = dataclasses.replace(Config(steps=args.steps), **RATES)
    corpus = load_corpus(None, config.context + 1)
    curves: dict[str, list[Curve]] = {name: [] for name in optimizers(config, mesh)}
    for seed in SEEDS:
        seeded = dataclasses.replace(config, seed=seed)
        for name, make in optimizers(seeded, mesh).items():
            curves[name].append(train(make(), seeded, corpus, mesh, on_step=lambda *_: None))
            console.print(f"{name}, seed {seed}: {curves[name][-1].val_loss[-1]:.4f}")
    summary = summarize(curves, BASE)
    args.output.mkdir(parents=True, exist_ok=True)
    record = {
        "config": dataclasses.asdict(config),
        "seeds": SEEDS,
        "summary": summary,
        "curves": {name: [dataclasses.asdict(c) for c in runs] for name, runs in curves.items()},
    }
    (args.output / "convergence.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(summary, BASE))


if __name__ == "__main__":
    main()
