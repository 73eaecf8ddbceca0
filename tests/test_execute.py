"""Every strategy on every layout against whole matrices on one device, in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update, first_updates, traced_update
from sharded import FAST, STACK, Leaf, make_mesh

from muon_optax import MatrixView, scale_by_muon
from muon_optax import MuonDimensionNumbers as Dims

WIDE, TALL = (16, 32), (32, 16)

# For each mesh, layouts by name, and what can be done with them besides 'auto'.
SHARDED = ("gather", "all_to_all")
LONG_SIDE = (*SHARDED, "gram")
WHOLE = ("local", *SHARDED)
MESHES = {
    "one axis": (
        {"f": 8},
        {
            "rows": (Leaf(WIDE, P("f")), SHARDED),
            "long_columns": (Leaf(WIDE, P(None, "f")), LONG_SIDE),
            "long_rows": (Leaf(TALL, P("f")), LONG_SIDE),
            "short_columns": (Leaf(TALL, P(None, "f")), SHARDED),
            "stack_on_rows": (Leaf((3, *WIDE), P(None, "f"), STACK), SHARDED),
            "stack_on_layers": (Leaf((8, *WIDE), P("f"), STACK), ("local",)),
            "scan_axis_inside": (Leaf((16, 3, 32), P(None, None, "f"), Dims(0, 2)), ("gram",)),
            "scan_axis_inside_sharded": (Leaf((16, 8, 32), P(None, "f"), Dims(0, 2)), WHOLE),
            "replicated": (Leaf(WIDE, P()), WHOLE),
        },
    ),
    "two axes": (
        {"x": 2, "y": 4},
        {
            "two_dims": (Leaf(WIDE, P("x", "y")), SHARDED),
            "two_dims_crossed": (Leaf(TALL, P("y", "x")), SHARDED),
            "tuple": (Leaf(TALL, P(("x", "y"))), LONG_SIDE),
            "tuple_reversed": (Leaf(WIDE, P(None, ("y", "x"))), LONG_SIDE),
            "hsdp": (Leaf((5, *WIDE), P(None, None, "y"), STACK), LONG_SIDE),
            "hsdp_rows": (Leaf((3, *WIDE), P(None, "y"), STACK), SHARDED),
            "hsdp_outer": (Leaf(TALL, P(None, "x")), SHARDED),
            "ddp": (Leaf((3, *WIDE), P(), STACK), WHOLE),
            "experts": (Leaf((4, *WIDE), P("x", "y"), STACK), SHARDED),
            "experts_stacked": (
                Leaf((2, 4, *WIDE), P(None, "y", None, "x"), Dims(2, 3)),
                ("gram",),
            ),
        },
    ),
    "three axes": (
        {"r": 2, "e": 2, "f": 2},
        {
            "experts": (Leaf((4, *WIDE), P("e", None, "f"), STACK), LONG_SIDE),
            "experts_whole": (Leaf((4, *WIDE), P("e"), STACK), WHOLE),
            "experts_over_two": (Leaf((4, *WIDE), P(("f", "e"), "r"), STACK), SHARDED),
            "tuple_and_one": (Leaf(WIDE, P(("f", "r"), "e")), SHARDED),
            "three": (Leaf(TALL, P(("f", "r", "e"))), LONG_SIDE),
            "attention": (Leaf((16, 4, 8), P("f", "r"), Dims(0, (1, 2))), SHARDED),
        },
    ),
    "size one": (
        {"o": 1, "f": 4, "unused": 2},
        {
            "rows": (Leaf(WIDE, P(("o", "f"))), SHARDED),
            "both": (Leaf(WIDE, P("o", "f")), LONG_SIDE),
            "layers": (Leaf((4, *WIDE), P("o", None, "f"), STACK), LONG_SIDE),
        },
    ),
}


def trees(
    name: str, most: int | None = None
) -> tuple[dict[str, int], dict[str, Leaf], list[tuple[str, str]]]:
    """Mesh sizes, a leaf for each layout and strategy, and the rules that say which is which."""
    sizes, layouts = MESHES[name]
    leaves, rules = {}, []
    for layout, (leaf, strategies) in layouts.items():
        for strategy in (*strategies, "auto")[-most if most else None :]:
            leaves[f"{layout}_{strategy}"] = leaf
            rules.append((f"{layout}_{strategy}", strategy))
    return sizes, leaves, rules


@pytest.mark.parametrize("name", MESHES)
def test_every_strategy_on_every_layout(name):
    sizes, leaves, rules = trees(name)
    sharded.check(leaves, make_mesh(sizes), strategy=rules)


@pytest.mark.parametrize("name", MESHES)
def test_every_layout_on_auto_axes(name):
    sizes, leaves, rules = trees(name, most=1)
    mesh = make_mesh(sizes, "auto")
    declared = sharded.shardings(leaves, mesh)
    sharded.check(leaves, mesh, strategy=rules, param_shardings=declared)


DECLARED = {
    "specs": lambda where, tree: {name: s.spec for name, s in where.items()},
    "arrays": lambda where, tree: jax.device_put(tree, where),
    "structs": lambda where, tree: {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name])
        for name, x in tree.items()
    },
    "prefix": lambda where, tree: where["a"],
    "prefix_spec": lambda where, tree: where["a"].spec,
}


def test_every_way_to_declare_a_layout():
    leaves = {"a": Leaf(WIDE, P("f")), "b": Leaf(TALL, P("f"))}
    mesh = make_mesh({"f": 8}, "auto")
    where, grads = sharded.shardings(leaves, mesh), sharded.gradients(leaves)
    cases = [{"param_shardings": declared(where, grads)} for declared in DECLARED.values()]
    sharded.check_each(leaves, mesh, cases)


@pytest.mark.parametrize("explicit", ["x", "y"])
def test_meshes_that_mix_explicit_and_auto_axes(explicit):
    auto = "y" if explicit == "x" else "x"
    leaves = {
        "both": Leaf(WIDE, P("x", "y")),
        "x": Leaf(WIDE, P("x")),
        "y": Leaf(WIDE, P(None, "y")),
        "one_dim": Leaf(TALL, P((explicit, auto))),  # JAX itself can't keep the other order
        "experts": Leaf((4, *WIDE), P("y", "x"), STACK),
    }
    mesh = make_mesh({"x": 2, "y": 4}, {explicit: "explicit", auto: "auto"})
    sharded.check(leaves, mesh, param_shardings=sharded.shardings(leaves, mesh))


# Of several shapes, so that no two share a bucket.
COUNTS = {
    count: Leaf((count, 16, width), P(None, None, "f"), STACK)
    for count, width in ((1, 24), (3, 40), (8, 48), (19, 32))
}


def test_numbers_of_matrices_that_do_not_divide():
    leaves = {f"stack_{count}": leaf for count, leaf in COUNTS.items()}
    cases = [{"strategy": strategy} for strategy in ("auto", *LONG_SIDE)]
    sharded.check_each(leaves, make_mesh({"f": 8}), cases)


def test_numbers_of_matrices_shared_over_replicas():
    leaves = {f"stack_{n}": Leaf((n, *WIDE), P(None, "f"), STACK) for n in (1, 5, 11)}
    leaves |= {f"whole_{n}": Leaf((n, *WIDE), P(), STACK) for n in (1, 5, 11)}
    cases = [{"strategy": strategy, "device": sharded.SLOW} for strategy in SHARDED]
    sharded.check_each(leaves, make_mesh({"r": 2, "f": 4}), cases)


def test_nineteen_leaves_of_one_shape_share_a_bucket():
    leaves = {f"layer_{i:02}": Leaf((4, 6), P("f")) for i in range(19)}
    sharded.check(leaves, make_mesh({"f": 2, "r": 4}), strategy="all_to_all", device=sharded.SLOW)


def test_many_whole_leaves_are_joined_in_groups_of_one_size():
    """So XLA on CPU compiles the cuts of one group, not of all; a stack is not cut."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 128, 256), np.float32)
    tx = scale_by_muon(FAST, weight_dimension_numbers=Dims(-2, -1))
    step = jax.jit(lambda x: tx.update(x, tx.init(x))[0])
    leaves = {f"w{i:02}": jnp.asarray(matrix) for i, matrix in enumerate(x)}
    stack = {"w": jnp.asarray(x)}
    joined = "tensor<32x128x256xf32>"
    assert joined not in step.lower(leaves).as_text()
    assert "stablehlo.concatenate" not in step.lower(stack).as_text()
    for matrix, update in zip(x, step(leaves).values(), strict=True):
        assert reference.relative_error(update, reference.newton_schulz(matrix, FAST)) <= 1e-5


