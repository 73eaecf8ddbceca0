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
from running import apply_updates, run

from benchmarks.compiled import Counter
from benchmarks.hlo import parse
from muon_optax import BlockPeriodic, muon, scale_by_muon, scale_by_shape
from muon_optax import MuonDimensionNumbers as Dims

orthogonalize = functools.partial(reference.newton_schulz, rows=sharded.ONE_STEP)
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
                sharded.ONE_STEP,
                momentum="sum",
                nesterov=options.get("nesterov", False),
                bias_correction=False,
                block_periodic=BlockPeriodic(mine, period, ratio),
                block_scale=scale,
                device=sharded.SLOW,  # on which replicas share the work of whole steps
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


def test_the_formula(monkeypatch):
    monkeypatch.setattr(meshes, "ON_MESHES", set())
    blocks = dict.fromkeys(OPTIONS, ALIGNED) | {"shape_scaling": ACROSS}
    meshes.check_all({name: case(blocks[name], **OPTIONS[name]) for name in OPTIONS}, "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind, monkeypatch):
    monkeypatch.setattr(meshes, "ON_ONE_DEVICE", set())
    meshes.check_all({"aligned": case(ALIGNED), "across": case(ACROSS)}, kind)


def sent(program: Any) -> list[list[str]]:
    """The collectives outside of the conditional, in block steps and in whole steps."""
    module = parse(program.as_text())
    counter, entry = Counter(module), module.computations[module.entry]
    steps = [
        [collective.kind for collective in counter.count(name).collectives]
        for i in entry
        if i.opcode == "conditional"
        for name in i.called  # true is whole, and comes second
    ]
    others = (counter.one(module.entry, i) for i in entry if i.opcode != "conditional")
    return [[collective.kind for found in others for collective in found.collectives], *steps]


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_block_steps_send_nothing_where_blocks_are_whole_on_devices(kind):
    mesh = sharded.make_mesh(meshes.AXES, kind)
    names = [name for name in meshes.LEAVES if name not in UNEQUAL]
    where = {name: jax.NamedSharding(mesh, meshes.LEAVES[name][1]) for name in names}
    tx = case(ALIGNED).make({name: meshes.VIEWS[name] for name in names}, where)
    shapes = {name: meshes.SHAPES[name] for name in names}
    outside, of_blocks, whole = sent(sharded.lower(tx, shapes, where, "float32").compile())
    assert outside == of_blocks == []
    assert len(whole) >= len(names)


# Mesh axes, shapes, shardings of parameters and momentum, and blocks. Most are whole on a device.
FLAT, PAIR = (16, 24), (8, 4)
LAYOUTS: dict[str, tuple[dict[str, int], Any, Any, tuple[int, int]]] = {
    "fsdp rows": ({"f": 4}, P("f"), None, (4, 1)),
    "fsdp columns": ({"f": 4}, P(None, "f"), None, (1, 4)),
    "fsdp x tp": ({"f": 2, "t": 4}, P("f", "t"), None, (2, 4)),
    "fsdp x tp, blocks of tp": ({"f": 2, "t": 4}, P("f", "t"), None, (1, 4)),
    "hsdp": ({"r": 2, "f": 4}, P("f"), None, (4, 2)),
    "ddp": ({"r": 8}, P(), None, (2, 2)),
    "zero-1": ({"r": 4}, P(), P("r"), (4, 1)),
    "zero-1, columns": ({"r": 4}, P(), P(None, "r"), (2, 1)),
}
SHAPES = {"up": (16, 24), "down": (24, 16), "stack": (3, 16, 8), "bias": (16,)}
VIEWS: Any = {"up": Dims(0, 1), "down": Dims(0, 1), "stack": Dims(1, 2), "bias": None}


def in_muon(blocks: Any = (4, 1), **options: Any) -> Any:
    options = {"muon_weight_dimension_numbers": VIEWS, "ns_coeffs": sharded.ONE_STEP} | options
    periodic = BlockPeriodic(blocks, 3, 0.5)
    return muon(0.1, weight_decay=0.1, block_periodic=periodic, **options)


def shardings(mesh: Any, spec: Any) -> Any:
    stacked: Any = {"stack": P(None, *spec), "bias": P()}
    return {name: jax.NamedSharding(mesh, stacked.get(name, spec)) for name in SHAPES}


def wanted(blocks: tuple[int, int], steps: int) -> list[Any]:
    """The updates of matrices, by the oracle."""
    weights = {k: w.astype(np.float64) for k, w in meshes.arrays(0, SHAPES).items()}
    scale = SCALES["unit_rms_norm"]
    make = functools.partial(oracle.BlockPeriodic, orthogonalize, scale, blocks, 3, 0.5)
    states = {k: [make() for _ in range(3 if k == "stack" else 1)] for k in SHAPES if k != "bias"}
    updates = []
    for t in range(steps):
        grads, new = meshes.arrays(100 + t, SHAPES), {}
        for k, matrices in states.items():
            pairs = zip(*(oracle.matrices(VIEWS[k], x[k]) for x in (grads, weights)), strict=True)
            rows = [
                -0.1 * (state.update(g, w) + 0.1 * w)
                for state, (g, w) in zip(matrices, pairs, strict=True)
            ]
            new[k] = oracle.joined(VIEWS[k], rows, grads[k])
            weights[k] = weights[k] + new[k]
        updates.append(new)
    return updates


PAPER: dict[str, Any] = {
    "momentum": "sum",
    "nesterov": False,
    "bias_correction": False,
    "scale": "unit_rms_norm",
}


ON_AUTO = [(name, "auto") for name in ("fsdp x tp", "hsdp", "zero-1")]


@pytest.mark.parametrize(("name", "kind"), [*((name, "explicit") for name in LAYOUTS), *ON_AUTO])
def test_muon_on_layouts(name, kind):
    axes, spec, of_momentum, blocks = LAYOUTS[name]
    mesh = sharded.make_mesh(axes, kind)
    where = shardings(mesh, spec)
    there = of_momentum and shardings(mesh, of_momentum)
    tx = in_muon(blocks, param_shardings=where, mu_shardings=there, **PAPER)
    params: Any = jax.device_put(meshes.arrays(0, SHAPES), where)
    state, programs = jax.jit(tx.init)(params), 0

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return updates, state, apply_updates(params, updates)

    step: Any = jax.jit(update)
    for t, want in enumerate(wanted(blocks, 10)):
        if t == 2:
            programs = step._cache_size()
        grads = jax.device_put(meshes.arrays(100 + t, SHAPES), where)
        updates, state, params = step(grads, state, params)
        for k, x in want.items():
            sharded.assert_sharded(updates[k], where[k])
            for got, exact in zip(
                *(oracle.matrices(VIEWS[k], y) for y in (updates[k], x)), strict=True
            ):
                assert reference.relative_error(got, exact) <= 1e-5, (k, t)
    assert step._cache_size() == programs  # one serves whole steps and block steps


def test_block_steps_send_results_alone_under_zero_1():
    """The momentum's blocks are whole; what goes to the parameters is what each update sends."""
    mesh = sharded.make_mesh({"r": 4}, "explicit")
    where, there = shardings(mesh, P()), shardings(mesh, P("r"))
    tx = in_muon((4, 1), param_shardings=where, mu_shardings=there, **PAPER)
    outside, of_blocks, _ = sent(sharded.lower(tx, SHAPES, where, "float32").compile())
    assert set(of_blocks) | set(outside) == {"all-gather"}


def test_every_step_is_whole_with_a_period_of_one():
    params, grads = meshes.arrays(0, SHAPES), [meshes.arrays(t, SHAPES) for t in (1, 2)]
    make = functools.partial(muon, 0.1, muon_weight_dimension_numbers=VIEWS)
    periodic = BlockPeriodic((2, 2), 1)
    got, state, _ = run(make(block_periodic=periodic), params, grads, jit=True)
    want, like, _ = run(make(), params, grads, jit=True)
    jax.tree.map(np.testing.assert_array_equal, (got, state), (want, like))


def test_steps_outside_of_jit_are_the_same():
    tx = periodic((2, 2))
    grads = [meshes.arrays(t, {"w": (4, 6)})["w"] for t in range(1, 4)]
    got, want = (run(tx, grads[0], grads, jit=jit)[0] for jit in (False, True))
    for g, w in zip(got, want, strict=True):
        assert reference.relative_error(g, w) <= 1e-5


def periodic(blocks: tuple[int, int], **options: Any) -> Any:
    return scale_by_muon(sharded.ONE_STEP, block_periodic=BlockPeriodic(blocks, 2), **options)


@functools.cache
def of_one_device(blocks: tuple[int, int], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Three updates of matrices that are leaves of their own, by one program."""
    grads = [[*meshes.arrays(t, {"w": shape})["w"].reshape(-1, *shape[-2:])] for t in (1, 2, 3)]
    updates, _, _ = run(periodic(blocks), grads[0], grads, jit=True)
    return [np.reshape(update, shape) for update in updates]


KINDS = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]])
def test_meshes_with_axes_of_both_kinds(kinds):
    mesh = jax.make_mesh((2, 4), ("f", "t"), axis_types=kinds)
    where = jax.NamedSharding(mesh, P("f", "t"))
    tx, state = periodic((2, 4), param_shardings=where), None
    update = jax.jit(tx.update)
    for t, want in enumerate(of_one_device((2, 4), (16, 12)), start=1):
        grad = jax.device_put(meshes.arrays(t, {"w": (16, 12)})["w"], where)
        state = jax.jit(tx.init)(grad) if state is None else state
        got, state = update(grad, state)
        sharded.assert_sharded(got, where)
        assert reference.relative_error(got, want) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "blocks", "inner"),
    [
        ("explicit", (1, 4), P(None, "t")),
        ("auto", (1, 4), P(None, "t")),
        ("explicit", (2, 2), P(None, "t")),  # blocks that aren't whole on devices
        ("explicit", (1, 4), P()),  # members are whole on devices
    ],
)
def test_members_under_vmap(kind, blocks, inner):
    axes = {"members": 2, "t": 4} if inner else {"members": 2}
    mesh = sharded.make_mesh(axes, kind)
    where = jax.NamedSharding(mesh, P("members", *inner))
    of_one = jax.NamedSharding(mesh, inner)
    tx = periodic(blocks, param_shardings=None if kind == "explicit" else of_one)
    grads = [meshes.arrays(t, {"w": (2, 8, 12)})["w"] for t in (1, 2, 3)]
    state = jax.jit(jax.vmap(tx.init))(jax.device_put(grads[0], where))
    update = jax.jit(jax.vmap(tx.update))
    for grad, want in zip(grads, of_one_device(blocks, (2, 8, 12)), strict=True):
        got, state = update(jax.device_put(grad, where), state)
        for member in range(2):
            assert reference.relative_error(np.asarray(got)[member], want[member]) <= 1e-5


def test_zero_gradients_change_nothing():
    zeros = jax.tree.map(np.zeros_like, meshes.arrays(0, SHAPES))
    tx = muon(0.1, muon_weight_dimension_numbers=VIEWS, block_periodic=BlockPeriodic((2, 2), 2))
    for updates in run(tx, zeros, [zeros] * 2, jit=True)[0]:
        jax.tree.map(np.testing.assert_array_equal, updates, zeros)


def test_empty_leaves_stay_empty():
    params = {"w": np.ones((4, 4), np.float32), "empty": np.ones((0, 4), np.float32)}
    tx = periodic((2, 2))
    for updates in run(tx, params, [params] * 2, jit=True)[0]:
        assert updates["empty"].shape == (0, 4)


def test_half_precision_directions_are_scaled_in_float32():
    """Only the update is rounded to bfloat16, once."""
    grads = {"w": meshes.arrays(1, {"w": (16, 24)})["w"].astype("bfloat16")}
    tx = muon(
        0.1,
        beta=0.0,
        scale="match_rms_adamw",
        orthogonalizer=lambda x: x,
        block_periodic=BlockPeriodic((4, 1), 2, 0.3),
    )
    got = run(tx, grads, [grads] * 2, jit=True)[0][1]["w"]
    want = -0.1 * 0.3 * 0.2 * math.sqrt(24) * np.asarray(grads["w"], np.float64)
    assert np.max(np.abs(np.asarray(got, np.float64) / want - 1)) < 1.001 * 2**-8
