"""The pipeline: rounds in the program, results in place, transposed shardings."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import OVERLAPPING, STACK, Leaf, make_mesh
from shown import plan

from muon_optax import MuonDimensionNumbers as Dims
from muon_optax import muon, orthogonalize, scale_by_muon
from muon_optax.sharding.planning.device_models import DeviceModel

WIDE, TALL = (16, 32), (32, 16)
# Leaves whose chunks are parts of them, so many that some rounds are a loop, several of them, and
# all of one.
LEAVES = {
    "stack": Leaf((19, *WIDE), P(None, "f"), STACK),
    "long": Leaf((67, 16, 24), P(None, "f"), STACK),
    "long_inside": Leaf((16, 45, 32), P("f"), Dims(0, 2)),
    "single": Leaf(WIDE, P("f")),
    "tall": Leaf(TALL, P(None, "f")),
    "whole": Leaf((9, *WIDE), P(), STACK),
    "local": Leaf((8, *WIDE), P("f"), STACK),
}


@pytest.mark.parametrize("strategy", ["auto", "gather", "all_to_all"])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_results_written_in_place_are_those_of_whole_matrices(kind, strategy):
    leaves = {k: leaf for k, leaf in LEAVES.items() if strategy == "auto" or k != "local"}
    mesh = make_mesh({"f": 4, "r": 2}, kind)
    where = sharded.shardings(leaves, mesh)
    sharded.check(leaves, mesh, param_shardings=where, strategy=strategy, device=OVERLAPPING)


@pytest.mark.filterwarnings("ignore:max_workspace_bytes")  # one matrix at a time
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("dtypes", [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)])
def test_several_steps_are_those_of_whole_matrices(dtypes, overlaps):
    device = DeviceModel("slow", 1e9, 1e9, 1e12, latency=0.0, overlaps=overlaps)
    mesh = make_mesh({"f": 4, "r": 2})
    sharded.check_steps(LEAVES, mesh, dtypes, device=device, max_workspace_bytes=1)


@pytest.mark.filterwarnings("ignore:max_workspace_bytes")  # one matrix at a time
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_that_end_elsewhere_have_a_place_of_their_own(dtype):
    leaves = {"w": Leaf((59, *WIDE), P(None, "f"), STACK), "v": Leaf(WIDE, P("f"))}
    mesh = make_mesh({"f": 8})
    home = NamedSharding(mesh, P())
    grads = sharded.gradients(leaves)
    tx = scale_by_muon(
        sharded.FAST,
        ns_dtype=dtype,
        weight_dimension_numbers=sharded.views(leaves),
        mu_shardings=sharded.shardings(leaves, mesh),
        device=OVERLAPPING,
        max_workspace_bytes=1,
    )
    placed = jax.device_put(grads, home)
    updates = first_update(tx, placed, jit=True)
    for name, want in sharded.answers(leaves, grads).items():
        sharded.assert_sharded(updates[name], home)
        bar = 1e-5 if dtype == "float32" else 4e-2
        assert sharded.worst_error(leaves[name], updates[name], want) <= bar


def test_orthogonalize_alone_is_held_back_too():
    leaf = Leaf((19, *WIDE), P(None, "f"), STACK)
    x = leaf.gradient(0)
    placed = jax.device_put(x, NamedSharding(make_mesh({"f": 8}), leaf.spec))
    tx = orthogonalize(sharded.FAST, weight_dimension_numbers=STACK, device=OVERLAPPING)
    lowered = jax.jit(tx.update).lower(placed, tx.init(placed))
    found, _ = lowered.compile()(placed, tx.init(placed))
    want = sharded.answers({"w": leaf}, {"w": x})["w"]  # the first mix has the gradient's direction
    assert sharded.worst_error(leaf, found, want) <= 1e-5
    assert (
        len(re.findall("optimization_barrier %", lowered.as_text())) >= 2 * 3
    )  # two for each of three rounds


def lowered(count: int) -> str:
    """The program of `count` chunks of eight matrices."""
    leaf = Leaf((8 * count, *WIDE), P(None, "f"), STACK)
    where = NamedSharding(make_mesh({"f": 8}), leaf.spec)
    tx = scale_by_muon(weight_dimension_numbers=STACK, device=OVERLAPPING)
    w = jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where)
    return jax.jit(tx.update).lower(w, jax.eval_shape(tx.init, w)).as_text()


@pytest.mark.parametrize(
    ("strategy", "overlaps", "loops"),
    [("all_to_all", True, 0), ("all_to_all", False, 1), ("local", True, 1)],
)
def test_what_is_sent_is_not_orthogonalised_in_a_loop(strategy, overlaps, loops):
    """XLA on GPUs hides no collective under a loop."""
    batch = 16 * 32  # one matrix
    device = DeviceModel("one", 1e15, 1e15, 1e9, overlaps=overlaps, batch_elements=batch)
    spec = P(None, "f") if strategy == "all_to_all" else P("f")
    where = NamedSharding(make_mesh({"f": 8}), spec)
    tx = scale_by_muon(weight_dimension_numbers=STACK, strategy=strategy, device=device)
    w = jax.ShapeDtypeStruct((32, *WIDE), "float32", sharding=where)
    text = jax.jit(tx.update).lower(w, jax.eval_shape(tx.init, w)).as_text()
    assert len(re.findall(r"stablehlo\.while", text)) == loops


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_round_sends_one_chunk_and_receives_the_next_but_one(count):
    found = re.findall(r"stablehlo\.(optimization_barrier|all_to_all)", lowered(count))
    rounds = [len(list(g)) for k, g in itertools.groupby(found) if k == "all_to_all"]
    assert sum(rounds) == 2 * count
    # What is sent comes before a barrier, and what is received after it.
    assert rounds == [1] * 2 * count


def test_a_long_stack_is_no_larger_a_program():
    few, many = lowered(6), lowered(60)
    assert many.count("\n") == few.count("\n")
    # Two rounds before the loop, one in front of it that is like those in it, it, and two after.
    assert len(re.findall(r"stablehlo\.all_to_all", many)) == 2 + 2 + 2 + 2
    assert len(re.findall(r"stablehlo\.while", many)) == 1


def test_the_cheapest_exchanges_are_at_the_ends():
    sizes = {"large": (64, 128), "middle": (64, 64), "small": (32, 64)}
    leaves = {k: Leaf((8, *size), P(None, "f"), STACK) for k, size in sizes.items()}
    where = sharded.shardings(leaves, make_mesh({"f": 8}))
    tx = scale_by_muon(weight_dimension_numbers=sharded.views(leaves), device=OVERLAPPING)
    shapes = {
        k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where[k])
        for k, leaf in leaves.items()
    }
    text = jax.jit(tx.update).lower(shapes, jax.eval_shape(tx.init, shapes)).as_text()
    sent = re.findall(r"all_to_all.*-> tensor<8x(?:1x)?(\d+)x(\d+)xf32>", text)
    first, last = sent[0], sent[-1]
    assert (first, last) == (("8", "64"), ("4", "64"))
    assert sorted(sent) == sorted([("8", "128"), ("8", "64"), ("4", "64")] * 2)


# Queries and outputs of attention, and gates and downs, under FSDP x TP: each other's transposes.
ACROSS = {
    "q": Leaf((5, 16, 16), P(None, "x", "y"), STACK),
    "o": Leaf((6, 16, 16), P(None, "y", "x"), STACK),
    "up": Leaf(WIDE, P("x", "y")),
    "down": Leaf(TALL, P("y", "x")),
    "down_too": Leaf((2, 32, 16), P(None, "y", "x"), STACK),
    "out_first": Leaf(WIDE, P("x", "y"), Dims(1, 0)),
}


@pytest.mark.filterwarnings("ignore:max_workspace_bytes")  # one matrix at a time
@pytest.mark.parametrize("device", [OVERLAPPING, sharded.SLOW], ids=["in_place", "joined"])
def test_matrices_that_lie_across_are_orthogonalised_as_they_lie(device):
    options = {"device": device, "max_workspace_bytes": 1}
    cases = [{"strategy": s, **options} for s in ("auto", "gather", "all_to_all")]
    sharded.check_each(ACROSS, make_mesh({"x": 2, "y": 4}), cases)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [{"q", "o"}, {"up", "down", "down_too", "out_first"}]),
        ({"ns_coeffs": "turbo"}, [{"q"}, {"o"}, {"up"}, {"down", "down_too"}, {"out_first"}]),
        (
            {"orthogonalizer": lambda x: x},
            [{"q"}, {"o"}, {"up"}, {"down", "down_too"}, {"out_first"}],
        ),
    ],
    ids=["newton_schulz", "row_norms", "a_function"],
)
def test_those_whose_transposes_mean_the_same_share_a_bucket(options, expected):
    mesh = make_mesh({"x": 2, "y": 4})
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in ACROSS.items()}
    found = plan(
        shapes,
        sharded.shardings(ACROSS, mesh),
        muon_weight_dimension_numbers=sharded.views(ACROSS),
        **options,
    )
    assert {frozenset(row.leaves) for row in found.rows} == set(map(frozenset, expected))


def test_full_rounds_of_owners_are_not_turned():
    leaves = {
        "up": Leaf((8, *WIDE), P(None, "x", "y"), STACK),
        "down": Leaf((16, *TALL), P(None, "y", "x"), STACK),
    }
    shapes = {k: jax.ShapeDtypeStruct(leaf.shape, "float32") for k, leaf in leaves.items()}
    found = plan(
        shapes,
        sharded.shardings(leaves, make_mesh({"x": 2, "y": 4})),
        muon_weight_dimension_numbers=sharded.views(leaves),
    )
    assert sorted(row.leaves for row in found.rows) == [("down",), ("up",)]


def test_derivatives_pass_through_the_rounds():
    """Of stacks of which none or some of the rounds are a loop, by one program."""
    stacks = {count: Leaf((count, *WIDE), P(None, "f"), STACK) for count in (19, 51)}
    mesh, x = make_mesh({"f": 8}), stacks[51].gradient(0).astype(np.float32)

    def slopes(grads, **options):
        tx: Any = scale_by_muon(sharded.FAST, weight_dimension_numbers=STACK, **options)

        def loss(grads):
            return sum(jnp.sum(jnp.sin(tx.update(g, tx.init(g))[0])) for g in grads.values())

        return jax.jit(jax.grad(loss))(grads)

    placed = {n: jax.device_put(x[:n], NamedSharding(mesh, s.spec)) for n, s in stacks.items()}
    want = slopes({"all": x})["all"]
    for count, found in slopes(placed, device=OVERLAPPING).items():
        assert reference.relative_error(found, np.asarray(want[:count])) <= 1e-5


def ancestors(eqns, outvars, of):
    """What an equation hangs on, once what nobody reads is dropped from barriers, as XLA does."""
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    live, pending = set(), [v for v in outvars if v in maker]
    while pending:
        v = pending.pop()
        if v not in live:
            live.add(v)
            pending += [u for u in reads(maker[v], {v}) if u in maker]
    found, pending = [], [of]
    while pending:
        eqn = pending.pop()
        if eqn not in found:
            found.append(eqn)
            pending += [maker[u] for u in reads(eqn, live) if u in maker]
    return found


def reads(eqn, live):
    """The variables that `eqn` reads for those of its results that are live."""
    pairs = zip(eqn.invars, eqn.outvars, strict=False)
    mine = (
        [u for u, v in pairs if v in live] if eqn.primitive.name == "muon_barrier" else eqn.invars
    )
    return [u for u in mine if not isinstance(u, Literal)]


def mapped_in(jaxpr):
    """What each shard_map runs; the newest JAX keeps an inlined jit around it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            found.append(eqn.params["jaxpr"])
        elif eqn.primitive.name == "jit":
            found += mapped_in(eqn.params["jaxpr"].jaxpr)
    return found


