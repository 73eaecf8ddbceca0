"""More devices than matrices: groups of devices that own a matrix together."""

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
from sharded import FAST, OVERLAPPING, SLOW, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import MatrixView, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims
from muon_optax.sharding.planning.device_models import DEVICES, DeviceModel

# Wide, tall and nearly square, and of three dims.
FSDP = {
    "up": Leaf((8, 48), P("f")),
    "down": Leaf((64, 8), P("f")),
    "short": Leaf((1, 8, 16), P(None, None, "f"), STACK),
    "heads": Leaf((8, 3, 8), P("f"), Dims(0, (1, 2))),
}
HSDP = {
    "up": Leaf((2, 8, 48), P(None, "f"), STACK),
    "down": Leaf((2, 48, 8), P(None, "f"), STACK),
}
MESHES = {
    # name: (sizes of the mesh, leaves, devices of a group)
    "fsdp": ({"f": 8}, FSDP, 2),
    "lone": ({"f": 8}, {"up": Leaf((8, 64), P("f"))}, 8),
    "rounds": ({"f": 8}, {"up": Leaf((5, 8, 188), P(None, "f"), STACK)}, 4),
    "loop": ({"f": 8}, {"up": Leaf((5, 2, 768), P(None, None, "f"), STACK)}, 8),
    "two_rounds": (
        {"f": 8},
        {
            "up": Leaf((3, 8, 48), P(None, "f"), STACK),
            "down": Leaf((48, 8), P("f")),
            "short": Leaf((3, 8, 16), P(None, "f"), STACK),
        },
        2,
    ),
    "hsdp": ({"r": 2, "f": 4}, HSDP, 2),
    "replicas_inside": ({"f": 4, "r": 2}, HSDP, 2),
    "fsdp_tp": (
        {"x": 2, "y": 4},
        {
            "q": Leaf((8, 8), P("x", "y")),
            "o": Leaf((8, 8), P("y", "x")),
            "up": Leaf((8, 48), P("x", "y")),
            "down": Leaf((48, 8), P("y", "x")),
        },
        4,
    ),
    "experts": (
        {"e": 2, "f": 4},
        {
            "up": Leaf((2, 8, 48), P("e", "f"), STACK),
            "down": Leaf((2, 48, 8), P("e", "f"), STACK),
        },
        2,
    ),
    "beside_owners": (
        {"f": 8},
        {"up": Leaf((8, 64), P("f")), "fused": Leaf((8, 24), P("f"), MatrixView(0, 1, (8, 16)))},
        8,
    ),
}


def planned(name, **options):
    sizes, leaves, _ = MESHES[name]
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    options = {
        "device": SLOW,
        "ns_coeffs": FAST,
        "ns_method": "standard",
        "muon_weight_dimension_numbers": sharded.views(leaves),
        **options,
    }
    return plan(shapes, sharded.shardings(leaves, mesh), **options)


@pytest.mark.parametrize("name", MESHES)
def test_the_plan_shows_the_groups_and_what_they_own(name):
    sizes, leaves, group = MESHES[name]
    rows = [row for row in planned(name).rows if row.strategy == "groups"]
    assert {leaf for row in rows for leaf in row.leaves} == set(leaves) - {"fused"}
    assert {row.group_size for row in rows} == {group}
    assert f"of {group} devices, which split each" in rows[0].reason
    for number in {row.round for row in rows}:
        of_round = [row for row in rows if row.round == number]
        assert all(first % group == 0 for row in of_round for first in row.owners)
        if number is not None:
            owners = [first + k for row in of_round for first in row.owners for k in range(group)]
            assert len(set(owners)) == len(owners) <= 8 // sizes.get("e", 1)
            assert [len(row.owners) for row in of_round] == [row.count for row in of_round]
            assert all(f"owners {row.owners[0]}-" in row.reason for row in of_round)


