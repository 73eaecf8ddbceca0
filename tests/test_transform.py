"""The pieces: momentum, orthogonalised, scaled by shape; each against float64 numpy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from running import dtypes, first_update, run

from muon_optax import (
    MatrixView,
    MuonDimensionNumbers,
    MuonState,
    orthogonalize,
    scale_by_momentum,
    scale_by_muon,
    scale_by_shape,
)

PIECES = [scale_by_muon, orthogonalize]


def leaves(seed=0, steps=3):
    """Gradients of two matrices and of a stack whose middle axis is the batch."""
    shapes = {"wide": (6, 10), "tall": (12, 4)}
    trails: dict[str, Any] = {
        name: reference.gradients(seed, *shape, steps=steps) for name, shape in shapes.items()
    }
    stacks = [reference.gradients(seed + i, 8, 6, steps=steps) for i in range(3)]
    trails["stack"] = [np.stack(layers, axis=1) for layers in zip(*stacks, strict=True)]
    return [dict(zip(trails, step, strict=True)) for step in zip(*trails.values(), strict=True)]


VIEWS = {
    "wide": MuonDimensionNumbers(),
    "tall": MuonDimensionNumbers(1, 0),
    "stack": MuonDimensionNumbers(0, 2),
}


def orthogonalized(mix: Any) -> Any:
    """Newton-Schulz on each matrix of a leaf of `leaves`."""
    if mix.ndim == 2:
        return reference.newton_schulz(mix)
    return np.stack([reference.newton_schulz(mix[:, i]) for i in range(3)], axis=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "beta": 0.8},
        {"bias_correction": False},
        {"bias_correction": False, "momentum": "sum", "nesterov": False},
    ],
)
def test_muon_orthogonalises_the_mix_of_each_matrix(options):
    grads = leaves()
    tx = scale_by_muon(weight_dimension_numbers=VIEWS, **options)
    updates, state, _ = run(tx, grads[0], grads, jit=True)
    assert int(state.count) == len(grads)
    form = {"form": options.pop("momentum", "ema")}
    for name in VIEWS:
        mixes = reference.mixes([g[name] for g in grads], **options, **form)
        for update, mix in zip(updates, mixes, strict=True):
            assert reference.relative_error(update[name], orthogonalized(mix)) <= 1e-5, name


@pytest.mark.parametrize("momentum", ["ema", "sum"])
def test_the_pieces_in_a_chain_are_the_whole(momentum):
    grads = leaves()
    options = {"beta": 0.9, "nesterov": False, "momentum": momentum}
    pieces = optax.chain(
        scale_by_momentum(**options),
        orthogonalize("tight", adaptive=True, weight_dimension_numbers=VIEWS),
    )
    whole = scale_by_muon("tight", adaptive=True, weight_dimension_numbers=VIEWS, **options)
    # In one program each: outside of jit the pieces round between them.
    got, chained, _ = run(pieces, grads[0], grads, jit=True)
    want, state, _ = run(whole, grads[0], grads, jit=True)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6), got, want)
    assert isinstance(state, MuonState)
    jax.tree.map(np.testing.assert_array_equal, chained[0], state)


def test_the_momentum_piece_gives_the_mix():
    grads = leaves()
    updates, _, _ = run(scale_by_momentum(0.9), grads[0], grads, jit=True)
    for name in VIEWS:
        want = reference.mixes([g[name] for g in grads], beta=0.9)
        got = [u[name] for u in updates]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_an_orthogonaliser_of_the_users_gets_the_mix_as_it_is():
    seen = []

    def identity(x):
        seen.append((x.shape, x.dtype))
        return x

    (grad,) = leaves(steps=1)
    tx = scale_by_muon(
        orthogonalizer=identity, weight_dimension_numbers=VIEWS, nesterov=False, mu_dtype="float32"
    )
    update = first_update(tx, jax.tree.map(lambda x: x.astype(jnp.bfloat16), grad), jit=True)
    # Native orientation, (batch, fan-in, fan-out), in the momentum's dtype; the mix of a first
    # step is the gradient, of any norm.
    assert {shape for shape, _ in seen} == {(1, 6, 10), (1, 4, 12), (3, 8, 6)}
    assert {dtype for _, dtype in seen} == {jnp.dtype("float32")}
    for name in VIEWS:
        np.testing.assert_array_equal(update[name], grad[name].astype(jnp.bfloat16))


def test_an_orthogonaliser_by_singular_values():
    def polar(x):
        u, _, v = jnp.linalg.svd(x, full_matrices=False)
        return u @ v

    (grad,) = leaves(steps=1)
    tx = orthogonalize(orthogonalizer=polar, weight_dimension_numbers=VIEWS)
    update = first_update(tx, grad, jit=True)
    for x in (update["wide"], update["tall"], *np.moveaxis(update["stack"], 1, 0)):
        np.testing.assert_allclose(np.linalg.svd(x, compute_uv=False), 1, rtol=1e-5)
    for i in range(3):
        u, _, v = np.linalg.svd(np.asarray(grad["stack"][:, i], np.float64), full_matrices=False)
        assert reference.relative_error(update["stack"][:, i], u @ v) <= 1e-5


@pytest.mark.parametrize("piece", PIECES)
def test_fused_blocks_are_matrices_of_their_own(piece):
    q, k, v = (reference.matrix(i, 8, n) for i, n in enumerate((16, 4, 4)))
    fused = {"qkv": np.concatenate([q, k, v], axis=1)}
    view = MatrixView(0, 1, split=(16, 4, 4))
    got = first_update(piece(weight_dimension_numbers=view), fused, jit=True)["qkv"]
    want = np.concatenate([reference.newton_schulz(x) for x in (q, k, v)], axis=1)
    assert reference.relative_error(got, want) <= 1e-5
    scaled = first_update(scale_by_shape(view), fused)["qkv"]
    np.testing.assert_allclose(scaled, np.concatenate([2**0.5 * q, k, v], axis=1), rtol=1e-6)


@pytest.mark.parametrize("piece", PIECES)
def test_adaptive_multiplies_by_the_inner_product_with_the_input(piece):
    x = 3 * reference.matrix(0, 6, 10)
    y = reference.newton_schulz(x)
    options: dict[str, Any] = {} if piece is orthogonalize else {"nesterov": False}
    got = first_update(piece(adaptive=True, **options), {"w": x})["w"]
    assert reference.relative_error(got, (x * y).sum() * y) <= 1e-5


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, (2, 1)),
        ({"scale": "match_rms_adamw"}, (0.8, 0.8)),
        ({"scale": "spectral", "scale_factor": 0.5}, (2, 2)),
        ({"scale": "unit_rms_norm"}, (2, 0.5)),
        ({"scale": "none", "scale_factor": 3}, (3, 3)),
        ({"consistent_rms": 0.2, "scale_factor": 2.0}, (1.6, 1.6)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_each_matrix_is_scaled_by_its_shape(options, factors, dtype):
    ones = {"up": np.ones((4, 16), dtype), "down": np.ones((16, 4), dtype)}
    got = first_update(scale_by_shape(**options), ones)
    for name, factor in zip(ones, factors, strict=True):
        assert got[name].dtype == dtype
        np.testing.assert_array_equal(got[name], np.full_like(ones[name], factor))


def test_a_scale_may_be_traced():
    ones = {"w": np.ones((4, 16), np.float32)}
    got = jax.vmap(lambda c: first_update(scale_by_shape(None, c), ones)["w"][0, 0])(
        jnp.arange(3.0)
    )
    np.testing.assert_allclose(got, [0, 4, 8])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_orthogonalising_in_half_precision_is_a_choice(precision):
    grad = {"w": reference.matrix(0, 16, 24, kappa=10)}
    want = reference.newton_schulz(grad["w"])
    exact = first_update(scale_by_muon(), grad)["w"]
    half = first_update(scale_by_muon(ns_dtype=precision), grad)["w"]
    by_momentum = first_update(scale_by_muon(mu_dtype=precision), grad)["w"]
    assert exact.dtype == half.dtype == by_momentum.dtype == jnp.float32
    assert reference.relative_error(exact, want) <= 1e-5
    for rough in (half, by_momentum):
        assert 1e-4 <= reference.relative_error(rough, want) <= 4e-2


@pytest.mark.parametrize("piece", PIECES)
def test_a_nan_stays_in_its_matrix(piece):
    stack = np.stack([reference.matrix(i, 6, 8) for i in range(3)])
    spoilt = stack.copy()
    spoilt[1, 2, 3] = np.nan
    views = {"other": MuonDimensionNumbers(), "stack": MuonDimensionNumbers(1, 2)}
    tx = piece(weight_dimension_numbers=views)
    first = jax.jit(lambda grads: first_update(tx, grads))
    update, clean = (first({"other": stack[0], "stack": x}) for x in (spoilt, stack))
    np.testing.assert_array_equal(update["other"], clean["other"])
    for i in (0, 2):
        np.testing.assert_array_equal(update["stack"][i], clean["stack"][i])
    assert np.isnan(update["stack"][1]).all()


@pytest.mark.parametrize("piece", PIECES)
def test_empty_leaves(piece):
    shapes = {"a": (0, 4), "b": (4, 0), "c": (2, 0, 3)}
    grad = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    views = {"a": MuonDimensionNumbers(), "b": None, "c": MuonDimensionNumbers(1, 2)}
    views["b"] = MuonDimensionNumbers()
    update = first_update(piece(weight_dimension_numbers=views), grad)
    scaled = first_update(scale_by_shape(views), grad)
    assert jax.tree.map(jnp.shape, update) == jax.tree.map(jnp.shape, grad)
    assert jax.tree.map(jnp.shape, scaled) == jax.tree.map(jnp.shape, grad)


@pytest.mark.parametrize("tx", [scale_by_muon(), scale_by_momentum(), orthogonalize()])
def test_an_empty_tree(tx):
    assert first_update(tx, {}) == {}


def test_an_empty_matrix_beside_a_full_one():
    grad = {"a": np.ones((0, 4), np.float32), "b": reference.matrix(0, 6, 8)}
    update = first_update(scale_by_muon(), grad, jit=True)
    assert update["a"].shape == (0, 4)
    assert reference.relative_error(update["b"], reference.newton_schulz(grad["b"])) <= 1e-5


TYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize("mu_dtype", [None, *TYPES])
@pytest.mark.parametrize("make", [scale_by_muon, scale_by_momentum])
def test_updates_follow_the_gradient_and_the_state_stays(make, mu_dtype):
    tx, w = make(mu_dtype=mu_dtype), {kind: jax.ShapeDtypeStruct((4, 6), kind) for kind in TYPES}
    for param in TYPES:
        state = tx.init({"w": w[param]})
        assert state.mu["w"].dtype == (param if mu_dtype is None else mu_dtype)
        for grad in TYPES:
            update, new = jax.eval_shape(tx.update, {"w": w[grad]}, state)
            assert update["w"].dtype == grad
            assert dtypes(new) == dtypes(state)


def test_double_precision():
    with jax.enable_x64(True):
        x = np.asarray(reference.matrix(0, 12, 20), np.float64)
        grads = {"double": x, "single": x.astype(np.float32)}
        update = first_update(scale_by_muon(nesterov=False), grads, jit=True)
        want = reference.newton_schulz(x)
        assert dtypes(update) == dtypes(grads)
        assert reference.relative_error(update["double"], want) <= 1e-12
        assert 1e-9 <= reference.relative_error(update["single"], want) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mu_dtype", [None, "float32", "float16"])
def test_strict_promotion(dtype, mu_dtype):
    grad = {"w": jax.ShapeDtypeStruct((6, 10), dtype)}
    tx = optax.chain(
        scale_by_muon(adaptive=True, mu_dtype=mu_dtype),
        scale_by_shape(consistent_rms=jnp.float32(0.2)),
    )
    with jax.numpy_dtype_promotion("strict"):
        update = jax.eval_shape(partial(first_update, tx), grad)
    assert dtypes(update) == {"w": jnp.dtype(dtype)}


def test_no_weak_types():
    weak = {"w": jnp.full((2, 3), 1.0)}
    assert weak["w"].weak_type
    updates, state, _ = run(optax.chain(scale_by_muon(), scale_by_shape()), weak, [weak])
    assert not any(x.weak_type for x in jax.tree.leaves((updates, state)))


def test_states_share_no_buffer():
    params = {"a": jnp.zeros((4, 6)), "b": jnp.zeros((4, 6))}
    state = scale_by_muon().init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(set(buffers)) == len(buffers)


def test_leaves_that_make_no_matrix_are_listed_at_init():
    params = {"mlp": {"bias": np.ones(3), "kernel": np.ones((2, 2))}, "cube": np.ones((2, 2, 2))}
    for piece in PIECES:
        with pytest.raises(ValueError, match=r"(?s)mlp/bias.*two dims or more.*\(3,\)"):
            piece().init(params)
        with pytest.raises(ValueError, match=r"(?s)cube.*\[-3, 2\].*got 5"):
            piece(weight_dimension_numbers=MuonDimensionNumbers(5, 7)).init(params)
        with pytest.raises(ValueError, match="mlp/kernel"):
            piece(weight_dimension_numbers={"mlp": None, "cube": MuonDimensionNumbers()}).init(
                params
            )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scale_by_muon, "steps: not a floating-point leaf"),
        (scale_by_momentum, "steps: got dtype int32"),
    ],
)
def test_leaves_that_are_not_floating_point_are_listed_at_init(make, message):
    with pytest.raises(ValueError, match=message):
        make().init({"w": jnp.ones((2, 2)), "steps": jnp.ones((2, 2), jnp.int32)})


def test_a_state_of_other_leaves_is_an_error_that_lists_them():
    for tx in (scale_by_muon(), scale_by_momentum()):
        state = tx.init({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))})
        with pytest.raises(ValueError, match=r"(?s)a: in the state only.*c: in the updates only"):
            tx.update({"b": jnp.ones((2, 3)), "c": jnp.ones((2, 3))}, state)
        with pytest.raises(ValueError, match=r"b: momentum \(2, 3\), update \(3, 2\)"):
            tx.update({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))}, state)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ns_coeffs": "polar"}, ValueError, "'polar' is no schedule; allowed are.*'jordan'"),
        ({"ns_coeffs": [(1, 2, 3)] * 3, "ns_steps": 5}, ValueError, "ns_steps=5.*3 rows"),
        ({"ns_steps": 0}, ValueError, "ns_steps=0; it must be at least 1"),
        ({"ns_steps": "3"}, TypeError, "ns_steps='3' is a str"),
        ({"adaptive": "false"}, TypeError, "adaptive must be True or False, got 'false'"),
        ({"preconditioning": "fro"}, ValueError, "preconditioning='fro'; allowed are"),
        ({"ns_method": "newton"}, ValueError, "ns_method must be one of .*'gram'.*got 'newton'"),
        ({"ns_dtype": "int8"}, TypeError, "ns_dtype must be a floating-point dtype"),
        ({"ns_precision": "best"}, ValueError, "ns_precision must be one of .*got 'best'"),
        ({"orthogonalizer": 3}, TypeError, "orthogonalizer must be a function, got 3"),
    ],
)
def test_options_are_checked_at_construction(piece, options, error, message):
    with pytest.raises(error, match=message):
        piece(**options)


@pytest.mark.parametrize("tx", [scale_by_muon(), scale_by_momentum()], ids=["muon", "momentum"])
@pytest.mark.parametrize("other", [optax.scale_by_adam(), optax.contrib.scale_by_muon()])
def test_the_state_of_another_transformation_is_an_error(tx, other):
    w = jnp.ones((4, 8))
    with pytest.raises(TypeError, match=r"must be a MuonState of muon_optax, got .*from_optax"):
        tx.update(w, other.init(w))


def test_updates_may_have_a_wider_dtype_than_the_gradient():
    grad = jnp.asarray(reference.matrix(0, 8, 16), jnp.bfloat16)
    narrow = scale_by_muon(mu_dtype="float32")
    wide = scale_by_muon(mu_dtype="float32", update_dtype="float32")
    rounded, exact = (first_update(tx, grad) for tx in (narrow, wide))
    assert (rounded.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))
    want = reference.newton_schulz(
        reference.mixes([np.asarray(grad, np.float64)])[0], reference.JORDAN
    )
    assert reference.relative_error(exact, want) <= 1e-5
    with pytest.raises((ValueError, TypeError), match="update_dtype"):
        scale_by_muon(update_dtype="int32")