@pytest.mark.parametrize("is_stacked", [True, False])
def test_each_chunk_is_sent_after_the_one_before(is_stacked):
    sizes = [(16, 32), (16, 64), (32, 64)]
    whole = [Leaf((8, *size), P(None, "f"), STACK) for size in sizes]
    single = [Leaf(size, P("f")) for size in sizes for _ in range(8)]
    leaves = {f"w{i}": leaf for i, leaf in enumerate(whole if is_stacked else single)}
    where = sharded.shardings(leaves, make_mesh({"f": 8}))
    tx = scale_by_muon(weight_dimension_numbers=sharded.views(leaves), device=OVERLAPPING)
    grads = {
        k: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=where[k])
        for k, leaf in leaves.items()
    }
    traced = jax.make_jaxpr(tx.update)(grads, jax.eval_shape(tx.init, grads))
    (body,) = mapped_in(traced.jaxpr)
    exchanges = [eqn for eqn in body.eqns if eqn.primitive.name == "all_to_all"]
    sent = [eqn for eqn in exchanges if eqn.params["tiled"]]
    assert len(sent) == len(sizes)
    for before, after in itertools.pairwise(sent):
        assert before in ancestors(body.eqns, body.outvars, after)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("make", [muon, optax.inject_hyperparams(muon)], ids=["muon", "injected"])
