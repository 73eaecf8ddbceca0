"""MuonBP, beside its formula in float64, and what its block steps send."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
import sharded
import variants_on_meshes as meshes
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import QUICK

from benchmarks.compiled import Counter
from benchmarks.hlo import parse
from muon_optax import (
    BlockPeriodic,
    MatrixView,
    MuonDimensionNumbers,
    muon,
    plan,
    scale_by_muon,
    scale_by_shape,
    state_shardings,
)

orthogonalize = functools.partial(reference.newton_schulz, rows=sharded.FAST)
# Blocks that are whole on the devices of `variants_on_meshes`, where a leaf's blocks can be.
ALIGNED = {
    "rows": (8, 2),
    "columns": (1, 4),
    "both": (2, 4),
    "transposed": (2, 4),
    "stack": (2, 4),
    "experts": (4, 3),
    "replicated": (2, 3),
    "merged": (2, 8),
    "qkv": (2, 1),
    "grouped": (2, 4),
    "heads": (2, 4),
    "input_blocks": (1, 3),
}
# Blocks that are on several devices, whole or in part.
ACROSS = {
    "rows": (4, 1),
    "columns": (2, 2),
    "both": (4, 1),
    "transposed": (1, 2),
    "stack": (3, 1),
    "experts": (1, 1),
    "replicated": (4, 1),
    "merged": (1, 2),
    "qkv": (2, 2),
    "grouped": (1, 2),
    "heads": (1, 2),
    "input_blocks": (4, 3),
}
# Fused matrices of unequal size, one after the other, don't end where devices' blocks do.
UNEQUAL = {"qkv", "input_blocks"}

SCALES: dict[Any, Any] = {  # of [out, in]
    "match_rms_adamw": lambda out, fan_in: 0.2 * math.sqrt(max(out, fan_in)),
    "unit_rms_norm": lambda out, fan_in: math.sqrt(out / fan_in),
    None: lambda out, fan_in: math.sqrt(max(1, out / fan_in)),
}


@dataclasses.dataclass(frozen=True)
class BlockCase(meshes.Case):
    blocks: Any = None
    scale_of: Any = None
    options: Any = None

    def state_of(self, leaf: str) -> Any:
        scale, blocks = SCALES[self.scale_of], self.blocks[leaf]
        # A leaf without blocks is whole in each step, at the rate of whole steps.
        options = self.options | ({"ratio": 1.0} if blocks == (1, 1) else {})
        return oracle.BlockPeriodic(orthogonalize, scale, blocks, **options)


def case(blocks: Any, scale: Any = "match_rms_adamw", **options: Any) -> BlockCase:
    """`scale_by_muon` before `scale_by_shape`, beside the oracle."""
    ratio, period = options.get("ratio", 1.0), options.get("period", 5)

    def make(views: Any, shardings: Any) -> Any:
        mine = [(name, blocks[name]) for name in views]
        kwargs = {"weight_dimension_numbers": views, "param_shardings": shardings}
        return optax.chain(
            scale_by_muon(
                sharded.FAST,
                momentum="sum",
                nesterov=options.get("nesterov", False),
                bias_correction=False,
                block_periodic=BlockPeriodic(mine, period, ratio),
                block_scale=scale,
                **kwargs,
            ),
            scale_by_shape(scale=scale, **kwargs),
        )

    return BlockCase(make, lambda: None, blocks=blocks, scale_of=scale, options=options)


OPTIONS: dict[str, dict[str, Any]] = {
    "match_rms_adamw": {},
    "unit_rms_norm": {"scale": "unit_rms_norm", "ratio": 0.5, "period": 3},
    "shape_scaling": {"scale": None, "nesterov": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("blocks", [ALIGNED, ACROSS], ids=["aligned", "across"])
def test_the_formula(blocks, name, monkeypatch):
    monkeypatch.setattr(meshes, "ON_MESHES", set())
    meshes.check(case(blocks, **OPTIONS[name]), "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
@pytest.mark.parametrize("blocks", [ALIGNED, ACROSS], ids=["aligned", "across"])
def test_the_same_on_meshes(blocks, kind, monkeypatch):
    monkeypatch.setattr(meshes, "ON_ONE_DEVICE", set())
    meshes.check(case(blocks), kind)
