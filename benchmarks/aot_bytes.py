"""What a step of a real model receives, overlaps and needs, compiled for machines that aren't here.

    python benchmarks/aot_bytes.py cuda --devices 8 64 512 1024 --output aot_bytes.json
    python benchmarks/aot_bytes.py cuda --model deepseek-v3 --devices 64 --layouts fsdp_experts
    python benchmarks/aot_bytes.py tpu --devices 8 64 512 --output aot_bytes.json

Each platform wants a virtual environment of its own, as the plugins would otherwise claim the CPU
process: `pip install jax jax-cuda13-plugin jax-cuda13-pjrt optax`, all of one JAX version, and
`pip install jax libtpu optax`; `make bench-aot` makes both. No accelerator is looked for. Records
of other platforms and sizes that the output holds already are kept.

The step updates all parameters, bfloat16, the AdamW leaves too; parameters and state are donated,
and the gradients are made in the step, as a backward pass makes them, so that their memory can be
used again. The workspace is what a device needs beyond parameters, state and gradients.
The bytes are read from the optimised program, and set against the formulas of the strategies that
the plan chose, and of those with the fewest bytes. The fastest plan need not be the one with the
fewest: replicas are on slower networks. `optax.contrib.muon` is measured beside, on the same mesh
with Auto axes (it raises on Explicit ones), and so is MaxText's own Muon, of a checkout that
MUON_OPTAX_MAXTEXT names.
"""

import argparse
import itertools
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
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks.aot_formulas import chosen_bytes, fewest_bytes, ideal_flops, largest_bytes
from benchmarks.compiled import read_program
from benchmarks.maxtext import maxtext_muon, numbers_of
from benchmarks.schedule import read_schedule
from benchmarks.shapes import LAYOUTS, ModelOnMesh, like_params, model_on, placed, plain_views
from muon_optax import Plan, muon, plan
from muon_optax.models import MODELS
from muon_optax.sharding.planning.device_models import DEVICES

DEFAULT_LAYOUTS = ("fsdp_rows", "fsdp_columns", "hsdp", "fsdp_tp")
CONTESTANTS = ("muon_optax", "optax", "maxtext")
DEVICE_MODELS = {"cuda": "h100", "tpu": "tpu_v5p"}
TPU_SHAPES = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8"}


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


def compile_step(
    contestant: str, model: ModelOnMesh, where: Any, device: str
) -> tuple[jax.stages.Compiled, float]:
    """(params, what makes gradients, state) -> (params, state), and the seconds to compile it."""
    if contestant == "optax":
        tx = optax.contrib.muon(
            0.02, muon_weight_dimension_numbers=plain_views(model.views), weight_decay=0.1
        )
    elif contestant == "maxtext":
        numbers = numbers_of(plain_views(model.views), where)
        options = {"mu_dtype": "bfloat16", "weight_decay": 0.1}  # as its configuration gives it
        tx = maxtext_muon().muon(0.02, muon_weight_dimension_numbers=numbers, **options)
    else:
        tx = muon(
            0.02,
            muon_weight_dimension_numbers=model.views,
            weight_decay=0.1,
            param_shardings=where,
            device=device,
        )
    shapes = jax.eval_shape(tx.init, model.params)
    shardings = like_params(shapes, where)
    state = placed(shapes, shardings)
    params = placed(model.params, where)

    def step(params, sources, state):
        grads = jax.lax.optimization_barrier(jax.tree.map(jnp.negative, sources))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = time.perf_counter()
    jitted = jax.jit(step, out_shardings=(where, shardings), donate_argnums=(0, 2))
    compiled = jitted.lower(params, params, state).compile()
    return compiled, time.perf_counter() - start


def measure(
    platform: str, name: str, layout: str, devices: int, contestant: str, is_scanned: bool
) -> dict[str, Any]:
    """One record of the results."""
    device = DEVICE_MODELS[platform]
    model = model_on(name, layout, devices=devices, scanned=is_scanned)
    where = model.shardings(make_mesh(platform, model.sizes))
    compiled, seconds = compile_step(contestant, model, where, device)
    text = compiled.as_text() or ""
    program, schedule = read_program(text), read_schedule(text, DEVICES[device])
    workspace, fewest = _workspace(compiled, placed(model.params, where)), fewest_bytes(model)
    record = {
        "platform": platform,
        "model": name,
        "devices": devices,
        "layout": layout,
        "scanned": is_scanned,
        "contestant": contestant,
        "mesh": model.sizes,
        "received": program.received,
        "received_by_kind": program.received_by_kind,
        "collectives": program.counts,
        "fewest": round(fewest),
        "ratio_to_fewest": round(program.received / fewest, 4) if fewest else 1.0,
        "flops_in_program": program.flops,
        "exchanges_between_products": program.exchanges_between_products,
        "share_overlapped": round(schedule.share_covered, 4),
        "share_hidden_by_model": round(schedule.share_hidden, 4),
        "model_seconds": round(schedule.seconds, 6),
        "workspace": workspace,
        "workspace_in_largest_matrices": round(workspace / largest_bytes(model), 2),
        "seconds_to_compile": round(seconds, 1),
    }
    if contestant != "muon_optax":
        return record
    tx = muon(1.0, muon_weight_dimension_numbers=model.views, param_shardings=where, device=device)
    promised = plan(tx, model.params)
    return record | _promises(promised, program.received, model)


def _workspace(compiled: jax.stages.Compiled, params: Any) -> int:
    """Bytes that a device needs beyond parameters, gradients and state."""
    memory: Any = compiled.memory_analysis()
    grads = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(params)
    )
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return needed - grads


def _promises(promised: Plan, received: int, model: ModelOnMesh) -> dict[str, Any]:
    """What the plan says, and how the program keeps to it."""
    chosen = chosen_bytes(promised, model)
    return {
        "strategies": [
            f"{row.count} {row.strategy}" + f" over {row.share_axes}" * bool(row.share_axes)
            for row in promised.rows
        ],
        "formula": round(chosen),
        "ratio": round(received / chosen, 4) if chosen else 1.0,
        "plan_bytes": promised.bytes,
        "plan_seconds": round(promised.seconds, 6),
        "busiest_flops": promised.flops,
        "busiest_ratio": round(promised.flops / ideal_flops(model), 4),
    }


def keep(records: list[dict[str, Any]], path: Path) -> None:
    """Writes records beside those of other programs."""
    names = ("platform", "model", "devices", "layout", "scanned", "contestant")
    old = json.loads(path.read_text())["records"] if path.exists() else []
    merged = {tuple(r[n] for n in names): r for r in (*old, *records)}
    data = {"jax": jax.__version__, "records": [merged[k] for k in sorted(merged)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("platform", choices=("cuda", "tpu"))
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=DEFAULT_LAYOUTS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=["muon_optax"])
    parser.add_argument("--unstacked", action="store_true", help="a leaf a layer")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for devices, layout, contestant in itertools.product(
        arguments.devices, arguments.layouts, arguments.contestants
    ):
        program = layout, devices, contestant, not arguments.unstacked
        record = measure(arguments.platform, arguments.model, *program)
        print(json.dumps(record), flush=True)
        if arguments.output:
            keep([record], arguments.output)


if __name__ == "__main__":
    main()