def test_chunks_give_the_same_numbers():
    leaves = {"a": COUNTS[19], "b": Leaf((6, *WIDE), P(None, None, "f"), STACK)}
    matrix = 4 * 16 * 32
    cases = [{"strategy": s, "max_workspace_bytes": 6 * matrix} for s in LONG_SIDE]
    sharded.check_each(leaves, make_mesh({"f": 8}), cases)


OBLONG = {
    "a": Leaf((3, 16, 64), P(None, None, "f"), STACK),
    "b": Leaf((64, 16), P("f")),
    "c": Leaf((3, 64, 16), P(None, "f"), STACK),
}


def by_strategy(leaf: Leaf) -> tuple[dict[str, Leaf], list[tuple[str, str]]]:
    """A leaf for each strategy with which its matrices can be exchanged, and the rules for it."""
    return dict.fromkeys(LONG_SIDE, leaf), [(name, name) for name in LONG_SIDE]


SCHEDULES: dict[str, dict[str, Any]] = {
    "jordan": {"ns_coeffs": "jordan"},
    "tight": {"ns_coeffs": "tight"},
    "turbo": {"ns_coeffs": "turbo"},
    "polar_express": {"ns_coeffs": "polar_express", "ns_steps": 8},
    "adaptive": {"ns_coeffs": "jordan", "adaptive": True},
}


