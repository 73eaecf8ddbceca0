"""The update under JAX's other transformations, and called in other ways."""

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import FAST, STACK, Leaf, make_mesh

from muon_optax import (
    DeviceModel,
    MatrixView,
    MuonDimensionNumbers,
    MuonWarning,
    muon,
    scale_by_muon,
)

KINDS = ["explicit", "auto"]
MEMBERS = Leaf((4, 16, 32), P(), STACK)
SPECS = {"w": P("f"), "b": P()}


def model(kind: str):
    """Shardings, parameters, four gradients and the optimizer of a small model."""
    mesh = make_mesh({"f": 8}, kind)
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = {"w": reference.matrix(9, 16, 32), "b": np.ones(32, np.float32)}
    grads = reference.gradients(0, 16, 32, 4)
    trees = [{"w": g, "b": np.ones(32, np.float32)} for g in grads]
    tx: Any = muon(0.1, FAST, param_shardings=where if kind == "auto" else None)
    return where, jax.device_put(params, where), [jax.device_put(t, where) for t in trees], tx


def host(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


class Members(NamedTuple):
    """Four members on a mesh, how each is updated, and what is vmapped."""

    spec: P
    strategy: str = "auto"
    axis: str | None = None
    within: Any = lambda f: f


def check_members(kind: str, members: Iterable[Members], sizes: Any) -> None:
    """The updates of members are right and sharded like them; one program makes those of all."""
    cases = list(members)
    mesh, x = make_mesh(sizes, kind), MEMBERS.gradient(0)

    def step(case: Members, x: jax.Array) -> jax.Array:
        inner = P(*tuple(case.spec)[1:]) if kind == "auto" else None
        tx = scale_by_muon(FAST, strategy=case.strategy, param_shardings=inner)
        update = case.within(lambda g: tx.update(g, tx.init(g))[0])
        return jax.vmap(update, spmd_axis_name=case.axis)(x)

    where = [NamedSharding(mesh, case.spec) for case in cases]
    step_all = jax.jit(lambda *xs: [step(case, x) for case, x in zip(cases, xs, strict=True)])
    updates = step_all(*(jax.device_put(x, sharding) for sharding in where))
    want = sharded.answers({"w": MEMBERS}, {"w": x})["w"]
    for case, update, sharding in zip(cases, updates, where, strict=True):
        assert sharded.worst_error(MEMBERS, update, want) <= 1e-5, case
        if kind == "explicit" or case.axis or tuple(case.spec[:1]) == (None,):
            sharded.assert_sharded(update, sharding)


TWO, THREE = {"m": 2, "f": 4}, {"m": 2, "x": 2, "y": 2}
SHARDED_MEMBERS = [P("m", "f"), P(None, "f"), P("m", None, "f")]


@pytest.mark.parametrize("kind", KINDS)
def test_members_under_vmap(kind):
    """Also where their matrices are whole, or they are all on each device."""
    cases = itertools.product(SHARDED_MEMBERS, ["auto", "gather", "all_to_all"])
    members = [*itertools.starmap(Members, cases), Members(P("m")), Members(P())]
    check_members(kind, members, TWO)


def in_scan(step: Any) -> Any:
    return lambda g: jax.lax.scan(lambda g, _: (step(g), None), g, length=1)[0]


def in_cond(step: Any) -> Any:
    return lambda g: jax.lax.cond(jnp.array(1) > 0, step, lambda g: g, g)


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_transformed_updates_under_vmap(kind):
    """The tracers at hand are the inner transformation's, and show nothing of the vmap."""
    within = (jax.jit, jax.checkpoint, in_scan, in_cond)
    cases = itertools.product((P("m", "f"), P("m")), within)
    check_members(kind, [Members(spec, within=f) for spec, f in cases], TWO)


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_members_share_under_vmap(kind):
    mesh = make_mesh({"m": 2, "f": 4}, kind)
    where, members = NamedSharding(mesh, P("f")), NamedSharding(mesh, P("m"))
    x = reference.matrix(0, 16, 32)
    tx = scale_by_muon(FAST, param_shardings=P("f") if kind == "auto" else None, strategy="gather")
    grad, factors = jax.device_put(x, where), jax.device_put(np.arange(4.0), members)
    step = jax.vmap(lambda g, factor: factor * tx.update(g, tx.init(g))[0], in_axes=(None, 0))
    updates = jax.jit(step)(grad, factors)
    want = reference.newton_schulz(reference.mixes([x])[0], FAST)
    for factor, update in enumerate(updates):
        np.testing.assert_allclose(update, factor * want, atol=1e-5)


def errors_by_gram(kind: str, cases: Sequence[tuple[str | None, str]]) -> list[float]:
    """The errors of members for which 'auto' would exchange Gram matrices.

    Args:
      kind: of the mesh axes.
      cases: the mesh axis of the members, and the strategy; one program updates for all.
    """
    mesh = make_mesh({"m": 2, "f": 4}, kind)
    view, leaves, steps = MuonDimensionNumbers(2, 3), [], []
    for member, strategy in cases:
        leaves.append(Leaf((4, 3, 8, 128), P(member, None, None, "f"), view))
        tx = scale_by_muon(
            FAST,
            weight_dimension_numbers=STACK,
            strategy=strategy,
            param_shardings=P(None, None, "f") if kind == "auto" else None,
            device=DeviceModel("slow links", 1e14, 1e14, 1e8),
        )
        steps.append(jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(g))[0]))
    x = leaves[0].gradient(0)
    step_all = jax.jit(lambda *xs: [step(x) for step, x in zip(steps, xs, strict=True)])
    updates = step_all(*(jax.device_put(x, NamedSharding(mesh, leaf.spec)) for leaf in leaves))
    want = sharded.answers({"w": leaves[0]}, {"w": x})["w"]
    pairs = zip(leaves, updates, strict=True)
    return [sharded.worst_error(leaf, update, want) for leaf, update in pairs]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("auto", [("m", "auto"), ("m", "gram"), (None, "gram")]),
        ("explicit", [("m", "auto"), (None, "auto"), (None, "gram")]),
    ],
)
def test_members_by_gram_matrices_or_whole(kind, cases):
    errors = errors_by_gram(kind, cases)
    assert all(error <= 1e-5 for error in errors), errors


