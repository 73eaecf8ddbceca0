"""QK-clip: logits are what they should be, on every attention and every mesh, and never NaN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import read_program
from muon_optax import Attention, HeadWeight, MuonDimensionNumbers, clip_qk, muon, qk_clip

HEADS, KEYS, DIMS, WIDTH, ROPE, VALUES = 4, 2, 6, 8, 2, 3
TAU = 5.0
LOGITS = np.array([20.0, 4.0, -1.0, 8.0])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def factors(logits: np.ndarray, groups: int = 1) -> np.ndarray:
    """g of each head of the queries, by the formula, in float64."""
    grouped = np.asarray(logits, np.float64).reshape(*np.shape(logits)[:-1], -1, groups)
    g = [
        [min(1.0, TAU / s) if s > 0 else 1.0 for s in row]
        for row in grouped.max(-1).reshape(-1, grouped.shape[-2])
    ]
    return np.repeat(np.reshape(g, grouped.shape[:-1]), groups, -1)


def logits_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """(heads, tokens, tokens) of weights [width, heads, dims] of queries and keys."""
    x = normal(9, 5, WIDTH).astype(np.float64)
    groups = q.shape[1] // k.shape[1]
    queries = np.einsum("td,dhk->htk", x, np.asarray(q, np.float64))
    keys = np.einsum("td,dhk->htk", x, np.repeat(np.asarray(k, np.float64), groups, 1))
    return queries @ keys.swapaxes(-1, -2)


def clipped(params: Any, logits: Any, *options: float, heads: Any) -> Any:
    """`clip_qk`, compiled as a whole; as arrays of numpy."""
    clip = lambda params, logits: clip_qk(params, logits, *options, heads=heads)  # noqa: E731
    return jax.tree.map(np.asarray, jax.jit(clip)(params, logits))


MHA = Attention(HEADS, {"q": HeadWeight("query", 1), "k": HeadWeight("key", 1)})
GQA = Attention(HEADS, dict(MHA.weights), KEYS)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("attention", "keys"), [(MHA, HEADS), (GQA, KEYS)])
def test_logits_become_g_times_what_they_were(attention, keys, alpha):
    params = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, keys, DIMS)}
    new = clipped(params, {"": LOGITS}, TAU, alpha, heads={"": attention})
    g = factors(LOGITS, HEADS // keys)
    want = g[:, None, None] * logits_of(params["q"], params["k"])
    np.testing.assert_allclose(logits_of(new["q"], new["k"]), want, rtol=1e-5, atol=1e-5)
    for head in np.flatnonzero(g == 1):
        np.testing.assert_array_equal(new["q"][:, head], params["q"][:, head])


def test_heads_side_by_side_and_biases():
    """Linear layers [in, heads * dims] as many models have them, and their biases."""
    apart = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, HEADS, DIMS)}
    flat = {name: x.reshape(WIDTH, -1) for name, x in apart.items()} | {"b": normal(2, 24)}
    weights = {"q": HeadWeight("query", -1), "k": HeadWeight("key", -1)}
    with_bias = Attention(HEADS, weights | {"b": HeadWeight("query", 0)})
    want = clipped(apart, {"": LOGITS}, TAU, 0.3, heads={"": MHA})
    got = clipped(flat, {"": LOGITS}, TAU, 0.3, heads={"": with_bias})
    for name in apart:
        np.testing.assert_array_equal(got[name].reshape(WIDTH, HEADS, DIMS), want[name])
    bias = flat["b"].reshape(HEADS, DIMS) * factors(LOGITS)[:, None] ** 0.3
    np.testing.assert_allclose(got["b"].reshape(HEADS, DIMS), bias, rtol=1e-6)


@pytest.mark.parametrize("is_flat", [True, False])
def test_mla(is_flat):
    """Queries q_nope g^a and q_rope g, keys g^(1 - a); values, k_rope and down projections stay."""
    size = {"q_b": DIMS + ROPE, "kv_b": DIMS + VALUES}
    params: Any = {name: normal(i, WIDTH, HEADS, n) for i, (name, n) in enumerate(size.items())}
    params |= {"q_a": normal(3, 5, WIDTH), "kv_a": normal(4, 5, WIDTH + ROPE)}
    whole = dict(params)
    if is_flat:
        params |= {name: params[name].reshape(WIDTH, -1) for name in size}
    axes: Any = {"axis": 1} if is_flat else {"axis": 1, "dim_axis": 2}
    weights = {
        "q_b": HeadWeight((("query", DIMS), ("query_rope", ROPE)), **axes),
        "kv_b": HeadWeight((("key", DIMS), ("none", VALUES)), **axes),
    }
    new = clipped(params, {"": LOGITS}, TAU, 0.3, heads={"": Attention(HEADS, weights)})
    g = factors(LOGITS)[:, None]
    powers = {"q_b": (0.3, 1.0), "kv_b": (0.7, 0.0)}
    for name, (nope, rest) in powers.items():
        of_head = np.concatenate([g**nope * np.ones(DIMS), g**rest * np.ones(size[name] - DIMS)], 1)
        np.testing.assert_allclose(
            new[name].reshape(whole[name].shape), whole[name] * of_head, rtol=1e-6
        )
    for name in ("q_a", "kv_a"):
        np.testing.assert_array_equal(new[name], params[name])


def side_by_side(q: Any, k: Any, v: Any) -> Any:
    """[..., width, all queries, all keys, all values]: GPT-2's kernel."""
    return np.concatenate([x.reshape(*x.shape[:-2], -1) for x in (q, k, v)], -1)


