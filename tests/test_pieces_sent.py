"""What pieces send on every layout, counted in compiled programs."""

import functools
from typing import Any, NamedTuple

import jax
import pytest
import sharded
import variants_on_meshes as meshes
from jax.sharding import PartitionSpec as P
from test_pieces import PIECES, compiled

from benchmarks.compiled import Program, read_program
from muon_optax import MatrixView, scale_by_dion2, scale_by_muon

VIEW = MatrixView(-2, -1)
MATRICES: dict[str, tuple[tuple[int, ...], Any]] = {
    "up": ((16, 32), VIEW),
    "gate": ((16, 32), VIEW),
    "down": ((32, 16), VIEW),
    "qkv": ((16, 64), MatrixView(0, 1, split=(32, 16, 16))),
}
EXPERTS = {"up": ((8, 16, 32), VIEW), "down": ((8, 32, 16), VIEW)}
TRANSPOSED = ("down",)  # tensor parallelism shards the fan-in of these


class Layout(NamedTuple):
    """How leaves are sharded: the mesh, the spec of all but the transposed, and of these."""

    axes: dict[str, int]
    kind: str
    spec: P
    transposed: P | None = None
    of_momentum: tuple[P, P] | None = None
    leaves: Any = MATRICES


LAYOUTS = {
    "FSDP, rows": Layout({"a": 8}, "manual", P("a")),
    "FSDP, columns": Layout({"a": 8}, "auto", P(None, "a")),
    "FSDP x TP": Layout({"a": 2, "b": 4}, "explicit", P("a", "b"), P("b", "a")),
    "FSDP x TP, auto": Layout({"a": 2, "b": 4}, "auto", P("a", "b"), P("b", "a")),
    "HSDP x TP": Layout({"r": 2, "a": 2, "b": 2}, "manual", P("a", "b"), P("b", "a")),
    "experts x FSDP": Layout({"e": 2, "a": 4}, "explicit", P("e", "a"), leaves=EXPERTS),
    "experts x FSDP x TP": Layout(
        {"e": 2, "a": 2, "b": 2}, "auto", P("e", "a", "b"), P("e", "b", "a"), leaves=EXPERTS
    ),
    "DDP": Layout({"a": 8}, "explicit", P()),
    "ZeRO-1": Layout({"a": 8}, "explicit", P(), of_momentum=(P("a"), P("a"))),
    "ZeRO-1 x TP": Layout(
        {"a": 2, "b": 4}, "auto", P(None, "b"), P("b"), (P("a", "b"), P("b", "a"))
    ),
    "ZeRO-1, experts": Layout(
        {"a": 4, "e": 2},
        "explicit",
        P("e"),
        of_momentum=(P(("e", "a")), P(("e", "a"))),
        leaves=EXPERTS,
    ),
}
# Those that take more than sums over matrices are compiled on all layouts, the others on two.
PLAIN = ("entry", "hyperball", "floor", "relative", "brake", "pinned")
ACROSS = ("neuron", "neuron_longer", "floor_of_rows")
WITH_PLAIN = ("FSDP, rows", "FSDP x TP")
WITH_MOMENTUM = {
    "namo": ("FSDP x TP", "ZeRO-1", "ZeRO-1, experts"),
    "namo_d": ("FSDP x TP", "HSDP x TP", "ZeRO-1", "ZeRO-1 x TP", "ZeRO-1, experts"),
    "dion2": ("HSDP x TP", "ZeRO-1", "ZeRO-1, experts"),
}


def program(layout: Layout, make: Any, *, has_momentum: bool = False) -> Program:
    """The update of a piece."""
    mesh = sharded.make_mesh(layout.axes, meshes.KINDS[layout.kind])

    def shardings(spec: P, transposed: P | None) -> Any:
        specs = {k: transposed or spec if k in TRANSPOSED else spec for k in layout.leaves}
        return {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}

    where, there = shardings(layout.spec, layout.transposed), None
    options: dict[str, Any] = {"param_shardings": where}
    if has_momentum and layout.of_momentum is not None:
        there = options["mu_shardings"] = shardings(*layout.of_momentum)
    tx = make(weight_dimension_numbers={k: v for k, (_, v) in layout.leaves.items()}, **options)
    shapes = {k: shape for k, (shape, _) in layout.leaves.items()}
    return read_program(compiled(tx, shapes, where, layout.kind, there))


@pytest.mark.parametrize(
    ("name", "on"),
    [(name, on) for name in ACROSS for on in LAYOUTS if on != "ZeRO-1"]  # DDP without momentum
    + [(name, on) for name in PLAIN for on in WITH_PLAIN],
)
def test_a_piece_sends_one_all_reduce_for_all_leaves(name, on):
    """Of vectors at most; nothing where matrices, or the rows that are summed, are whole."""
    layout = LAYOUTS[on]
    found = program(layout, PIECES[name])
    is_whole = on in ("DDP", "ZeRO-1, experts")
    sends = not is_whole and (name, on) != ("floor_of_rows", "FSDP, columns")
    assert found.counts == ({"all-reduce": 1} if sends else {})
    sides = sum(sum(shape[-2:]) for shape, _ in layout.leaves.values())
    experts = 8 if layout.leaves is EXPERTS else 1
    assert found.received <= 2 * 2 * 4 * experts * sides


MUON: dict[str, Any] = {"momentum": "sum", "nesterov": False, "bias_correction": False}


@functools.cache
def of_muon(on: str) -> Program:
    make = functools.partial(scale_by_muon, sharded.FAST, **MUON)
    return program(LAYOUTS[on], make, has_momentum=True)


@pytest.mark.parametrize(
    ("name", "on"), [(name, on) for name, layouts in WITH_MOMENTUM.items() for on in layouts]
)
def test_one_all_reduce_comes_to_what_muon_sends(name, on):
    """Also where sums are made of the momentum, which ZeRO-1 shards as parameters aren't."""
    make = functools.partial(scale_by_dion2, 0.5, ns_coeffs=sharded.FAST)
    piece = make if name == "dion2" else PIECES[name]
    found, own = program(LAYOUTS[on], piece, has_momentum=True), of_muon(on)
    counts, muons = dict(found.counts), dict(own.counts)
    assert counts.pop("all-reduce") == muons.pop("all-reduce", 0) + 1
    if name != "dion2":
        assert counts == muons
        return
    # Matrices with zeros between aren't exchanged with others' transposes.
    assert counts.keys() == muons.keys()
    received = [dict(x.received_by_kind) for x in (found, own)]
    assert all(received[0][kind] <= received[1][kind] for kind in muons)
