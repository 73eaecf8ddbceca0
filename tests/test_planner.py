"""Buckets, shares, offsets and the choice of strategies, without running anything."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import MATRIX, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import DeviceModel, MatrixView, muon, orthogonalize, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.planning import planner
from muon_optax.sharding.planning.chooser import Chooser
from muon_optax.sharding.planning.loads import rest_owners
from muon_optax.sharding.planning.workload import Workload

FLAT = AbstractMesh((8,), ("f",))
HSDP = AbstractMesh((2, 4), ("r", "f"))


def chosen(
    leaves: Mapping[str, tuple[tuple[int, ...], P]], mesh: AbstractMesh = FLAT, **options: Any
):
    """The plan of leaves given by shape and spec; those of three dims are stacks."""
    dtype = options.pop("dtype", "float32")
    dims = {name: MATRIX if len(shape) == 2 else STACK for name, (shape, _) in leaves.items()}
    options.setdefault("muon_weight_dimension_numbers", dims)
    return plan(
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, _) in leaves.items()},
        {name: NamedSharding(mesh, spec) for name, (_, spec) in leaves.items()},
        **{"device": sharded.SLOW, **options},
    )


def buckets(found) -> set[frozenset[str]]:
    return {frozenset(row.leaves) for row in found.rows}


def test_leaves_that_differ_in_batch_dims_alone_share_a_bucket():
    found = chosen(
        {
            "a": ((64, 256), P("f")),
            "b": ((64, 256), P("f", None)),
            "stack": ((6, 64, 256), P(None, "f")),
        }
    )
    assert buckets(found) == {frozenset({"a", "b", "stack"})}
    assert [(row.count, row.strategy) for row in found.rows] == [(8, "all_to_all")]


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 128), P("f")),
        ((256, 64), P("f")),
        ((64, 256), P(None, "f")),
        ((64, 256), P()),
        ((8, 64, 256), P("f")),
    ],
)
def test_leaves_that_lie_otherwise_have_a_bucket_of_their_own(shape, spec):
    found = chosen({"a": ((64, 256), P("f")), "b": (shape, spec)})
    assert buckets(found) == {frozenset({"a"}), frozenset({"b"})}


def test_dtypes_strategies_and_views_make_buckets():
    leaves = {name: ((64, 256), P("f")) for name in "abc"}
    assert len(buckets(chosen(leaves))) == 1
    assert buckets(chosen(leaves, strategy=[("b", "gather")])) == {
        frozenset({"a", "c"}),
        frozenset({"b"}),
    }
    fused = {"a": Dims(0, 1), "b": MatrixView(0, 1, heads=4), "c": MatrixView(0, 1)}
    found = chosen(leaves, muon_weight_dimension_numbers=fused)
    assert buckets(found) == {frozenset({"a", "c"}), frozenset({"b"})}
    params = {
        "a": jax.ShapeDtypeStruct((64, 256), "float32"),
        "b": jax.ShapeDtypeStruct((64, 256), "bfloat16"),
    }
    where = NamedSharding(FLAT, P("f"))
    assert len(buckets(plan(params, where))) == 2
    assert len(buckets(plan(params, where, ns_dtype="bfloat16"))) == 1


def test_every_matrix_is_in_one_row():
    leaves = {f"up_{i}": ((64, 256), P("f")) for i in range(19)}
    leaves |= {f"across_{i}": ((256, 64), P(None, "f")) for i in range(5)}
    leaves |= {f"down_{i}": ((256, 64), P("f")) for i in range(7)}
    leaves |= {"stack": ((11, 64, 256), P(None, "f"))}
    found = chosen(leaves)
    assert sum(row.count for row in found.rows if "up_0" in row.leaves) == 19 + 11 + 5
    assert sum(row.count for row in found.rows if "down_0" in row.leaves) == 7
    assert set().union(*buckets(found)) == set(leaves)


def test_full_rounds_and_a_rest():
    found = chosen({"stack": ((19, 64, 256), P(None, "f"))})
    assert [(row.count, row.strategy) for row in found.rows] == [
        (16, "all_to_all"),
        (3, "all_to_all"),
    ]
    assert "3 matrices for 8 owners" in found.rows[1].reason


def test_rests_go_to_devices_that_have_less_to_do():
    shapes = {"a": (64, 256), "b": (256, 64), "c": (64, 64), "d": (32, 256)}
    found = chosen({name: ((4, *shape), P(None, "f")) for name, shape in shapes.items()})
    flops = sorted((row.flops for row in found.rows), reverse=True)
    # The two large ones side by side, the two small ones side by side after them.
    assert found.flops <= flops[0] + flops[2]
    one = chosen({"a": ((4, 64, 256), P(None, "f")), "b": ((4, 256, 64), P(None, "f"))})
    assert one.flops == one.rows[0].flops


@pytest.mark.parametrize(
    ("shape", "spec", "strategy"),
    [
        ((8, 64, 256), P("f"), "local"),
        ((8, 64, 256), P(None, "f"), "all_to_all"),
        ((8, 64, 256), P(None, None, "f"), "all_to_all"),
        ((8, 16, 4096), P(None, None, "f"), "gram"),
        ((8, 4096, 16), P(None, "f"), "gram"),
        ((8, 16, 4096), P(None, "f"), "all_to_all"),
    ],
)
def test_the_strategy_of_fewest_bytes_is_chosen(shape, spec, strategy):
    slow_network = DeviceModel("slow network", 1e15, 1e15, 1e6, latency=0.0)
    (row,) = chosen({"w": (shape, spec)}, device=slow_network).rows
    assert row.strategy == strategy


def test_latency_makes_tiny_matrices_gather():
    tiny = {f"w{i}": ((8, 16), P("f")) for i in range(4)}
    (row,) = chosen(tiny, device="h100").rows
    assert row.strategy == "gather"


def test_gram_is_not_chosen_where_one_device_would_not_use_it():
    wide = {"w": ((8, 16, 4096), P(None, None, "f"))}
    slow_network = DeviceModel("slow network", 1e15, 1e15, 1e6, latency=0.0)
    found = chosen(wide, device=slow_network, ns_method="standard")
    assert [row.strategy for row in found.rows] == ["all_to_all"]
    asked = chosen(wide, strategy="gram", ns_method="standard")
    assert [row.strategy for row in asked.rows] == ["gram"]


@pytest.mark.parametrize(("bandwidth", "axes"), [(1e15, ("r",)), (1e2, ())])
def test_replicas_share_work_unless_their_network_is_too_slow(bandwidth, axes):
    device = DeviceModel("test", 1e9, 1e9, 1e12, latency=0.0, axis_bandwidth=(("r", bandwidth),))
    (row,) = chosen({"w": ((16, 64, 256), P(None, "f"))}, HSDP, device=device).rows
    assert (row.strategy, row.share_axes) == ("all_to_all", axes)


@pytest.mark.parametrize(
    ("limit", "axes"), [(3 * 33 * 255 * 4, ("r",)), (3 * 33 * 255 * 4 - 1, ())]
)
def test_rows_of_replicas_without_a_matrix_fit_the_workspace(limit, axes):
    """Slices of five matrices, none of which can be cut in two, and zeros of three replicas."""
    mesh, leaves = AbstractMesh((8, 2), ("r", "f")), {"w": ((5, 66, 255), P(None, "f"))}
    rows = chosen(leaves, mesh, strategy="all_to_all", max_workspace_bytes=limit).rows
    assert {row.share_axes for row in rows} == {axes}


@pytest.mark.parametrize(("others", "strategy"), [(7, "all_to_all"), (0, "gather")])
def test_a_matrix_is_not_repeated_where_later_ones_keep_the_other_devices_busy(others, strategy):
    fast_network = DeviceModel("fast network", 1e9, 1e9, 1e12, latency=0.0)
    # No group can own it together, as its slices can't be cut in two.
    leaves = {"large": ((64, 255), P("f"))} | {
        f"small_{i}": ((64, 248), P("f")) for i in range(others)
    }
    found = chosen(leaves, device=fast_network)
    rows = {row.leaves[0]: row.strategy for row in found.rows}
    assert rows["large"] == strategy  # a gather receives half of it
    flops = NewtonSchulz(resolve_schedule()).flops(64, 255)
    assert found.flops == flops
    exchange = sum(row.bytes for row in found.rows) / 1e12
    assert found.seconds == pytest.approx(flops / 1e9 + exchange)


@pytest.mark.parametrize(("counts", "plans"), [((8, 16), 2), ((8, 9), 2), ((9, 9), 6), ((3, 4), 9)])
def test_rounds_that_nothing_can_share_are_not_planned_again(monkeypatch, counts, plans):
    """Twice for each way of sharing that there is, and once for each size of groups."""
    made = []

    class Counted(Chooser):
        def slices(self, count):
            made.append(count)
            return super().slices(count)

    monkeypatch.setattr(planner, "Chooser", Counted)
    planner.plan_leaves.cache_clear()
    leaves = {f"w{n}": ((count, 64, 8 * n), P(None, "f")) for n, count in enumerate(counts, 3)}
    chosen(leaves)
    assert sorted(made) == sorted(counts * plans)


IMPOSSIBLE = [
    ("local", (64, 256), P("f"), {}, "is sharded"),
    ("gram", (64, 256), P("f"), {}, "the long side of a matrix, and that alone"),
    ("gram", (64, 256), P(), {}, "the long side of a matrix, and that alone"),
    ("gram", (64, 256), P(None, "f"), {"preconditioning": "spectral"}, "whole matrices"),
    (
        "gram",
        (64, 256),
        P(None, "f"),
        {"muon_weight_dimension_numbers": {"attn": {"w": MatrixView(0, 1, heads=4)}}},
        "fused blocks",
    ),
]


@pytest.mark.parametrize(("strategy", "shape", "spec", "options", "message"), IMPOSSIBLE)
def test_an_impossible_strategy_is_an_error_that_says_what_is_possible(
    strategy, shape, spec, options, message
):
    params = {"attn": {"w": jax.ShapeDtypeStruct(shape, "float32")}}
    where = NamedSharding(FLAT, spec)
    match = rf"(?s)attn/w.*'{strategy}'.*possible.*'all_to_all', 'gather'"
    with pytest.raises(ValueError, match=match) as caught:
        plan(params, where, strategy=strategy, **options)
    assert message in str(caught.value)


def test_the_update_raises_the_same_error():
    mesh = make_mesh({"f": 8})
    where = {"w": NamedSharding(mesh, P("f"))}
    tx = scale_by_muon(strategy=[("w", "gram")])
    with pytest.raises(ValueError, match=r"(?s)w: 'gram'.*'all_to_all', 'gather'"):
        sharded.lower(tx, {"w": (64, 256)}, where, "float32")


@pytest.mark.parametrize("strategy", ["fast", "GATHER", [("w", "everywhere")]])
def test_an_unknown_strategy_is_an_error_when_the_optimizer_is_made(strategy):
    with pytest.raises(ValueError, match=r"strategy.*all_to_all"):
        muon(0.1, strategy=strategy)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1"])
def test_a_workspace_that_is_not_a_positive_integer_is_an_error(limit):
    with pytest.raises((ValueError, TypeError), match="max_workspace_bytes"):
        muon(0.1, max_workspace_bytes=limit)


def test_an_unknown_device_is_an_error_when_the_optimizer_is_made():
    with pytest.raises(ValueError, match=r"device.*h100.*'abacus'"):
        muon(0.1, device="abacus")


def test_the_first_rule_that_matches_names_the_strategy():
    leaves = {name: ((64, 256), P("f")) for name in ("a", "b", "c")}
    rules = [("a", "gather"), ("a", "all_to_all"), ("b", "all_to_all")]
    found = {row.leaves[0]: row for row in chosen(leaves, strategy=rules).rows}
    assert found["a"].strategy == "gather"
    assert (found["a"].reason, found["b"].reason) == ("asked for", "asked for")
    assert "asked for" not in found["c"].reason


@pytest.mark.parametrize(("limit", "chunks"), [(None, 1), (10 * 65536, 4), (6 * 65536, 8), (1, 8)])
def test_the_workspace_decides_how_many_chunks(limit, chunks):
    leaves = {"w": ((64, 64, 256), P(None, "f"))}
    (row,) = chosen(leaves, max_workspace_bytes=limit).rows
    assert row.chunks == chunks


@pytest.mark.parametrize(
    ("experts", "chunks"),
    [(64, 2), (128, 4), (40, 1), (67 * 8, 12)],
)
def test_small_matrices_go_in_equal_chunks_where_matmuls_hide_them(experts, chunks):
    # Sending 6 of 4 MB to each of 8 owners takes 5 latencies of 10 microseconds; 4 cut 64 evenly.
    leaves = {"experts": ((experts, 2048, 1024), P(None, "f"))}
    (row,) = chosen(leaves, device="h100", dtype="bfloat16").rows
    assert (row.strategy, row.chunks) == ("all_to_all", chunks)


def test_a_plan_is_plain_hashable_data():
    leaves = {"w": ((19, 64, 256), P(None, "f")), "v": ((64, 256), P())}
    one, other = chosen(leaves), chosen(leaves)
    assert one == other
    assert hash(one) == hash(other)
    data = json.loads(json.dumps(one.to_dict()))
    assert data["totals"]["bytes"] == one.bytes == sum(row.bytes for row in one.rows)
    assert len(data["rows"]) == len(one.rows)


def test_a_printed_plan_shows_what_is_done_with_each_leaf():
    leaves = {"decoder": ((19, 64, 256), P(None, "f")), "down": ((8, 256, 64), P("f"))}
    text = str(chosen(leaves))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for word in ("64 x 256", "float32", "f, -", "all_to_all", "MFLOP", "kB", "owners"):
        assert any(word in line for line in text.splitlines() if "decoder" in line), word
    assert "local" in lines["down"]
    assert "matrices are whole here" in lines["down"]
    for heading in ("leaves", "spec", "strategy", "bytes", "FLOPs", "time", "reason"):
        assert heading in text.splitlines()[0]
    assert "a device receives" in text


PLANNED = {
    "rows": ({"f": 8}, Leaf((19, 64, 256), P(None, "f"), STACK)),
    "wide": ({"f": 8}, Leaf((16, 16, 1024), P(None, None, "f"), STACK)),
    "two_dims": ({"x": 2, "y": 4}, Leaf((16, 64, 256), P(None, "x", "y"), STACK)),
    "hsdp": ({"r": 2, "f": 4}, Leaf((19, 64, 256), P(None, "f"), STACK)),
    "ddp": ({"r": 8}, Leaf((16, 64, 256), P(), STACK)),
    "experts": ({"e": 2, "f": 4}, Leaf((16, 64, 256), P("e", "f"), STACK)),
}


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_is_what_the_compiled_update_does(name):
    sizes, leaf = PLANNED[name]
    mesh = make_mesh(sizes)
    found = read_program(sharded.compile_update({"w": leaf}, mesh, device=sharded.SLOW))
    promised = plan(
        {"w": jax.ShapeDtypeStruct(leaf.shape, "float32")},
        sharded.shardings({"w": leaf}, mesh),
        muon_weight_dimension_numbers={"w": leaf.view},
        device=sharded.SLOW,
    )
    assert found.received == pytest.approx(promised.bytes, rel=0.02)
    assert found.flops == pytest.approx(promised.flops, rel=0.02)


def test_a_plan_is_read_off_the_arrays_themselves():
    """On Auto axes only if they are declared too: a traced update can't see how they are."""
    leaf = Leaf((16, 64, 256), P(None, "f"), STACK)
    for kind in ("explicit", "auto"):
        where = sharded.shardings({"w": leaf}, make_mesh({"f": 8}, kind))
        placed = jax.device_put({"w": leaf.gradient(0)}, where)
        declared = None if kind == "explicit" else placed
        options: Any = {"muon_weight_dimension_numbers": STACK, "device": sharded.SLOW}
        (row,) = plan(placed, declared, **options).rows
        assert (row.strategy, row.spec, row.count) == ("all_to_all", "f, -", 16)
    (row,) = plan({"w": jnp.ones((8, 8))}).rows
    assert (row.strategy, row.bytes) == ("local", 0)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (8, 1), (2, 4), (3, 2)])