@functools.cache
def with_all_schedules() -> tuple[Any, Any]:
    """Updates of `OBLONG` by schedule and strategy, and by schedule on one device."""
    views, grads = sharded.views(OBLONG), sharded.gradients(OBLONG)
    make = functools.partial(scale_by_muon, weight_dimension_numbers=views)
    alone = {k: make(**options, ns_method="gram") for k, options in SCHEDULES.items()}
    on_mesh = {(k, s): make(**o, strategy=s) for k, o in SCHEDULES.items() for s in LONG_SIDE}
    placed = jax.device_put(grads, sharded.shardings(OBLONG, make_mesh({"f": 4, "r": 2})))
    return first_updates(on_mesh, placed), first_updates(alone, grads)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_that_of_one_device(schedule):
    got, want = with_all_schedules()
    for strategy, (name, leaf) in itertools.product(LONG_SIDE, OBLONG.items()):
        update = got[schedule, strategy][name]
        error = sharded.worst_error(leaf, update, leaf.blocks(want[schedule][name]))
        assert error <= 1e-5, (strategy, name)


@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", "bfloat16")])
def test_half_precision(dtypes):
    own, compute = dtypes
    leaf = Leaf((3, 16, 64), P(None, None, "f"), STACK)
    leaves, rules = by_strategy(leaf)
    grads = jnp.asarray(leaf.gradient(0), own)
    where = sharded.shardings(leaves, make_mesh({"f": 8}))
    placed = jax.device_put(dict.fromkeys(leaves, grads), where)
    tx = scale_by_muon(weight_dimension_numbers=STACK, ns_dtype=compute, strategy=rules)
    _, updates, state = traced_update(tx, placed)
    want = sharded.answers({"w": leaf}, {"w": grads}, reference.JORDAN)["w"]
    for strategy, update in updates.items():
        assert sharded.worst_error(leaf, update, want) <= 4e-2, strategy
        assert update.dtype == state.mu[strategy].dtype == own


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_complex_matrices(promotion):
    leaf = Leaf((3, 16, 32), P(None, None, "f"), STACK)
    leaves, rules = by_strategy(leaf)
    x = leaf.gradient(0) + 1j * leaf.gradient(10)
    where = sharded.shardings(leaves, make_mesh({"f": 8}))
    want = [reference.newton_schulz(b, FAST) for b in x]
    tx = scale_by_muon(FAST, weight_dimension_numbers=STACK, strategy=rules)
    with jax.numpy_dtype_promotion(promotion):
        updates = first_update(tx, jax.device_put(dict.fromkeys(leaves, x), where), jit=True)
    for strategy, update in updates.items():
        assert sharded.worst_error(leaf, update, want) <= 1e-5, strategy
        assert update.dtype == jnp.complex64