@functools.cache
def checked_program(name, kind):
    """The compiled first step, whose updates are those of whole matrices."""
    sizes, leaves, _ = MESHES[name]
    mesh = make_mesh(sizes, kind)
    device = SLOW if kind == "explicit" else OVERLAPPING
    where = sharded.shardings(leaves, mesh)
    options = {"param_shardings": where, "device": device, "ns_method": "standard"}
    return sharded.check(leaves, mesh, **options)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_whole_matrices(name, kind):
    checked_program(name, kind)


@pytest.mark.parametrize("name", [name for name in MESHES if name != "beside_owners"])
def test_what_is_sent_is_what_the_plan_says_and_none_is_in_a_branch(name):
    sizes, leaves, group = MESHES[name]
    compiled = checked_program(name, "explicit")
    found, text = read_program(compiled), compiled.as_text()
    shown = planned(name)
    rounds = {"rounds": 3, "loop": 5, "two_rounds": 2, "fsdp_tp": 2}.get(name, 1)
    steps, exchanges = len(FAST), int(math.log2(group))
    expected = {"all-to-all": 2, "collective-permute": (steps + 1) * exchanges}
    expected = {kind: rounds * times for kind, times in expected.items()}
    assert found.counts == expected | ({"all-gather": 1} if "r" in sizes else {})
    assert found.received == shown.bytes
    assert (found.flops == shown.flops) or "down" in leaves
    main = text[text.index("\nENTRY") :]
    assert len(re.findall(r" collective-permute\(", main)) == expected["collective-permute"]


