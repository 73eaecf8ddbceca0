"""Seconds to trace and compile an update of more and more layers, beside optax's 'dion'.

    python benchmarks/compile_time.py [--devices 1 8] [--layers 12 48] [--repeats 3]
        [--output benchmarks/results/compile_time.json]

Each layer has four matrices, those of a GPT-2 block, sharded on their rows where there are several
CPU devices. optax gets an Auto mesh, as it raises on Explicit ones. Contestants and numbers of
layers take turns; `processor` is the process's CPU time, less shaken by what else runs.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import timing
from benchmarks.shapes import gpt2_layers, like_params, placed
from muon_optax import muon

OURS, DION = "muon_optax", "optax dion"


def seconds_of(name: str, devices: int, layers: int, model: int) -> dict[str, float]:
    """Seconds to trace and lower, and to compile, with nothing kept from before."""
    jax.clear_caches()
    kind = AxisType.Explicit if name == OURS else AxisType.Auto
    mesh = jax.make_mesh((devices,), ("fsdp",), (kind,), devices=jax.devices()[:devices])
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {
        key: jax.ShapeDtypeStruct(shape, "float32", sharding=rows)
        for key, shape in gpt2_layers(layers, model).items()
    }
    tx = muon(0.02) if name == OURS else optax.contrib.muon(0.02, ns_coeffs="dion")
    state = jax.eval_shape(tx.init, params)
    state = placed(state, like_params(state, dict.fromkeys(params, rows)))
    start, cpu = time.perf_counter(), time.process_time()
    lowered = jax.jit(tx.update).lower(params, state, params)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    return {
        "trace": middle - start,
        "compile": end - middle,
        "total": end - start,
        "processor": time.process_time() - cpu,
    }


def measure(devices: int, layers: list[int], model: int, repeats: int) -> dict[str, Any]:
    """Medians of some runs of each contestant and number of layers, and their ratios."""
    keys = [(name, n) for n in layers for name in (OURS, DION)]
    runs = [
        {key: seconds_of(key[0], devices, key[1], model) for key in keys} for _ in range(repeats)
    ]
    record: dict[str, Any] = {"model": model, "repeats": repeats, "machine": timing.machine()}
    for clock in ("total", "processor"):
        of = {key: [run[key][clock] for run in runs] for key in keys}
        record[clock] = {
            "seconds": {f"{name}, {n}": timing.spread(of[name, n]) for name, n in keys},
            "of_dion": {n: _median_ratio(of[OURS, n], of[DION, n]) for n in layers},
            "of_fewest_layers": {
                n: _median_ratio(of[OURS, n], of[OURS, layers[0]]) for n in layers[1:]
            },
        }
    return record


def _median_ratio(a: list[float], b: list[float]) -> float:
    return timing.spread([x / y for x, y in zip(a, b, strict=True)])["median"]


def show(devices: int, record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    load = record["machine"]["load_average"][0]
    title = f"{devices} device(s), model {record['model']}, load {load:.1f}"
    table = Table("", "CPU seconds", "spread", "wall", title=title)
    for key, cpu in record["processor"]["seconds"].items():
        wall = record["total"]["seconds"][key]
        ends = f"{cpu['q1']:.1f}–{cpu['q3']:.1f}"
        table.add_row(f"{key} layers", f"{cpu['median']:.1f}", ends, f"{wall['median']:.1f}")
    for what in ("of_dion", "of_fewest_layers"):
        for n, value in record["processor"][what].items():
            wall = record["total"][what][n]
            table.add_row(f"{what}, {n} layers", f"{value:.2f}", "", f"{wall:.2f}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--model", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(args.devices))
    records = {}
    for devices in args.devices:
        records[str(devices)] = measure(devices, args.layers, args.model, args.repeats)
        show(devices, records[str(devices)])
    if args.output:
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