def test_gram_is_refused_where_members_lie_over_an_explicit_axis():
    with pytest.raises(ValueError, match="'gram' can't be, JAX can't reduce-scatter under a vmap"):
        errors_by_gram("explicit", [("m", "gram")])


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_matrices_cut_over_two_axes(kind):
    specs = [P("m", "x", "y"), P("m", ("x", "y")), P("m", None, ("y", "x"))]
    cases = itertools.product(specs, ["gather", "all_to_all"])
    check_members(kind, itertools.starmap(Members, cases), THREE)


@pytest.mark.parametrize(
    ("shape", "view"),
    [((4, 4, 4, 8), MuonDimensionNumbers((0, 1), (2, 3))), ((16, 32), MatrixView(heads=2))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_members_of_merged_and_cut_axes(kind, shape, view):
    mesh = make_mesh({"m": 2, "f": 4}, kind)
    spec = P(*[None] * (len(shape) - 1), "f")
    leaf = Leaf(shape, spec, view)
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=view,
        strategy="gather",
        param_shardings=spec if kind == "auto" else None,
    )
    x = np.stack([leaf.gradient(seed) for seed in range(4)])
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0])
    updates = jax.jit(step)(jax.device_put(x, NamedSharding(mesh, P("m", *spec))))
    for found, grad in zip(updates, x, strict=True):
        want = sharded.answers({"w": leaf}, {"w": grad})["w"]
        assert sharded.worst_error(leaf, found, want) <= 1e-5


def test_members_on_one_device_each_along_an_axis_of_size_one():
    mesh = make_mesh({"m": 8, "o": 1})
    leaf = Leaf((8, 8, 4, 32), P("m", None, "o"), MuonDimensionNumbers((1, 2), 3))
    x, where = leaf.gradient(0), NamedSharding(mesh, leaf.spec)
    options: Any = {"weight_dimension_numbers": MuonDimensionNumbers((0, 1), 2)}
    strategies = ("auto", "gather", "all_to_all")
    txs = {s: scale_by_muon(FAST, strategy=s, **options) for s in strategies}
    want = sharded.answers({"w": leaf}, {"w": x})["w"]
    step = jax.jit(jax.vmap(lambda g: {s: first_update(tx, g) for s, tx in txs.items()}))
    for strategy, update in step(jax.device_put(x, where)).items():
        assert sharded.worst_error(leaf, update, want) <= 1e-5, strategy
        sharded.assert_sharded(update, where)


@pytest.mark.filterwarnings("ignore:max_workspace_bytes")  # one matrix at a time
@pytest.mark.parametrize("kind", KINDS)
def test_members_whose_results_are_written_to_a_place_of_their_own(kind):
    """Members whose matrices are whole or sharded; one program updates both."""
    mesh = make_mesh({"m": 2, "f": 4}, kind)
    specs = (P("m"), P("m", None, None, "f"))
    leaf = Leaf((2, 9, 16, 32), P(), MuonDimensionNumbers(2, 3))
    x, steps = leaf.gradient(0), []
    for spec in specs:
        tx = scale_by_muon(
            FAST,
            weight_dimension_numbers=STACK,
            mu_dtype="bfloat16",
            param_shardings=P(*tuple(spec)[1:]) if kind == "auto" else None,
            device=sharded.OVERLAPPING,
            max_workspace_bytes=1,
        )
        steps.append(jax.vmap(lambda g, tx=tx: first_update(tx, g)))
    step_both = jax.jit(lambda *xs: [step(x) for step, x in zip(steps, xs, strict=True)])
    want = sharded.answers({"w": leaf}, {"w": x})["w"]
    for updates in step_both(*(jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs)):
        assert sharded.worst_error(leaf, updates, want) <= 4e-2


