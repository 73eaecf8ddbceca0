"""What an update of Llama-3-8B receives, compiled for GPUs and TPUs that need not be there.

    python benchmarks/aot_bytes.py cuda --devices 8 64 512 --output aot_bytes.json
    python benchmarks/aot_bytes.py tpu --devices 8 64 512 --output aot_bytes.json

Each platform wants a virtual environment of its own, as the plugins would otherwise claim the CPU
process: `pip install jax jax-cuda13-plugin jax-cuda13-pjrt optax`, all of one JAX version, and
`pip install jax libtpu optax`. No accelerator is looked for. Records of other platforms and sizes
that the output holds already are kept.

All matrices are bfloat16, layers stacked. The bytes are read from the optimised program, and set
against the formulas of the strategies that the plan chose, and of those with the fewest bytes:

    gather      L mn b f                    each matrix whole on every device
    all_to_all  2 ceil(L / N) mn b f        each matrix whole on one device, and back
    gram        2 (1 + r) ceil(L / N) m² 4 (N - 1)   where its long side alone is sharded

with L matrices m x n (m <= n) of b bytes an element, N devices to a replica, f = (N - 1) / N and r
restarts. Where R replicas share the work, L is ceil(L / R), and each receives the results of the
others. The fastest plan need not be the one with the fewest bytes: replicas lie on slower networks.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.append(str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.compiled import read_program
from muon_optax import MuonDimensionNumbers, Plan, plan, scale_by_muon, state_shardings
from muon_optax.polar import NewtonSchulz, resolve_schedule

LAYERS, ITEMSIZE, RESTARTS = 32, 2, 1
TPU_SHAPES = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8"}
STACK = MuonDimensionNumbers(1, 2)
# [fan-in, fan-out], and whether tensor parallelism cuts the output (else the input).
KERNELS = {
    "q": (4096, 4096, True),
    "k": (4096, 1024, True),
    "v": (4096, 1024, True),
    "o": (4096, 4096, False),
    "gate": (4096, 14336, True),
    "up": (4096, 14336, True),
    "down": (14336, 4096, False),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way to lay the parameters out.

    Attributes:
      name: as shown in the results.
      axes: names of the mesh axes; the last one lies within a host.
      inner: size of the last of two axes, at most.
      specs: mesh axes on the fan-in and the fan-out, for kernels cut along either by TP.
    """

    name: str
    axes: tuple[str, ...]
    inner: int
    column_parallel: tuple[str | None, str | None]
    row_parallel: tuple[str | None, str | None]

    def sizes(self, devices: int) -> dict[str, int]:
        """Size of each mesh axis."""
        if len(self.axes) == 1:
            return {self.axes[0]: devices}
        inner = min(self.inner, devices // 2)
        return dict(zip(self.axes, (devices // inner, inner), strict=True))

    def spec(self, kernel: str) -> tuple[str | None, str | None]:
        """Mesh axes on the fan-in and the fan-out of a kernel."""
        return self.column_parallel if KERNELS[kernel][2] else self.row_parallel

    def shards(self, kernel: str, sizes: dict[str, int]) -> int:
        """Number of devices that a kernel is cut over."""
        return math.prod(sizes[axis] for axis in self.spec(kernel) if axis)


ROWS, COLUMNS = ("fsdp", None), (None, "fsdp")
LAYOUTS = (
    Layout("fsdp_rows", ("fsdp",), 0, ROWS, ROWS),
    Layout("fsdp_columns", ("fsdp",), 0, COLUMNS, COLUMNS),
    Layout("hsdp_rows", ("replica", "fsdp"), 8, ROWS, ROWS),
    Layout("fsdp_tp", ("fsdp", "tensor"), 8, ("fsdp", "tensor"), ("tensor", "fsdp")),
)


def make_mesh(platform: str, sizes: dict[str, int]) -> Mesh:
    """A mesh of devices that need not exist: H100s in hosts of eight, or TPU v5p."""
    devices = math.prod(sizes.values())
    if platform == "cuda":
        target = (Path(__file__).parent / "h100_sxm.txtpb").read_text()
        hosts = f"1x{max(devices // 8, 1)}x{min(devices, 8)}"
        found = topologies.get_topology_desc(
            topology_name="", platform="cuda", target_config=target, topology=hosts
        )
    else:
        found = topologies.get_topology_desc(f"v5p:{TPU_SHAPES[devices]}", "tpu")
    grid = np.array(found.devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def formula(strategy: str, count: int, kernel: str, shards: int, sharing: int) -> float:
    """Bytes of so many matrices like a kernel's under a strategy."""
    fan_in, fan_out, _ = KERNELS[kernel]
    matrix, mine = fan_in * fan_out * ITEMSIZE, math.ceil(count / sharing)
    owned = math.ceil(mine / shards)
    inside = {
        "local": 0.0,
        "gather": mine * matrix * (shards - 1) / shards,
        "all_to_all": 2 * owned * matrix * (shards - 1) / shards,
        "gram": 2 * (1 + RESTARTS) * owned * min(fan_in, fan_out) ** 2 * 4 * (shards - 1),
    }[strategy]
    return inside + mine * matrix / shards * (sharing - 1)


def chosen_bytes(promised: Plan, layout: Layout, sizes: dict[str, int]) -> float:
    """The formulas' bytes of what the plan chose."""
    return sum(
        formula(
            row.strategy,
            row.count,
            row.leaves[0],
            layout.shards(row.leaves[0], sizes),
            math.prod(sizes[a] for a in row.share_axes),
        )
        for row in promised.rows
    )


def fewest_bytes(layout: Layout, sizes: dict[str, int]) -> float:
    """The formulas' bytes of the strategies with the fewest, all matrices of a shape together."""
    groups: dict[tuple, list[str]] = {}
    for kernel, (fan_in, fan_out, _) in KERNELS.items():
        groups.setdefault((fan_in, fan_out, layout.spec(kernel)), []).append(kernel)
    total = 0.0
    for (fan_in, fan_out, spec), kernels in groups.items():
        shards = layout.shards(kernels[0], sizes)
        along_input, along_output = (axis is not None for axis in spec)
        only_long = along_output < along_input if fan_in > fan_out else along_input < along_output
        possible = ("gather", "all_to_all", *(("gram",) if only_long else ()))
        total += min(
            formula(strategy, LAYERS * len(kernels), kernels[0], shards, sharing)
            for strategy in possible
            for sharing in {1, math.prod(sizes.values()) // shards}
        )
    return total


def ideal_flops(devices: int) -> float:
    """FLOPs of the busiest device where all is shared as well as can be."""
    newton_schulz = NewtonSchulz(resolve_schedule())
    each = [newton_schulz.flops(m, n, "bfloat16") for m, n, _ in KERNELS.values()]
    return max(LAYERS * sum(each) / devices, max(each))


def compile_update(
    platform: str, layout: Layout, sizes: dict[str, int]
) -> tuple[jax.stages.Compiled, Plan]:
    """The compiled update, and its plan."""
    mesh = make_mesh(platform, sizes)
    where = {k: NamedSharding(mesh, PartitionSpec(None, *layout.spec(k))) for k in KERNELS}
    params = {
        k: jax.ShapeDtypeStruct((LAYERS, m, n), "bfloat16", sharding=where[k])
        for k, (m, n, _) in KERNELS.items()
    }
    device = {"cuda": "h100", "tpu": "tpu_v5p"}[platform]
    tx = scale_by_muon(weight_dimension_numbers=STACK, param_shardings=where, device=device)
    lies = state_shardings(tx, params, where)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        lies,
    )
    lowered = jax.jit(tx.update, out_shardings=(where, lies)).lower(params, state)
    promised = plan(
        params, where, muon_weight_dimension_numbers=dict.fromkeys(KERNELS, STACK), device=device
    )
    return lowered.compile(), promised


def measure(platform: str, layout: Layout, devices: int) -> dict[str, Any]:
    """One record of the results."""
    start = time.perf_counter()
    sizes = layout.sizes(devices)
    compiled, promised = compile_update(platform, layout, sizes)
    program, memory = read_program(compiled), compiled.memory_analysis()
    chosen, fewest = chosen_bytes(promised, layout, sizes), fewest_bytes(layout, sizes)
    return {
        "platform": platform,
        "devices": devices,
        "layout": layout.name,
        "mesh": sizes,
        "strategies": [
            f"{row.count} {row.strategy}" + f" over {row.share_axes}" * bool(row.share_axes)
            for row in promised.rows
        ],
        "received": program.received,
        "received_by_kind": program.received_by_kind,
        "collectives": program.counts,
        "formula": round(chosen),
        "ratio": round(program.received / chosen, 4),
        "fewest": round(fewest),
        "ratio_to_fewest": round(program.received / fewest, 4),
        "busiest_flops": promised.flops,
        "busiest_ratio": round(promised.flops / ideal_flops(devices), 4),
        "exchanges_between_products": program.exchanges_between_products,
        "workspace": memory.temp_size_in_bytes if memory else None,
        "seconds_to_compile": round(time.perf_counter() - start, 1),
    }


def keep(records: list[dict[str, Any]], path: Path) -> None:
    """Writes records beside those of other platforms, sizes and layouts."""
    names = ("platform", "devices", "layout")
    old = json.loads(path.read_text())["records"] if path.exists() else []
    merged = {tuple(r[n] for n in names): r for r in (*old, *records)}
    data = {"jax": jax.__version__, "records": [merged[k] for k in sorted(merged)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("platform", choices=("cuda", "tpu"))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--layouts", nargs="+", default=[layout.name for layout in LAYOUTS])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for devices in arguments.devices:
        for layout in LAYOUTS:
            if layout.name in arguments.layouts:
                record = measure(arguments.platform, layout, devices)
                print(json.dumps(record), flush=True)
                if arguments.output:
                    keep([record], arguments.output)


if __name__ == "__main__":
    main()
