"""The parameter report against figures made by hand."""

import io
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console
from shown import report

import muon_optax
from muon_optax import MatrixView, MuonDimensionNumbers, Rule, default_rules, muon
from muon_optax.inspect.reports import ParameterReport

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {
    "attn": {"qkv": normal(32, 80), "heads": normal(32, 2, 8)},
    "embed": normal(50, 32),
    "ids": np.zeros((4,), np.int32),
    "ln": {"scale": normal(32)},
    "mlp": normal(32, 128),
    "old": normal(4, 4),
}
VIEWS = {
    "attn": {
        "qkv": MatrixView(split=(64, 8, 8)),
        "heads": MatrixView(0, (1, 2), heads=2),
    },
    "embed": None,
    "ids": None,
    "ln": None,
    "mlp": MuonDimensionNumbers(0, 1),
    "old": None,
}


def rendered(table: Any, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_rows_by_rules():
    params = {k: v for k, v in PARAMS.items() if k != "attn"}
    rows = report(params, partition=(Rule("old", "frozen", "kept"), *default_rules())).rows
    assert [(r.path, r.shape, r.dtype, r.optimizer, r.reason) for r in rows] == [
        ("embed", (50, 32), "float32", "adam", "embedding"),
        ("ids", (4,), "int32", "frozen", "not a floating-point leaf"),
        ("ln/scale", (32,), "float32", "adam", "fewer than two dims"),
        ("mlp", (32, 128), "float32", "muon", "weight matrix"),
        ("old", (4, 4), "float32", "frozen", "kept"),
    ]
    assert [r.matrices for r in rows] == [(), (), (), ((1, 32, 128),), ()]
    assert [r.scales for r in rows] == [(), (), (), (2.0,), ()]
    assert [r.size for r in rows] == [1600, 4, 32, 4096, 16]


def test_fused_blocks_have_matrices_and_scales_of_their_own():
    found = report(PARAMS, muon_weight_dimension_numbers=VIEWS)
    rows = {row.path: row for row in found.rows}
    qkv, heads = rows["attn/qkv"], rows["attn/heads"]
    assert qkv.matrices == ((1, 32, 64), (1, 32, 8), (1, 32, 8))
    assert qkv.scales == (math.sqrt(2), 1.0, 1.0)
    assert heads.matrices == ((2, 32, 8),)
    assert heads.scales == (1.0,)
    assert qkv.reason == "matrix view given"
    assert rows["embed"].reason == "embedding"
    assert found.totals == {"muon": (3, 7168), "adam": (3, 1648), "frozen": (1, 4)}


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 2.0),
        ({"scale": "match_rms_adamw"}, 0.2 * math.sqrt(128)),
        ({"scale": "spectral"}, math.sqrt(128)),
        ({"scale": "unit_rms_norm"}, 2.0),
        ({"scale": "none", "scale_factor": 0.5}, 0.5),
        ({"consistent_rms": 0.2}, 0.2 * math.sqrt(128)),
        ({"consistent_rms": np.float32(0.5)}, 0.5 * math.sqrt(128)),
        ({"scale_factor": jnp.asarray(3.0)}, 6.0),
    ],
)
def test_scales_are_what_the_updates_have(options, scale):
    params = {"w": PARAMS["mlp"]}
    (row,) = report(params, **options).rows
    assert row.scales == (pytest.approx(scale, rel=1e-7),)
    json.dumps(report(params, **options).to_dict())
    identity: Any = {"orthogonalizer": jnp.ones_like, "beta": 0.0, **options}
    tx = muon(1.0, **identity)
    (update,) = jax.tree.leaves(tx.update(params, tx.init(params), params)[0])
    np.testing.assert_allclose(update, -scale * np.ones((32, 128)), rtol=1e-6)


def test_text():
    params = {"mlp": {"kernel": normal(4, 16), "bias": normal(16)}, "t": np.float32(1)}
    text = str(report(params))
    assert text.split("\n") == [
        "path        shape   matrices     optimizer  scale  reason",
        "mlp/bias    16                   adam              fewer than two dims",
        "mlp/kernel  4 x 16  1 of 4 x 16  muon       2      weight matrix",
        "t           scalar               adam              fewer than two dims",
        "adam: 2 leaves, 17 elements; muon: 1 leaf, 64 elements",
    ]
    fused = str(report({"w": normal(4, 6)}, muon_weight_dimension_numbers=MatrixView(split=(4, 2))))
    assert "1 of 4 x 4, 1 of 4 x 2" in fused


