"""Fewer matrices than owners: kinds of several shapes that share a round."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update, first_updates, traced_update
from sharded import FAST, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import DeviceModel, MatrixView, orthogonalize, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims

# Devices whose network takes about as long as their matmuls.
IN_ORDER = DeviceModel("slow network", 1e9, 1e9, 1e7, latency=0.0)
IN_NO_ORDER = dataclasses.replace(IN_ORDER, overlaps=False)
# Slices of one size (up and down), of smaller ones, of three dims, and a fused one.
FSDP = {
    "up": Leaf((2, 16, 40), P(None, "f"), STACK),
    "down": Leaf((40, 16), P("f")),
    "square": Leaf((1, 16, 16), P(None, None, "f"), STACK),
    "heads": Leaf((16, 3, 8), P("f"), Dims(0, (1, 2))),
    "fused": Leaf((16, 24), P("f"), MatrixView(0, 1, split=(8, 16))),
}
HSDP = {
    "up": Leaf((3, 16, 32), P(None, "f"), STACK),
    "up_too": Leaf((16, 32), P("f")),
    "down": Leaf((2, 32, 16), P(None, "f"), STACK),
    "square": Leaf((16, 16), P("f")),
}
FSDP_TP = {
    "q": Leaf((16, 16), P("x", "y")),
    "o": Leaf((2, 16, 16), P(None, "y", "x"), STACK),
    "up": Leaf((16, 32), P("x", "y")),
    "down": Leaf((32, 16), P("y", "x")),
}
EXPERTS = {
    "up": Leaf((4, 16, 32), P("e", "f"), STACK),
    "down": Leaf((2, 32, 16), P("e", "f"), STACK),
}
MESHES = {
    "fsdp": ({"f": 8}, FSDP),
    "hsdp": ({"r": 2, "f": 4}, HSDP),
    "replicas_inside": ({"f": 4, "r": 2}, HSDP),
    "fsdp_tp": ({"x": 2, "y": 4}, FSDP_TP),
    "experts": ({"e": 2, "f": 4}, EXPERTS),
}


def planned(name, **options):
    sizes, leaves = MESHES[name]
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    options = {
        "device": IN_NO_ORDER,
        "muon_weight_dimension_numbers": sharded.views(leaves),
        **options,
    }
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize("name", MESHES)
def test_the_plan_shows_one_round_and_who_owns_what(name):
    sizes, _ = MESHES[name]
    rows = planned(name).rows
    owners = [owner for row in rows for owner in row.owners]
    assert {row.round for row in rows} == {0}
    assert [len(row.owners) for row in rows] == [row.count * row.repeats for row in rows]
    of_experts = sizes.get("e", 1)
    assert len(set(owners)) == len(owners) <= 8 // of_experts
    assert set(owners) <= set(range(8 // of_experts))
    # What all share is counted once, of the largest; replicas send each other what each has.
    largest = 4 * max(np.prod(row.matrix) for row in rows)
    shards = 8 // sizes.get("r", 1) // of_experts
    shared = 2 * largest * (shards - 1) / shards
    halves = [-(-row.count // 2) * 2 // row.repeats for row in rows]  # that each replica sends
    from_replicas = sum(
        2 * np.prod(row.matrix) / shards * n for row, n in zip(rows, halves, strict=True)
    )
    total = sum(row.bytes for row in rows)
    assert total == shared + (from_replicas if "r" in sizes else 0)
    assert "in the round of" in rows[-1].reason
    assert f"owners {rows[0].owners[0]}" in rows[0].reason


@functools.cache
def checked_program(name, kind):
    """The compiled first step, whose updates are those of whole matrices."""
    sizes, leaves = MESHES[name]
    mesh = make_mesh(sizes, kind)
    device = IN_NO_ORDER if kind == "explicit" else IN_ORDER
    where = sharded.shardings(leaves, mesh)
    return sharded.check(leaves, mesh, param_shardings=where, device=device)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_whole_matrices(name, kind):
    checked_program(name, kind)


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_one_round_is_two_collectives_and_none_is_in_a_branch(name):
    compiled = checked_program(name, "explicit")
    found, text = read_program(compiled), compiled.as_text()
    expected = {"all-to-all": 2} | ({"all-gather": 1} if name == "hsdp" else {})
    assert found.counts == expected
    assert found.received == planned(name).bytes
    assert " conditional(" in text
    main = text[text.index("\nENTRY") :]
    assert len(re.findall(r" all-to-all\(", main)) == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    mesh, specs = make_mesh({"r": 2, "f": 4}), {k: leaf.spec for k, leaf in HSDP.items()}
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=sharded.views(HSDP),
        param_shardings=specs,
        device=IN_NO_ORDER,
    )
    sharded.check_mapped(HSDP, tx, mesh, check_vma, "all_to_all", 2)


@pytest.mark.parametrize("dtypes", [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)])
def test_several_steps_are_those_of_whole_matrices(dtypes):
    sharded.check_steps(FSDP, make_mesh({"f": 8}), dtypes, device=IN_ORDER)


OTHER_SCHEDULES: dict[str, dict[str, Any]] = {
    "tight": {"ns_coeffs": "tight"},
    "turbo": {"ns_coeffs": "turbo"},  # row norms: transposes are kinds of their own
    "polar_express": {"ns_coeffs": "polar_express", "ns_steps": 8},
    "spectral": {"preconditioning": "spectral"},
    "gram, adaptive": {"ns_method": "gram", "adaptive": True},
    "sum": {"nesterov": False, "momentum": "sum"},
}


@functools.cache
def with_other_schedules() -> tuple[Any, Any]:
    """The first updates on a mesh and on one device; one program for all schedules."""
    grads = sharded.gradients(FSDP_TP)
    placed = jax.device_put(grads, sharded.shardings(FSDP_TP, make_mesh({"x": 2, "y": 4})))
    make = functools.partial(scale_by_muon, weight_dimension_numbers=sharded.views(FSDP_TP))
    alone = {name: make(**options) for name, options in OTHER_SCHEDULES.items()}
    shared = {k: make(**options, device=IN_NO_ORDER) for k, options in OTHER_SCHEDULES.items()}
    return first_updates(shared, placed), first_updates(alone, grads)


@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_every_schedule_is_that_of_one_device(schedule):
    got, want = (updates[schedule] for updates in with_other_schedules())
    for name, leaf in FSDP_TP.items():
        assert sharded.worst_error(leaf, got[name], leaf.blocks(want[name])) <= 1e-5


def test_results_that_go_whole_to_every_device():
    shapes = {"up": (16, 40), "down": (40, 16), "square": (16, 16)}
    leaves = {name: Leaf(shape, P()) for name, shape in shapes.items()}
    mesh, grads = make_mesh({"d": 8}), sharded.gradients(leaves)
    whole = sharded.shardings(leaves, mesh)
    parts = {name: NamedSharding(mesh, P("d")) for name in leaves}
    tx = scale_by_muon(FAST, mu_shardings=parts, strategy="all_to_all", device=IN_NO_ORDER)
    placed = jax.device_put(grads, whole)
    traced, updates, state = traced_update(tx, placed)
    assert (traced.count(" all_to_all["), traced.count(" all_gather_invariant[")) == (2, 1)
    want = sharded.answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5
        sharded.assert_sharded(updates[name], whole[name])
        sharded.assert_sharded(state.mu[name], parts[name])


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_each_owner_gets_its_matrix_whole_and_once(name):
    sizes, leaves = MESHES[name]
    mesh, seen = make_mesh(sizes), []

    def orthogonalizer(x):
        index = jax.lax.axis_index(tuple(sizes))
        jax.debug.callback(lambda i, x: seen.append((int(i), x.shape, float(x[0, 0, 0]))), index, x)
        return -x

    leaves = {k: dataclasses.replace(leaf, view=_unfused(leaf.view)) for k, leaf in leaves.items()}
    numbers = {name: float(i + 1) for i, name in enumerate(leaves)}
    params = {k: np.full(leaves[k].shape, x, np.float32) for k, x in numbers.items()}
    placed = jax.device_put(params, sharded.shardings(leaves, mesh))
    tx = orthogonalize(
        orthogonalizer=orthogonalizer,
        device=IN_NO_ORDER,
        weight_dimension_numbers=sharded.views(leaves),
    )
    updates = first_update(tx, placed, jit=True)
    jax.effects_barrier()
    for key, x in params.items():
        np.testing.assert_array_equal(updates[key], -x)
    options = {"orthogonalizer": orthogonalizer, "device": IN_NO_ORDER}
    shown = plan(
        params,
        sharded.shardings(leaves, mesh),
        muon_weight_dimension_numbers=sharded.views(leaves),
        **options,
    )
    assert all(len(row.leaves) == 1 or row.leaves == ("up", "up_too") for row in shown.rows)
    assert sorted(i for i, *_ in seen) == sorted(i for row in shown.rows for i in row.owners)
    for row in shown.rows:
        values = {numbers[leaf] for leaf in row.leaves}
        assert {x for i, _, x in seen if i in row.owners} == values
        assert {shape[1:] for i, shape, _ in seen if i in row.owners} == {_matrix(row.matrix)}


def _unfused(view):
    return Dims(0, 1) if isinstance(view, MatrixView) else view


def _matrix(sizes):
    return sizes if len(sizes) == 2 else (sizes[0], sizes[1] * sizes[2])


def test_what_is_not_finite_stays_in_its_own_matrix():
    mesh, grads = make_mesh({"f": 8}), sharded.gradients(FSDP)
    spoiled = {**grads, "down": grads["down"].copy()}
    spoiled["down"][3, 4] = np.nan
    placed = jax.device_put(spoiled, sharded.shardings(FSDP, mesh))
    tx = scale_by_muon(FAST, device=IN_NO_ORDER, weight_dimension_numbers=sharded.views(FSDP))
    updates = first_update(tx, placed, jit=True)
    assert not np.isfinite(updates.pop("down")).any()
    for name, x in updates.items():
        assert sharded.worst_error(FSDP[name], x, sharded.answers(FSDP, grads)[name]) <= 1e-5


def test_members_under_vmap_and_derivatives():
    leaves = {k: FSDP_TP[k] for k in ("q", "up")}
    mesh, grads = make_mesh({"x": 2, "y": 4}), sharded.gradients(leaves)
    two = {k: np.stack([x, 2 * x[::-1]]).astype(np.float32) for k, x in grads.items()}
    where = {k: NamedSharding(mesh, P(None, *leaf.spec)) for k, leaf in leaves.items()}
    alone, tx = scale_by_muon(FAST), scale_by_muon(FAST, device=IN_NO_ORDER)

    def slope(tx, members):
        def loss(x):
            return sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(tx.update(x, tx.init(x))[0]))

        return jax.jit(jax.vmap(jax.grad(loss)))(members)

    got, want = slope(tx, jax.device_put(two, where)), slope(alone, two)
    for name in leaves:
        assert reference.relative_error(got[name], np.asarray(want[name])) <= 1e-5


# Matrices of Llama-3-8B, by how many layers have.
LLAMA = {
    "down": (1, (14336, 4096)),
    "up": (2, (4096, 14336)),
    "q": (2, (4096, 4096)),
    "k": (2, (4096, 1024)),
}


def llama(layers, sizes, spec, **options):
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    leaves = {
        k: Leaf((n * layers, *shape), P(None, *spec), STACK) for k, (n, shape) in LLAMA.items()
    }
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "bfloat16") for k, leaf in leaves.items()}
    options = {"device": "h100", "muon_weight_dimension_numbers": STACK, **options}
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize(("layers", "devices"), [(32, 512), (8, 64)])
def test_all_of_a_llama_goes_in_one_round(layers, devices):
    found = llama(layers, {"fsdp": devices}, P("fsdp"), strategy="all_to_all")
    assert [row.round for row in found.rows] == [0] * 4
    assert found.bytes == 2 * 14336 * 4096 * 2 * (devices - 1) // devices
    sent, matmuls = found.bytes / 50e9 + 2e-5, found.rows[0].flops / 989e12
    assert found.seconds == pytest.approx(sent + matmuls, rel=1e-6)


def test_replicas_share_the_round_too():
    found = llama(32, {"replica": 8, "fsdp": 64}, P("fsdp"), strategy="all_to_all")
    a_layer = sum(n * 2 * rows * columns for n, (rows, columns) in LLAMA.values())
    own = 32 * a_layer // 64
    assert found.bytes == 2 * 14336 * 4096 * 2 * 63 // 64 + own * 7 // 8


@pytest.mark.parametrize(("bound", "sharing"), [(1024, 0), (2048, 2), (3072, 2), (3328, 3)])
def test_results_of_all_replicas_fit_the_workspace(bound, sharing):
    """They come in one flat array, before they are cut from it; a fourth is on each shard."""
    rows = planned("hsdp", max_workspace_bytes=bound).rows
    shared = [row for row in rows if row.round is not None]
    assert len(shared) == sharing
    assert sum(row.count * math.prod(row.matrix) for row in shared) <= bound


def test_what_does_not_fit_goes_on_in_a_new_round():
    leaves = {
        "large": Leaf((5, 64, 64), P(None, "f"), STACK),
        "middle": Leaf((5, 64, 48), P(None, "f"), STACK),
        "small": Leaf((5, 64, 16), P(None, "f"), STACK),
    }
    found = plan(
        {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()},
        sharded.shardings(leaves, make_mesh({"f": 8})),
        muon_weight_dimension_numbers=STACK,
        device=IN_NO_ORDER,
    )
    assert [(row.leaves, row.count, row.round) for row in found.rows] == [
        (("large",), 5, 0),
        (("middle",), 3, 0),
        (("middle",), 2, 1),
        (("small",), 5, 1),
    ]
    assert found.bytes == 2 * 4 * (64 * 64 + 64 * 48) * 7 // 8
    sharded.check(leaves, make_mesh({"f": 8}), device=IN_NO_ORDER)


def test_rounds_that_gain_nothing_are_not_shared():
    def rounds(leaves, sizes=None, **options):
        sizes = sizes or {"f": 8}
        mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        found = plan(
            {
                k: jax.ShapeDtypeStruct(leaf.shape, options.get("dtypes", {}).get(k, "float32"))
                for k, leaf in leaves.items()
            },
            sharded.shardings(leaves, mesh),
            muon_weight_dimension_numbers=sharded.views(leaves),
            **{"device": IN_NO_ORDER, **{k: v for k, v in options.items() if k != "dtypes"}},
        )
        return [row.round for row in found.rows]

    two = {"a": Leaf((3, 64, 64), P(None, "f"), STACK), "b": Leaf((3, 64, 48), P(None, "f"), STACK)}
    assert rounds(two) == [0, 0]
    assert rounds(two, dtypes={"b": "bfloat16"}) == [None, None]
    assert rounds(two, strategy=[("b", "gather")]) == [None, None]
    # Tiny matrices for which a latency is all: two gathers take as long as a round.
    tiny = {"a": Leaf((8, 16), P("f")), "b": Leaf((16, 8), P("f"))}
    assert rounds(tiny, device="h100") == [None, None]
    # Full rounds and a lone rest.
    full = {"a": Leaf((8, 64, 64), P(None, "f"), STACK), "b": two["b"]}
    assert rounds(full) == [None, None]
    # Sharded over an axis of one device, over which the types of results may not vary.
    ones = {
        "a": Leaf((3, 64, 64), P(None, "f", "one"), STACK),
        "b": Leaf((3, 64, 48), P(None, "f"), STACK),
    }
    assert rounds(ones, {"f": 8, "one": 1}) == [None, None]
    # Sharded over other devices, or in groups of them.
    apart = {
        "a": Leaf((2, 64, 64), P(None, "e"), STACK),
        "b": Leaf((4, 64, 48), P("e", "f"), STACK),
    }
    assert rounds(apart, {"e": 2, "f": 4}) == [None, None]
