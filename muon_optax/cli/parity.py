"""`python -m muon_optax parity`: the same run under PyTorch's FSDP2 and under JAX."""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from muon_optax.cli.output import show, write_json
from muon_optax.interop.parity.case import Case, Dtype, Optimizer, parse_mesh
from muon_optax.interop.parity.launch import run_cases
from muon_optax.interop.parity.replay import need_devices, replay
from muon_optax.interop.parity.verdict import Verdict
from muon_optax.recipes import systems

__all__ = ["add_parser", "grid", "judge", "run"]

_MESHES = ("fsdp=2", "fsdp=4", "replica=2,fsdp=2", "fsdp=2,tp=2")


def add_parser(subparsers: Any) -> None:
    """Adds the command to `python -m muon_optax`."""
    parser = subparsers.add_parser(
        "parity",
        help="prove that a recipe does what PyTorch does",
        description=(
            "Trains a small model under PyTorch FSDP2, replays its gradients through muon_optax on "
            "the like JAX mesh, and prints how far updates, momenta and parameters are apart. "
            "Exit code: 0 all within tolerance, 1 not, 2 for errors."
        ),
    )
    parser.add_argument("--recipe", choices=sorted(systems.__all__), default="torch_muon")
    parser.add_argument("--ranks", type=int, help="number of processes; default: the mesh's")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="such as fsdp=4, replica=2,fsdp=2 or fsdp=2,tp=2; default: fsdp over all ranks",
    )
    parser.add_argument(
        "--optimizer",
        choices=get_args(Optimizer),
        default="reference",
        help="torch's optimizer: our own optimizer in float32 or float64, torch.optim.Muon on "
        "DTensors (bfloat16 inside), or the package muon-fsdp2",
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", action="store_true", help="every mesh, recipe and dtype instead")
    parser.add_argument("--worst", action="store_true", help="one row a leaf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--port", type=int, help="where ranks meet; default: in a file")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for torch's side")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    cases = grid(args.steps) if args.grid else [_case(args)]
    verdicts = []
    for verdict in judge(cases, port=args.port, timeout=args.timeout):
        verdicts.append(verdict)
        show(verdict.table(worst=args.worst))
    if args.json is not None:
        found = [verdict.to_dict(worst=args.worst) for verdict in verdicts]
        write_json(found, args.json)
    failed = [v.case.name for v in verdicts if not v.passed]
    if len(verdicts) > 1:
        print(f"{len(verdicts) - len(failed)} cases passed, {len(failed)} failed")
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


def _case(args: argparse.Namespace) -> Case:
    mesh = (("fsdp", args.ranks or 2),) if args.mesh is None else parse_mesh(args.mesh)
    case = Case(
        args.recipe,
        mesh,
        args.optimizer,
        args.dtype,
        args.steps,
        args.learning_rate,
        args.weight_decay,
        args.seed,
    )
    if args.ranks not in (None, case.world):
        raise ValueError(
            f"--mesh {case.mesh_name} is of {case.world} ranks, not --ranks {args.ranks}"
        )
    return case


def grid(steps: int = 10) -> list[Case]:
    """The cases of `make parity`: every mesh in every precision, and every system's recipe.

    Example:
      >>> len(grid())
      30
    """
    cases = [
        Case("torch_muon", parse_mesh(mesh), optimizer, dtype, steps)
        for mesh in _MESHES
        for optimizer, dtype in _PRECISIONS
    ]
    others = sorted(set(systems.__all__) - {"torch_muon"})
    dtypes: tuple[Dtype, ...] = ("float32", "float64")
    mesh = parse_mesh("fsdp=2")
    return cases + [
        Case(recipe, mesh, "reference", dtype, steps) for recipe in others for dtype in dtypes
    ]


_PRECISIONS: tuple[tuple[Optimizer, Dtype], ...] = (
    ("reference", "float32"),
    ("reference", "float64"),
    ("torch", "float32"),
)


def judge(
    cases: Sequence[Case], *, port: int | None = None, timeout: float = 900.0
) -> Iterable[Verdict]:
    """Runs cases on both sides, those of one number of ranks in one launch.

    Args:
      cases: the cases to run.
      port: where ranks meet; None: in a file.
      timeout: seconds for torch's side of one launch.

    Yields:
      The verdicts, in the order in which they are reached.

    Raises:
      ParityError: where torch's side can't be run.
    """
    worlds = sorted({case.world for case in cases})
    need_devices(max(worlds))
    for world in worlds:
        own = [case for case in cases if case.world == world]
        with tempfile.TemporaryDirectory(prefix="muon_parity_") as name:
            folder = Path(name)
            run_cases(folder, own, port=port, timeout=timeout)
            for i, case in enumerate(own):
                yield replay(case, folder / f"{i}.npz")