def test_eager_updates_compile_nothing_in_the_second_step(make, kind, caplog):
    mesh = make_mesh({"f": 8}, kind)
    params = {
        name: jax.device_put(leaf.gradient(0), NamedSharding(mesh, leaf.spec))
        for name, leaf in {"up": Leaf(WIDE, P("f")), "down": Leaf(TALL, P(None, "f"))}.items()
    }
    tx = make(0.1)
    _, state = tx.update(params, tx.init(params), params)
    with jax.log_compiles():
        tx.update(params, state, params)
    assert "Finished XLA compilation" not in caplog.text
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(params["up"])
    assert "Finished XLA compilation" in caplog.text


def test_a_function_may_close_over_what_is_traced():
    leaf = Leaf((51, *WIDE), P(None, "f"), STACK)
    grad = leaf.gradient(0).astype(np.float32)
    placed = jax.device_put(grad, NamedSharding(make_mesh({"f": 8}), leaf.spec))

    def update(grad, factor):
        tx = scale_by_muon(
            orthogonalizer=lambda x: factor * x, weight_dimension_numbers=STACK, device=OVERLAPPING
        )
        return tx.update(grad, tx.init(grad))[0]

    with jax.checking_leaks():  # raises if anything keeps a tracer
        jax.eval_shape(update, placed, 2.0)
    found = jax.jit(update)(placed, 2.0)
    assert reference.relative_error(found, 2 * reference.mixes([grad])[0]) <= 1e-6


def test_eager_updates_follow_a_function_that_changes():
    leaf = Leaf(WIDE, P("f"))
    grad = leaf.gradient(0).astype(np.float32)
    placed = jax.device_put(grad, NamedSharding(make_mesh({"f": 8}), leaf.spec))
    factors = iter((2, 3))
    tx = orthogonalize(orthogonalizer=lambda x: next(factors) * x)
    state = tx.init(placed)
    for factor in (2, 3):
        found, _ = tx.update(placed, state)
        assert sharded.worst_error(leaf, found, [factor * grad]) <= 1e-6
