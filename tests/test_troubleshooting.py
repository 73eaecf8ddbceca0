"""Every message in docs/troubleshooting.md is one that the library gives, and every fix is one."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shown import plan

from muon_optax import (
    MatrixView,
    MuonWarning,
    Rule,
    check_state,
    default_rules,
    flax_matrix_views,
    muon,
    state_shardings,
)
from muon_optax.interop import from_optax

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


W = {"w": ones(4, 4)}
TWO = {"w": ones(4, 4), "v": ones(4, 4)}
CONV = {"w": ones(4, 4), "conv": ones(3, 3, 4, 4)}
STACK = {"w": ones(3, 4, 5), "b": ones(3, 4)}
MIX = {"mix": {"kernel": ones(3, 4, 5)}}
SHARED = {"layers": {"norm": {"scale": ones(3, 8)}, "step": {"scale": ones(8)}}}
SHARED["layers"]["attn"] = {"q": ones(3, 8, 6), "o": ones(3, 6, 8)}
STEM = {"stem": {"kernel": ones(3, 3, 1, 8)}, "up": {"kernel": ones(8, 16)}}
GROUPS = {"a": {"kernel": ones(3, 32)}, "b": {"kernel": ones(3, 3, 8, 32), "bias": ones(32)}}
ORDER = {"mix": {"weight": ones(4, 6)}}
LAST = {"block": {"a": ones(2, 2), "b": ones(2, 2)}, "last": {"c": ones(2, 2)}}
WIDE = {"a": {"kernel": ones(8, 8)}, "b": {"kernel": ones(8, 20)}}
TIED = dict.fromkeys(("up", "lm_head"), W["w"])
QKV = {"qkv": ones(64, 80)}
HALF = {"w": ones(4, 4).astype(jnp.bfloat16)}
MESH8 = AbstractMesh((8,), ("f",))
STRUCT = {"w": jax.ShapeDtypeStruct((16, 32), "float32")}


def init(params: Any, **options: Any) -> Callable[[], Any]:
    return lambda: muon(0.1, **options).init(params)


def on_mesh(make: Callable[..., Any], kind: str = "explicit", **options: Any) -> Callable[[], Any]:
    """Traces an update of a matrix whose rows are sharded."""

    def trace():
        where = NamedSharding(sharded.make_mesh({"f": 8}, kind), P("f"))
        params = {"w": jax.device_put(jnp.ones((16, 32)), where)}
        tx = make(0.1, **options)
        return jax.jit(tx.update).lower(params, tx.init(params), params)

    return trace


def in_shard_map(check_vma: bool, **options: Any) -> Callable[[], Any]:
    mesh = sharded.make_mesh({"f": 8})

    def body(x):
        tx: Any = muon(0.1, **options)
        return tx.update({"w": x}, tx.init({"w": x}))[0]["w"]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("f"), out_specs=P("f"), check_vma=check_vma)
    x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=NamedSharding(mesh, P("f")))
    return lambda: jax.jit(mapped).lower(x)


def on_auto() -> Any:
    mesh = sharded.make_mesh({"f": 8}, "auto")
    return jax.device_put({"w": jnp.ones((16, 32))}, NamedSharding(mesh, P()))


def planned(shape: tuple[int, ...], where: Any, **options: Any) -> Callable[[], Any]:
    return lambda: plan({"w": jax.ShapeDtypeStruct(shape, "float32")}, where, **options)


def injected(params: Any, inject: Any = None, **options: Any) -> Callable[[], Any]:
    tx = optax.inject_hyperparams(muon, **(inject or {}))
    return lambda: tx(learning_rate=0.1, **options).init(params)


def update(tx: Any, grads: Any, *params: Any, begin: Any = None) -> Callable[[], Any]:
    start = begin or tx.init
    return lambda: jax.eval_shape(tx.update, grads, start(grads), *params)


def of_optax(params: Any) -> Any:
    return optax.contrib.muon(0.1).init(params)


def labelled(label: Any, params: Any = W) -> Any:
    return init(params, partition=label)


def viewed(view: Any, params: Any) -> Any:
    return init(params, muon_weight_dimension_numbers=view)


def ruled(params: Any, *rules: Rule) -> Callable[[], Any]:
    return lambda: flax_matrix_views(params, rules=rules)


RULES = default_rules()
AS_ADAM: Any = {"w": "adam", "v": "muon"}
ROWS = NamedSharding(MESH8, P("f"))
CHANGED = muon(0.1, partition=AS_ADAM)
DECAYED = muon(0.1, weight_decay=0.1)

# What gives each message of the page, in its order, and what the fix makes of it.
CASES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (init({"head": W["w"]}), labelled((Rule("head", "muon"), *RULES), {"head": W["w"]})),
    (init(CONV), viewed({"w": MatrixView(), "conv": MatrixView((0, 1, 2), 3)}, CONV)),
    (init(STACK), viewed({"w": MatrixView(1, 2), "b": None}, STACK)),
    (lambda: flax_matrix_views(MIX), lambda: flax_matrix_views(MIX, scanned={"mix": 0})),
    (
        lambda: flax_matrix_views(SHARED),
        lambda: flax_matrix_views(SHARED, scanned=("layers/attn", "layers/norm")),
    ),
    (ruled(STEM), ruled(STEM, Rule("stem", "muon"))),
    (ruled(GROUPS), ruled(GROUPS, Rule("b", "muon", view=MatrixView((0, 1, 2), 3, heads=4)))),
    (init(ORDER), labelled((Rule("mix", "muon", view=MatrixView(1, 0)), *RULES), ORDER)),
    (init(LAST), labelled((Rule("last/c", "adam"), *RULES), LAST)),
    (init(WIDE), labelled((Rule("b", "muon"), *RULES), WIDE)),
    (init([ones(4, 6), ones(6, 4)]), init({"a": ones(4, 6), "b": ones(6, 4)})),
    (init(TIED), labelled((Rule("up", "adam"), *RULES), {**TIED, "v": TWO["v"]})),
    (labelled((Rule("v", "adam"), *RULES)), labelled((Rule("v", "adam"), *RULES), TWO)),
    (
        labelled((*RULES, Rule("head", "muon")), {"head": W["w"], **W}),
        labelled((Rule("head", "muon"), *RULES), {"head": W["w"], **W}),
    ),
    (
        init(TWO, partition=(Rule("v", "adam"),), muon_weight_dimension_numbers=MatrixView()),
        viewed({"w": MatrixView(), "v": None}, TWO),
    ),
    (labelled((Rule("v", "adam"), RULES), TWO), labelled((Rule("v", "adam"), *RULES), TWO)),
    (
        labelled({"w": "muon", "b": "muon"}, {**W, "b": ones(4)}),
        labelled({"w": "muon", "b": "adam"}, {**W, "b": ones(4)}),
    ),
    (viewed(MatrixView(split=(64, 8)), QKV), viewed(MatrixView(split=(64, 8, 8)), QKV)),
    (labelled({"w": "muon"}, TWO), labelled({"w": "muon", "v": "muon"}, TWO)),
    (init({**W, "act": jax.nn.relu}), init({**W, "act": None})),
    (on_mesh(optax.contrib.muon), on_mesh(muon)),
    (on_mesh(muon, "auto"), on_mesh(muon, "auto", param_shardings=P("f"))),
    (in_shard_map(True), in_shard_map(True, param_shardings=P("f"))),
    (in_shard_map(False), in_shard_map(False, param_shardings=P("f"))),
    (
        in_shard_map(True, param_shardings=P("f"), mu_shardings=P()),
        in_shard_map(True, param_shardings=P("f"), mu_shardings=P("f")),
    ),
    (planned((18, 4), ROWS), planned((18, 4), NamedSharding(MESH8, P()))),
    (
        on_mesh(muon, "auto", param_shardings=P("embed", "mlp")),
        on_mesh(muon, "auto", param_shardings=P("f")),
    ),
    (on_mesh(muon, strategy="gram"), on_mesh(muon, strategy="gather")),
    (on_mesh(muon, strategy=(("v", "gather"),)), on_mesh(muon, strategy=(("w", "gather"),))),
    (planned((16, 32), P("f")), planned((16, 32), ROWS)),
    (
        lambda: state_shardings(muon(0.1), STRUCT),
        lambda: state_shardings(muon(0.1), STRUCT, ROWS),
    ),
    (
        planned((16, 12), None, mu_shardings=NamedSharding(MESH8, P(None, "f"))),
        planned((16, 12), None, mu_shardings={"w": None}),
    ),
    (
        lambda: jax.jit(muon(0.1, shard_moments_over="f").init)(on_auto()),
        lambda: jax.jit(muon(0.1, shard_moments_over="f", param_shardings=P()).init)(on_auto()),
    ),
    (on_mesh(muon, max_workspace_bytes=4096), on_mesh(muon, max_workspace_bytes=6 * 2048)),
    (lambda: muon(0.1, "dion", 6), lambda: muon(0.1, "dion")),
    (injected(W, ns_steps=5), injected(W, {"static_args": ("ns_steps",)}, ns_steps=5)),
    (injected(W, mu_dtype=jnp.float32), injected(W, mu_dtype="float32")),
    (injected(HALF), injected(HALF, {"hyperparam_dtype": jnp.float32})),
    (lambda: muon(0.1, beta=lambda count: 0.9), injected(W, beta=lambda count: 0.9)),  # pyright: ignore
    (
        lambda: muon(0.1, scale="match_rms_adamw", consistent_rms=0.2),
        lambda: muon(0.1, scale="match_rms_adamw"),
    ),
    (lambda: muon(0.1, nesterov="false"), lambda: muon(0.1, nesterov=False)),  # pyright: ignore
    (update(DECAYED, W), update(DECAYED, W, W)),
    (update(CHANGED, TWO, begin=muon(0.1).init), update(muon(0.1), TWO, begin=muon(0.2).init)),
    (update(muon(0.1), W, {"w": ones(4, 5)}), update(muon(0.1), W, W)),
    (
        lambda: check_state(CHANGED, TWO, muon(0.1).init(TWO)),
        lambda: check_state(muon(0.2), TWO, muon(0.1).init(TWO)),
    ),
    (
        update(muon(0.1), W, begin=of_optax),
        update(muon(0.1), W, begin=lambda params: from_optax(of_optax(params), params)),
    ),
    (update(muon(0.1), W, begin=optax.adamw(0.1).init), update(muon(0.1), W)),
    (lambda: from_optax(optax.adamw(0.1).init(W), W), init(W)),
]


def told(call: Callable[[], Any]) -> list[str]:
    """The warnings and the error of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return [str(w.message) for w in caught] + [str(error)]
    return [str(w.message) for w in caught if issubclass(w.category, MuonWarning)]


@pytest.mark.parametrize(
    ("message", "broken", "fixed"),
    [(message, *case) for message, case in zip(MESSAGES, CASES, strict=True)],
    ids=[message[:40] for message in MESSAGES],
)
def test_the_message_comes_and_the_fix_fixes(message, broken, fixed):
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    found = [" ".join(text.split()) for text in told(broken)]
    assert any(re.match(pattern, text) for text in found), found
    assert told(fixed) == []
