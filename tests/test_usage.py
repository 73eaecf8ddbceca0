"""How a traced call uses its parameters: axes of matmuls, tables, what can't be told, heads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import pallas_call

from muon_optax import MatrixView, MuonDimensionNumbers
from muon_optax.readers.usage import read_usage
from muon_optax.views.matrix_view import bind_view

D = 6


def use_of(call: Any, shape: tuple[int, ...], *inputs: Any) -> Any:
    """What a call does with its only parameter."""
    usage = read_usage(lambda p, x: call(p, *x), jax.ShapeDtypeStruct(shape, jnp.float32), inputs)
    (role,) = usage.roles.values()
    return role


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, m: (c @ m, None), x, w)[0]


def conv(w: Any, x: Any, groups: int = 1) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


MATMULS = {
    "matmul": (lambda w, x: x @ w, (D, 9), (0,), (1,)),
    "transposed": (lambda w, x: x @ w.T, (9, D), (1,), (0,)),
    "two outputs": (lambda w, x: jnp.einsum("td,dnh->tnh", x, w), (D, 3, 4), (0,), (1, 2)),
    "two inputs": (
        lambda w, x: jnp.einsum("tnh,nhd->td", x.reshape(5, 2, 3), w),
        (2, 3, 8),
        (0, 1),
        (2,),
    ),
    "Gemma's query": (lambda w, x: jnp.einsum("td,ndh->tnh", x, w), (3, D, 4), (1,), (0, 2)),
    "Gemma's key and value": (
        lambda w, x: jnp.einsum("bsd,ckdh->cbskh", x[None], w),
        (2, 3, D, 4),
        (2,),
        (1, 3),
    ),
    "layers of a scan": (scanned, (4, D, D), (1,), (2,)),
    "as deep as wide": (scanned, (D, D, D), (1,), (2,)),
    "layers second": (lambda w, x: scanned(jnp.moveaxis(w, 1, 0), x), (D, D, D), (0,), (2,)),
    "layers last": (lambda w, x: scanned(jnp.moveaxis(w, 2, 0), x), (D, D, D), (0,), (1,)),
    "fori_loop": (
        lambda w, x: jax.lax.fori_loop(0, 4, lambda i, c: c @ w[i], x),
        (4, D, D),
        (1,),
        (2,),
    ),
    "vmap over weights": (lambda w, x: jax.vmap(lambda m: x @ m)(w), (4, D, 8), (1,), (2,)),
    "vmap, two layers": (
        lambda w, x: jax.vmap(lambda m: jax.nn.relu(x @ m) @ m, out_axes=2)(w),
        (4, D, D),
        (1,),
        (2,),
    ),
    "experts": (lambda w, x: jnp.einsum("etd,edf->etf", x[None], w), (4, D, 8), (1,), (2,)),
    "an expert each": (
        lambda w, x: jnp.einsum("td,tdf->tf", x, w[jnp.arange(5) % 4]),
        (4, D, 8),
        (1,),
        (2,),
    ),
    "ragged experts": (
        lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([2, 1, 1, 1])),
        (4, D, 8),
        (1,),
        (2,),
    ),
    "remat": (lambda w, x: jax.checkpoint(lambda w, x: x @ w)(w, x), (D, 9), (0,), (1,)),
    "a branch": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w * 2),
        (D, 9),
        (0,),
        (1,),
    ),
    "normalised": (lambda w, x: x @ (w / jnp.linalg.norm(w, axis=0)), (D, 9), (0,), (1,)),
    "masked half precision": (
        lambda w, x: x.astype("bfloat16") @ (w * jnp.tri(D, 9)).astype("bfloat16"),
        (D, 9),
        (0,),
        (1,),
    ),
    "convolution": (lambda w, x: conv(w, x[None]), (3, D, 8), (0, 1), (2,)),
    "convolution of grey images": (lambda w, x: conv(w, x[None, :, :1]), (3, 1, 8), (0, 1), (2,)),
    "vmap over kernels": (
        lambda w, x: jax.vmap(conv, (0, None))(w, x[None]),
        (4, 3, D, 8),
        (1, 2),
        (3,),
    ),
    "vmap over convolutions": (
        lambda w, x: jax.vmap(conv)(w, jnp.stack([x[None]] * 4)),
        (4, 3, D, 8),
        (1, 2),
        (3,),
    ),
}


@pytest.mark.parametrize("name", MATMULS)
def test_the_axes_of_a_matmul(name):
    call, shape, reduction, output = MATMULS[name]
    role = use_of(call, shape, floats(5, D))
    assert role.kind == "matrix"
    assert tuple(map(tuple, map(sorted, role.view[:2]))) == (reduction, output)


@pytest.mark.parametrize("name", ["layers second", "Gemma's key and value"])
def test_the_gradient_of_one_example_is_an_outer_product_in_each_matrix(name):
    """What comes back for one position is one row for each matrix, by the definition of a layer."""
    call, shape, _, _ = MATMULS[name]
    x = oracle.gaussian(1, D).astype(np.float32)
    view = bind_view(use_of(call, shape, floats(1, D)).view, shape)

    def matrices() -> Any:
        def loss(w: Any) -> Any:
            y = call(w, x)
            return (y * oracle.gaussian(*y.shape, seed=1)).sum()

        return view.split(jax.grad(loss)(jnp.asarray(oracle.gaussian(*shape, seed=2), "float32")))[
            0
        ]

    for matrix in np.asarray(jax.jit(matrices)()):
        assert np.linalg.matrix_rank(matrix, tol=1e-4 * np.abs(matrix).max()) == 1
        assert matrix.shape == (view.fan_in, view.fan_out)


def halves(w: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w[:, :4]) * (x @ w[:, 4:])


BLOCKS = {
    "slices": (halves, (D, 8), MatrixView((0,), (1,), split=(4, 4))),
    "split": (
        lambda w, x: [x @ m for m in jnp.split(w, [2], axis=1)],
        (D, 8),
        MatrixView((0,), (1,), split=(2, 6)),
    ),
    "a reshaped kernel": (
        lambda w, x: jnp.einsum("td,dsh->sth", x, w.reshape(D, 3, 4)),
        (D, 12),
        MatrixView((0,), (1,), split=(4, 4, 4)),
    ),
    "interleaved": (
        lambda w, x: jnp.einsum("td,dhs->sth", x, w.reshape(D, 4, 3)),
        (D, 12),
        MatrixView((0,), (1,), split=(1, 1, 1), groups=4),
    ),
    "groups of channels": (
        lambda w, x: conv(w, x[None], 2),
        (3, D // 2, 8),
        MatrixView((0, 1), (2,), split=(4, 4)),
    ),
    "a merged batch axis": (
        lambda w, x: jnp.einsum("etd,edf->etf", jnp.stack([x] * 2), w.reshape(2, D, 8)),
        (2 * D, 8),
        MatrixView((0,), (1,), split=(D, D), axis="reduction"),
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_matrices_side_by_side(name):
    call, shape, view = BLOCKS[name]
    assert use_of(call, shape, floats(5, D)).view == view


OTHERS = {
    "take": (lambda w, x: jnp.take(w, x, axis=0), (9, D), "lookup"),
    "index": (lambda w, x: w[x], (9, D), "lookup"),
    "one-hot": (lambda w, x: jax.nn.one_hot(x, 9) @ w, (9, D), "one-hot"),
    "tied to a head": (lambda w, x: w[x] @ w.T, (9, D), "lookup"),
    "relative positions": (lambda w, x: w[x[:, None] - x, :], (9, 2), "lookup"),
    "position": (lambda w, x: w + x[:, None], (5, D), "elementwise"),
    "scale": (lambda w, x: w * x[:, None], (5, D), "elementwise"),
    "token": (
        lambda w, x: jnp.concatenate([w, jnp.ones((5, D)) * x[:, None]]),
        (1, D),
        "elementwise",
    ),
    "never used": (lambda w, x: x, (5, D), "unused"),
    "depthwise": (
        lambda w, x: conv(w, jnp.ones((1, 5, D)) * x[:, None], D),
        (3, 1, D),
        "depthwise",
    ),
    "depthwise, two each": (
        lambda w, x: conv(w, jnp.ones((1, 5, D)) * x[:, None], D),
        (3, 1, 2 * D),
        "depthwise",
    ),
    "overlapping slices": (
        lambda w, x: [jnp.ones((5, D)) * x[:, None] @ m for m in (w[:, :5], w[:, 3:])],
        (D, 8),
        "unclear",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_matrix(name):
    call, shape, kind = OTHERS[name]
    assert use_of(call, shape, jax.ShapeDtypeStruct((5,), jnp.int32)).kind == kind


@pytest.mark.parametrize("width", [D, 8])
def test_a_kernel_that_cannot_be_seen_into(width):
    """Its operands may have its result's shape, as an elementwise operation's have."""

    def multiply(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    def call(w: Any, x: Any) -> Any:
        return pallas_call(multiply, out_shape=floats(D, width), interpret=True)(x, w)

    usage = read_usage(call, floats(D, width), floats(D, D))
    assert {role.kind for role in usage.roles.values()} == {"unclear"}
    assert usage.heads == {()}


def test_two_parameters_in_one_matmul():
    """Learned queries are an activation; LoRA's factors make no matmul with one."""
    params = {"queries": floats(3, D), "key": floats(D, D), "a": floats(D, 2), "b": floats(2, D)}

    def call(p: Any, x: Any) -> Any:
        queries = jnp.broadcast_to(p["queries"], (len(x), 3, D)) @ p["key"]
        return queries @ (x @ (p["key"] + p["a"] @ p["b"]))[..., None]

    roles = {path[0]: role for path, role in read_usage(call, params, floats(5, D)).roles.items()}
    assert {name: role.kind for name, role in roles.items()} == {
        "queries": "elementwise",
        "key": "matrix",
        "a": "unclear",
        "b": "unclear",
    }
    assert roles["key"].view == MuonDimensionNumbers((0,), (1,))


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["w"]) @ p["v"] + p["b"][:, 0]