def on_an_axis(q: Any, k: Any, v: Any) -> Any:
    """[..., width, 3, heads, dims]."""
    return np.stack([q, k, v], -3)


def of_each_head(q: Any, k: Any, v: Any) -> Any:
    """[..., width, heads, 3 * dims]: query, key and value of a head side by side, as GPT-NeoX."""
    return np.concatenate([q, k, v], -1)


def of_each_group(q: Any, k: Any, v: Any) -> Any:
    """[..., width, groups * (queries, key, value of one)]: Megatron-Core's linear_qkv."""
    grouped = [x.reshape(*x.shape[:-2], k.shape[-2], -1) for x in (q, k, v)]
    return np.concatenate(grouped, -1).reshape(*k.shape[:-2], -1)


Q, K = HEADS * DIMS, KEYS * DIMS
GROUP = HEADS // KEYS * DIMS
# How the three are fused, the heads of keys, and what the leaf holds.
FUSED: dict[str, tuple[Any, int, Any]] = {
    "side by side": (
        side_by_side,
        HEADS,
        [HeadWeight("query", -1, within=(-1, 0, Q)), HeadWeight("key", -1, within=(-1, Q, 2 * Q))],
    ),
    "side by side, GQA": (
        side_by_side,
        KEYS,
        [HeadWeight("query", -1, within=(-1, 0, Q)), HeadWeight("key", -1, within=(-1, Q, Q + K))],
    ),
    "on an axis": (
        on_an_axis,
        HEADS,
        [HeadWeight("key", -2, within=(-3, 1, 2)), HeadWeight("query", -2, within=(-3, 0, 1))],
    ),
    "of each head": (
        of_each_head,
        HEADS,
        HeadWeight((("query", DIMS), ("key", DIMS), ("none", DIMS)), -2, -1),
    ),
    "of each group": (
        of_each_group,
        KEYS,
        HeadWeight((("query", GROUP), ("key", DIMS), ("none", DIMS)), -1),
    ),
}


