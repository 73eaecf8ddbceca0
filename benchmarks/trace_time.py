"""Seconds to trace an update of many leaves, and to make their state, beside optax's optimizers.

    python benchmarks/trace_time.py [--layers 500] [--rounds 9]
        [--output benchmarks/results/trace_time.json]

Each layer has a matrix and a bias, all of one shape. Contestants take turns; ratios are
those of the process's CPU time, less shaken by what else runs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import optax

from benchmarks import timing
from muon_optax import muon

OURS, ADAMW, THEIRS = "muon_optax", "optax adamw", "optax muon"
CONTESTANTS = {OURS: muon, ADAMW: optax.adamw, THEIRS: optax.contrib.muon}


def parameters(layers: int) -> Any:
    """A tree of twice as many leaves."""
    return {
        f"layer_{i}": {"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)} for i in range(layers)
    }


def tracing(make: Callable[[float], Any], params: Any) -> Callable[[], Any]:
    """Traces an update of an optimizer made anew, so that no trace is kept from the last time."""
    state = jax.eval_shape(make(0.02).init, params)
    return lambda: jax.jit(make(0.02).update).trace(params, state, params)


def making_state(make: Callable[[float], Any], params: Any) -> Callable[[], Any]:
    """Calls `init` outside of `jit`."""
    return lambda: jax.block_until_ready(make(0.02).init(params))


def measure(layers: int, rounds: int) -> dict[str, Any]:
    """Ours over adamw and over optax's Muon: median and quartiles of the rounds."""
    params = parameters(layers)
    record: dict[str, Any] = {"leaves": 2 * layers, "rounds": rounds, "machine": timing.machine()}
    for name, of in {"trace": tracing, "init": making_state}.items():
        functions = {key: of(make, params) for key, make in CONTESTANTS.items()}
        samples = timing.interleaved(functions, rounds)
        record[name] = {
            "seconds": {key: timing.spread(samples[key]["cpu"]) for key in CONTESTANTS},
            "of_adamw": timing.ratio(samples, OURS, ADAMW, "cpu"),
            "of_optax_muon": timing.ratio(samples, OURS, THEIRS, "cpu"),
        }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = measure(args.layers, args.rounds)
    text = json.dumps(record, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