def residual(p: Any, x: Any) -> Any:
    for _ in range(2):
        x = x + jax.nn.relu(x @ p["w"]) @ p["v"]
    return x


HEADS = {
    "the last layer": (mlp, {"v"}),
    "its softmax": (lambda p, x: jax.nn.log_softmax(mlp(p, x)), {"v"}),
    "capped": (lambda p, x: 30 * jnp.tanh(mlp(p, x) / 30), {"v"}),
    "pooled after": (lambda p, x: mlp(p, x).mean(0), {"v"}),
    "its loss": (lambda p, x: jnp.square(mlp(p, x)).mean(), {"v"}),
    "two of them": (lambda p, x: (x @ p["w"], x @ p["v"]), {"w", "v"}),
    "hidden states too": (lambda p, x: (residual(p, x), residual(p, x) @ p["b"]), {"b"}),
    "a residual stream": (residual, set()),
    "a loop's state": (
        lambda p, x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), h), x, length=3),
        set(),
    ),
    "a layer in each step": (
        lambda p, x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), h @ p["v"]), x, length=3)[1],
        {"v"},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_layers_that_make_the_results(name):
    call, heads = HEADS[name]
    params = {"w": floats(D, D), "v": floats(D, D), "b": floats(D, 1)}
    assert {path[0] for path in read_usage(call, params, floats(5, D)).heads} == heads


def test_a_head_with_an_adapter_is_a_head():
    params = {"w": floats(D, D), "head": floats(D, 9), "a": floats(D, 2), "b": floats(2, 9)}

    def call(p: Any, x: Any) -> Any:
        x = jax.nn.relu(x @ p["w"])
        return x @ p["head"] + x @ p["a"] @ p["b"]

    usage = read_usage(call, params, floats(5, D), adapters=frozenset({("a",), ("b",)}))
    assert usage.heads == {("head",)}
