"""Fewer matrices than replicas: several work on the same one, and each sends a part of it."""

import dataclasses
import math
from typing import Any

import jax
import pytest
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import DeviceModel, MatrixView
from muon_optax import MuonDimensionNumbers as Dims

# Bytes take about as long as matmuls: all work is divided, and no byte is for nothing.
DEVICE = DeviceModel("slow network", 1e9, 1e9, 2e7, latency=0.0, overlaps=False)
FASTER = dataclasses.replace(DEVICE, bandwidth=4e8)
# Of 1, 2, 3 and 5 matrices 8, 4, 2 and 1 can each be on 8 replicas; of 3 and 5 some rows are empty.
LEAVES = {
    "one": Leaf((16, 56), P("f")),
    "two": Leaf((2, 24, 16), P(None, None, "f"), STACK),
    "three": Leaf((3, 16, 40), P(None, "f"), STACK),
    "five": Leaf((5, 16, 16), P(None, "f"), STACK),
    "heads": Leaf((16, 3, 8), P("f"), Dims(0, (1, 2))),
    "fused": Leaf((32, 24), P("f"), MatrixView(0, 1, split=(8, 16))),
}
REPLICATED = {name: Leaf(leaf.shape, P(), leaf.view) for name, leaf in LEAVES.items()}
MESHES = {
    "ddp": ({"r": 8}, REPLICATED),
    "hsdp": ({"r": 4, "f": 2}, LEAVES),
    "replicas_inside": ({"f": 2, "r": 4}, LEAVES),
    "two_axes": ({"r": 2, "f": 2, "s": 2}, LEAVES),
}


def planned(leaves, sizes, **options):
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    options = {"device": DEVICE, "muon_weight_dimension_numbers": sharded.views(leaves), **options}
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize("strategy", ["all_to_all", "gather"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_whole_matrices(name, strategy):
    sizes, leaves = MESHES[name]
    assert any(row.repeats > 1 for row in planned(leaves, sizes, strategy=strategy).rows)
    sharded.check(leaves, make_mesh(sizes), strategy=strategy, device=DEVICE)


def test_gram_matrices_of_slices():
    leaves, sizes = {"two": Leaf((2, 24, 16), P(None, "f"), STACK)}, {"r": 4, "f": 2}
    options = {"strategy": "gram", "device": FASTER}
    assert [row.repeats for row in planned(leaves, sizes, **options).rows] == [2]
    sharded.check(leaves, make_mesh(sizes), **options)


@pytest.mark.parametrize("name", MESHES)
def test_a_device_receives_what_the_plan_says(name):
    sizes, leaves = MESHES[name]
    options = {"strategy": "all_to_all", "device": DEVICE}
    compiled = sharded.compile_update(leaves, make_mesh(sizes), **options)
    assert read_program(compiled).received == planned(leaves, sizes, **options).bytes


def on_h100s(sizes, **stacks):
    """The rows of a plan of stacks (count, m, n) of bfloat16, by leaf."""
    spec = P(None, "fsdp") if "fsdp" in sizes else P()
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in stacks.items()}
    views = dict.fromkeys(stacks, STACK)
    rows = plan(
        shapes, NamedSharding(mesh, spec), device="h100", muon_weight_dimension_numbers=views
    ).rows
    return {name: [row for row in rows if row.leaves == (name,)] for name in stacks}


def test_ddp_receives_no_zeros():
    """Of GPT-2's matrices each device receives those that others work on, as none can do with less.

    Twelve of a shape on eight devices are one each, and the other four on two devices each.
    """
    widths = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}
    stacks = {name: (12, *shape) for name, shape in widths.items()}
    rows = on_h100s({"data": 8}, **stacks)
    for name, found in rows.items():
        assert [(row.count, row.repeats) for row in found] == [(8, 1), (4, 2)], name
        assert sum(row.bytes for row in found) == 2 * math.prod(stacks[name]) * 7 // 8, name


@pytest.mark.parametrize(
    ("replicas", "count", "rows"),
    [
        (64, 32, [(32, 2)]),
        (128, 64, [(64, 2)]),
        (128, 32, [(32, 4)]),
        (64, 160, [(128, 1), (32, 2)]),
        (128, 80, [(64, 2), (16, 8)]),
    ],
)
def test_hsdp_receives_no_zeros_from_other_replicas(replicas, count, rows):
    """The matrices of Llama-3's up or down projections on shards of eight."""
    (found,) = on_h100s({"replica": replicas, "fsdp": 8}, w=(count, 4096, 14336)).values()
    assert [(row.count, row.repeats) for row in found] == rows
    matrix, shards = 2 * 4096 * 14336, 8
    ways = {"gather": 1, "all_to_all": 2}  # whole matrices to one or all shards, and slices back
    exchanged = sum(ways[row.strategy] * matrix * 7 // 8 for row in found)
    from_replicas = sum(row.bytes for row in found) - exchanged
    assert from_replicas == count * matrix // shards * (replicas - 1) // replicas


def test_the_plan_says_on_how_many_replicas_each_is_and_where():
    (row,) = planned({"w": LEAVES["two"]}, {"r": 4, "f": 1}, strategy="all_to_all").rows
    assert row.reason == "asked for; each on 2 replicas"
    assert row.owners == (0, 1, 2, 3)


def test_a_part_of_a_result_is_whole_elements():
    """Of two matrices with 3 x 5 elements each could be on 4 of 8 replicas, but is on 3."""
    leaves = {"w": Leaf((2, 3, 5), P(), STACK)}
    (row,) = planned(leaves, {"r": 8}, device=FASTER).rows
    assert (row.repeats, row.bytes) == (3, 7 * 5 * 4)
    sharded.check(leaves, make_mesh({"r": 8}), device=FASTER)
