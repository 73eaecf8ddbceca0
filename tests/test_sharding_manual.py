"""Updates inside the user's own shard_map, where the arrays at hand are blocks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import FAST, STACK, Leaf, make_mesh

from muon_optax import MatrixView, MuonState, muon, orthogonalize, scale_by_muon, scale_by_shape

LEAVES = {
    "rows": Leaf((16, 32), P("f")),
    "columns": Leaf((16, 32), P(None, "f")),
    "both": Leaf((32, 16), P("f", "r")),
    "one_dim": Leaf((16, 32), P(None, ("f", "r"))),
    "hsdp": Leaf((3, 16, 32), P(None, "f"), STACK),
    "layers": Leaf((4, 16, 32), P("f"), STACK),
    "whole": Leaf((16, 32), P()),
}


def specs_of(leaves):
    return {name: leaf.spec for name, leaf in leaves.items()}


def first_updates(leaves, tx, mesh, check_vma):
    """What `tx` makes of the gradients inside a shard_map over all of the mesh."""
    mapped = sharded.mapped_updates(leaves, tx, mesh, check_vma)
    grads = sharded.gradients(leaves)
    placed = jax.device_put(grads, sharded.shardings(leaves, mesh))
    return grads, jax.jit(mapped)(placed)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_every_layout(kind, check_vma):
    ways = itertools.product(LEAVES, ["auto", "gather", "all_to_all"])
    named = {f"{name}_{strategy}": (LEAVES[name], strategy) for name, strategy in ways}
    leaves = {name: leaf for name, (leaf, _) in named.items()}
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=sharded.views(leaves),
        param_shardings=specs_of(leaves),
        strategy=[(name, strategy) for name, (_, strategy) in named.items()],
        device=sharded.SLOW,
    )
    mesh = make_mesh({"r": 2, "f": 4}, kind)
    sharded.assert_right(leaves, *first_updates(leaves, tx, mesh, check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
def test_slices_of_the_long_side(check_vma):
    leaves = {
        "wide": Leaf((16, 32), P(None, "f")),
        "tall": Leaf((3, 32, 16), P(None, ("r", "f")), STACK),
    }
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=sharded.views(leaves),
        param_shardings=specs_of(leaves),
        strategy="gram",
    )
    mesh = make_mesh({"r": 2, "f": 4})
    sharded.assert_right(leaves, *first_updates(leaves, tx, mesh, check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_side_that_lies_over_axes_of_both_shard_maps(check_vma):
    mesh = make_mesh({"r": 2, "f": 4})
    leaf = Leaf((16, 64), P(None, ("r", "f")))
    cases = [*itertools.product(("gram", "all_to_all"), (False, True))]
    txs = {
        case: scale_by_muon(FAST, strategy=case[0], adaptive=case[1], param_shardings=leaf.spec)
        for case in cases
    }
    outer = P(None, "r")
    mapped = jax.shard_map(
        lambda x: {case: tx.update(x, tx.init(x))[0] for case, tx in txs.items()},
        mesh=mesh,
        in_specs=outer,
        out_specs=outer,
        axis_names={"r"},
        check_vma=check_vma,
    )
    grad = leaf.gradient(0)
    found = jax.jit(mapped)(jax.device_put(grad, NamedSharding(mesh, leaf.spec)))
    (direction,) = sharded.answers({"w": leaf}, {"w": grad})["w"]
    dual_norm = np.sum(direction * reference.mixes([grad])[0])
    for (strategy, adaptive), update in found.items():
        want = direction * dual_norm if adaptive else direction
        assert reference.relative_error(update, want) <= 1e-5, (strategy, adaptive)


def test_orthogonalize_alone():
    leaves = {"w": Leaf((16, 32), P("f"))}
    tx = orthogonalize(FAST, param_shardings=specs_of(leaves))
    sharded.assert_right(leaves, *first_updates(leaves, tx, make_mesh({"f": 8}), True))


BLOCKS = {
    "columns": Leaf((16, 80), P(None, "f"), MatrixView(0, 1, split=(64, 8, 8))),
    "rows": Leaf((16, 80), P("f"), MatrixView(0, 1, split=(64, 8, 8))),
    "heads": Leaf((16, 8, 10), P(None, "f"), MatrixView(0, (1, 2), split=(70, 10))),
    "stack": Leaf((3, 16, 48), P(None, None, "f"), MatrixView(1, 2, heads=3)),
}


def scaled_answers(leaves, grads):
    return {
        name: [reference.muon(b, [b], learning_rate=1.0, rows=FAST)[0] for b in leaf.blocks(g)]
        for (name, leaf), g in zip(leaves.items(), grads.values(), strict=True)
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_fused_blocks_have_their_own_scale(check_vma):
    mesh = make_mesh({"f": 8})
    leaves = {"columns": BLOCKS["columns"], "rows": BLOCKS["rows"], "heads": BLOCKS["heads"]}
    tx = muon(
        1.0,
        FAST,
        muon_weight_dimension_numbers=sharded.views(leaves),
        param_shardings=specs_of(leaves),
    )
    grads, updates = first_updates(leaves, tx, mesh, check_vma)
    want = scaled_answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5, name


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_fused_blocks_have_their_own_scale_outside_too(kind):
    mesh = make_mesh({"f": 8}, kind)
    grads, where = sharded.gradients(BLOCKS), sharded.shardings(BLOCKS, mesh)
    tx = muon(1.0, FAST, muon_weight_dimension_numbers=sharded.views(BLOCKS), param_shardings=where)
    placed = jax.device_put(grads, where)
    updates = first_update(tx, placed, jit=True)
    want = scaled_answers(BLOCKS, grads)
    for name, leaf in BLOCKS.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5, name
        sharded.assert_sharded(updates[name], where[name])


@pytest.mark.parametrize("check_vma", [True, False])
def test_scale_by_shape_takes_its_block_of_the_scales(check_vma):
    leaf = {"w": BLOCKS["columns"]}
    view = sharded.views(leaf)
    tx = scale_by_shape(view, param_shardings=specs_of(leaf))
    grads, updates = first_updates(leaf, tx, make_mesh({"f": 8}), check_vma)
    scales = np.repeat([2.0, 1.0, 1.0], [64, 8, 8])
    np.testing.assert_allclose(updates["w"], scales * grads["w"], rtol=1e-6)


def test_the_scale_is_that_of_the_whole_matrix():
    leaf = {"w": Leaf((16, 64), P(None, "f"))}  # a block is 16 x 8
    tx = scale_by_shape(param_shardings=specs_of(leaf))
    grads, updates = first_updates(leaf, tx, make_mesh({"f": 8}), True)
    np.testing.assert_allclose(updates["w"], 2 * grads["w"], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_parallel_training_with_whole_parameters(check_vma):
    mesh = make_mesh({"d": 8})
    grads = reference.gradients(0, 16, 32, 8)
    mean = np.mean(grads, axis=0, dtype=np.float64)
    param = {"w": reference.matrix(9, 16, 32), "b": np.ones(32, np.float32)}
    tx: Any = muon(0.1, FAST, param_shardings=P(), device=sharded.SLOW)

    def body(param, mine):
        grad = jax.lax.pmean({"w": mine[0], "b": jnp.ones(32)}, "d")
        updates, state = tx.update(grad, tx.init(param), param)
        return updates["w"], state.inner_states["muon"].inner_state[0].mu["w"]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check_vma
    )
    stacked = jax.device_put(np.stack(grads), NamedSharding(mesh, P("d")))
    placed = jax.device_put(param, NamedSharding(mesh, P()))
    update, mu = jax.jit(mapped)(placed, stacked)
    want = reference.muon(param["w"], [mean], learning_rate=0.1, rows=FAST)[0]
    assert reference.relative_error(update, want) <= 1e-5
    assert reference.relative_error(mu, 0.05 * mean) <= 1e-6


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_accumulation(check_vma):
    mesh = make_mesh({"f": 8})
    grads = reference.gradients(0, 16, 32, 4)
    param = {"w": reference.matrix(9, 16, 32), "b": np.ones(32, np.float32)}
    specs = {"w": P("f"), "b": P()}
    tx = optax.MultiSteps(muon(0.1, FAST, param_shardings=specs), 2)

    def body(param, grads):
        def step(carry, grad):
            param, state = carry
            updates, state = tx.update(grad, state, param)
            return (optax.apply_updates(param, updates), state), updates

        return jax.lax.scan(step, (param, tx.init(param)), grads)[1]

    stacked = {"w": P(None, "f"), "b": P()}
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, stacked), out_specs=stacked, check_vma=check_vma
    )
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), (specs, stacked))
    data = (param, {"w": np.stack(grads), "b": np.ones((4, 32), np.float32)})
    updates = jax.jit(mapped)(*jax.device_put(data, where))["w"]
    means = [np.mean(grads[i : i + 2], axis=0, dtype=np.float64) for i in (0, 2)]
    want = reference.muon(param["w"], means, learning_rate=0.1, rows=FAST)
    np.testing.assert_array_equal(updates[::2], 0)
    assert reference.relative_error(updates[1], want[0]) <= 1e-5
    assert reference.relative_error(updates[3], want[1]) <= 1e-5


def undeclared(check_vma, spec, declared=None):
    mesh = make_mesh({"f": 8})
    tx = scale_by_muon(FAST, param_shardings=declared)

    def body(tree):
        return tx.update(tree, tx.init(tree))[0]

    tree = {"decoder": {"kernel": np.ones((16, 32), np.float32)}}
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=check_vma)
    return jax.eval_shape(mapped, jax.device_put(tree, NamedSharding(mesh, spec)))


def test_an_undeclared_block_is_an_error_that_names_the_leaf():
    with pytest.raises(ValueError, match=r"decoder/kernel.*varies over \['f'\].*param_shardings"):
        undeclared(True, P("f"))


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_momentum_said_to_lie_like_its_parameter(kind):
    """In a shard_map over some of the axes or over all, which one program has."""
    mesh = make_mesh({"r": 2, "f": 4}, kind)
    leaf = Leaf((16, 32), P("f", "r"))
    tx = scale_by_muon(FAST, param_shardings=leaf.spec, mu_shardings=leaf.spec)

    def mapped(axes: set[str]) -> Any:
        spec = P("f", "r" if "r" in axes else None)
        return jax.shard_map(
            lambda g: tx.update(g, tx.init(g))[0],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=axes,
        )

    x, over = leaf.gradient(0), [mapped({"f"}), mapped({"r", "f"})]
    placed = jax.device_put(x, NamedSharding(mesh, leaf.spec))
    want = sharded.answers({"w": leaf}, {"w": x})["w"]
    for update in jax.jit(lambda g: [f(g) for f in over])(placed):
        assert sharded.worst_error(leaf, update, want) <= 1e-5


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize(("spec", "there"), [(P("f"), P()), (P(), P("f")), (P("f"), P(None, "f"))])
def test_momentum_cannot_lie_elsewhere(spec, there, kind):
    tx: Any = scale_by_muon(FAST, param_shardings=spec, mu_shardings=there)
    mesh = make_mesh({"f": 8}, kind)
    tree = jax.device_put({"kernel": np.ones((16, 32), np.float32)}, NamedSharding(mesh, spec))
    state = MuonState(jnp.zeros((), jnp.int32), tree)
    whole: Any = P()
    specs = (spec, MuonState(whole, spec))
    for function in (tx.update, lambda x, _: tx.init(x).mu):
        mapped = jax.shard_map(
            lambda x, s, f=function: f(x, s)[0], mesh=mesh, in_specs=specs, out_specs=spec
        )
        with pytest.raises(ValueError, match=r"kernel: mu_shardings P\(.*\), parameter P\("):
            jax.eval_shape(mapped, tree, state)


@pytest.mark.parametrize("spec", [P("f"), P()])
def test_without_a_check_of_what_varies_every_undeclared_matrix_is_an_error(spec):
    with pytest.raises(ValueError, match=r"decoder/kernel.*check_vma=False.*param_shardings"):
        undeclared(False, spec)


def test_what_does_not_vary_is_whole_without_a_declaration():
    undeclared(True, P())


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_declared_empty_spec_says_that_the_matrix_is_whole(check_vma):
    undeclared(check_vma, P(), P())


def test_leaves_of_adamw_need_no_declaration():
    mesh = make_mesh({"f": 8})
    tx = muon(0.1)
    tree = {"bias": jax.device_put(np.ones(32, np.float32), NamedSharding(mesh, P("f")))}
    with pytest.warns(UserWarning, match="no leaf"):
        jax.jit(
            jax.shard_map(
                lambda x: tx.update(x, tx.init(x), x)[0],
                mesh=mesh,
                in_specs=P("f"),
                out_specs=P("f"),
            )
        )(tree)
