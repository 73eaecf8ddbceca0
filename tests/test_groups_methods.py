"""What groups of devices that own a matrix together send each other, by the iteration's method."""

import re
from typing import Any

import jax
import pytest
import sharded
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from sharded import FAST, SLOW, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import scale_by_muon


def planned(leaves: sharded.Leaves, dtype: str = "float32", **options: Any) -> Any:
    mesh: Any = AbstractMesh((8,), ("f",))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, dtype) for k, leaf in leaves.items()}
    options |= {"ns_coeffs": FAST, "muon_weight_dimension_numbers": sharded.views(leaves)}
    return plan(shapes, sharded.shardings(leaves, mesh), device=SLOW, **options)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_scalars_are_planned_too(dtype, adaptive, method):
    leaves = {"up": Leaf((8, 48), P("f")), "down": Leaf((64, 8), P(None, "f"))}
    options: Any = {"ns_method": method, "adaptive": adaptive}
    found = planned(leaves, dtype, **options)
    assert {row.strategy for row in found.rows} == {"groups"}
    options |= {"ns_coeffs": FAST, "device": SLOW}
    compiled = sharded.compile_update(leaves, make_mesh({"f": 8}), dtype, **options)
    assert read_program(compiled).received == found.bytes


def test_matrices_of_two_methods_are_in_two_rounds():
    leaves = {"long": Leaf((16, 64), P("f")), "square": Leaf((16, 16), P("f"))}
    alone, shared = (planned(leaves, ns_method=method).rows for method in ("auto", "standard"))
    assert [(row.strategy, row.group_size, row.round) for row in alone] == [("groups", 4, None)] * 2
    assert [(row.strategy, row.group_size, row.round) for row in shared] == [("groups", 4, 0)] * 2
    mesh, tx = make_mesh({"f": 8}), scale_by_muon(FAST, device=SLOW)
    placed = jax.device_put(sharded.gradients(leaves), sharded.shardings(leaves, mesh))
    traced = str(jax.make_jaxpr(tx.update)(placed, tx.init(placed)))
    exchanges, passes, steps = 2, 1, len(FAST)
    triangles = re.findall(r":f32\[144\][^\n]* = ppermute\[", traced)
    assert len(triangles) == exchanges * (passes + steps)
    sharded.check(leaves, mesh, device=SLOW)
