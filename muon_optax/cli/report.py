"""`python -m muon_optax report`: which optimizer each leaf of a model gets, and why."""

import argparse
from pathlib import Path
from typing import Any, get_args

from muon_optax.alias import muon
from muon_optax.cli.output import present
from muon_optax.cli.target import add_arguments, read_target
from muon_optax.inspect.reports import report
from muon_optax.transforms.shape_scale import Scale

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Adds the command to `python -m muon_optax`."""
    parser = subparsers.add_parser(
        "report",
        help="which optimizer each parameter gets, and why",
        description=(
            "Prints for each leaf its optimizer, the matrices it makes, their scale, and why. "
            "Exit code: 0, 1 where no leaf gets Muon, 2 for errors."
        ),
    )
    add_arguments(parser)
    parser.add_argument("--scale", choices=get_args(Scale), default="shape_scaling")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there; - prints it instead"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    target = read_target(args)
    made = report(muon(1.0, partition=target.partition, scale=args.scale), target.params)
    data = {"model": target.name, **made.to_dict()}
    return present(target, target.title, made, data, args.json, target.notes)
