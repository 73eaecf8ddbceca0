"""MuonBP's plan, and what is refused of its options."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import sharded
from jax.sharding import PartitionSpec as P

from muon_optax import BlockPeriodic, MatrixView, muon, plan, scale_by_muon

PARAMS = {
    "down": np.ones((24, 16), np.float32),
    "up": np.ones((16, 24), np.float32),
    "stack": np.ones((3, 16, 8), np.float32),
}
VIEWS: Any = {"down": MatrixView(), "up": MatrixView(), "stack": MatrixView(1, 2)}


def in_muon(blocks: Any) -> Any:
    return muon(0.1, muon_weight_dimension_numbers=VIEWS, block_periodic=BlockPeriodic(blocks))


def planned(blocks: Any, spec: Any, *, device: Any = "h100", strategy: Any = "auto") -> Any:
    mesh = jax.sharding.AbstractMesh((8,), ("f",))
    where = jax.NamedSharding(mesh, spec)
    shapes = {name: jax.ShapeDtypeStruct((64, 256), "float32") for name in ("up", "gate")}
    periodic = blocks and BlockPeriodic(blocks, 5)
    options: dict[str, Any] = {"device": device, "strategy": strategy}
    return plan(muon(0.1, param_shardings=where, block_periodic=periodic, **options), shapes)


def test_the_plan_averages_over_the_period():
    whole, found = planned(None, P("f")), planned((8, 1), P("f"))
    assert found.bytes == round(whole.bytes / 5) > 0
    assert [(row.bytes > 0, row.steps, row.period) for row in found.rows] == [
        (True, 1, 5),
        (False, 4, 5),
    ]
    of_blocks = found.rows[1]
    assert (of_blocks.matrix, of_blocks.strategy) == ((8, 256), "local")
    assert found.flops == round((found.rows[0].added_flops + 4 * of_blocks.added_flops) / 5)
    assert str(found).splitlines()[-1].startswith("on average over 5 updates, a device receives ")
    assert "; 4 of 5 updates" in str(found)
    assert found.to_dict()["totals"]["bytes"] == found.bytes
    assert found.to_dict()["rows"][1]["period"] == 5


def test_the_plan_counts_blocks_that_are_on_several_devices():
    found = planned((4, 1), P("f"))
    assert found.bytes == planned(None, P("f")).bytes
    assert "each is cut in 4 x 1 blocks, which aren't whole on a device" in found.rows[1].reason


def test_leaves_without_blocks_have_one_row():
    found = planned([("up", (8, 1))], P("f"))
    shown = [(row.leaves, row.steps, row.period) for row in found.rows]
    assert shown == [(("gate", "up"), 1, 5), (("gate",), 4, 5), (("up",), 4, 5)]
    unshared = planned([("up", (8, 1))], P("f"), strategy=[("up", "gather"), ("*", "all_to_all")])
    assert (("gate",), 1, 1) in [(row.leaves, row.steps, row.period) for row in unshared.rows]


def test_replicas_share_whole_steps_alone():
    """Where sharing takes less time; block steps would send results."""
    found = planned((2, 2), P(), device=sharded.SLOW)
    assert [(row.bytes > 0, row.share_axes, row.steps) for row in found.rows] == [
        (True, ("f",), 1),
        (False, (), 4),
    ]


@pytest.mark.parametrize(
    "blocks", [4, (4,), (4, 0), (2.0, 1), (True, 1), [], [("up", 4)], [(0, (1, 2))], "up", None]
)
def test_blocks_are_pairs(blocks):
    with pytest.raises(TypeError, match="blocks must be a pair of positive integers"):
        BlockPeriodic(blocks)


@pytest.mark.parametrize("period", [0, -1, 2.5, True, None])
def test_periods_are_positive(period):
    with pytest.raises(ValueError, match="period must be a positive integer"):
        BlockPeriodic((2, 2), period)


def test_other_options_out_of_range():
    with pytest.raises(ValueError, match="block_scale must be one of"):
        scale_by_muon(block_scale="linear")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="learning_rate_ratio must be finite"):
        BlockPeriodic((2, 2), learning_rate_ratio=-1.0)
    pair: Any = (2, 2)
    for make in (scale_by_muon, functools.partial(muon, 0.1)):
        with pytest.raises(TypeError, match="block_periodic must be a BlockPeriodic"):
            make(block_periodic=pair)


def test_leaves_that_blocks_do_not_divide_are_listed():
    tx = in_muon([("up", (3, 5)), ("stack", (2, 3)), ("down", (8, 8))])
    with pytest.raises(ValueError, match="blocks must cut matrices in equal parts") as error:
        tx.init(PARAMS)
    assert str(error.value).splitlines()[1:] == [
        "  stack (3, 16, 8), blocks=(2, 3): fan-out 8 in 3",
        "  up (16, 24), blocks=(3, 5): fan-in 16 in 3, fan-out 24 in 5",
    ]
    with pytest.raises(ValueError, match="blocks must cut matrices"):
        plan(tx, PARAMS)


def test_fused_matrices_are_cut_each():
    tx = scale_by_muon(
        weight_dimension_numbers=MatrixView(0, 1, split=(8, 4, 2)),
        block_periodic=BlockPeriodic((1, 4)),
    )
    with pytest.raises(ValueError, match=r"blocks=\(1, 4\): fan-out 2 in 4$"):
        tx.init({"qkv": np.ones((4, 14))})


def test_patterns_that_match_no_leaf_are_listed():
    with pytest.raises(
        ValueError, match="these patterns of blocks match no leaf of Muon's:\n  'u'"
    ):
        in_muon([("u", (2, 2)), ("up", (2, 2))]).init(PARAMS)
