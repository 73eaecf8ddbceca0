"""The plan that is printed is the plan that runs, with the design's byte counts."""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import (
    DeviceModel,
    MatrixView,
    MuonWarning,
    Rule,
    default_rules,
    muon,
    scale_by_muon,
)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def llama(layers: int) -> dict:
    """The matrices of Llama-3 8B, [in, out]."""
    shapes = {
        "q": (4096, 4096),
        "k": (4096, 1024),
        "v": (4096, 1024),
        "o": (4096, 4096),
        "gate": (4096, 14336),
        "up": (4096, 14336),
        "down": (14336, 4096),
    }
    return {
        f"layer_{i}": {name: {"kernel": struct(*shape)} for name, shape in shapes.items()}
        for i in range(layers)
    }


def on(mesh: AbstractMesh, spec: P) -> NamedSharding:
    return NamedSharding(mesh, spec)


@pytest.mark.parametrize(
    ("devices", "layers", "megabytes"), [(8, 8, 763), (64, 32, 545)]
)  # design.md: enough for FSDP rows
def test_llama_needs_no_more_bytes_than_the_bound(devices, layers, megabytes):
    rows = on(AbstractMesh((devices,), ("fsdp",)), P("fsdp"))
    made = plan(llama(layers), rows, device="h100")
    assert round(made.bytes / 1e6) == megabytes
    assert {row.strategy for row in made.rows} == {"all_to_all"}


def test_two_sharded_dims_cost_what_one_does():
    tree = llama(8)
    one = plan(tree, on(AbstractMesh((8,), ("fsdp",)), P("fsdp")), device="h100")
    two = plan(tree, on(AbstractMesh((4, 2), ("fsdp", "tp")), P("fsdp", "tp")), device="h100")
    assert two.bytes == one.bytes
    assert two.flops == one.flops


def test_stacks_sharded_over_layers_or_experts_cost_nothing():
    mesh = AbstractMesh((8,), ("expert",))
    view = MatrixView(1, 2)
    made = plan(
        {"w": struct(16, 512, 256)}, on(mesh, P("expert")), muon_weight_dimension_numbers=view
    )
    (row,) = made.rows
    assert (row.strategy, row.bytes, row.count) == ("local", 0, 2)


def test_replicas_share_the_work_and_pay_for_it_once():
    mesh = AbstractMesh((8,), ("data",))
    tree = {f"w{i}": struct(4096, 4096) for i in range(8)}
    made = plan(tree, on(mesh, P()), device="h100")
    (row,) = made.rows
    assert row.share_axes == ("data",)
    assert row.bytes == 7 * 4096 * 4096 * 2
    alone = plan(tree, device="h100")
    assert made.flops == alone.flops // 8


def test_the_busiest_device_has_hardly_more_than_its_part():
    mesh = AbstractMesh((8,), ("fsdp",))
    shapes = {"qkv": (768, 2304), "o": (768, 768), "up": (768, 3072), "down": (3072, 768)}
    tree = {f"{name}{i}": struct(*s) for i in range(12) for name, s in shapes.items()}
    divided = plan(tree, on(mesh, P("fsdp")), device="h100", strategy="all_to_all")
    alone = plan(tree, device="h100")
    assert divided.flops <= 1.1 * alone.flops / 8


def test_a_rule_overrides_the_strategy():
    mesh = AbstractMesh((8,), ("fsdp",))
    tree = {"a": struct(1024, 4096), "b": struct(1024, 4096)}
    made = plan(tree, on(mesh, P(None, "fsdp")), strategy=(("b", "gather"),), device="h100")
    by_leaf = {row.leaves: (row.strategy, row.reason) for row in made.rows}
    assert by_leaf["b",] == ("gather", "asked for")
    assert by_leaf["a",][1] != "asked for"


