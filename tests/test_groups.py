"""More devices than matrices: groups of devices that own a matrix together."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, OVERLAPPING, SLOW, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import MatrixView, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims
from muon_optax.sharding.planning.device_models import DEVICES, DeviceModel

# Wide, tall and nearly square, and of three dims.
FSDP = {
    "up": Leaf((8, 48), P("f")),
    "down": Leaf((64, 8), P("f")),
    "short": Leaf((1, 8, 16), P(None, None, "f"), STACK),
    "heads": Leaf((8, 3, 8), P("f"), Dims(0, (1, 2))),
}
HSDP = {
    "up": Leaf((2, 8, 48), P(None, "f"), STACK),
    "down": Leaf((2, 48, 8), P(None, "f"), STACK),
}
MESHES = {
    # name: (sizes of the mesh, leaves, devices of a group)
    "fsdp": ({"f": 8}, FSDP, 2),
    "lone": ({"f": 8}, {"up": Leaf((8, 64), P("f"))}, 8),
    "rounds": ({"f": 8}, {"up": Leaf((5, 8, 192), P(None, "f"), STACK)}, 4),
    "two_rounds": (
        {"f": 8},
        {
            "up": Leaf((3, 8, 48), P(None, "f"), STACK),
            "down": Leaf((48, 8), P("f")),
            "short": Leaf((3, 8, 16), P(None, "f"), STACK),
        },
        2,
    ),
    "hsdp": ({"r": 2, "f": 4}, HSDP, 2),
    "replicas_inside": ({"f": 4, "r": 2}, HSDP, 2),
    "fsdp_tp": (
        {"x": 2, "y": 4},
        {
            "q": Leaf((8, 8), P("x", "y")),
            "o": Leaf((8, 8), P("y", "x")),
            "up": Leaf((8, 48), P("x", "y")),
            "down": Leaf((48, 8), P("y", "x")),
        },
        2,
    ),
    "experts": (
        {"e": 2, "f": 4},
        {
            "up": Leaf((2, 8, 48), P("e", "f"), STACK),
            "down": Leaf((2, 48, 8), P("e", "f"), STACK),
        },
        2,
    ),
    "beside_owners": (
        {"f": 8},
        {"up": Leaf((8, 64), P("f")), "fused": Leaf((8, 24), P("f"), MatrixView(0, 1, (8, 16)))},
        8,
    ),
}


def planned(name, **options):
    sizes, leaves, _ = MESHES[name]
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    options = {
        "device": SLOW,
        "ns_coeffs": FAST,
        "ns_method": "standard",
        "muon_weight_dimension_numbers": sharded.views(leaves),
        **options,
    }
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize("name", MESHES)
def test_the_plan(name):
    print(planned(name))


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_whole_matrices(name, kind):
    sizes, leaves, _ = MESHES[name]
    mesh = make_mesh(sizes, kind)
    device = OVERLAPPING if kind == "explicit" else SLOW
    where = sharded.shardings(leaves, mesh)
    sharded.check(leaves, mesh, param_shardings=where, device=device, ns_method="standard")
