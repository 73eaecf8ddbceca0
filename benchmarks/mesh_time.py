"""Time of an update on eight CPU devices and the bytes each receives, beside optax on an Auto mesh.

    python benchmarks/mesh_time.py [--rounds 5] [--output benchmarks/results/mesh_time.json]
    MUON_OPTAX_MAXTEXT=<checkout> python benchmarks/mesh_time.py --maxtext

On Explicit meshes, which `jax.make_mesh` makes by default, `optax.contrib.muon` raises for every
sharded weight, so it gets an Auto mesh here, where the partitioner places its exchanges. The speed
of its default is 1. Bytes are read from the compiled programs. The eight devices share this
machine's cores: the times say what is computed in all, not what a machine with eight would take.
With `--maxtext` MaxText's own Muon is measured, on Auto axes too: it moves stacked layers alone by
all-to-alls, so it gets the matrices as one leaf as well, and so does muon_optax.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import timing
from benchmarks.compiled import read_program
from benchmarks.maxtext import maxtext_muon, numbers_of
from benchmarks.shapes import like_params
from muon_optax import MuonDimensionNumbers, muon

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


class Contestant(NamedTuple):
    """An optimizer, and what it is given.

    Attributes:
      make: from (dimension numbers, shardings) of each leaf to the optimizer.
      kind: of the mesh's axes.
      is_stacked: whether all matrices are one leaf.
    """

    make: Callable[[Any, Any], Any]
    kind: AxisType = AxisType.Auto
    is_stacked: bool = False


def _ours(coeffs: Literal["jordan", "fast"], is_stacked: bool = False) -> Contestant:
    return Contestant(
        lambda views, _: muon(1.0, coeffs, muon_weight_dimension_numbers=views),
        AxisType.Explicit,
        is_stacked,
    )


def _maxtext(views: Any, where: Any) -> Any:
    numbers = numbers_of(views, where)
    return maxtext_muon().muon(1.0, muon_weight_dimension_numbers=numbers)


CONTESTANTS = {
    "muon_optax jordan": _ours("jordan"),
    "muon_optax fast": _ours("fast"),
    OPTAX: Contestant(lambda *_: optax.contrib.muon(1.0)),
    "optax dion": Contestant(lambda *_: optax.contrib.muon(1.0, ns_coeffs="dion")),
}
WITH_MAXTEXT = {
    **CONTESTANTS,
    "muon_optax jordan, stacked": _ours("jordan", is_stacked=True),
    "maxtext": Contestant(_maxtext),
    "maxtext, stacked": Contestant(_maxtext, is_stacked=True),
}


def update_of(contestant: Contestant, layout: str) -> tuple[Callable[[], Any], int]:
    """A function that takes one update and waits for it, and the bytes a device receives."""
    sizes, spec = LAYOUTS[layout]
    mesh = _mesh(sizes, contestant.kind)
    leaves = _matrices(contestant.is_stacked)
    rows = NamedSharding(mesh, PartitionSpec(*(None,) * contestant.is_stacked, *spec))
    where = dict.fromkeys(leaves, rows)
    grads = jax.device_put(leaves, where)
    views = dict.fromkeys(leaves, MuonDimensionNumbers(-2, -1))
    tx = contestant.make(views, where)
    state = jax.jit(tx.init)(grads)
    if contestant.kind == AxisType.Auto:  # theirs don't see to how the momentum is sharded
        state = jax.device_put(state, like_params(state, where))
    program = jax.jit(tx.update).lower(grads, state, grads).compile()
    received = read_program(program).received
    return lambda: jax.block_until_ready(program(grads, state, grads)), received


def _matrices(is_stacked: bool) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), COUNT)
    matrices = [jax.random.normal(key, SHAPE) for key in keys]
    return (
        {"w": jnp.stack(matrices)} if is_stacked else {f"w{i}": x for i, x in enumerate(matrices)}
    )


def _mesh(sizes: dict[str, int], kind: AxisType) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes))


def measure(contestants: Mapping[str, Contestant], layout: str, rounds: int) -> dict[str, Any]:
    """Speeds and bytes of every contestant in one layout."""
    made = {name: update_of(each, layout) for name, each in contestants.items()}
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
    parser.add_argument("--maxtext", action="store_true", help="MaxText's Muon too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    contestants = WITH_MAXTEXT if args.maxtext else CONTESTANTS
    layouts = {layout: measure(contestants, layout, args.rounds) for layout in LAYOUTS}
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
