"""Tunes the learning rates of the demo's two optimizers, and compares them where each is best.

Either gets five rates, a factor of two apart, and the same model, steps, batches, warm-up, decay,
clipping and weight decay. AdamW comes first; its best rate then serves the embeddings, the head and
the gains in Muon's runs, and the rate that is tuned there is that of the hidden matrices. Last, the
best rates run from two more seeds.

    python benchmarks/demo_grid.py --output benchmarks/results
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from gpt.config import Config
from gpt.corpus import Corpus, load_corpus
from gpt.curves import Curve, compare
from gpt.layout import make_mesh
from train_gpt import make_optimizer, train

RATES = {
    "adamw": (0.001, 0.002, 0.004, 0.008, 0.016),
    "muon": (0.01, 0.02, 0.04, 0.08, 0.16),
}
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run."""

    optimizer: str
    config: Config
    curve: Curve

    @property
    def rate(self) -> float:
        """The rate that is tuned."""
        return self.config.lr if self.optimizer == "muon" else self.config.adamw_lr

    @property
    def final_loss(self) -> float:
        """The validation loss at the end."""
        return self.curve.val_loss[-1]


def run_all(config: Config, corpus: Corpus) -> Iterator[Run]:
    """Trains over both grids, then from the other seeds at the best rates."""
    for name, option in (("adamw", "adamw_lr"), ("muon", "lr")):
        tried = []
        for rate in RATES[name]:
            tried.append(run(name, dataclasses.replace(config, **{option: rate}), corpus))
            yield tried[-1]
        config = best(tried).config
    for seed in SEEDS[1:]:
        for name in RATES:
            yield run(name, dataclasses.replace(config, seed=seed), corpus)


def run(name: str, config: Config, corpus: Corpus) -> Run:
    """Trains once, on one device."""
    mesh = make_mesh({"fsdp": 1})
    tx = make_optimizer(name, config, mesh)
    return Run(name, config, train(tx, config, corpus, mesh, on_step=lambda *_: None))


def grid_runs(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs of an optimizer over its grid, in the order of their rates."""
    return [r for r in runs if r.optimizer == name and r.config.seed == SEEDS[0]]


def best(runs: Sequence[Run]) -> Run:
    """The run with the least final validation loss."""
    return min(runs, key=lambda r: r.final_loss)


def tuned_runs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs Muon's and AdamW's runs at their best rates, one pair for each seed."""
    rates = {name: best(grid_runs(runs, name)).rate for name in RATES}
    pick = {(r.optimizer, r.config.seed): r for r in runs if r.rate == rates[r.optimizer]}
    return [(pick["muon", seed], pick["adamw", seed]) for seed in SEEDS]


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each seed, how soon Muon is at AdamW's final validation loss."""
    rows = []
    for muon, adamw in tuned_runs(runs):
        reached = compare(muon.curve, adamw.curve)
        rows.append(
            {
                "seed": muon.config.seed,
                "muon_rate": muon.rate,
                "adamw_rate": adamw.rate,
                "muon_final_loss": muon.final_loss,
                "adamw_final_loss": adamw.final_loss,
                "steps_to_adamw_final_loss": reached.steps,
                "share_of_steps": reached.steps and reached.steps / reached.baseline_steps,
            }
        )
    return rows


def save(path: Path, corpus: Corpus, runs: Sequence[Run], summary: Sequence[Any]) -> None:
    """Writes all runs with their whole curves."""
    record = {
        "corpus": corpus.name,
        "rates": RATES,
        "tuned": summary,
        "runs": [{"rate": r.rate, **dataclasses.asdict(r)} for r in runs],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def grid_table(runs: Sequence[Run]) -> Table:
    table = Table("optimizer", "learning rate", "seed", "final validation loss", "seconds")
    for r in runs:
        cells = (r.rate, r.config.seed, f"{r.final_loss:.4f}", f"{r.curve.seconds[-1]:.0f}")
        table.add_row(r.optimizer, *map(str, cells))
    return table


def summary_table(summary: Sequence[dict[str, Any]]) -> Table:
    table = Table(*(name.replace("_", " ") for name in summary[0]))
    for row in summary:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    config, console = Config(steps=args.steps), Console()
    corpus, runs = load_corpus(None, config.context + 1), []
    for r in run_all(config, corpus):
        runs.append(r)
        console.print(f"{r.optimizer} {r.rate} seed {r.config.seed}: {r.final_loss:.4f}")
    args.output.mkdir(parents=True, exist_ok=True)
    summary = summarize(runs)
    save(args.output / "demo_grid.json", corpus, runs, summary)
    console.print(grid_table(runs), summary_table(summary))


if __name__ == "__main__":
    main()
