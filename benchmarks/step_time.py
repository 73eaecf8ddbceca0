"""Time of a whole optimizer step on one CPU device, beside optax's and torch's Muon.

    python benchmarks/step_time.py [--cases 'square 1024' '512 x 2048'] [--cores 1] [--rounds 9]
        [--output benchmarks/results/step_time.json]

The speed of optax's default is 1. In each round every contestant takes one step, and so do two
plain matmuls, whose rate is the physical bound: `share` is the FLOPs that the algorithm needs,
symmetric matmuls at half, over the time, over that rate. Accuracy is of the first step on one
Gaussian leaf of each shape, the worst of them. CPU time tells more than the wall clock where
others use the machine, and less where a contestant leaves a core idle; with one core they agree.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import timing
from benchmarks.contestants import (
    OPTAX,
    OURS,
    THEIRS,
    TORCH,
    Case,
    Tree,
    accuracy,
    direction_of,
    needed_flops,
    polar_factor,
    step_of,
)
from benchmarks.shapes import gpt2_layers

MATMUL_SIZE = 1536
SVD_LIMIT = 1100  # optax's spectral norm is an SVD, too slow for more
SVD_MAX = 4096  # so is the accuracy's own
CASES = [
    *(Case(f"square {m}", {"w": (m, m)}) for m in (256, 512, 768, 1024, 2048)),
    *(Case(f"{m} x {4 * m}", {"w": (m, 4 * m)}) for m in (256, 512, 768, 1024)),
    Case("2048 x 512", {"w": (2048, 512)}),
    Case("64 leaves of 128 x 128", {f"w{i}": (128, 128) for i in range(64)}),
    Case("stack of 32 x 64 x 256", {"w": (32, 64, 256)}),
    Case("stack of 8 x 512 x 512", {"w": (8, 512, 512)}),
    *(
        Case(
            f"gpt2-124m, {layers} of 12 layers",
            gpt2_layers(layers),
            {"wte": (50257 * layers // 12, 768), "wpe": (1024 * layers // 12, 768)},
        )
        for layers in (2, 12)
    ),
]


def measure(
    case: Case, rounds: int, names: Sequence[str], dtype: str = "float32"
) -> dict[str, Any]:
    """The ratios, shares and accuracy of every contestant, on leaves of `dtype`."""
    grads = case.gradients()
    steps = {name: step_of(name, case, grads, dtype) for name in names}
    samples = timing.interleaved({**steps, **matmuls()}, rounds)
    record = {name: _row(name, case, samples) for name in names}
    leaves = {shape[-2:]: leaf for leaf, shape in case.shapes.items() if max(shape) <= SVD_MAX}
    first = {leaf: grads[leaf].reshape(-1, *shape)[0] for shape, leaf in leaves.items()}
    exact = {leaf: polar_factor(gradient) for leaf, gradient in first.items()}
    for name in names:
        record[name]["accuracy"] = _worst_accuracy(name, first, exact, dtype)
    return {"rounds": rounds, "machine": timing.machine(), "contestants": record}


def matmuls() -> dict[str, Callable[[], Any]]:
    """A plain square matmul with float32 inputs, and with bfloat16 ones."""
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    x = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE))
    inputs = {"float32": x, "bfloat16": x.astype(jnp.bfloat16)}
    return {k: lambda x=x: jax.block_until_ready(multiply(x)) for k, x in inputs.items()}


def _row(name: str, case: Case, samples: timing.Samples) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for clock in timing.CLOCKS:
        row[clock] = {
            "seconds": timing.spread(samples[name][clock]),
            "speed": timing.ratio(samples, OPTAX, name, clock),
        }
        if name in OURS:
            bound = sum(
                flops / (2 * MATMUL_SIZE**3) * np.asarray(samples[kind][clock])
                for kind, flops in needed_flops(name, case).items()
            )
            row[clock]["share"] = timing.spread(bound / np.asarray(samples[name][clock]))
    return row


def _worst_accuracy(name: str, first: Tree, exact: Tree, dtype: str) -> dict[str, float]:
    """Over one matrix of each shape; nothing where all are too large."""
    rows = []
    for leaf, gradient in first.items():
        one = Case(leaf, {leaf: gradient.shape})
        rows.append(accuracy(direction_of(name, one, {leaf: gradient}, leaf, dtype), exact[leaf]))
    if not rows:
        return {}
    return {
        "pol": max(r["pol"] for r in rows),
        "low": min(r["low"] for r in rows),
        "high": max(r["high"] for r in rows),
    }


def contestants(case: Case) -> list[str]:
    """All, less the SVD where it would take minutes."""
    small = max(max(shape) for shape in case.matrices) <= SVD_LIMIT
    return [*OURS, *(k for k in THEIRS if small or k != "optax spectral"), TORCH]


def show(case: str, record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = record["machine"]
    load = machine["load_average"][0]
    title = f"{case}: {record['rounds']} rounds, {machine['cores']} core(s), load {load:.1f}"
    table = Table(title=title)
    for column in ("", "speed, CPU time", "spread", "speed, wall", "share", "pol", "σ"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in record["contestants"].items():
        cpu, wall, acc = row["cpu"], row["wall"], row["accuracy"]
        speed = cpu["speed"]
        table.add_row(
            f"muon_optax {name}" if name in OURS else name,
            f"{speed['median']:.2f}",
            f"{speed['q1']:.2f}–{speed['q3']:.2f}",
            f"{wall['speed']['median']:.2f}",
            f"{cpu['share']['median']:.0%}" if "share" in cpu else "",
            f"{acc['pol']:.3f}" if acc else "",
            f"{acc['low']:.2f}–{acc['high']:.2f}" if acc else "",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], metavar="CASE")
    parser.add_argument("--only", nargs="+", help="contestants; optax's default is always one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--output", type=Path, help="cases that it holds already are kept")
    args = parser.parse_args()
    timing.use_cores(args.cores)
    known = args.output and args.output.exists()
    cases: dict[str, Any] = json.loads(args.output.read_text()) if known else {}
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        names = contestants(case)
        if args.only:
            names = [n for n in names if n in (OPTAX, *args.only)]
        cases[case.name] = measure(case, args.rounds, names)
        show(case.name, cases[case.name])
        if args.output:
            args.output.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
