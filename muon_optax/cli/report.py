"""`python -m muon_optax report`: which optimizer each leaf of a model gets, and why."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args

from muon_optax.alias import muon
from muon_optax.cli.output import present
from muon_optax.cli.target import add_arguments, read_target
from muon_optax.reports import ParameterReport, report
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
    tx = muon(1.0, muon_weight_dimension_numbers=target.views, scale=args.scale)
    made = report(tx, target.params)
    pairs = zip(made.rows, target.choices, strict=True)
    made = ParameterReport(
        tuple(dataclasses.replace(row, optimizer=c.label, reason=c.reason) for row, c in pairs)
    )
    data = {"model": target.name, **made.to_dict()}
    return present(target, target.title, made, data, args.json)
