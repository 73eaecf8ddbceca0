"""The plan's time where there are more devices than matrices, and that of each size of groups.

    python benchmarks/many_devices.py

Nothing is compiled or run: times are those of the device models, with nothing overlapped. Columns
2, 4 and 8 have all matrices owned by groups of so many neighbours, in as few rounds as possible,
each with matrices padded to the largest of it; the last has what the plan takes, which may cut some
matrices otherwise, as slices must be cut in equal parts.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from muon_optax import DeviceModel, MuonDimensionNumbers, muon, plan
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.planning.device_models import DEVICES

Sizes = list[tuple[int, int, int]]

# (how many, fan-in, fan-out) of the matrices. Of DeepSeek-V3 all but the experts' kernels, which
# are whole on their devices where these are sharded over experts alone.
MODELS: dict[str, Sizes] = {
    "Llama-3-8B": [(64, 4096, 14336), (32, 14336, 4096), (64, 4096, 4096), (64, 4096, 1024)],
    "Llama-3-70B": [(160, 8192, 28672), (80, 28672, 8192), (160, 8192, 8192), (160, 8192, 1024)],
    "Llama-3-405B": [
        (252, 16384, 53248),
        (126, 53248, 16384),
        (252, 16384, 16384),
        (252, 16384, 1024),
    ],
    "DeepSeek-V3, dense": [
        (6, 7168, 18432),
        (3, 18432, 7168),
        (61, 16384, 7168),
        (61, 1536, 24576),
        (116, 7168, 2048),
        (58, 2048, 7168),
        (61, 7168, 1536),
        (61, 512, 32768),
        (61, 7168, 576),
    ],
}
# Sizes of the mesh: replicas, and devices that each matrix's rows are sharded over.
MESHES = {
    "Llama-3-8B": [(1, 256), (1, 512), (8, 64)],
    "Llama-3-70B": [(1, 512), (2, 512), (4, 512)],
    "Llama-3-405B": [(2, 512), (4, 512), (8, 512), (16, 512)],
    "DeepSeek-V3, dense": [(1, 512), (2, 512), (4, 512)],
}
GROUPS = (2, 4, 8)
STACK = MuonDimensionNumbers(1, 2)


def planned(sizes: Sizes, mesh: tuple[int, int], model: DeviceModel, strategy: str) -> Any:
    """The plan of the matrices, stacked by shape."""
    where = NamedSharding(AbstractMesh(mesh, ("replica", "fsdp")), PartitionSpec(None, "fsdp"))
    shapes = {
        f"w{i}": jax.ShapeDtypeStruct((count, *size), "bfloat16")
        for i, (count, *size) in enumerate(sizes)
    }
    options = {"muon_weight_dimension_numbers": STACK, "param_shardings": where}
    return plan(muon(0.02, device=model, strategy=strategy, **options), shapes)


def rounds(sizes: Sizes, owners: int) -> Iterator[Sizes]:
    """The matrices of each round of owners, the largest first."""
    round_, left = [], owners
    for count, *size in sorted(sizes, key=lambda x: -x[1] * x[2]):
        while count:
            taken = min(count, left)
            round_.append((taken, min(size), max(size)))
            count, left = count - taken, left - taken
            if not left:
                yield round_
                round_, left = [], owners
    if round_:
        yield round_


def seconds_in_groups(sizes: Sizes, mesh: tuple[int, int], size: int, model: DeviceModel) -> float:
    """The time if groups split each matrix: slices in and out, sums in each step, matmuls."""
    replicas, shards = mesh
    axes: dict[str, int] = {"replica": replicas, "fsdp": shards}
    far, from_replicas = (model.bandwidth_over((axis,), axes) for axis in ("fsdp", "replica"))
    near = model.bandwidth_in_groups(("fsdp",), axes, size)
    steps, exchanges = len(NewtonSchulz(resolve_schedule()).schedule.rows), int(math.log2(size))
    own = [(-(-count // replicas), m, n) for count, m, n in sizes]
    total = model.latency * (replicas > 1)
    for each in rounds(own, shards // size):
        rows, columns = max(m for _, m, _ in each), max(n for *_, n in each)
        longest = max(m * n for _, m, n in each)
        total += 2 * longest * 2 / size * (shards - 1) / shards / far + 2 * model.latency
        total += exchanges * (steps * 2 * 9 / 16 * rows**2 / near + (2 * steps + 1) * model.latency)
        total += steps * (4 * rows**2 * columns / size + 2 * rows**3) / model.rate(2)
    results = sum(count * m * n * 2 / shards for count, m, n in own)
    return total + results * (replicas - 1) / from_replicas


def chosen(found: Any) -> str:
    """The sizes of the groups that a plan has, most matrices first."""
    groups: dict[int, int] = {}
    for row in found.rows:
        groups[row.group_size] = groups.get(row.group_size, 0) + row.count
    return ", ".join(str(g) for g in sorted(groups, key=lambda g: -groups[g]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    header = ["", "replicas x shards", "one owner", *map(str, GROUPS), "the plan", "its groups"]
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for name in arguments.models:
        for device in ("h100", "tpu_v5p"):
            for mesh in MESHES[name]:
                sizes, model = MODELS[name], DEVICES[device]
                found = planned(sizes, mesh, model, "auto")
                times = [
                    planned(sizes, mesh, model, "all_to_all").seconds,
                    *(seconds_in_groups(sizes, mesh, size, model) for size in GROUPS),
                    found.seconds,
                ]
                cells = [f"{name}, {device}", " x ".join(f"{n:,}" for n in mesh)]
                cells += [f"{seconds * 1e3:.1f}" for seconds in times]
                print("| " + " | ".join([*cells, chosen(found)]) + " |")


if __name__ == "__main__":
    main()