@pytest.mark.parametrize(
    "strategy",
    [
        "auto",
        "gather",
        pytest.param(
            "all_to_all",
            marks=pytest.mark.xfail(strict=True, reason="work is shared over the members' axis"),
        ),
    ],
)
def test_members_keep_their_axis_where_it_is_named(strategy):
    check_members("auto", [Members(P("m", "f"), strategy, axis="m")], TWO)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_optimizer_of_members(kind):
    mesh = make_mesh({"m": 2, "f": 4}, kind)
    w = Leaf((4, 16, 32), P("m", "f"), STACK)
    specs = {"w": w.spec, "b": P("m")}
    where = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = jax.device_put({"w": w.gradient(0), "b": np.ones((4, 32), np.float32)}, where)
    inner = {"w": P("f"), "b": P()}
    tx = muon(0.1, FAST, param_shardings=inner if kind == "auto" else None)
    members_of = jax.sharding.reshard if kind == "explicit" else lambda x, _: x

    def counts(state):  # born from constants, so they must be told how the members are sharded
        axis = NamedSharding(mesh, P("m"))
        return jax.tree.map(lambda x: members_of(x, axis) if x.ndim == 1 else x, state)

    state = counts(jax.jit(jax.vmap(tx.init))(params))
    updates, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    want = [
        reference.muon(x, [x], learning_rate=0.1, rows=FAST)[0] for x in np.asarray(params["w"])
    ]
    assert sharded.worst_error(w, updates["w"], want) <= 1e-5
    if kind == "explicit":
        sharded.assert_sharded(updates["w"], where["w"])


CHECKPOINTED = Leaf((3, 16, 32), P(None, None, "f"), STACK)


def slopes_of_checkpointed(x: Any, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Derivatives of a function of checkpointed updates, by the options of each case."""
    direction = CHECKPOINTED.gradient(50)

    def slope(x: jax.Array, options: Any) -> jax.Array:
        tx = scale_by_muon(FAST, weight_dimension_numbers=STACK, ns_method="gram", **options)

        def loss(x: jax.Array) -> jax.Array:
            update = jax.checkpoint(lambda g: tx.update(g, tx.init(g))[0])(x)
            return (update * jnp.asarray(direction, update.dtype)).sum()

        return jax.grad(loss)(x)

    return jax.jit(lambda x: {name: slope(x, options) for name, options in cases.items()})(x)


@functools.cache
def slope_on_one_device() -> np.ndarray:
    x = CHECKPOINTED.gradient(0, kappa=3.0)
    return np.asarray(slopes_of_checkpointed(x, {"alone": {}})["alone"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_a_checkpointed_update(kind):
    leaf, strategies = CHECKPOINTED, ("gather", "all_to_all", "gram")
    where = NamedSharding(make_mesh({"f": 8}, kind), leaf.spec)
    x = jax.device_put(leaf.gradient(0, kappa=3.0), where)
    cases = {s: {"strategy": s, "param_shardings": leaf.spec} for s in strategies}
    for strategy, got in slopes_of_checkpointed(x, cases).items():
        want = leaf.blocks(slope_on_one_device())
        assert sharded.worst_error(leaf, got, want) <= 1e-5, strategy
        sharded.assert_sharded(got, where)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_mesh_changes_nothing(kind):
    where, params, grads, tx = model(kind)
    alone = first_update(tx, grads[0], params, jit=True)
    with jax.set_mesh(params["w"].sharding.mesh):
        within = first_update(tx, grads[0], params, jit=True)
    np.testing.assert_array_equal(within["w"], alone["w"])
    sharded.assert_sharded(within["w"], where["w"])


def test_an_unknown_sharding_is_right_and_warned_of_once():
    mesh = make_mesh({"f": 8}, "auto")
    leaves = {"a": Leaf((16, 32), P("f")), "b": Leaf((3, 16, 32), P(None, None, "f"), STACK)}
    tx = scale_by_muon(FAST, weight_dimension_numbers=sharded.views(leaves))
    grads, where = sharded.gradients(leaves), sharded.shardings(leaves, mesh)
    placed = jax.device_put(grads, where)
    state = jax.jit(tx.init)(placed)
    with pytest.warns(MuonWarning, match=r"param_shardings.*a \(16, 32\), b \(3, ") as caught:
        updates, _ = jax.jit(tx.update)(placed, state)
    assert len(caught) == 1
    want = sharded.answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5
        sharded.assert_sharded(state.mu[name], where[name])


def test_no_warning_where_the_sharding_is_known():
    mesh = make_mesh({"f": 8}, "auto")
    x = jax.device_put(reference.matrix(0, 16, 32), NamedSharding(mesh, P("f")))
    declared = scale_by_muon(FAST, param_shardings=P("f"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(declared.update).lower(x, declared.init(x))
        one_device = scale_by_muon(FAST)
        jax.jit(one_device.update).lower(np.asarray(x), one_device.init(np.asarray(x)))