def test_what_is_not_finite_stays_in_its_own_matrix():
    leaf = Leaf((11, *WIDE), P(None, None, "f"), STACK)
    leaves, rules = by_strategy(leaf)
    clean = leaf.gradient(0)
    spoiled = clean.copy()
    spoiled[2, 3, 4], spoiled[5, 0, 0], spoiled[9, 15, 31] = np.nan, np.inf, -np.inf
    where = sharded.shardings(leaves, make_mesh({"f": 8}))
    tx = scale_by_muon(FAST, weight_dimension_numbers=STACK, strategy=rules)
    updates = first_update(tx, jax.device_put(dict.fromkeys(leaves, spoiled), where), jit=True)
    want = sharded.answers({"w": leaf}, {"w": clean})["w"]
    for strategy, x in updates.items():
        for i, update in enumerate(np.asarray(x)):
            if i in (2, 5, 9):
                assert not np.isfinite(update).any(), strategy
            else:
                assert reference.relative_error(update, want[i]) <= 1e-5, strategy


def test_what_a_function_makes_of_padding_does_not_leak():
    leaf = Leaf((11, *WIDE), P(None, "f"), STACK)
    x = leaf.gradient(0)
    placed = jax.device_put(x, sharded.shardings({"w": leaf}, make_mesh({"r": 2, "f": 4}))["w"])

    def normalized(m):
        return m / jnp.linalg.norm(m, axis=(1, 2), keepdims=True)  # 0/0 of padding

    options: Any = {"weight_dimension_numbers": STACK, "device": sharded.SLOW}
    txs = {s: scale_by_muon(orthogonalizer=normalized, strategy=s, **options) for s in SHARDED}
    want = [m / np.linalg.norm(m) for m in x.astype(np.float64)]
    for strategy, update in first_updates(txs, placed).items():
        assert sharded.worst_error(leaf, update, want) <= 1e-5, strategy


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_function_may_return_a_constant(kind):
    mesh, constant = make_mesh({"r": 2, "f": 4}, kind), np.eye(*WIDE, dtype=np.float32)
    where = NamedSharding(mesh, P(None, "f"))
    tx = scale_by_muon(
        orthogonalizer=lambda m: jnp.broadcast_to(constant, m.shape),
        weight_dimension_numbers=STACK,
        param_shardings=where,
        strategy="all_to_all",
        device=sharded.SLOW,
    )
    stacks = [jax.device_put(np.ones((n, *WIDE), np.float32), where) for n in (3, 8, 11)]
    for update in jax.jit(lambda xs: [first_update(tx, x) for x in xs])(stacks):
        np.testing.assert_array_equal(update, np.broadcast_to(constant, update.shape))


def test_a_zero_gradient_gives_exactly_zero():
    mesh = make_mesh({"f": 8})
    kinds = {"a": Leaf((3, *WIDE), P(None, None, "f"), STACK), "b": Leaf(WIDE, P(None, "f"))}
    leaves = {f"{name}_{rule}": leaf for name, leaf in kinds.items() for rule in LONG_SIDE}
    rules = [(name, name.split("_", 1)[1]) for name in leaves]
    zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in leaves.items()}
    placed = jax.device_put(zeros, sharded.shardings(leaves, mesh))
    tx = scale_by_muon(weight_dimension_numbers=sharded.views(leaves), strategy=rules)
    _, updates, state = traced_update(tx, placed)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves((updates, state.mu)))


def test_a_stack_without_matrices():
    mesh = make_mesh({"f": 8})
    leaf = Leaf((0, *WIDE), P(None, "f"), STACK)
    x = jnp.zeros(leaf.shape, device=sharded.shardings({"w": leaf}, mesh)["w"])
    tx = scale_by_muon(weight_dimension_numbers=STACK)
    update = first_update(tx, x, jit=True)
    assert update.shape == leaf.shape


def test_an_orthogonalizer_gets_whole_matrices_as_they_are():
    strategies = ("auto", *SHARDED)
    seen = {strategy: set() for strategy in strategies}

    def recorded_by(strategy):
        def orthogonalizer(x):
            seen[strategy].add((x.shape[1:], x.dtype.name))
            return -x

        return orthogonalizer

    leaves = {
        "wide": Leaf((3, *WIDE), P(None, "f"), STACK),
        "tall": Leaf(TALL, P(None, "f")),
        "attention": Leaf((16, 4, 8), P("f"), Dims((1, 2), 0)),
        "fused": Leaf((16, 48), P("f"), MatrixView(0, 1, heads=3)),
    }
    grads = sharded.gradients(leaves)
    placed = jax.device_put(grads, sharded.shardings(leaves, make_mesh({"f": 8})))
    views = {"weight_dimension_numbers": sharded.views(leaves)}
    options: Any = {"nesterov": False, "ns_dtype": "float16", **views}
    updates = first_updates(
        {s: scale_by_muon(orthogonalizer=recorded_by(s), strategy=s, **options) for s in seen},
        placed,
    )
    for strategy in strategies:
        assert seen[strategy] == {(s, "float16") for s in ((16, 32), (32, 16), (16, 16))}
        for name, x in grads.items():
            want = -x.astype("float16").astype("float32")
            np.testing.assert_array_equal(updates[strategy][name], want, strategy)


