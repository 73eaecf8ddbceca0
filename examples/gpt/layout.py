"""How the parameters and the text are sharded on a mesh of devices."""

import argparse
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["make_mesh", "parse_mesh", "shard_batch", "shard_parameters"]

AXES = ("data", "fsdp", "tp")


def parse_mesh(text: str) -> dict[str, int]:
    """Reads 'data=2,fsdp=4': sizes of the axes data (replicas), fsdp (rows) and tp (columns)."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"must be like data=2,fsdp=4 with axes among {', '.join(AXES)}, got {text}"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """Makes the mesh, on CPU out of as many devices as it needs; call it before any computation."""
    count = math.prod(sizes.values())
    jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise ValueError(f"--mesh needs {count} devices, there are {jax.device_count()}")
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count]
    )


def shard_parameters(params: Any, mesh: Mesh) -> Any:
    """The sharding of each parameter: rows over fsdp and columns over tp, where they divide."""

    def sharding(leaf: Any) -> NamedSharding:
        spec = [
            axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
            for size, axis in zip(leaf.shape, ("fsdp", "tp"), strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, params)


def shard_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch of text: examples over data and fsdp."""
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
    return NamedSharding(mesh, PartitionSpec(axes or None))
