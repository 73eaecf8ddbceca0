"""The plan that is printed is the plan that runs, with the design's byte counts."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import DeviceModel, MatrixView, Rule, default_rules, plan


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
    spread = plan(tree, on(mesh, P("fsdp")), device="h100", strategy="all_to_all")
    alone = plan(tree, device="h100")
    assert spread.flops <= 1.1 * alone.flops / 8


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
    tree = {f"w{i}": struct(256, 256) for i in range(2)}
    rows = on(AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    slow_link = DeviceModel("slow link", 1e15, 1e15, bandwidth=1e6, latency=0.0)
    slow_chip = DeviceModel("slow chip", 1e6, 1e6, bandwidth=1e12, latency=0.0)
    assert plan({"w": struct(256, 256)}, rows, device=slow_link).rows[0].strategy == "gather"
    assert plan(tree, rows, device=slow_chip).rows[0].strategy == "all_to_all"
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