def test_the_owners_of_a_rest_are_different_devices_and_even_over_replicas(replicas, shards):
    sizes = (("r", replicas), ("f", shards))
    work = Workload(8, 8, 4, 0, ("f",), ("r",), sizes)
    for count in range(1, work.owners):
        for offset in range(work.owners):
            owners = rest_owners(offset, count, work)
            assert len(set(owners.tolist()) & set(range(work.owners))) == count
            assert np.bincount(owners // shards).max() == -(-count // replicas)
            assert owners[0] == offset


DOORS: dict[str, Any] = {
    "muon": lambda **options: muon(0.1, **options),
    "scale_by_muon": scale_by_muon,
    "orthogonalize": orthogonalize,
}


@pytest.mark.parametrize("strategy", ["gram", [("a", "gather"), ("w", "gram")]], ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_gram_with_a_function_is_an_error_at_construction(door, strategy):
    function = lambda x: x  # noqa: E731
    with pytest.raises(ValueError, match=r"(?s)'gram'.*<function.*allowed.*'all_to_all', 'gather'"):
        DOORS[door](orthogonalizer=function, strategy=strategy)


@pytest.mark.parametrize("door", DOORS)
def test_gram_with_our_own_iteration_is_fine(door):
    DOORS[door](orthogonalizer=NewtonSchulz(resolve_schedule("tight")), strategy="gram")
    with pytest.raises(TypeError, match="strategy must be a name or a sequence"):
        DOORS[door](orthogonalizer=jnp.negative, strategy=[("w", "gram", "gather")])
