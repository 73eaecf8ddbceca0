"""`python -m muon_optax plan`: bytes received and FLOPs of an update, for any model on any mesh."""

import argparse
import math
from pathlib import Path
from typing import Any

from muon_optax.alias import muon
from muon_optax.cli.output import present
from muon_optax.cli.target import add_arguments, check_dtype, read_target, shardings
from muon_optax.inspect.plans import plan
from muon_optax.sharding.planning.device_models import DEVICES
from muon_optax.sharding.strategies import STRATEGIES
from muon_optax.sharding.usual_specs import parse_sizes

__all__ = ["add_parser", "run"]

_MOST_DEVICES = 2**17


def add_parser(subparsers: Any) -> None:
    """Adds the command to `python -m muon_optax`."""
    parser = subparsers.add_parser(
        "plan",
        help="bytes received and FLOPs of an update, on a mesh that need not be there",
        description=(
            "Prints how Muon's matrices are brought together on each device of a mesh, with bytes, "
            "FLOPs and time. Mesh axes named replica, data or dp replicate; fsdp shards one "
            "dim of each matrix; tensor, tp or model the other; expert or ep the experts. "
            "Exit code: 0, 1 where no leaf gets Muon, 2 for errors."
        ),
    )
    add_arguments(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="such as replica=4,fsdp=16, the last axes within a host; default: one device",
    )
    parser.add_argument(
        "--fsdp", choices=("rows", "columns"), help="which dim fsdp shards; default: rows"
    )
    parser.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help=f"whose speeds decide: {', '.join(DEVICES)}; default: h100",
    )
    parser.add_argument("--strategy", choices=("auto", *STRATEGIES), default="auto")
    parser.add_argument("--ns-coeffs", default="jordan", help="name of a schedule")
    parser.add_argument("--ns-dtype", help="of collectives and matmuls; default: the parameters'")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the plan there; - prints it instead"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    sizes = {} if args.mesh is None else parse_sizes(args.mesh)
    if math.prod(sizes.values()) > _MOST_DEVICES:
        raise ValueError(f"--mesh may have {_MOST_DEVICES:,} devices at most, got {args.mesh!r}")
    if args.fsdp and "fsdp" not in sizes:
        raise ValueError(f"--fsdp is for a --mesh with an axis fsdp, got {args.mesh!r}")
    if args.ns_dtype is not None:
        check_dtype("--ns-dtype", args.ns_dtype)
    target = read_target(args)
    tx = muon(
        1.0,
        args.ns_coeffs,
        ns_dtype=args.ns_dtype,
        muon_weight_dimension_numbers=target.views,
        param_shardings=shardings(target, sizes, args.fsdp or "rows"),
        strategy=args.strategy,
        device=args.device,
    )
    made = plan(tx, target.params)
    where = ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"
    data = {"model": target.name, "mesh": sizes, **made.to_dict()}
    notes = [*target.notes, *target.warnings]
    return present(target, f"{target.title} on {where}", made, data, args.json, notes)