@pytest.mark.parametrize("layers", [(), (2,)])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels(name, layers):
    """As their three parts apart, also with layers stacked; the values stay as they are."""
    fuse, keys, holds = FUSED[name]
    logits = np.array([[20.0, 1.0, 2.0, 7.0], [1.0, 30.0, -2.0, 3.0]])[: 2 if layers else 1]
    logits = logits.reshape(*layers, HEADS)
    counts = {"q": HEADS, "k": keys, "v": keys}
    apart = {x: normal(i, *layers, WIDTH, n, DIMS) for i, (x, n) in enumerate(counts.items())}
    weights = {"q": HeadWeight("query", -2), "k": HeadWeight("key", -2)}
    new = clipped(apart, {"": logits}, TAU, 0.3, heads={"": Attention(HEADS, weights, keys)})
    want = fuse(**new)
    params, attention = {"qkv": fuse(**apart)}, Attention(HEADS, {"qkv": holds}, keys)
    got = clipped(params, {"": logits}, TAU, 0.3, heads={"": attention})
    np.testing.assert_allclose(got["qkv"], want, rtol=1e-6)
    assert np.mean(got["qkv"] != params["qkv"]) > 0.2


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
@pytest.mark.parametrize("name", ["side by side, GQA", "on an axis"])
def test_fused_kernels_on_meshes(name, kind):
    """Where a device has queries and keys in its block, or a part of the dims of all."""
    fuse, keys, holds = FUSED[name]
    mesh = sharded.make_mesh({"a": 2, "b": 2}, "auto" if kind == "manual" else kind)
    shapes = [(WIDTH, n, DIMS) for n in (HEADS, keys, keys)]
    params = {"qkv": fuse(*[normal(i, *shape) for i, shape in enumerate(shapes)])}
    spec = {"qkv": P("a", "b") if params["qkv"].ndim == 2 else P("a", None, None, "b")}
    where = {"qkv": jax.NamedSharding(mesh, spec["qkv"])}
    heads = {"": Attention(HEADS, {"qkv": holds}, keys)}
    want = clipped(params, {"": LOGITS}, TAU, heads=heads)
    clip = lambda p, s: clip_qk(p, {"": s}, TAU, heads=heads, param_shardings=where)  # noqa: E731
    if kind == "manual":
        clip = jax.shard_map(clip, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    logits = jax.device_put(LOGITS.astype("float32"), jax.NamedSharding(mesh, P()))
    got = jax.jit(clip)(jax.device_put(params, where), logits)
    sharded.assert_sharded(got["qkv"], where["qkv"])
    np.testing.assert_allclose(got["qkv"], want["qkv"], rtol=1e-6)


def test_a_stack_of_layers_and_layers_by_path():
    """As `nn.scan` has them, (layers, width, heads, dims); and one leaf a layer."""
    logits = np.array([[20.0, 1.0, 2.0, 7.0], [1.0, 30.0, 2.0, 3.0]])
    stacked = {"q": normal(0, 2, WIDTH, HEADS, DIMS), "k": normal(1, 2, WIDTH, KEYS, DIMS)}
    weights = {"q": HeadWeight("query", -2), "k": HeadWeight("key", -2)}
    attention = Attention(HEADS, weights, KEYS)
    params = {"layers": {"attn": stacked}, "norm": np.ones(3)}
    got = clipped(params, {"layers/attn": logits}, TAU, heads={"layers/attn": attention})
    single = {str(i): {name: x[i] for name, x in stacked.items()} for i in range(2)}
    each = clipped(
        single, {str(i): logits[i] for i in range(2)}, TAU, heads=dict.fromkeys("01", attention)
    )
    for name in stacked:
        want = np.stack([each[str(i)][name] for i in range(2)])
        np.testing.assert_array_equal(got["layers"]["attn"][name], want)
    np.testing.assert_array_equal(got["norm"], params["norm"])


@pytest.mark.parametrize("bad", [0.0, -3.0, np.nan, np.inf, -np.inf])
def test_logits_that_are_not_positive_change_nothing(bad):
    """Also beside a head above the bound, where others' code divides by them."""
    params = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, HEADS, DIMS)}
    logits = np.array([20.0, bad, bad, 1.0])
    new = jax.jit(lambda s: clip_qk(params, {"": s}, TAU, heads={"": MHA}))(logits)
    for name, x in new.items():
        np.testing.assert_array_equal(x[:, 1:], params[name][:, 1:])
        np.testing.assert_allclose(x[:, 0], 0.5 * params[name][:, 0], rtol=1e-6)