def test_the_bytes_and_flops_of_a_round():
    """By hand: the longest slices, and in pairs sums of 36, 36 and 1 entries."""
    found = planned("fsdp")
    assert found.bytes == 2 * 64 * 8 // 2 * 4 * 7 // 8 + (2 * 36 + 1) * 4
    assert found.flops == 2 * (4 * 8 * 8 * 64 // 2 + 2 * 8**3)
    assert found.seconds == pytest.approx(found.bytes / 1e12 + found.flops / 1e9)


OTHER_SCHEDULES: dict[str, dict[str, Any]] = {
    "tight": {"ns_coeffs": "tight"},
    "turbo": {"ns_coeffs": "turbo"},  # row norms
    "polar_express": {"ns_coeffs": "polar_express", "ns_steps": 8},
    "spectral": {"preconditioning": "spectral"},
    "schatten": {"preconditioning": "schatten"},
    "gram": {"ns_method": "gram"},
    "gram, adaptive": {"ns_method": "gram", "adaptive": True},
    "adaptive": {"adaptive": True},
    "sum": {"nesterov": False, "momentum": "sum"},
}
PAIR = {"up": Leaf((8, 96), P("f")), "down": Leaf((2, 128, 8), P(None, "f"), STACK)}


@functools.cache
def with_other_schedules() -> tuple[Any, Any]:
    """The first updates of `PAIR` on a mesh and on one device; one program for all schedules."""
    grads = sharded.gradients(PAIR)
    placed = jax.device_put(grads, sharded.shardings(PAIR, make_mesh({"f": 8})))
    views = sharded.views(PAIR)

    def txs(**more):
        options = {k: {"ns_method": "standard", **o, **more} for k, o in OTHER_SCHEDULES.items()}
        return {k: scale_by_muon(weight_dimension_numbers=views, **o) for k, o in options.items()}

    in_groups = txs(device=SLOW)
    for tx in in_groups.values():
        traced = jax.make_jaxpr(lambda x, tx=tx: tx.update(x, tx.init(x)))(placed)
        assert " ppermute[" in str(traced)
    return first_updates(in_groups, placed), first_updates(txs(), grads)


@pytest.mark.parametrize("name", OTHER_SCHEDULES)
def test_every_schedule_is_that_of_one_device(name):
    got, want = with_other_schedules()
    for key, leaf in PAIR.items():
        assert sharded.worst_error(leaf, got[name][key], leaf.blocks(want[name][key])) <= 1e-5


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", None), ("float16", None)])
def test_half_precision_is_near_to_double_precision(dtypes):
    own, compute = dtypes
    views = sharded.views(FSDP)
    options = {"weight_dimension_numbers": views, "ns_dtype": compute, "ns_method": "standard"}
    grads = {k: jnp.asarray(g, own) for k, g in sharded.gradients(FSDP).items()}
    placed = jax.device_put(grads, sharded.shardings(FSDP, make_mesh({"f": 8})))
    traced, got, _ = traced_update(scale_by_muon(**options, device=SLOW), placed)
    assert " ppermute[" in traced
    want = sharded.answers(FSDP, grads, reference.JORDAN)
    for name, leaf in FSDP.items():
        assert got[name].dtype == own
        assert sharded.worst_error(leaf, got[name], want[name]) <= 4e-2


def test_rows_of_any_size_are_normalized_by_row_norms_in_half_precision():
    """Orthogonal rows, one of them a million times as large as the others, on the same device."""
    grad = np.eye(8, 48, dtype=np.float32) * np.array([[1.0]] + [[1e-6]] * 7, np.float32)
    placed = jax.device_put(grad, NamedSharding(make_mesh({"f": 8}), P("f")))
    tx = scale_by_muon("turbo", ns_dtype="bfloat16", ns_method="standard", device=SLOW)
    traced, got, _ = traced_update(tx, placed)
    assert " ppermute[" in traced
    got = np.asarray(got)
    np.testing.assert_array_equal(got[got != 0], np.full(8, got[0, 0]))
    assert got[0, 0] == pytest.approx(1, abs=0.1)


def test_derivatives_in_half_precision_are_near_those_in_single_precision():
    """Of a function of any size, as no derivative is sent in float16."""
    leaf = Leaf((8, 48), P("f"))
    grad, sizes = leaf.gradient(0), np.array([1e-8, 1.0, 1e8], np.float32)
    options: Any = {"ns_coeffs": FAST, "ns_method": "standard"}

    def slopes(x, **more):
        tx = scale_by_muon(**options, **more)

        def loss(x, size):
            (update,) = jax.tree.leaves(tx.update(x, tx.init(x))[0])
            return size * jnp.mean(jnp.sin(3 * update))

        slope = jax.jit(jax.grad(loss))
        assert (" ppermute[" in str(slope.trace(x, sizes[0]).jaxpr)) == ("device" in more)
        return [slope(x, size) for size in sizes]

    placed = jax.device_put(grad, NamedSharding(make_mesh({"f": 8}), P("f")))
    found = slopes(placed, ns_dtype="bfloat16", device=SLOW)
    for got, want in zip(found, slopes(grad), strict=True):
        assert reference.relative_error(got, np.asarray(want)) <= 1.5e-2


@pytest.mark.parametrize(
    ("dtypes", "options", "width"),
    [
        (("bfloat16", None), {}, 2),
        (("float32", "bfloat16"), {}, 2),
        (("bfloat16", "float32"), {}, 4),
        (("float16", None), {}, 2),
        (("bfloat16", None), {"ns_method": "gram"}, 4),
        (("bfloat16", None), {"preconditioning": "aol"}, 4),
    ],
)
def test_gram_matrices_are_sent_in_float16_where_matmuls_have_half_precision(
    dtypes, options, width
):
    own, compute = dtypes
    options = {"ns_method": "standard", "ns_dtype": compute, "device": SLOW, **options}
    tx = scale_by_muon(FAST, **options)
    grad = jnp.asarray(Leaf((8, 48), P("f")).gradient(0), own)
    placed = jax.device_put(grad, NamedSharding(make_mesh({"f": 8}), P("f")))
    traced = str(jax.make_jaxpr(lambda x: tx.update(x, tx.init(x)))(placed))
    sent = re.findall(r":(\w+)\[36\][^\n]* = ppermute\[", traced)
    name = {2: "f16", 4: "f32"}[width]
    assert set(sent) == {name}
    shape = jax.ShapeDtypeStruct(grad.shape, grad.dtype)
    mesh: Any = AbstractMesh((8,), ("f",))
    found = plan(shape, NamedSharding(mesh, P("f")), ns_coeffs=FAST, **options)
    (row,) = found.rows
    exchanges = int(math.log2(row.group_size))
    slices = 2 * 8 * 48 // row.group_size * jnp.dtype(row.dtype).itemsize * 7 // 8
    assert found.bytes == slices + exchanges * (
        len(sent) // exchanges * (36 * width + 4 * (width == 2)) + 4
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    mesh, specs = make_mesh({"r": 2, "f": 4}), {k: leaf.spec for k, leaf in HSDP.items()}
    views = sharded.views(HSDP)
    options: Any = {"device": SLOW, "ns_method": "standard"}
    tx = scale_by_muon(FAST, weight_dimension_numbers=views, param_shardings=specs, **options)
    sharded.check_mapped(HSDP, tx, mesh, check_vma, "ppermute", 3)


def test_results_that_go_whole_to_every_device():
    shapes = {"up": (8, 48), "down": (48, 8), "short": (8, 16)}
    leaves = {name: Leaf(shape, P()) for name, shape in shapes.items()}
    mesh, grads = make_mesh({"d": 8}), sharded.gradients(leaves)
    whole = sharded.shardings(leaves, mesh)
    parts = {name: NamedSharding(mesh, P("d")) for name in leaves}
    tx = scale_by_muon(FAST, mu_shardings=parts, device=SLOW, ns_method="standard")
    placed = jax.device_put(grads, whole)
    traced, updates, state = traced_update(tx, placed)
    assert " ppermute[" in traced
    want = sharded.answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5
        sharded.assert_sharded(updates[name], whole[name])
        sharded.assert_sharded(state.mu[name], parts[name])


def test_what_is_not_finite_stays_in_its_own_matrix():
    mesh, grads = make_mesh({"f": 8}), sharded.gradients(FSDP)
    spoiled = {**grads, "down": grads["down"].copy()}
    spoiled["down"][3, 4] = np.nan
    placed = jax.device_put(spoiled, sharded.shardings(FSDP, mesh))
    views = sharded.views(FSDP)
    tx = scale_by_muon(FAST, device=SLOW, weight_dimension_numbers=views, ns_method="standard")
    updates = first_update(tx, placed, jit=True)
    assert not np.isfinite(updates.pop("down")).any()
    for name, x in updates.items():
        assert sharded.worst_error(FSDP[name], x, sharded.answers(FSDP, grads)[name]) <= 1e-5


def test_members_under_vmap_and_derivatives():
    leaves = {k: FSDP[k] for k in ("up", "down")}
    mesh, grads = make_mesh({"f": 8}), sharded.gradients(leaves)
    two = {k: np.stack([x, 2 * x[::-1]]).astype(np.float32) for k, x in grads.items()}
    where = {k: NamedSharding(mesh, P(None, *leaf.spec)) for k, leaf in leaves.items()}
    options: Any = {"ns_method": "standard"}
    alone, tx = scale_by_muon(FAST, **options), scale_by_muon(FAST, device=SLOW, **options)

    def slope(tx, members):
        def loss(x):
            return sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(tx.update(x, tx.init(x))[0]))

        slope = jax.jit(jax.vmap(jax.grad(loss)))
        return str(slope.trace(members).jaxpr), slope(members)

    (traced, got), (_, want) = slope(tx, jax.device_put(two, where)), slope(alone, two)
    assert " ppermute[" in traced
    for name in leaves:
        assert reference.relative_error(got[name], np.asarray(want[name])) <= 1e-5


def test_members_on_devices_of_their_own():
    mesh = make_mesh({"members": 2, "f": 4})
    leaf = Leaf((8, 48), P("f"))
    members = np.stack([leaf.gradient(seed) for seed in (0, 7)]).astype(np.float32)
    placed = jax.device_put(members, NamedSharding(mesh, P("members", "f")))
    tx = scale_by_muon(FAST, device=SLOW, ns_method="standard")
    updates = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0]))(placed)
    for x, update in zip(members, updates, strict=True):
        want = sharded.answers({"w": leaf}, {"w": x})["w"]
        assert sharded.worst_error(leaf, update, want) <= 1e-5


