"""Moments over more mesh axes than their parameters: results are all-gathered along these."""

import dataclasses
from typing import Any, NamedTuple

import jax
import pytest
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, SLOW, STACK, Leaf, make_mesh
from shown import plan

from benchmarks.compiled import read_program
from muon_optax import MatrixView, scale_by_muon

ROWS, COLUMNS = P(("f", "r")), P(None, ("f", "r"))
HSDP, INSIDE = {"r": 2, "f": 4}, {"f": 4, "r": 2}
MIXED = {
    "up": (Leaf((16, 40), P("f")), ROWS),
    "down": (Leaf((40, 16), P("f")), ROWS),
    "columns": (Leaf((8, 16), P(None, "f")), COLUMNS),
    "fused": (Leaf((16, 24), P("f"), MatrixView(0, 1, (8, 16))), ROWS),
    "stack": (Leaf((4, 16, 24), P(None, "f"), STACK), P(None, ("f", "r"))),
}
MANY = {f"w{i}": (Leaf((16, 24), P("f")), ROWS) for i in range(11)}
GROUPED = {
    "up": (Leaf((8, 48), P("f")), ROWS),
    "down": (Leaf((64, 8), P("f")), ROWS),
    "short": (Leaf((1, 8, 32), P(None, None, "f"), STACK), P(None, None, ("f", "r"))),
}


class Case(NamedTuple):
    """Leaves with the specs of their moments, on a mesh.

    Attributes:
      sizes: of the mesh.
      leaves: each with the spec of its momentum.
      options: of the transformation.
      sent: how often each collective is called, of which results take the second all-to-all and the
        all-gathers.
    """

    sizes: dict[str, int]
    leaves: dict[str, tuple[Leaf, P]]
    options: dict[str, Any]
    sent: dict[str, int]


OWNERS, GROUPS = {"strategy": "all_to_all"}, {"ns_method": "standard"}
# Rounds are shared where the network takes about as long as matmuls.
SHARED = OWNERS | {"device": dataclasses.replace(SLOW, bandwidth=1e7)}
CASES = {
    "rounds": Case(HSDP, MANY, OWNERS, {"all-to-all": 4, "all-gather": 2}),
    "replicas_inside": Case(INSIDE, MANY, OWNERS, {"all-to-all": 4, "all-gather": 2}),
    "four_replicas": Case({"r": 4, "f": 2}, MANY, OWNERS, {"all-to-all": 4, "all-gather": 2}),
    "shared_round": Case(HSDP, MIXED, SHARED, {"all-to-all": 2, "all-gather": 1}),
    "shared_round_inside": Case(INSIDE, MIXED, SHARED, {"all-to-all": 2, "all-gather": 1}),
    "other_dim": Case(
        HSDP,
        {f"w{i}": (Leaf((16, 24), P("f")), P("f", "r")) for i in range(8)},
        {},
        {"all-to-all": 2, "all-gather": 1},
    ),
    "two_dims": Case(
        {"r": 2, "x": 2, "y": 2},
        {
            "q": (Leaf((16, 16), P("x", "y")), P(("x", "r"), "y")),
            "o": (Leaf((16, 16), P("y", "x")), P("y", ("x", "r"))),
            "up": (Leaf((16, 40), P("x", "y")), P(("x", "r"), "y")),
        },
        SHARED,
        {"all-to-all": 2, "all-gather": 1},
    ),
    "both_replicas": Case(
        {"r": 2, "f": 2, "s": 2},
        {f"w{i}": (Leaf((16, 24), P("f")), P(("f", "r", "s"))) for i in range(8)},
        {},
        {"all-to-all": 2, "all-gather": 1},
    ),
    "one_of_two_replicas": Case(
        {"r": 2, "s": 2, "f": 2},
        {f"w{i}": (Leaf((16, 24), P("f")), P(("f", "r"))) for i in range(8)},
        {},
        {"all-to-all": 2, "all-gather": 2},
    ),
    "replicas_that_repeat": Case(
        {"s": 2, "r": 4},
        {
            "up": (Leaf((16, 40), P()), P("s")),
            "down": (Leaf((40, 16), P()), P(None, "s")),
            "fused": (Leaf((16, 24), P(), MatrixView(0, 1, (8, 16))), P("s")),
        },
        OWNERS | {"device": dataclasses.replace(SLOW, bandwidth=1e8)},
        {"all-to-all": 2, "all-gather": 2},
    ),
    "groups": Case(
        HSDP, GROUPED, GROUPS, {"all-to-all": 2, "all-gather": 1, "collective-permute": 3}
    ),
    "groups_inside": Case(
        INSIDE, GROUPED, GROUPS, {"all-to-all": 2, "all-gather": 1, "collective-permute": 3}
    ),
    "stack_in_rounds": Case(
        INSIDE,
        {"w": (Leaf((19, 16, 24), P(None, None, "f"), STACK), P(None, None, ("f", "r")))},
        OWNERS,
        {"all-to-all": 4, "all-gather": 2},
    ),
    "an_axis_of_one_device": Case(
        {"r": 2, "f": 4, "t": 1},
        {f"w{i}": (Leaf((16, 24), P("f", "t")), P(("f", "r"), "t")) for i in range(8)},
        {},
        {"all-to-all": 2, "all-gather": 1},
    ),
    "whole_and_transposed": Case(
        {"r": 8},
        {
            "up": (Leaf((16, 40), P()), P("r")),
            "down": (Leaf((40, 16), P()), P(None, "r")),
        },
        OWNERS,
        {"all-to-all": 2, "all-gather": 1},
    ),
    "whole_by_gram": Case(
        {"r": 8},
        {"up": (Leaf((16, 64), P()), P(None, "r"))},
        {"strategy": "gram"},
        {"reduce-scatter": 1, "all-gather": 3, "all-reduce": 1},
    ),
    "gather": Case(HSDP, MIXED, {"strategy": "gather"}, {"all-gather": 5}),
    "gram": Case(
        INSIDE,
        {
            "up": (Leaf((3, 16, 64), P(None, None, "f"), STACK), P(None, None, ("f", "r"))),
            "heads": (Leaf((8, 8, 8), P(None, "f"), MatrixView(0, (1, 2))), P(None, "f", "r")),
        },
        {"strategy": "gram"},
        {"reduce-scatter": 2, "all-gather": 6, "all-reduce": 1},  # those of scales, too,
    ),
}