def test_the_transformation_leads_to_the_clipped_weights():
    params: Any = {"attn": {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, KEYS, DIMS)}}
    params["up"] = normal(2, WIDTH, WIDTH)
    grads, heads = jax.tree.map(lambda x: 0.1 * x + 1, params), {"attn": GQA}
    views: Any = {"attn": {k: MuonDimensionNumbers(0, (1, 2)) for k in "qk"}}
    views["up"] = MuonDimensionNumbers(0, 1)
    plain: Any = muon(0.1, muon_weight_dimension_numbers=views)
    with_clip: Any = optax.chain(plain, qk_clip(TAU, heads=heads))
    unclipped, step = jax.jit(plain.update), jax.jit(with_clip.update)
    moved = optax.apply_updates(params, unclipped(grads, plain.init(params), params)[0])
    want = clipped(moved, {"attn": LOGITS}, TAU, heads=heads)
    state = with_clip.init(params)
    updates, state = step(grads, state, params, max_logits={"attn": LOGITS})
    got = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    below, _ = step(grads, state, params, max_logits={"attn": np.zeros(HEADS)})
    same, _ = unclipped(grads, state[0], params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), below, same)


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    """Heads and width sharded, heads side by side or on an axis of their own, layers stacked.

    Nothing is sent: each device makes the factors of its block from all heads' logits.
    """
    mesh = sharded.make_mesh({"a": 2, "b": 2}, "auto" if kind == "manual" else kind)
    params = {"q": normal(0, 2, WIDTH, HEADS, DIMS), "k": normal(1, 2, WIDTH, KEYS * DIMS)}
    specs = {"q": P(None, "a", "b", None), "k": P(None, "a", "b")}
    where = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    weights = {"q": HeadWeight("query", 2), "k": HeadWeight("key", 2)}
    heads = {"": Attention(HEADS, weights, KEYS)}
    logits = np.array([[20.0, 1.0, 2.0, 7.0], [1.0, 30.0, 2.0, 3.0]], np.float32)
    want = clipped(params, {"": logits}, TAU, heads=heads)
    tx = qk_clip(TAU, heads=heads, param_shardings=where)
    zeros = jax.tree.map(np.zeros_like, params)

    def clip(p, u, s):
        new = clip_qk(p, {"": s}, TAU, heads=heads, param_shardings=where)
        return new, tx.update(u, tx.init(p), p, max_logits={"": s})[0]

    if kind == "manual":
        clip = jax.shard_map(clip, mesh=mesh, in_specs=(specs, specs, P()), out_specs=(specs,) * 2)
    replicated = jax.device_put(logits, jax.NamedSharding(mesh, P()))
    placed = jax.device_put((params, zeros), (where, where))
    step = jax.jit(clip).lower(*placed, replicated).compile()
    assert read_program(step).counts == {}
    new, updates = step(*placed, replicated)
    for name in params:
        sharded.assert_sharded(new[name], where[name])
        np.testing.assert_allclose(new[name], want[name], rtol=1e-6)
        np.testing.assert_allclose(params[name] + updates[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_logits", [P("b"), P(("b", "a"))])
def test_logits_may_be_sharded_by_heads(of_logits):
    """As attention under tensor parallelism makes them; weights stay sharded as they are."""
    mesh = sharded.make_mesh({"a": 2, "b": 2}, "explicit")
    params = {"q": normal(0, WIDTH, HEADS * DIMS), "k": normal(1, WIDTH, KEYS * DIMS)}
    where = {"q": jax.NamedSharding(mesh, P("a")), "k": jax.NamedSharding(mesh, P("a", "b"))}
    want = clipped(params, {"": LOGITS}, TAU, heads={"": GQA})
    clip = jax.jit(lambda p, s: clip_qk(p, {"": s}, TAU, heads={"": GQA}))
    logits = jax.device_put(LOGITS.astype("float32"), jax.NamedSharding(mesh, of_logits))
    got = clip(jax.device_put(params, where), logits)
    for name in params:
        sharded.assert_sharded(got[name], where[name])
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_leaves_without_a_gradient():
    """Others are passed over; a weight whose update can't be said is listed."""
    params: Any = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, HEADS, DIMS)}
    zeros, tx = jax.tree.map(np.zeros_like, params), qk_clip(TAU, heads={"": MHA})
    update = functools.partial(tx.update, max_logits={"": LOGITS})
    want, _ = update(zeros, tx.init(params), params)
    params["act"] = jax.nn.relu
    got: Any = update(zeros | {"act": None}, tx.init(params), params)[0]
    assert got.pop("act") is None
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ValueError, match="q: no such parameter, or one without a gradient"):
        update(zeros | {"q": None, "act": None}, tx.init(params), params)


def test_ranks_are_never_promoted():
    params = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, KEYS, DIMS)}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = clipped(params, {"": LOGITS}, TAU, heads={"": GQA})
    want = clipped(params, {"": LOGITS}, TAU, heads={"": GQA})
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_data_parallel_devices_clip_by_the_largest_logit_of_all():
    """In a shard_map each has the logits of its part of the batch; `pmax` is the user's."""
    params = {"q": normal(0, WIDTH, HEADS, DIMS), "k": normal(1, WIDTH, HEADS, DIMS)}
    inputs = normal(2, 8, 5, WIDTH)
    tx = qk_clip(TAU, heads={"": MHA}, param_shardings=P())

    def largest(p: Any, x: Any) -> Any:
        q, k = (jnp.einsum("btd,dhk->bhtk", x, p[name]) for name in "qk")
        return jnp.max(jnp.einsum("bhtk,bhsk->bhts", q, k), (0, 2, 3))

    def step(p: Any, x: Any) -> Any:
        logits = {"": jax.lax.pmax(largest(p, x), "data")}
        return tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p, max_logits=logits)[0]

    mesh = sharded.make_mesh({"data": 8}, "auto")
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    got = optax.apply_updates(params, jax.jit(step)(params, inputs))
    want = clipped(params, {"": jax.jit(largest)(params, inputs)}, TAU, heads={"": MHA})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert np.any(want["q"] != params["q"])


