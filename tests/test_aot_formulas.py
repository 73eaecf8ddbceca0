"""The formulas of `benchmarks.aot_formulas` beside the plans, for the whole of Llama-3-8B."""

import doctest

import pytest
from jax.sharding import AbstractMesh
from shown import plan

from benchmarks import aot_formulas
from benchmarks.aot_formulas import chosen_bytes, fewest_bytes, ideal_flops, largest_bytes
from benchmarks.shapes import model_on

LARGEST = 4096 * 14336 * 2
MATRICES = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) * 2  # bytes


@pytest.mark.parametrize(
    ("layout", "devices", "received"),
    [
        ("fsdp_rows", 8, 2 * MATRICES / 8 * 7 / 8),
        ("fsdp_columns", 8, 2 * MATRICES / 8 * 7 / 8),
        ("fsdp_tp", 8, 2 * MATRICES / 8 * 7 / 8),
        ("hsdp", 8, 2 * MATRICES / 8 * 3 / 4 + MATRICES / 4 / 2),
        # Fewer matrices than devices are one round of the largest, and every device's own slices.
        ("fsdp_rows", 512, 2 * LARGEST * 511 / 512),
        ("fsdp_tp", 512, 2 * LARGEST * 511 / 512),
        ("hsdp_64", 512, 2 * LARGEST * 63 / 64 + MATRICES / 64 * 7 / 8),
    ],
)
def test_plans_keep_to_the_formulas(layout, devices, received):
    model = model_on("llama3-8b", layout, devices=devices, scanned=True)
    mesh = AbstractMesh(tuple(model.sizes.values()), tuple(model.sizes))
    where = model.shardings(mesh)
    options = {"muon_weight_dimension_numbers": model.views, "device": "h100"}
    options["strategy"] = "auto" if devices == 8 else "all_to_all"
    promised = plan(model.params, where, **options)
    assert promised.bytes == chosen_bytes(promised, model) == fewest_bytes(model) == received
    assert promised.flops == ideal_flops(model)
    assert largest_bytes(model) == LARGEST


@pytest.mark.parametrize(
    ("layout", "group", "shards", "aim"),
    [("fsdp_rows", 2, 512, 9e-3), ("fsdp_tp", 2, 512, 9e-3), ("hsdp_64", 2, 64, 11e-3)],
)
def test_more_devices_than_matrices_are_groups(layout, group, shards, aim):
    model = model_on("llama3-8b", layout, devices=512, scanned=True)
    mesh = AbstractMesh(tuple(model.sizes.values()), tuple(model.sizes))
    options = {"muon_weight_dimension_numbers": model.views, "device": "h100"}
    promised = plan(model.params, model.shardings(mesh), **options)
    found = {(row.strategy, row.group_size, row.round) for row in promised.rows}
    assert found == {("groups", group, 0)}
    received = 2 * LARGEST / group * (shards - 1) / shards + 5 * (2 * 4096**2 * 9 / 16 + 4) + 4
    received += MATRICES / 64 * 7 / 8 if shards == 64 else 0
    assert promised.bytes == chosen_bytes(promised, model) == received
    assert promised.flops == 5 * (4 * 4096**2 * 14336 / group + 2 * 4096**3)
    assert promised.seconds < aim


def test_kinds_that_lie_across_each_other_go_together_where_that_sends_less():
    rows, both = (
        fewest_bytes(model_on("llama3-8b", layout, devices=64, scanned=True))
        for layout in ("fsdp_rows", "fsdp_tp")
    )
    # 32 + 32 queries and outputs and 64 + 32 of the rest, as many rounds of 64 as rows have.
    assert both == rows


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(aot_formulas)
    assert (result.failed, result.attempted > 0) == (0, True)