def setting(case: Case, mesh: Any) -> tuple[Any, Any, Any, Any]:
    """The leaves, how they and their momentum are sharded, and the options of the case."""
    leaves = {name: leaf for name, (leaf, _) in case.leaves.items()}
    where = sharded.shardings(leaves, mesh)
    there = {name: NamedSharding(mesh, spec) for name, (_, spec) in case.leaves.items()}
    options = {"mu_shardings": there, "param_shardings": where, "device": SLOW, **case.options}
    return leaves, where, there, options


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_whole_matrices(name, kind):
    case = CASES[name]
    mesh = make_mesh(case.sizes, kind)
    leaves, where, there, options = setting(case, mesh)
    options["device"] = dataclasses.replace(options["device"], overlaps=kind == "explicit")
    tx = scale_by_muon(FAST, weight_dimension_numbers=sharded.views(leaves), **options)
    grads = sharded.gradients(leaves)
    placed = jax.device_put(grads, where)
    updates, state = jax.jit(tx.update)(placed, tx.init(placed))
    sharded.assert_right(leaves, grads, updates)
    for leaf in leaves:
        sharded.assert_sharded(updates[leaf], where[leaf])
        sharded.assert_sharded(state.mu[leaf], there[leaf])


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_update_receives_what_is_planned(name):
    case = CASES[name]
    mesh = make_mesh(case.sizes)
    leaves, where, _, options = setting(case, mesh)
    views = sharded.views(leaves)
    tx = scale_by_muon(FAST, weight_dimension_numbers=views, **options)
    params: Any = {
        k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where[k])
        for k, leaf in leaves.items()
    }
    program = read_program(jax.jit(tx.update).lower(params, tx.init(params), params).compile())
    planned = plan(params, ns_coeffs=FAST, muon_weight_dimension_numbers=views, **options)
    assert program.counts == case.sent
    assert "reshard" not in {row.strategy for row in planned.rows}
    scalars = 256 if "gram" in name else 0  # its norms
    assert program.received == pytest.approx(planned.bytes, abs=scalars)
    repeats, rounds = {row.repeats for row in planned.rows}, {row.round for row in planned.rows}
    if name == "replicas_that_repeat":
        assert (repeats, rounds) == ({2, 4}, {0})
    else:
        assert repeats == {1}


@pytest.mark.parametrize(
    ("sizes", "spec", "count", "eighths"),
    [
        (HSDP, P("f"), 8, 7 + 7 * 2),  # a full round: quarters come at once
        (HSDP, P("f"), 7, 7 + 7 + 7),
        (HSDP, P("f"), 1, 7 + 7 + 1),
        ({"r": 8}, P(), 8, 7 + 7 * 8),
        ({"r": 8}, P(), 1, 7 + 7 + 7),
    ],
)
def test_no_results_are_gathered_of_owners_without_a_matrix(sizes, spec, count, eighths):
    leaf = Leaf((16, 24), spec)
    leaves = {f"w{i}": (leaf, ROWS if "f" in sizes else P("r")) for i in range(count)}
    _, where, _, options = setting(Case(sizes, leaves, OWNERS, {}), make_mesh(sizes))
    params = {k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=x) for k, x in where.items()}
    assert plan(params, ns_coeffs=FAST, **options).bytes == eighths * 16 * 24 * 4 // 8
