"""Fewer matrices than owners: kinds of several shapes that share a round."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, OVERLAPPING, SLOW, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import DeviceModel, MatrixView, muon, orthogonalize, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims

# Slices of one size (up and down), of smaller ones, of three dims, and a fused one.
FSDP = {
    "up": Leaf((2, 16, 40), P(None, "f"), STACK),
    "down": Leaf((40, 16), P("f")),
    "square": Leaf((1, 16, 16), P(None, None, "f"), STACK),
    "heads": Leaf((16, 3, 8), P("f"), Dims(0, (1, 2))),
    "fused": Leaf((16, 24), P("f"), MatrixView(0, 1, split=(8, 16))),
}
HSDP = {
    "up": Leaf((3, 16, 32), P(None, "f"), STACK),
    "up_too": Leaf((16, 32), P("f")),
    "down": Leaf((2, 32, 16), P(None, "f"), STACK),
    "square": Leaf((16, 16), P("f")),
}
FSDP_TP = {
    "q": Leaf((16, 16), P("x", "y")),
    "o": Leaf((2, 16, 16), P(None, "y", "x"), STACK),
    "up": Leaf((16, 32), P("x", "y")),
    "down": Leaf((32, 16), P("y", "x")),
}
EXPERTS = {
    "up": Leaf((4, 16, 32), P("e", "f"), STACK),
    "down": Leaf((2, 32, 16), P("e", "f"), STACK),
}
MESHES = {
    "fsdp": ({"f": 8}, FSDP),
    "hsdp": ({"r": 2, "f": 4}, HSDP),
    "replicas_inside": ({"f": 4, "r": 2}, HSDP),
    "fsdp_tp": ({"x": 2, "y": 4}, FSDP_TP),
    "experts": ({"e": 2, "f": 4}, EXPERTS),
}


def planned(name, **options):
    sizes, leaves = MESHES[name]
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    options = {"device": SLOW, "muon_weight_dimension_numbers": sharded.views(leaves), **options}
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize("device", [OVERLAPPING, SLOW], ids=["in_order", "in_no_order"])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_whole_matrices(name, kind, device):
    sizes, leaves = MESHES[name]
    mesh = make_mesh(sizes, kind)
    where = sharded.shardings(leaves, mesh)
    sharded.check(leaves, mesh, param_shardings=where, device=device, strategy="all_to_all")