def test_an_orthogonalizers_dtype_is_the_exchanges_for_fewer_matrices_than_owners():
    mesh = make_mesh({"r": 2, "f": 4})
    x = jax.device_put(np.ones((3, *WIDE), "bfloat16"), NamedSharding(mesh, P(None, "f")))
    tx = scale_by_muon(
        orthogonalizer=lambda m: -m.astype("float32"),
        nesterov=False,
        weight_dimension_numbers=STACK,
        strategy="all_to_all",
    )
    update = first_update(tx, x, jit=True)
    np.testing.assert_array_equal(update, -x)


def test_a_strategy_asked_for_on_one_device_without_a_mesh():
    leaves = {"w": Leaf((3, *WIDE), P(), STACK), **FUSED}
    grads, views = sharded.gradients(leaves), sharded.views(leaves)
    txs = {s: scale_by_muon(FAST, weight_dimension_numbers=views, strategy=s) for s in WHOLE}
    for updates in first_updates(txs, grads).values():
        sharded.assert_right(leaves, grads, updates)


FUSED = {
    "split_columns": Leaf((16, 80), P(None, "f"), MatrixView(0, 1, split=(64, 8, 8))),
    "split_rows": Leaf((16, 80), P("f"), MatrixView(0, 1, split=(64, 8, 8))),
    "heads_columns": Leaf((16, 32), P(None, "f"), MatrixView(0, 1, heads=2)),
    "heads_of_a_stack": Leaf((3, 16, 48), P(None, None, "f"), MatrixView(1, 2, heads=3)),
    "merged_heads": Leaf((16, 8, 4), P(None, "f"), MatrixView(0, (1, 2), split=(16, 16))),
}


def test_fused_blocks_on_a_sharded_axis():
    cases = [{"strategy": strategy} for strategy in ("auto", *SHARDED)]
    sharded.check_each(FUSED, make_mesh({"f": 8}), cases)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_nested_shard_maps_over_the_other_axes(kind):
    leaves = {
        "inner": Leaf(WIDE, P("f")),
        "both": Leaf(WIDE, P("f", "d")),
        "outer": Leaf(TALL, P("d")),
        "one_dim": Leaf(WIDE, P(None, ("d", "f"))),
        "experts": Leaf((2, *WIDE), P("d", None, "f"), STACK),
    }
    mesh = make_mesh({"d": 2, "f": 4}, kind)
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    outer = {name: _only(spec, "d") for name, spec in specs.items()}
    tx = scale_by_muon(FAST, weight_dimension_numbers=sharded.views(leaves), param_shardings=specs)
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0],
        mesh=mesh,
        in_specs=(outer,),
        out_specs=outer,
        axis_names={"d"},
    )
    grads, where = sharded.gradients(leaves), sharded.shardings(leaves, mesh)
    updates = jax.jit(mapped)(jax.device_put(grads, where))
    want = sharded.answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5
        sharded.assert_sharded(updates[name], where[name])


def test_an_order_of_axes_that_nesting_rules_out_is_an_error():
    """Inside a shard_map over d, f cuts the blocks of d, and not the other way round."""
    mesh = make_mesh({"d": 2, "f": 4}, "auto")
    tx = scale_by_muon(param_shardings=P(None, ("f", "d")))
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0],
        mesh=mesh,
        in_specs=P(None, "d"),
        out_specs=P(None, "d"),
        axis_names={"d"},
    )
    where = NamedSharding(mesh, P(None, ("d", "f")))
    with pytest.raises(ValueError, match=r"\('f', 'd'\)"):
        jax.jit(mapped).lower(jax.ShapeDtypeStruct(WIDE, "float32", sharding=where))


def _only(spec: P, axis: str) -> P:
    """A spec without all axes but one."""
    return P(*(axis if axis in (e if isinstance(e, tuple) else (e,)) else None for e in spec))