def test_rich_rendering_has_every_cell():
    found = report(PARAMS, muon_weight_dimension_numbers=VIEWS)
    text = rendered(found)
    for row in found.rows:
        assert row.path in text
        assert row.reason in text
    for part in ("Parameters", "1 of 32 x 64", "1.414, 1, 1", "muon: 3 leaves, 7,168 elements"):
        assert part in text


def test_equal_layers_share_a_printed_row():
    tree = {
        "blocks": [{"up": normal(4, 8), "norm": normal(4)} for _ in range(12)],
        "h.0.w": normal(4, 8),
        "h.1.w": normal(4, 8),
        "h.2.w": normal(8, 4),
        "Dense_0": {"kernel": normal(4, 8)},
        "Dense_1": {"kernel": normal(4, 8)},
        "conv1": normal(4, 8),
        "conv2": normal(4, 8),
    }
    found = report(tree)
    assert len(found.rows) == 31
    lines = str(found).split("\n")[1:-1]
    assert [line.split("  ")[0] for line in lines] == [
        "Dense_*/kernel x 2",
        "blocks/*/norm x 12",
        "blocks/*/up x 12",
        "conv1",
        "conv2",
        "h.*.w x 2",
        "h.2.w",
    ]
    assert "blocks/*/up x 12" in rendered(found)
    frozen = report(tree, partition=(Rule("blocks/3/up", "frozen", "kept"), *default_rules()))
    assert "blocks/*/up x 11 " in str(frozen)
    assert "blocks/3/up " in str(frozen)


def test_names_that_look_like_markup_are_shown_as_they_are():
    found = report({"w[/b]": normal(4, 4), "[red]v": normal(4, 4)})
    text = rendered(found)
    assert "w[/b]" in text
    assert "[red]v" in text


def test_dict_is_json():
    data = json.loads(json.dumps(report(PARAMS, muon_weight_dimension_numbers=VIEWS).to_dict()))
    qkv = next(row for row in data["rows"] if row["path"] == "attn/qkv")
    assert qkv == {
        "path": "attn/qkv",
        "shape": [32, 80],
        "dtype": "float32",
        "optimizer": "muon",
        "reason": "matrix view given",
        "matrices": [[1, 32, 64], [1, 32, 8], [1, 32, 8]],
        "scales": [math.sqrt(2), 1.0, 1.0],
    }
    assert data["totals"] == {"muon": [3, 7168], "adam": [3, 1648], "frozen": [1, 4]}


def test_empty_report():
    assert str(report({})).split("\n") == [
        "path  shape  matrices  optimizer  scale  reason",
        "no parameters",
    ]
    assert "no parameters" in rendered(ParameterReport(()))
    assert report({}).totals == {}


@pytest.mark.parametrize("read", [muon_optax.report, muon_optax.plan, muon_optax.update_stats])
def test_a_wrapper_that_makes_other_leaves_is_an_error(read):
    """No empty table: the tree isn't the one that reaches `muon`."""
    params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    message = "in this transformation muon gets leaves that aren't in the given tree"
    with pytest.raises(ValueError, match=rf"{message}(?s:.)*:\n  bias\n  up$"):
        read(optax.lookahead(muon(0.02), 2, 0.5), optax.LookaheadParams.init_synced(params))
    with pytest.raises(ValueError, match=rf"{message}(?s:.)*:\n  \(root\)$"):
        read(optax.flatten(muon(0.02)), params)


def test_the_fast_parameters_of_lookahead():
    params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    found = muon_optax.report(optax.lookahead(muon(0.02), 2, 0.5), params)
    assert {row.path: row.optimizer for row in found.rows} == {"up": "muon", "bias": "adam"}


def test_report_of_shapes_and_nnx_states():
    def make():
        return nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Param)

    concrete, abstract = report(make()), report(jax.eval_shape(make))
    assert concrete == abstract
    assert [row.path for row in concrete.rows] == ["bias", "kernel"]


def test_report_raises_as_init_does():
    for options in (
        {"partition": (Rule("nothing", "adam"),)},
        {"partition": {"w": "muonn"}},
        {"muon_weight_dimension_numbers": {"w": MuonDimensionNumbers(0, 5)}},
        {"scale": "tall"},
    ):
        typed: Any = options
        with pytest.raises(ValueError, match=r"nothing|muonn|got 5|tall") as of_report:
            report({"w": normal(4, 4)}, **typed)
        with pytest.raises(ValueError, match=r"nothing|muonn|got 5|tall") as of_init:
            muon(0.1, **typed).init({"w": normal(4, 4)})
        assert str(of_report.value) == str(of_init.value)