def test_an_impossible_strategy_says_what_is_possible():
    rows = on(AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    with pytest.raises(ValueError, match=r"layer_0/gate/kernel: 'local'.*possible: .*gather"):
        plan(llama(1), rows, strategy="local")
    with pytest.raises(ValueError, match=r"'gram'.*long side"):
        plan({"w": struct(64, 512)}, rows, strategy="gram")
    with pytest.raises(ValueError, match=r"strategy must be one of"):
        plan({"w": struct(64, 512)}, rows, strategy="ring")


def test_a_spec_without_a_mesh_is_an_error_that_names_the_leaf():
    tree = {"rows": struct(64, 512), "whole": struct(64, 512), "bias": struct(512)}
    specs = {"rows": P("fsdp"), "whole": P(), "bias": P("fsdp")}
    with pytest.raises(ValueError, match=r"needs a mesh(?s:.*)  rows: got P\('fsdp',\)$"):
        plan(tree, specs)
    mesh = AbstractMesh((8,), ("fsdp",))
    with jax.sharding.use_abstract_mesh(mesh):
        within = plan(tree, specs)
    named = {name: on(mesh, spec) for name, spec in specs.items()}
    assert within == plan(tree, named)
    assert within.bytes > 0


def test_the_workspace_bounds_a_chunk():
    rows = on(AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    tree = {f"w{i}": struct(1024, 1024) for i in range(64)}
    wide = plan(tree, rows, device="h100")
    limit = 6 * 1024 * 1024 * 2
    tight = plan(tree, rows, device="h100", max_workspace_bytes=limit)
    assert wide.rows[0].chunks == 1
    assert tight.rows[0].chunks == 8
    assert tight.bytes == wide.bytes
    assert plan(tree, rows, device="h100", max_workspace_bytes=np.int64(limit)) == tight  # pyright: ignore[reportArgumentType]


def test_figures_of_ones_own_decide():
    tree = {f"w{i}": struct(256, 256) for i in range(8)}
    two = {name: tree[name] for name in ("w0", "w1")}
    rows = on(AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    slow_link = DeviceModel("slow link", 1e15, 1e15, bandwidth=1e6, latency=0.0)
    slow_chip = DeviceModel("slow chip", 1e6, 1e6, bandwidth=1e12, latency=0.0)
    assert plan({"w": struct(256, 256)}, rows, device=slow_link).rows[0].strategy == "gather"
    assert plan(tree, rows, device=slow_chip).rows[0].strategy == "all_to_all"
    assert plan(two, rows, device=slow_chip).rows[0].strategy == "groups"
    with pytest.raises(ValueError, match="device must be one of"):
        plan(tree, rows, device="abacus")


@pytest.mark.parametrize("option", ["mu_dtype", "ns_dtype"])
def test_dtypes_that_muon_refuses_are_refused(option):
    options: Any = {option: "float8_e4m3fn"}
    with pytest.raises(TypeError, match=f"{option} must be .*16 bits or more"):
        plan({"w": struct(64, 64)}, **options)


def test_table_and_data_say_the_same():
    rows = on(AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    made = plan(llama(8), rows, device="h100")
    text = str(made)
    assert "layer_0/gate/kernel + 15" in text
    assert "763 MB" in text
    data = json.loads(json.dumps(made.to_dict()))
    assert data["totals"]["bytes"] == made.bytes == sum(row["bytes"] for row in data["rows"])
    assert hash(made) == hash(plan(llama(8), rows, device="h100"))


def test_only_muons_leaves_are_planned():
    rules = (Rule("router", "adam", "router"), *default_rules())
    tree = {"router": struct(64, 8), "w": struct(64, 64), "norm": struct(64)}
    made = plan(tree, partition=rules)
    assert [row.leaves for row in made.rows] == [("w",)]


# What is planned is what compiled programs receive

M, N = 32, 64
FLAT, GRID, REPLICAS = {"f": 8}, {"x": 4, "y": 2}, {"r": 2, "f": 4}
WIDE, STACKED = (M, N), (16, M, N)
# Mesh, leaf, number of leaves, the momentum's spec, the strategy asked for.
LAYOUTS: dict[str, tuple[dict[str, int], Leaf, int, P | None, str]] = {
    "fsdp_rows": (FLAT, Leaf(WIDE, P("f")), 8, None, "auto"),
    "fsdp_columns": (FLAT, Leaf(WIDE, P(None, "f")), 8, None, "auto"),
    "fsdp_tp": (GRID, Leaf(WIDE, P("x", "y")), 8, None, "auto"),
    "hsdp": (REPLICAS, Leaf(WIDE, P("f")), 8, None, "auto"),
    "hsdp_uneven": (REPLICAS, Leaf(WIDE, P("f")), 5, None, "all_to_all"),
    "sub_replicas": ({"r": 2, "s": 2, "f": 2}, Leaf(WIDE, P("f")), 3, None, "auto"),
    "ddp": ({"d": 8}, Leaf(WIDE, P()), 8, None, "auto"),
    "experts": ({"e": 8}, Leaf(STACKED, P("e"), STACK), 1, None, "auto"),
    "experts_fsdp": ({"e": 2, "f": 4}, Leaf(STACKED, P("e", "f"), STACK), 1, None, "auto"),
    "stacked_layers": (FLAT, Leaf((12, M, N), P(None, "f"), STACK), 1, None, "auto"),
    "gather": (FLAT, Leaf(WIDE, P("f")), 3, None, "gather"),
    "gather_hsdp": (REPLICAS, Leaf(WIDE, P("f")), 3, None, "gather"),
    "gram": (FLAT, Leaf((M, 512), P(None, "f")), 3, None, "gram"),
    "gram_hsdp": (REPLICAS, Leaf((M, 512), P(None, "f")), 3, None, "gram"),
    "local": ({"d": 8}, Leaf(WIDE, P()), 3, None, "local"),
    "zero_1": ({"d": 8}, Leaf(WIDE, P()), 8, P("d"), "auto"),
    "zero_1_uneven": ({"d": 8}, Leaf(WIDE, P()), 5, P("d"), "auto"),
    "zero_1_gather": ({"d": 8}, Leaf(WIDE, P()), 3, P("d"), "gather"),
    "zero_1_hsdp": (REPLICAS, Leaf(WIDE, P("f")), 8, P(("f", "r")), "auto"),
    "zero_1_hsdp_other_order": (REPLICAS, Leaf(WIDE, P("f")), 8, P(("r", "f")), "auto"),
    "zero_1_hsdp_two_dims": (REPLICAS, Leaf(WIDE, P("f")), 8, P("f", "r"), "auto"),
    "zero_1_tp": (GRID, Leaf(WIDE, P(None, "y")), 8, P("x", "y"), "auto"),
    "zero_1_layers": ({"d": 8}, Leaf(STACKED, P(), STACK), 1, P("d"), "auto"),
    "zero_1_experts": ({"e": 2, "d": 4}, Leaf(STACKED, P("e"), STACK), 1, P("e", "d"), "auto"),
    "transposed": (FLAT, Leaf(WIDE, P("f")), 8, P(None, "f"), "auto"),
}


@functools.cache
def compiled_and_planned(name: str, kind: str) -> tuple[int, Any]:
    """Bytes that a device receives in a compiled update, and the plan of it."""
    sizes, leaf, count, mu_spec, strategy = LAYOUTS[name]
    mesh = make_mesh(sizes, kind)
    leaves = {f"w{i}": leaf for i in range(count)}
    where = sharded.shardings(leaves, mesh)
    there = None if mu_spec is None else NamedSharding(mesh, mu_spec)
    options: Any = {"strategy": strategy, "device": sharded.SLOW, "mu_shardings": there}
    if kind == "auto":
        options |= {"param_shardings": where}
    tx = scale_by_muon(sharded.FAST, weight_dimension_numbers=sharded.views(leaves), **options)
    params: Any = {
        k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where[k]) for k in leaves
    }
    state = tx.init(params)
    out = (where, jax.tree.map(lambda x: x.sharding, state))
    update = jax.jit(tx.update, out_shardings=out).lower(params, state, params)
    views: Any = {"muon_weight_dimension_numbers": sharded.views(leaves)}
    made = plan(params, ns_coeffs=sharded.FAST, **options, **views)
    return read_program(update.compile()).received, made


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiled_update_receives_what_is_planned(name):
    received, made = compiled_and_planned(name, "explicit")
    assert received == pytest.approx(made.bytes, rel=1e-3, abs=256)  # and scalars of norms
    assert (received > 0) == (name not in ("experts", "local"))


@pytest.mark.parametrize("name", ["zero_1", "zero_1_hsdp", "zero_1_layers", "transposed"])
def test_on_auto_axes_it_receives_the_same(name):
    received, made = compiled_and_planned(name, "auto")
    assert received == pytest.approx(made.bytes, rel=1e-3)
    assert made == compiled_and_planned(name, "explicit")[1]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_zero_1_sends_slices_once_and_results_whole(kind):
    """Eight replicated matrices of which each device has 1/8 of the momentum."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(kind,))
    where = on(mesh, P())
    params = {
        f"w{i}": jax.ShapeDtypeStruct((4096, 14336), "bfloat16", sharding=where) for i in range(8)
    }
    made = plan(params, where, mu_shardings=on(mesh, P("data")), device="h100")
    matrix = 4096 * 14336 * 2
    assert made.bytes == 7 * matrix // 8 + 8 * matrix * 7 // 8
    assert round(made.bytes / 1e6) == 925


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_concrete_arrays_are_planned_like_shapes(kind):
    mesh = make_mesh({"d": 8}, kind)
    x = jax.device_put(jnp.ones((M, N)), NamedSharding(mesh, P()))
    options: Any = {"mu_shardings": P("d"), "param_shardings": P(), "device": sharded.SLOW}
    (row,) = plan({f"w{i}": x for i in range(8)}, **options).rows
    assert (row.strategy, row.spec) == ("all_to_all", "d, -")
    assert row.bytes == (M * N * 4 + 8 * M * N * 4) * 7 // 8


def test_a_plan_says_that_results_stay_where_the_momentum_is():
    """On Auto axes an update can't see that parameters are replicated."""
    mesh = make_mesh({"d": 8}, "auto")
    x = jax.device_put(jnp.ones((M, N)), NamedSharding(mesh, P()))
    (row,) = plan({"w": x}, mu_shardings=P("d"), strategy="gather").rows
    assert "results stay sharded like the momentum" in row.reason
    assert row.bytes == M * N * 4 * 7 // 8


# What the partitioner does

HIDDEN: dict[str, tuple[dict[str, int], Leaf, int, dict[str, Any]]] = {
    "rows": (FLAT, Leaf(WIDE, P("f")), 3, {}),
    "rows_standard": (FLAT, Leaf(WIDE, P("f")), 3, {"ns_method": "standard"}),
    "columns": (FLAT, Leaf(WIDE, P(None, "f")), 3, {}),
    "tall": (FLAT, Leaf((N, M), P("f")), 3, {}),
    "square": (FLAT, Leaf((M, M), P(None, "f")), 3, {"ns_coeffs": "polar_express"}),
    "two_dims": (GRID, Leaf(WIDE, P("x", "y")), 3, {}),
    "hsdp": (REPLICAS, Leaf(WIDE, P("f")), 3, {}),
    "replicated": (FLAT, Leaf(WIDE, P()), 3, {}),
    "experts": ({"e": 8}, Leaf(STACKED, P("e"), STACK), 1, {}),
    "large_experts": (FLAT, Leaf((8, 256, 512), P("f"), STACK), 1, {}),
    "large_experts_fsdp": ({"x": 2, "y": 4}, Leaf((4, 256, 512), P("x", "y"), STACK), 1, {}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_plan_without_shardings_says_what_the_partitioner_does(name):
    sizes, leaf, count, options = HIDDEN[name]
    leaves = {f"w{i}": leaf for i in range(count)}
    where = sharded.shardings(leaves, make_mesh(sizes, "auto"))
    params = {k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where[k]) for k in leaves}
    tx = scale_by_muon(weight_dimension_numbers=sharded.views(leaves), **options)
    shapes = {k: leaf.shape for k in leaves}
    with pytest.warns(MuonWarning, match="param_shardings"):
        lowered = sharded.lower(tx, shapes, where, "float32")
    found = read_program(lowered.compile())
    views: Any = {"muon_weight_dimension_numbers": sharded.views(leaves)}
    made = plan(params, **options, **views)
    assert {row.strategy for row in made.rows} == {"partitioner"}
    assert made.bytes == pytest.approx(found.received, rel=1e-3, abs=256)
    assert made.flops == pytest.approx(found.flops, rel=1e-3)
    declared = plan(params, where, **options, **views)
    for row, better in zip(made.rows, declared.rows, strict=True):
        assert row.leaves == better.leaves
        assert f"with param_shardings: {better.strategy}, " in row.reason


def test_of_axes_of_both_kinds_a_plan_names_those_that_a_trace_can_not_see():
    mesh = make_mesh(GRID, {"x": "explicit", "y": "auto"})
    x = jax.device_put(jnp.ones((M, N)), NamedSharding(mesh, P("x", "y")))
    (row,) = plan({"w": x}, strategy="gather").rows
    assert (row.spec, row.bytes) == ("x, -", M * N * 4 * 3 // 4)
    assert "collectives over the Auto axes y" in row.reason
    assert "Auto axes" not in plan({"w": x}, P("x", "y")).rows[0].reason


# What is refused, and what is said


def test_a_pattern_that_matches_no_leaf_is_the_error_of_init():
    tree: Any = {"up": struct(64, 64), "bias": struct(64)}
    strategy = (("uo", "gather"), ("bias", "gather"))
    messages = []
    for call in (muon(0.1, strategy=strategy).init, lambda p: plan(p, strategy=strategy)):
        with pytest.raises(ValueError, match=r"match no leaf(?s:.*)'uo'(?s:.*)'bias'") as caught:
            call(tree)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("where", [P(None, None, "f"), P(("f", "f")), P(None, "f")])
def test_momentum_that_can_not_be_there_is_the_error_of_init(where):
    mesh = AbstractMesh((8,), ("f",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((16, 12), "float32", sharding=on(mesh, P()))
    messages = []
    tx: Any = muon(0.1, mu_shardings=where)
    for call in (tx.init, lambda p: plan(p, mu_shardings=where)):
        with pytest.raises(ValueError, match="mu_shardings says:\n  w: ") as caught:
            call({"w": x})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("spec", "strategy", "matrices"),
    [(P("f"), "auto", 6), (P("f"), "gather", 6), (P(), "local", 3)],
)
def test_a_bound_below_the_least_workspace_is_told(spec, strategy, matrices):
    mesh = make_mesh(FLAT)
    params: Any = {"w": jax.device_put(jnp.ones((M, N)), NamedSharding(mesh, spec))}
    least = matrices * math.prod(WIDE) * 4
    message = rf"max_workspace_bytes={least - 1:,} is exceeded.* {least:,} bytes.*: w \(32, 64\)$"
    for limit, is_told in ((least - 1, True), (least, False)):
        options: Any = {"max_workspace_bytes": limit, "strategy": strategy}
        (row,) = plan(params, **options).rows
        assert (f"more than max_workspace_bytes: {least:,} B" in row.reason) == is_told
        tx = scale_by_muon(sharded.FAST, **options)
        trace = lambda tx=tx: jax.eval_shape(tx.update, params, tx.init(params))  # noqa: E731
        if is_told:
            with pytest.warns(MuonWarning, match=message):
                trace()
        else:
            trace()
