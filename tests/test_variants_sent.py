"""What a whole `muon` with a variant sends beyond Muon's own, counted in compiled programs."""

import functools
from typing import Any

import jax
import optax
import pytest
import sharded
import variants_on_meshes as meshes
from jax.sharding import PartitionSpec as P
from running import side_by_side
from test_pieces import compiled
from test_variants_in_muon import VARIANTS, in_muon

from benchmarks.compiled import Program, read_program
from muon_optax import (
    MatrixView,
    floor_update,
    hyperball,
    radial_brake,
    scale_by_entry,
    scale_by_neuron,
)

# Three buckets, one of them of two leaves; the blocks of `qkv` are matrices of their own.
SHAPES = {"x": (16, 32), "y": (16, 32), "z": (32, 16), "qkv": (16, 48)}
VIEWS = {name: MatrixView(0, 1, split=(16, 16, 16) if name == "qkv" else None) for name in SHAPES}
BUCKETS = 3
CAUTIOUS = {"weight_decay": 0.1, "weight_decay_kind": "cautious"}
OPTIONS = {name: options for name, (options, _) in VARIANTS.items()} | {"cautious": CAUTIOUS}
# The two kinds of step of MuonBP are counted in test_block_periodic, slices in test_dion2_sent.
for name in ("muonbp", "dion2", "nordion2"):
    del OPTIONS[name]
# How many of a variant's pieces need sums over matrices.
PIECES = {"cautious": 0, "normuonh": 2, "floor and brake": 2}
# The variants that take another step of sums are compiled for every layout, the others for one.
MANY = ("normuon", "namo_d", "muonh", "floor and brake", "cautious")
# With what Muon itself sends: a round that all buckets share, or a gather for each.
ROUND, GATHERS = {"all-to-all": 2}, {"all-gather": BUCKETS}
LAYOUTS: dict[str, tuple[P, str, Any, dict[str, int]]] = {
    "FSDP x TP": (P("a", "b"), "explicit", OPTIONS, ROUND),
    "FSDP, rows": (P(("a", "b")), "manual", MANY, ROUND),
    "FSDP, columns": (P(None, "b"), "auto", MANY, GATHERS),
}


@functools.cache
def program(layout: str, name: str | None) -> Program:
    """The update with a variant; with none it is Muon's own."""
    spec, kind, *_ = LAYOUTS[layout]
    where = {k: jax.NamedSharding(mesh_of(kind), spec) for k in SHAPES}
    options = {"bias_correction": False} if name is None else OPTIONS[name]
    tx = in_muon(muon_weight_dimension_numbers=VIEWS, param_shardings=where, **options)
    return read_program(compiled(tx, SHAPES, where, kind))


def mesh_of(kind: str) -> Any:
    return sharded.make_mesh(meshes.AXES, meshes.KINDS[kind])


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout, (_, _, names, _) in LAYOUTS.items() for name in names],
)
def test_a_piece_sends_one_all_reduce_of_sums(layout, name):
    """Where Muon sends matrices, no other is sent, and what is reduced is no matrix."""
    own, whole = program(layout, None), program(layout, name)
    counts, received = whole.counts, whole.received_by_kind
    reduced, sums = counts.pop("all-reduce", 0), received.pop("all-reduce", 0)
    assert counts == own.counts == LAYOUTS[layout][-1]
    assert received == own.received_by_kind
    pieces = PIECES.get(name, 1)
    assert reduced == pieces
    # Three float32 sums at most for each place along a side of a leaf, sent both ways.
    assert sums <= pieces * 3 * 4 * 2 * sum(map(sum, SHAPES.values()))


def test_nothing_is_sent_where_leaves_are_replicated():
    """By none of the variants, which one program has all."""
    whole = jax.NamedSharding(mesh_of("auto"), P())
    options: Any = {"muon_weight_dimension_numbers": VIEWS, "param_shardings": whole}
    tx = side_by_side({name: in_muon(**options, **OPTIONS[name]) for name in MANY})
    params = {k: jax.ShapeDtypeStruct(s, "float32", sharding=whole) for k, s in SHAPES.items()}
    of_all = dict.fromkeys(MANY, params)
    state = jax.eval_shape(jax.jit(tx.init, out_shardings=whole), of_all)
    update = jax.jit(tx.update, out_shardings=whole).lower(of_all, state, of_all)
    assert read_program(update.compile()).counts == {}


CHAINS: dict[str, Any] = {
    "floor and brake": lambda **o: (floor_update(**o), radial_brake(**o)),
    "neurons and hyperball": lambda **o: (scale_by_neuron(**o), hyperball(0.1, **o)),
    "entries and floor": lambda **o: (scale_by_entry(**o), floor_update(**o)),
    "two brakes": lambda **o: (radial_brake(form="component", **o), radial_brake(**o)),
}


@pytest.mark.parametrize("kind", ["explicit", "manual"])
@pytest.mark.parametrize("name", CHAINS)
def test_two_pieces_take_an_all_reduce_each_whatever_the_leaves(name, kind):
    """XLA alone would merge a leaf's second with the next leaf's first."""
    shapes = {f"w{i}": (16, 16 * i) for i in range(1, 4)}
    where = {k: jax.NamedSharding(mesh_of(kind), P(("a", "b"))) for k in shapes}
    chain = optax.chain(*CHAINS[name](param_shardings=where))
    assert read_program(compiled(chain, shapes, where, kind)).counts == {"all-reduce": 2}
