"""Muon's presets on one GPU in bfloat16, beside optax's and torch's: a run of under 8 minutes.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json
    python benchmarks/gpu.py --small      # tiny sizes and two rounds, to try the script anywhere

All contestants compute in bfloat16: the parameters of optax's are bfloat16, torch casts by itself.
The speed of optax's default is 1; `share` is the FLOPs the algorithm needs, symmetric matmuls at
half, over the time, over the rate of a plain matmul in the same rounds. Cases are left out once
the time is spent, and the table says which.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# torch needs some of the memory that JAX would take.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.append(str(Path(__file__).parents[1]))

import jax

from benchmarks import step_time, timing
from benchmarks.contestants import OPTAX, TORCH, Case
from benchmarks.shapes import gpt2_layers

SECONDS = 420.0  # leaves a minute of the eight for the last case
CONTESTANTS = ("jordan bf16", "tight bf16", "fast bf16", OPTAX, "optax dion", TORCH)
SIZES = {False: (1024, 2048, 4096, 8192), True: (64, 128)}


def cases(small: bool) -> list[Case]:
    """The important ones first."""
    size = 8 if small else 1
    others = {"wte": (50257 // size**2, 768 // size)}
    return [
        Case("gpt2-124m", gpt2_layers(2 if small else 12, 768 // size), others),
        *(Case(f"square {m}", {"w": (m, m)}) for m in SIZES[small]),
        *(Case(f"{m // 2} x {m * 2}", {"w": (m // 2, m * 2)}) for m in SIZES[small]),
        Case("stack of experts", {"w": (64 // size, 2048 // size, 768 // size)}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    measure = functools.partial(step_time.measure, dtype="bfloat16")
    records: dict[str, Any] = {}
    for case in cases(args.small):
        if time.perf_counter() - start > SECONDS:
            print(f"{case.name}: left out, the time is spent")
            continue
        records[case.name] = measure(case, 2 if args.small else args.rounds, CONTESTANTS)
        step_time.show(case.name, records[case.name])
        jax.clear_caches()
        if args.output:
            args.output.write_text(json.dumps(records, indent=1) + "\n")
    print(f"{timing.machine()['device']}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
