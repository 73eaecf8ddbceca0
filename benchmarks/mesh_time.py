"""Time of an update on eight CPU devices and the bytes each receives, beside optax on an Auto mesh.

    python benchmarks/mesh_time.py [--rounds 5] [--output benchmarks/results/mesh_time.json]

On Explicit meshes, which `jax.make_mesh` makes by default, `optax.contrib.muon` raises for every
sharded weight, so it gets an Auto mesh here, where the partitioner places its exchanges. The speed
of its default is 1. Bytes are read from the compiled programs. The eight devices share this
machine's cores: the times say what is computed in all, not what a machine with eight would take.
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import timing
from benchmarks.compiled import read_program
from benchmarks.shapes import like_params
from muon_optax import muon

DEVICES = 8
COUNT, SHAPE = 8, (256, 1024)
# The mesh, and how every matrix is sharded.
LAYOUTS: dict[str, tuple[dict[str, int], tuple[Any, Any]]] = {
    "FSDP rows": ({"fsdp": 8}, ("fsdp", None)),
    "FSDP columns": ({"fsdp": 8}, (None, "fsdp")),
    "HSDP": ({"replica": 2, "fsdp": 4}, ("fsdp", None)),
    "FSDP x TP": ({"fsdp": 4, "tp": 2}, ("fsdp", "tp")),
    "TP": ({"replica": 2, "tp": 4}, (None, "tp")),
    "DDP": ({"replica": 8}, (None, None)),
}
OPTAX = "optax"
CONTESTANTS: dict[str, Callable[[], Any]] = {
    "muon_optax jordan": lambda: muon(1.0),
    "muon_optax fast": lambda: muon(1.0, "fast"),
    OPTAX: lambda: optax.contrib.muon(1.0),
    "optax dion": lambda: optax.contrib.muon(1.0, ns_coeffs="dion"),
}


def update_of(name: str, layout: str) -> tuple[Callable[[], Any], int]:
    """A function that takes one update and waits for it, and the bytes a device receives."""
    sizes, spec = LAYOUTS[layout]
    is_theirs = name.startswith(OPTAX)
    mesh = _mesh(sizes, AxisType.Auto if is_theirs else AxisType.Explicit)
    rows = NamedSharding(mesh, PartitionSpec(*spec))
    keys = jax.random.split(jax.random.key(0), COUNT)
    grads = {f"w{i}": jax.device_put(jax.random.normal(k, SHAPE), rows) for i, k in enumerate(keys)}
    tx = CONTESTANTS[name]()
    state = jax.jit(tx.init)(grads)
    if is_theirs:  # which doesn't see to how the momentum is sharded
        state = jax.device_put(state, like_params(state, dict.fromkeys(grads, rows)))
    program = jax.jit(tx.update).lower(grads, state, grads).compile()
    received = read_program(program).received
    return lambda: jax.block_until_ready(program(grads, state, grads)), received


def _mesh(sizes: dict[str, int], kind: AxisType) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes))


def measure(layout: str, rounds: int) -> dict[str, Any]:
    """Speeds and bytes of every contestant in one layout."""
    made = {name: update_of(name, layout) for name in CONTESTANTS}
    samples = timing.interleaved({name: run for name, (run, _) in made.items()}, rounds)
    return {
        name: {
            "bytes": received,
            **{clock: timing.ratio(samples, OPTAX, name, clock) for clock in timing.CLOCKS},
        }
        for name, (_, received) in made.items()
    }


def raises_on_explicit() -> str:
    """What optax says on an Explicit mesh."""
    rows = NamedSharding(_mesh({"fsdp": DEVICES}, AxisType.Explicit), PartitionSpec("fsdp", None))
    grads = {"w": jax.device_put(jnp.ones(SHAPE), rows)}
    tx = optax.contrib.muon(1.0)
    try:
        jax.jit(tx.update)(grads, tx.init(grads), grads)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing: it ran"


def show(layouts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", "speed, CPU time", "spread", "speed, wall", "MB received a device")
    for layout, rows in layouts.items():
        for name, row in rows.items():
            cpu = row["cpu"]
            ends = f"{cpu['q1']:.2f}–{cpu['q3']:.2f}"
            wall, megabytes = f"{row['wall']['median']:.2f}", f"{row['bytes'] / 1e6:.2f}"
            table.add_row(layout, name, f"{cpu['median']:.2f}", ends, wall, megabytes)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    layouts = {layout: measure(layout, args.rounds) for layout in LAYOUTS}
    record = {
        "matrices": [COUNT, *SHAPE],
        "rounds": args.rounds,
        "machine": timing.machine(),
        "optax_on_an_explicit_mesh": raises_on_explicit(),
        "layouts": layouts,
    }
    show(layouts)
    print("optax on an Explicit mesh:", record["optax_on_an_explicit_mesh"])
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
