"""What to train and how, and the command line that says so."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gpt.layout import parse_mesh

__all__ = ["Config", "Options", "parse_options"]


@dataclasses.dataclass(frozen=True)
class Config:
    """All that the learning curves depend on, but for the text.

    Attributes:
      steps: optimizer steps.
      layers: transformer blocks.
      width: the residual stream's width, a multiple of 32.
      context: bytes in a training example.
      batch: examples in a step.
      schedule: the name of Muon's Newton-Schulz coefficients.
      lr: Muon's peak learning rate, for the hidden matrices.
      adamw_lr: AdamW's peak learning rate; in Muon's run, that of all other parameters.
      weight_decay: of either optimizer, times its learning rate.
      seed: of the initial weights and of the order of the data.
    """

    steps: int = 400
    layers: int = 4
    width: int = 128
    context: int = 128
    batch: int = 16
    schedule: str = "jordan"
    lr: float = 0.02
    adamw_lr: float = 0.008
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % 32:
            raise ValueError(f"width must be a multiple of 32, got {self.width}")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      config: what to train and how.
      optimizers: 'muon', 'adamw' or both, in the order in which they run.
      mesh: sizes of the mesh's axes, by name.
      data: a folder of text; None for Python's standard library.
      output: the folder to write to.
    """

    config: Config
    optimizers: tuple[str, ...]
    mesh: dict[str, int]
    data: Path | None
    output: Path


def parse_options(description: str | None) -> Options:
    """Reads the command line; ends the program with one line where it can't be right."""
    parser = _make_parser(description)
    args = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Config)]
    try:
        config = Config(**{name: getattr(args, name) for name in names})
        _check_batch(config.batch, args.mesh)
    except ValueError as error:
        parser.error(str(error))
    optimizers = ("muon", "adamw") if args.optimizer == "both" else (args.optimizer,)
    return Options(config, optimizers, args.mesh, args.data, args.output)


def _check_batch(batch: int, mesh: dict[str, int]) -> None:
    parts = math.prod(size for axis, size in mesh.items() if axis != "tp")
    if batch % parts:
        raise ValueError(f"the batch must divide over {parts} devices (see --mesh), got {batch}")


def _make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    count, rate = _at_least(1), _at_least(0.0)
    add("--optimizer", choices=("muon", "adamw", "both"), default="both", help="what to train with")
    add("--steps", type=count, default=Config.steps, help="optimizer steps")
    add("--layers", type=count, default=Config.layers, help="transformer blocks")
    add("--width", type=count, default=Config.width, help="a multiple of 32")
    add("--context", type=count, default=Config.context, help="bytes in a training example")
    add("--batch", type=count, default=Config.batch, help="examples in a step")
    add("--schedule", default=Config.schedule, help="Muon's Newton-Schulz coefficients")
    add("--lr", type=rate, default=Config.lr, help="Muon's peak learning rate")
    add("--adamw-lr", type=rate, default=Config.adamw_lr, help="AdamW's, in Muon's run as well")
    add("--weight-decay", type=rate, default=Config.weight_decay, help="of both optimizers")
    add("--seed", type=_at_least(0), default=Config.seed, help="of weights and batches")
    add("--mesh", type=parse_mesh, default="fsdp=8", help="of devices, such as data=2,fsdp=4")
    add("--data", type=Path, help="a folder of text; None: Python's library")
    add("--output", type=Path, default=Path("demo"), help="the folder to write to")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _at_least(minimum: float) -> Callable[[str], float]:
    """Makes an option's type: numbers of the type of `minimum`, from there on."""
    number = type(minimum)

    def parse(text: str) -> float:
        value = number(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        return value

    parse.__name__ = number.__name__  # argparse's word for what it could not read
    return parse