def rows_of(leaves, sizes=None, **options):
    mesh: Any = AbstractMesh(tuple((sizes or {"f": 8}).values()), tuple(sizes or {"f": 8}))
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    views = {"muon_weight_dimension_numbers": sharded.views(leaves)}
    options = {"device": SLOW, "ns_method": "standard", **views, **options}
    return plan(shapes, sharded.shardings(leaves, mesh), **options).rows


@pytest.mark.parametrize(
    ("leaf", "options"),
    [
        (Leaf((8, 48), P("f")), {"orthogonalizer": lambda x: -x}),
        (Leaf((8, 48), P("f")), {"strategy": "all_to_all"}),
        (Leaf((8, 96), P("f"), MatrixView(0, 1, heads=2)), {}),
        (Leaf((72, 8), P("f")), {}),  # slices of nine rows
        (Leaf((8, 8, 48), P(None, "f"), STACK), {}),  # as many matrices as devices
        (Leaf((8, 48), P("f")), {"device": dataclasses.replace(SLOW, bandwidth=1e6)}),
        (Leaf((8, 48), P("f")), {"device": dataclasses.replace(SLOW, latency=1e-4)}),
    ],
)
def test_where_groups_cannot_be_or_do_not_pay(leaf, options):
    rows = rows_of({"w": leaf}, **options)
    assert [row.strategy for row in rows if row.strategy == "groups"] == []
    assert rows_of({"w": Leaf((8, 48), P("f"))})[0].strategy == "groups"


