"""Learning curves: recorded, compared, saved and drawn."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

__all__ = ["Comparison", "Curve", "compare", "plot_curves", "save_curves"]


@dataclasses.dataclass
class Curve:
    """One training run, with an entry for each evaluation.

    Attributes:
      steps: optimizer steps done.
      train_loss: the mean training loss since the last evaluation, in nats a byte.
      val_loss: the loss on the held-out files, in nats a byte.
      seconds: time spent in optimizer steps; compilation and evaluation don't count.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    train_loss: list[float] = dataclasses.field(default_factory=list)
    val_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def record(self, step: int, train_loss: float, val_loss: float, seconds: float) -> None:
        """Adds an evaluation."""
        self.steps.append(step)
        self.train_loss.append(train_loss)
        self.val_loss.append(val_loss)
        self.seconds.append(seconds)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """When one run first evaluates at or below the final validation loss of another.

    Attributes:
      target: the loss to reach, the baseline's last.
      steps: the steps it took; None where the loss was not reached.
      seconds: the training time it took.
      baseline_steps: the baseline's steps.
      baseline_seconds: the baseline's training time.
    """

    target: float
    steps: int | None
    seconds: float | None
    baseline_steps: int
    baseline_seconds: float

    def __str__(self) -> str:
        if self.steps is None or self.seconds is None:
            return f"Muon did not reach AdamW's final validation loss of {self.target:.3f}"
        return (
            f"Muon reached AdamW's final validation loss of {self.target:.3f} in "
            f"{self.steps} of {self.baseline_steps} steps "
            f"({self.steps / self.baseline_steps:.0%}) and "
            f"{self.seconds:.0f} of {self.baseline_seconds:.0f} seconds "
            f"({self.seconds / self.baseline_seconds:.0%})"
        )


def compare(curve: Curve, baseline: Curve) -> Comparison:
    """Finds the first evaluation of `curve` at or below the final validation loss of `baseline`."""
    target = baseline.val_loss[-1]
    reached = next((i for i, loss in enumerate(curve.val_loss) if loss <= target), None)
    return Comparison(
        target=target,
        steps=None if reached is None else curve.steps[reached],
        seconds=None if reached is None else curve.seconds[reached],
        baseline_steps=baseline.steps[-1],
        baseline_seconds=baseline.seconds[-1],
    )


def save_curves(path: Path, curves: Mapping[str, Curve], **context: Any) -> None:
    """Writes runs by name, and what else a reader should know about them, as JSON."""
    runs = {name: dataclasses.asdict(curve) for name, curve in curves.items()}
    path.write_text(json.dumps({**context, "runs": runs}, indent=2) + "\n")


def plot_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    """Draws validation loss, and faintly training loss, against steps and against seconds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for color, (name, curve) in zip(TABLEAU_COLORS, curves.items(), strict=False):
        for axes, x in ((by_step, curve.steps), (by_time, curve.seconds)):
            axes.plot(x, curve.train_loss, color=color, alpha=0.25)
            axes.plot(x, curve.val_loss, color=color, label=name)
    by_step.set(xlabel="steps", ylabel="validation loss (nats a byte)")
    by_time.set(xlabel="training seconds")
    by_step.legend(title="training loss is faint")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
