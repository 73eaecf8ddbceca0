"""What Dion2 sends and multiplies, in compiled programs and in the plan."""

import functools
import math
from typing import Any

import jax
import pytest
import sharded
from jax.sharding import PartitionSpec as P
from test_pieces import compiled

from benchmarks.compiled import Program, read_program
from muon_optax import Dion2, MatrixView, Plan, muon, plan

SHAPES = {"down_0": (128, 64), "down_1": (128, 64), "qkv": (64, 96), "heads": (64, 4, 16)}
VIEWS: Any = {k: MatrixView() for k in SHAPES} | {
    "qkv": MatrixView(0, 1, split=(32, 32, 32)),
    "heads": MatrixView(0, (1, 2)),
}
SUMS: dict[str, Any] = {"momentum": "sum", "nesterov": False, "bias_correction": False}


def mesh_of(axes: dict[str, int]) -> Any:
    return sharded.make_mesh(axes, "explicit")


def optimizer(where: Any, dion2: Dion2 | None, **options: Any) -> Any:
    return muon(
        0.1,
        sharded.FAST,
        muon_weight_dimension_numbers={k: VIEWS[k] for k in where},
        param_shardings=where,
        dion2=dion2,
        device="h100",
        **SUMS,
        **options,
    )


@functools.cache
def measured(spec: P, dion2: Dion2 | None, names: tuple[str, ...]) -> tuple[Program, Plan]:
    """The compiled update of some leaves, and its plan."""
    mesh = mesh_of({"a": 2, "b": 4})
    where = {k: jax.NamedSharding(mesh, spec) for k in names}
    tx, shapes = optimizer(where, dion2), {k: SHAPES[k] for k in names}
    params = {k: jax.ShapeDtypeStruct(v, "float32", sharding=where[k]) for k, v in shapes.items()}
    return read_program(compiled(tx, shapes, where, "explicit")), plan(tx, params)


ALL = tuple(SHAPES)
DOWNS = ALL[:2]


def test_half_of_the_slices_take_half_of_the_bytes_where_they_are_whole():
    """As those of outputs are with fan-in sharded: also of fused blocks and of merged axes."""
    (own, _), (half, planned) = (
        measured(P(("a", "b")), dion2, ALL) for dion2 in (None, Dion2(0.5))
    )
    counts, received = dict(half.counts), dict(half.received_by_kind)
    assert counts.pop("all-reduce") == 1  # the scores of all leaves
    scores = received.pop("all-reduce")
    assert scores <= 2 * 4 * (2 * 64 + 96 + 64)
    assert counts == own.counts
    assert sum(received.values()) == planned.bytes
    assert sum(received.values()) / own.received <= 0.5
    assert half.flops / own.flops <= 0.55
    assert {row.matrix for row in planned.rows} == {(128, 32), (64, 48), (64, 32)}


def test_flops_of_sharded_slices_shrink_alone():
    (own, _), (half, planned) = (
        measured(P("a", "b"), dion2, DOWNS) for dion2 in (None, Dion2(0.5))
    )
    assert half.counts == own.counts | {"all-reduce": 1}
    received = dict(half.received_by_kind)
    received.pop("all-reduce")
    assert received == own.received_by_kind
    assert planned.bytes == own.received
    assert half.flops / own.flops <= 0.55
    assert "slices that aren't chosen are sent as zeros" in str(planned)


def test_nothing_but_slices_is_sent_for_a_fraction_of_one():
    (own, _), (whole, _) = (measured(P(("a", "b")), dion2, DOWNS) for dion2 in (None, Dion2(1.0)))
    assert (whole.counts, whole.flops) == (own.counts, own.flops)


@pytest.mark.parametrize("name", ["down_0", "stack"])
def test_slices_go_back_to_parameters_under_zero_1(name):
    """Also where whole matrices are on each device, and only their results move."""
    mesh = mesh_of({"r": 4})
    shape, view = {"down_0": ((128, 64), MatrixView()), "stack": ((4, 128, 64), MatrixView(1, 2))}[
        name
    ]
    where = {name: jax.NamedSharding(mesh, P())}
    there = {name: jax.NamedSharding(mesh, P("r"))}
    params = {name: jax.ShapeDtypeStruct(shape, "float32", sharding=where[name])}
    own, half = (
        muon(
            0.1,
            sharded.FAST,
            muon_weight_dimension_numbers={name: view},
            param_shardings=where,
            mu_shardings=there,
            dion2=dion2,
            **SUMS,
        )
        for dion2 in (None, Dion2(0.5))
    )
    programs = [
        read_program(sharded.lower(tx, {name: shape}, where, "float32").compile())
        for tx in (own, half)
    ]
    received = [program.received_by_kind for program in programs]
    scores = received[1].pop("all-reduce")  # of all matrices, on each device
    assert scores <= 2 * 4 * 64 * math.prod(shape[:-2])
    assert sum(received[1].values()) <= sum(received[0].values()) / 2
    bytes_ = [plan(tx, params).bytes for tx in (own, half)]
    assert bytes_[1] == bytes_[0] / 2 > 0