def test_bfloat16_weights_are_rounded_once():
    params = {
        name: normal(i, WIDTH, HEADS, DIMS).astype(jnp.bfloat16) for i, name in enumerate("qk")
    }
    new = clipped(params, {"": LOGITS}, TAU, 0.3, heads={"": MHA})
    want = params["q"].astype("float32") * factors(LOGITS)[:, None].astype("float32") ** 0.3
    assert new["q"].dtype == jnp.bfloat16
    np.testing.assert_allclose(new["q"].astype("float32"), want, rtol=2**-8)


def test_heads_that_are_not_there_are_listed():
    params = {"a": {"q": np.ones((WIDTH, 5)), "k": np.ones((WIDTH, HEADS))}}
    flat = Attention(HEADS, {"q": HeadWeight("query", 1), "key": HeadWeight("key", 1)})
    parts = Attention(HEADS, {"k": HeadWeight((("key", 2), ("none", 1)), 1)})
    with pytest.raises(ValueError, match="QK-clip can't find the heads") as error:
        clip_qk(params, {"a": LOGITS}, heads={"a": flat, "b": MHA})
    lines = [line.split(": ")[:2] for line in str(error.value).splitlines()[1:]]
    assert [name.strip() for name, _ in lines] == ["a/q", "a/key", "b/q", "b/k"]
    key = HeadWeight("key", 1)
    beyond, short = (
        Attention(HEADS, {"k": HeadWeight("key", 1, within=within)})
        for within in ((1, 2, 6), (1, 0, 3))
    )
    twice = {"a": Attention(HEADS, {"k": key}), "": Attention(HEADS, {"a/k": key})}
    with pytest.raises(ValueError, match="a/k: two attentions name it"):
        clip_qk(params, dict.fromkeys(twice, LOGITS), heads=twice)
    for logits, heads in (
        (LOGITS, parts),
        (LOGITS, beyond),
        (LOGITS, short),
        (LOGITS[:3], flat),
        (np.ones((WIDTH + 1, HEADS)), flat),
    ):
        with pytest.raises(ValueError, match="  a/"):
            clip_qk(params, {"a": logits}, heads={"a": heads})


def test_options_out_of_range():
    for options in ({"alpha": 1.5}, {"tau": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            clip_qk({}, {}, heads={}, **options)
    for heads in (None, 5, [MHA], {"": 4}):
        with pytest.raises(TypeError, match="heads must have an Attention for each path"):
            clip_qk({}, {}, heads=heads)  # pyright: ignore[reportArgumentType]
    for counts in ((0, None), ("4", None), (4, 0)):
        with pytest.raises(ValueError, match="heads must be a positive integer, got"):
            Attention(counts[0], {}, counts[1])  # pyright: ignore[reportArgumentType]
    injected: Any = optax.inject_hyperparams(qk_clip)
    with pytest.raises(TypeError, match=r"alpha came as a JAX array.*static_args=\('alpha',\)"):
        injected(heads={}).init({})
    with pytest.raises(ValueError, match="role must be one of"):
        HeadWeight("value", 0)  # pyright: ignore[reportArgumentType]
    for within in ((0, 3, 3), (0, -2, 3)):
        with pytest.raises(ValueError, match=r"within must be \(axis, start, stop\)"):
            HeadWeight("key", 0, within=within)
    parts = {w: HeadWeight("key", 0, within=w) for w in ((0, 0, 4), (0, 3, 6), (1, 4, 6))}
    first, overlapping, other_axis = parts.values()
    for pair in ((first, overlapping), (first, other_axis), (first, HeadWeight("key", 0))):
        with pytest.raises(ValueError, match=r"must each be within other entries.*\n  qkv: "):
            Attention(4, {"qkv": pair})
    with pytest.raises(ValueError, match="4 heads can't share 3"):
        Attention(4, {}, 3)
    tx, params = qk_clip(heads={}), {"w": np.ones(2)}
    with pytest.raises(ValueError, match="needs the parameters and the largest logits"):
        tx.update(params, tx.init(params), params)