def test_a_bound_of_the_workspace_keeps_kinds_apart_that_would_be_padded():
    """A group's part of 64 x 16 and of 8 x 64, each in six copies, or of both padded to 64 x 64."""
    leaves = {"square": Leaf((48, 16), P("f")), "long": Leaf((8, 64), P("f"))}
    assert {row.round for row in rows_of(leaves)} == {0}
    rows = rows_of(leaves, max_workspace_bytes=4 * 6 * 48 * 16 // 2)
    assert {row.round for row in rows} == {None}


@pytest.mark.parametrize(
    ("axes", "sizes", "group", "bandwidth"),
    [
        (("f",), {"f": 512}, 8, 450e9),
        (("f",), {"f": 512}, 16, 50e9),
        (("f",), {"f": 64, "t": 8}, 2, 50e9),  # eight devices apart
        (("f", "t"), {"f": 64, "t": 8}, 8, 450e9),
        (("f", "t"), {"f": 64, "t": 2}, 8, 450e9),
        (("f",), {"r": 8, "f": 64}, 4, 450e9),
        (("f",), {"f": 12}, 6, 50e9),  # the second group is on two nodes
    ],
)
def test_the_network_within_groups(axes, sizes, group, bandwidth):
    assert DEVICES["h100"].bandwidth_in_groups(axes, sizes, group) == bandwidth


def test_a_bandwidth_given_for_an_axis_is_that_of_its_groups():
    device = DeviceModel("mine", 1e9, 1e9, 1e9, axis_bandwidth=(("f", 5.0), ("t", 7.0)))
    found = [device.bandwidth_in_groups(("f", "t"), {"f": 4, "t": 2}, g) for g in (2, 4)]
    assert found == [7.0, 5.0]
