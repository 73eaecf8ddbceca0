"""How leaves are sharded by the names of mesh axes, and plans of all models on all layouts."""

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from shown import plan, report

from benchmarks.shapes import LAYOUTS, model_on, plain_views
from muon_optax import MatrixView, MuonDimensionNumbers
from muon_optax.sharding.usual_specs import usual_specs


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "bfloat16")


STACK = MuonDimensionNumbers(1, 2)
FSDP, TENSOR = {"fsdp": 8}, {"fsdp": 8, "tensor": 4}


@pytest.mark.parametrize(
    ("path", "shape", "view", "sizes", "spec"),
    [
        ("up", (64, 256), None, FSDP, P("fsdp", None)),
        ("up", (63, 256), None, FSDP, P(None, "fsdp")),
        ("up", (63, 255), None, FSDP, P()),
        ("norm", (64,), None, FSDP, P()),
        ("up", (64, 256), None, {"replica": 2, "data": 2, "dp": 2}, P()),
        ("up", (64, 256), None, {"replica": 2, "fsdp": 4}, P("fsdp", None)),
        ("up", (64, 256), None, TENSOR, P("fsdp", "tensor")),
        ("down/kernel", (256, 64), None, TENSOR, P("tensor", "fsdp")),
        ("down/up", (256, 64), None, TENSOR, P("tensor", "fsdp")),
        ("out/mlp/up", (256, 64), None, TENSOR, P("fsdp", "tensor")),
        ("up", (64, 254), None, TENSOR, P("tensor", None)),
        ("up", (12, 64, 256), STACK, FSDP, P(None, "fsdp", None)),
        ("up", (16, 64, 256), STACK, {"expert": 8, "fsdp": 4}, P(None, "fsdp", None)),
        ("experts/up", (16, 64, 256), STACK, {"expert": 8, "fsdp": 4}, P("expert", "fsdp", None)),
        ("experts/up", (16, 64, 256), STACK, {"expert": 32}, P()),
        (
            "experts/up",
            (58, 16, 64, 256),
            MuonDimensionNumbers(2, 3),
            {"expert": 8, "fsdp": 4, "tp": 2},
            P(None, "expert", "fsdp", "tp"),
        ),
        ("conv", (3, 3, 64, 128), MuonDimensionNumbers((0, 1, 2), 3), FSDP, P(*[None] * 3, "fsdp")),
        ("q", (64, 8, 16), MuonDimensionNumbers(0, (1, 2)), TENSOR, P("fsdp", None, "tensor")),
        ("qkv", (64, 96), MatrixView(split=(64, 16, 16)), TENSOR, P("fsdp", "tensor")),
    ],
)
def test_specs(path, shape, view, sizes, spec):
    tree, views = {path: struct(*shape)}, {path: view}
    assert usual_specs(tree, views, sizes)[path] == spec


def test_columns():
    tree = {"up": struct(64, 256), "odd": struct(64, 255), "stack": struct(2, 64, 256)}
    specs = usual_specs(tree, {"up": None, "odd": None, "stack": STACK}, FSDP, fsdp="columns")
    assert specs == {
        "up": P(None, "fsdp"),
        "odd": P("fsdp", None),
        "stack": P(None, None, "fsdp"),
    }


def test_unknown_axes_and_wrong_views():
    with pytest.raises(ValueError, match=r"must be among.*'fsdp'.*got \['rows'\]"):
        usual_specs({"w": struct(4, 4)}, None, {"rows": 2})
    with pytest.raises(ValueError, match=r"can't be laid out:\n  w: .*axes must be"):
        usual_specs({"w": struct(4, 4)}, {"w": MuonDimensionNumbers(0, 5)}, FSDP)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "model", ["gpt2-124m", "llama3-8b", "deepseek-v3", "olmoe-7b", "vit-l", "resnet-50"]
)
def test_every_model_can_be_planned_on_every_layout(model, layout):
    case = model_on(model, layout, devices=128, scanned=True)
    mesh = AbstractMesh(tuple(case.sizes.values()), tuple(case.sizes))
    where = case.shardings(mesh)
    made = plan(case.params, where, muon_weight_dimension_numbers=case.views, device="h100")
    assert made.bytes > 0 or layout == "ddp"  # replicas may find sharing dearer than doing all
    found = report(case.params, muon_weight_dimension_numbers=case.views)
    muons = {row.path for row in found.rows if row.optimizer == "muon"}
    assert {path for row in made.rows for path in row.leaves} == muons


def test_sizes_and_plain_views():
    assert LAYOUTS["hsdp"].sizes(64) == {"replica": 8, "fsdp": 8}
    assert LAYOUTS["hsdp_64"].sizes(1024) == {"replica": 16, "fsdp": 64}
    assert LAYOUTS["fsdp_tp"].sizes(8) == {"fsdp": 2, "tensor": 4}
    inner = LAYOUTS["replica_experts_fsdp"].sizes(64)
    assert list(inner.items()) == [("replica", 2), ("expert", 8), ("fsdp", 4)]  # the last in a node
    views = {"a": MatrixView(1, 2, heads=4), "b": STACK, "c": None}
    assert plain_views(views) == {"a": STACK, "b": STACK, "c": None}
