"""Seconds to trace and compile an update of more and more layers on eight CPU devices.

    python benchmarks/compile_time.py [--layers 12 48] [--repeats 3] [--output results.json]

Each layer has four matrices, those of a GPT-2 block, sharded on their rows. The time of an update
should grow far less than the number of layers, as matrices of one shape are compiled once.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from muon_optax import muon, state_shardings

DEVICES = 8


def shapes_of(layers: int, model: int) -> dict[str, tuple[int, int]]:
    """The shapes of the matrices of GPT-2's blocks, in JAX's [fan-in, fan-out] order."""
    block = {
        "qkv": (model, 3 * model),
        "out": (model, model),
        "up": (model, 4 * model),
        "down": (4 * model, model),
    }
    return {f"layer_{i}_{k}": shape for i in range(layers) for k, shape in block.items()}


def seconds_of(layers: int, model: int) -> dict[str, float]:
    """Seconds to trace and lower, and to compile, with nothing kept from before."""
    jax.clear_caches()
    mesh = jax.make_mesh((DEVICES,), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=rows)
        for name, shape in shapes_of(layers, model).items()
    }
    tx = muon(0.02)
    state: Any = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        state_shardings(tx, params, rows),
    )
    start, cpu = time.perf_counter(), time.process_time()
    lowered = jax.jit(tx.update).lower(params, state, params)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    return {
        "trace": middle - start,
        "compile": end - middle,
        "total": end - start,
        "processor": time.process_time() - cpu,  # less shaken by what else runs on the machine
    }


def measure(layers: list[int], model: int, repeats: int) -> dict[str, Any]:
    """The least of some runs for each number of layers, taken in turns, and their ratios."""
    runs = [{n: seconds_of(n, model) for n in layers} for _ in range(repeats)]
    best = {n: {k: min(run[n][k] for run in runs) for k in runs[0][n]} for n in layers}
    first = best[layers[0]]
    return {
        "devices": DEVICES,
        "model": model,
        "repeats": repeats,
        "seconds": {str(n): best[n] for n in layers},
        "ratio": {str(n): {k: best[n][k] / first[k] for k in first} for n in layers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--model", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    text = json.dumps(measure(arguments.layers, arguments.model, arguments.repeats), indent=2)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
