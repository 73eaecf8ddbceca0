"""The plan's time of an update on very many devices, and what groups of owners would make of it.

    python benchmarks/many_devices.py

Nothing is compiled or run: times are those of the device models, with nothing overlapped. A group
is so many neighbours that split each of its matrices along the long side, sum Gram matrices among
themselves, and all iterate them: an owner of `plan` is one device. Groups aren't built.
"""

import argparse
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

# (how many, fan-in, fan-out) of the matrices. Of DeepSeek-V3 all but the experts' kernels, which
# are whole on their devices where these are sharded over experts alone.
MODELS = {
    "Llama-3-70B": [(240, 8192, 28672), (160, 8192, 8192), (160, 8192, 1024)],
    "Llama-3-405B": [(378, 16384, 53248), (252, 16384, 16384), (252, 16384, 1024)],
    "DeepSeek-V3, dense": [
        (9, 7168, 18432),
        (61, 16384, 7168),
        (61, 1536, 24576),
        (174, 7168, 2048),
        (61, 7168, 1536),
        (61, 512, 32768),
        (61, 7168, 576),
    ],
}
GROUP = 8
STACK = MuonDimensionNumbers(1, 2)


def planned(sizes: list[tuple[int, int, int]], devices: int, model: DeviceModel) -> Any:
    """The plan of the matrices, rows sharded over 512 devices, the others being replicas."""
    shards = min(devices, 512)
    mesh = AbstractMesh((devices // shards, shards), ("replica", "fsdp"))
    where = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    shapes = {
        f"w{i}": jax.ShapeDtypeStruct((count, *size), "bfloat16")
        for i, (count, *size) in enumerate(sizes)
    }
    options = {"muon_weight_dimension_numbers": STACK, "param_shardings": where}
    return plan(muon(0.02, device=model, **options), shapes)


def rounds(sizes: list[tuple[int, int, int]], owners: int) -> Iterator[tuple[int, int]]:
    """The largest matrix of each round of owners, rows and columns."""
    left = 0
    for count, *size in sorted(sizes, key=lambda x: -x[1] * x[2]):
        for _ in range(-(-max(0, count - left) // owners)):
            yield min(size), max(size)
            left += owners
        left -= count


def seconds_in_groups(sizes: list[tuple[int, int, int]], devices: int, model: DeviceModel) -> float:
    """The time if each matrix is split by a group: slices in and out, Gram matrices, matmuls."""
    iteration, total = NewtonSchulz(resolve_schedule()), 0.0
    passes = iteration.schedule.passes
    far = model.bandwidth if devices <= model.node_size else model.slow_bandwidth
    for rows, columns in rounds(sizes, devices // GROUP):
        with_slices, steps = iteration.gram_flops(rows, columns, is_half=True)
        total += 2 * rows * columns * 2 / GROUP / far + 2 * model.latency
        summed = 2 * rows**2 * 4 * (GROUP - 1) / GROUP
        total += passes * (summed / model.bandwidth + model.latency)
        total += (with_slices / GROUP + steps) / model.rate(2)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    arguments = parser.parse_args()
    print("| | " + " | ".join(f"{n:,}" for n in arguments.devices) + " |")
    print("|---" * (1 + len(arguments.devices)) + "|")
    for name, sizes in MODELS.items():
        for device in ("h100", "tpu_v5p"):
            model = DEVICES[device]
            cells = [
                f"{planned(sizes, n, model).seconds * 1e3:.0f}, "
                f"{seconds_in_groups(sizes, n, model) * 1e3:.0f}"
                for n in arguments.devices
            ]
            print(f"| {name}, {device} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
