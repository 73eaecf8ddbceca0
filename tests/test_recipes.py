"""Each recipe against the same system written out in float64 numpy, on [out, in] weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracle import JORDAN, Rows, newton_schulz, relative_error
from running import run

import muon_optax
from muon_optax import MatrixView, MuonWarning, flax_matrix_views, recipes

QUINTIC: Rows = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_102: Rows = (
    (8.156555, -22.483293, 15.878770),
    (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065),
    (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
)


def original(out: int, fan_in: int) -> float:
    return max(1, out / fan_in) ** 0.5


def match_rms_adamw(out: int, fan_in: int) -> float:
    return 0.2 * max(out, fan_in) ** 0.5


def spectral(out: int, fan_in: int) -> float:
    return max(out, fan_in) ** 0.5


def unit_rms_norm(out: int, fan_in: int) -> float:
    return (out / fan_in) ** 0.5


@dataclasses.dataclass(frozen=True)
class System:
    """One row of the table of conventions, as its source has it."""

    learning_rate: float
    decay: float
    scale: Callable[[int, int], float]
    rows: Rows = JORDAN
    norm: float = 1.0
    sums: bool = False
    nesterov: bool = True
    kind: str = "decoupled"
    adam_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adam_decay: float | None = None  # None: as Muon's

    def orthogonalized(self, x: np.ndarray) -> np.ndarray:
        return newton_schulz(x / (self.norm * np.linalg.norm(x)), self.rows, "none")

    def muon(self, p: np.ndarray, g: np.ndarray, buffer: np.ndarray, beta: float) -> np.ndarray:
        """The next weight [out, in]; `buffer` is rewritten in place."""
        if self.kind == "l2":
            g = g + self.decay * p
        gain = 1.0 if self.sums else 1 - beta
        buffer *= beta
        buffer += gain * g
        mix = gain * g + beta * buffer if self.nesterov else buffer
        factor = {"decoupled": self.learning_rate * self.decay, "independent": self.decay}
        p = p * (1 - factor.get(self.kind, 0.0))
        return p - self.learning_rate * self.scale(*p.shape) * self.orthogonalized(mix)

    def adamw(self, p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, step: int) -> Any:
        rate = self.learning_rate if self.adam_rate is None else self.adam_rate
        decay = self.decay if self.adam_decay is None else self.adam_decay
        b1, b2 = self.betas
        m[...] = b1 * m + (1 - b1) * g
        v[...] = b2 * v + (1 - b2) * g * g
        step_size = (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + self.eps)
        return p * (1 - rate * decay) - rate * step_size


TORCH_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "adam_decay": 0.01}
SYSTEMS = {
    "torch_muon": System(1e-3, 0.1, original, **TORCH_ADAMW),
    "keller_jordan": System(0.02, 0.0, original, adam_rate=3e-4, eps=1e-10, adam_decay=0.0),
    "moonlight": System(1e-3, 0.1, match_rms_adamw, sums=True),
    "llama_factory": System(1e-3, 0.1, match_rms_adamw, sums=True),
    "xtuner": System(1e-5, 0.1, match_rms_adamw, QUINTIC, sums=True),
    "areal": System(1e-3, 0.0, lambda *s: 0.2 * spectral(*s), eps=1e-10, adam_decay=0.0),
    "megatron": System(3e-4, 0.01, spectral, QUINTIC, nesterov=False, betas=(0.9, 0.999)),
    "transformer_engine": System(3e-4, 0.01, spectral, QUINTIC, betas=(0.9, 0.999), adam_decay=0.0),
    "dion": System(0.01, 0.01, unit_rms_norm, POLAR_102, 1.02, sums=True, nesterov=False),
}
# Sources without a learning rate of their own.
NEEDS_RATE = {"areal": {"learning_rate": 1e-3}}
SHAPES = {"up": (6, 10), "down": (10, 6), "row": (1, 8)}
ONE = {"up": (6, 10)}
LARGER = {"up": (24, 40), "down": (40, 24), "row": (1, 24), "square": (32, 32)}


def weights(seed: int, steps: int = 0, sizes: dict[str, tuple[int, int]] = SHAPES) -> Any:
    """[in, out] kernels and a bias; with `steps`, as many trees of gradients."""
    rng = np.random.default_rng(seed)
    shapes = {name: {"kernel": shape} for name, shape in sizes.items()} | {"b": {"bias": (7,)}}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    trees = [
        jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=is_shape)
        for _ in range(max(steps, 1))
    ]
    return trees if steps else trees[0]


def trajectory(system: System, params: Any, grads: list[Any], beta: float = 0.95) -> list[Any]:
    """The parameters after each step in float64, [in, out] again."""
    p = {
        name: np.asarray(leaf["kernel"], np.float64).T
        for name, leaf in params.items()
        if name != "b"
    }
    buffers = {name: np.zeros_like(x) for name, x in p.items()}
    bias = np.asarray(params["b"]["bias"], np.float64)
    m, v, seen = np.zeros_like(bias), np.zeros_like(bias), []
    for step, grad in enumerate(grads, start=1):
        g = {name: np.asarray(grad[name]["kernel"], np.float64).T for name in p}
        p = {name: system.muon(p[name], g[name], buffers[name], beta) for name in p}
        bias = system.adamw(bias, np.asarray(grad["b"]["bias"], np.float64), m, v, step)
        seen.append({name: {"kernel": x.T} for name, x in p.items()} | {"b": {"bias": bias}})
    return seen


def updates_of(params: Any, seen: list[Any]) -> list[Any]:
    before = [params, *seen[:-1]]
    return [
        jax.tree.map(lambda old, new: new - np.asarray(old, np.float64), a, b)
        for a, b in zip(before, seen, strict=True)
    ]


def worst(got: list[Any], want: list[Any]) -> dict[str, float]:
    """The largest relative error of any step, for Muon's leaves and for AdamW's."""
    errors = jax.tree.map(relative_error, got, want)
    muon = [max(jax.tree.leaves({k: v for k, v in e.items() if k != "b"})) for e in errors]
    return {"muon": max(muon), "adam": max(e["b"]["bias"] for e in errors)}


def errors_of(tx: Any, system: System, sizes: dict[str, tuple[int, int]] = ONE) -> dict[str, float]:
    params, grads = weights(0, sizes=sizes), weights(1, 4, sizes)
    got, _, _ = run(tx, params, grads, jit=True)
    return worst(got, updates_of(params, trajectory(system, params, grads)))


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_updates_are_the_systems(name):
    """With the defaults of the system, learning rate and weight decay among them."""
    make = getattr(recipes, name)
    tx = make(**NEEDS_RATE.get(name, {}), ns_dtype=None, partition=None)
    errors = errors_of(tx, SYSTEMS[name], SHAPES)
    assert errors["muon"] < 1e-5
    assert errors["adam"] < 3e-5  # optax's 1 - b2^t in float32


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_systems_own_dtype(name):
    """bfloat16 inside, but for TransformerEngine, which computes in the parameter's dtype."""
    tx = getattr(recipes, name)(**NEEDS_RATE.get(name, {}))
    params = weights(0, sizes=ONE)
    program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert ("bf16" in program) == (name != "transformer_engine")


@pytest.mark.parametrize("kind", ["decoupled", "independent", "l2"])
@pytest.mark.parametrize("name", ["megatron", "transformer_engine"])
def test_kinds_of_weight_decay(name, kind):
    system = dataclasses.replace(SYSTEMS[name], kind=kind, learning_rate=0.05, decay=0.2)
    tx = getattr(recipes, name)(
        0.05, weight_decay=0.2, weight_decay_kind=kind, ns_dtype=None, partition=None
    )
    assert errors_of(tx, system)["muon"] < 1e-5


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("torch_muon", {"scale": "match_rms_adamw"}, {"scale": match_rms_adamw}),
        ("torch_muon", {"nesterov": False}, {"nesterov": False}),
        ("llama_factory", {"learning_rate": 0.05}, {"learning_rate": 0.05}),
        ("xtuner", {"weight_decay": 0.3, "partition": None}, {"decay": 0.3}),
        ("megatron", {"nesterov": True}, {"nesterov": True}),
        ("megatron", {"scale_factor": 0.2}, {"scale": lambda *s: 0.2 * spectral(*s)}),
        ("areal", {"learning_rate": 1e-3, "scale": "unit_rms_norm"}, {"scale": unit_rms_norm}),
        ("areal", {"learning_rate": 1e-3, "scale": "shape_scaling"}, {"scale": original}),
        ("dion", {"scale": "match_rms_adamw"}, {"scale": match_rms_adamw}),
        ("dion", {"ns_coeffs": "dion"}, {"rows": QUINTIC, "norm": 1.0}),
        ("moonlight", {"adam_weight_decay": 0.5}, {"adam_decay": 0.5}),
        ("keller_jordan", {"adam_learning_rate": 1e-2}, {"adam_rate": 1e-2}),
    ],
)
def test_defaults_can_be_overridden(name, given, changes):
    system = dataclasses.replace(SYSTEMS[name], **changes)
    errors = errors_of(getattr(recipes, name)(**given, ns_dtype=None), system)
    assert errors["muon"] < 1e-5
    assert errors["adam"] < 3e-5


def muon_paths(tx: Any, params: Any) -> set[str]:
    mu = tx.init(params).inner_states["muon"].inner_state[0].mu
    return {
        jax.tree_util.keystr(k, simple=True) for k, _ in jax.tree_util.tree_leaves_with_path(mu)
    }


MODEL_SHAPES = {
    "embed_tokens": (32, 4),
    "PatchEmbedder": (4, 4),
    "wte": (32, 4),
    "wpe2": (6, 4),
    "q_lora_a": (4, 2),
    "lm_head": (4, 32),
    "up": (4, 8),
    "down": (8, 4),
    "gate": (4, 1),
    "norm": (4,),
}
MODEL = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in MODEL_SHAPES.items()}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama_factory", {"up", "down", "gate"}),
        ("xtuner", {"PatchEmbedder", "wte", "wpe2", "q_lora_a", "up", "down"}),
        ("torch_muon", {"PatchEmbedder", "up", "down"}),  # by words: wpe2, q_lora_a
        ("optax_muon", set(MODEL) - {"norm"}),
    ],
)
def test_who_gets_muon(name, wanted):
    assert muon_paths(getattr(recipes, name)(0.1), MODEL) == wanted


def test_rules_may_match_nothing():
    for name in (*SYSTEMS, "optax_muon"):
        assert muon_paths(getattr(recipes, name)(0.1), {"up": MODEL["up"]}) == {"up"}


def test_stacks_without_a_view_are_told_of():
    params = {"layers": jax.ShapeDtypeStruct((2, 4, 8), "float32"), "up": MODEL["up"]}
    for name in ("llama_factory", "xtuner", "torch_muon"):
        with pytest.warns(MuonWarning, match="layers"):
            getattr(recipes, name)(0.1).init(params)


def test_own_rules_and_views_replace_the_recipes():
    rules = (muon_optax.Rule("up", "adam"),)
    assert muon_paths(recipes.llama_factory(partition=rules), MODEL) == set(MODEL) - {"up", "norm"}
    views = {name: None for name in MODEL} | {"wte": MatrixView(0, 1)}
    assert muon_paths(recipes.xtuner(muon_weight_dimension_numbers=views), MODEL) == {"wte"}
    with pytest.raises(ValueError, match=r"partition would replace the views of \['qkv'\]"):
        recipes.dion(split_sizes={"qkv": 3}, partition=rules)


def blocks(sizes: tuple[int, ...], steps: int = 3) -> list[dict[str, np.ndarray]]:
    """A tree of [6, n] leaves for each step."""
    rng = np.random.default_rng(3)
    return [
        {f"w{i}": rng.normal(size=(6, n)).astype(np.float32) for i, n in enumerate(sizes)}
        for _ in range(steps)
    ]


def joined(tree: dict[str, Any]) -> np.ndarray:
    return np.concatenate(list(tree.values()), axis=1)


def check_fused(tx: Any, plain: Any, name: str, separate: list[Any], join: Any = joined) -> None:
    """One leaf of fused matrices against as many leaves of their own."""
    fused = [{name: join(tree)} for tree in separate]
    got, _, _ = run(tx, fused[0], fused, jit=True)
    want, _, _ = run(plain, separate[0], separate, jit=True)
    for one, many in zip(got, want, strict=True):
        np.testing.assert_allclose(one[name], join(many), rtol=2e-5, atol=1e-7)


F32: dict[str, Any] = {"ns_dtype": None}


@pytest.mark.parametrize(("name", "count"), [("fused_w1w3", 4), ("fused_w2", 2)])
def test_xtuner_splits_experts(name, count):
    tx = recipes.xtuner(0.1, num_experts=2, **F32)
    check_fused(tx, recipes.xtuner(0.1, **F32), name, blocks((5,) * count))


@pytest.mark.parametrize(("sizes", "split"), [((8, 2, 3), (8, 2, 3)), ((4, 4, 4), 3)])
@pytest.mark.parametrize("make", [recipes.xtuner, recipes.dion])
def test_split_sizes(make, sizes, split):
    check_fused(
        make(0.1, split_sizes={"qkv": split}, **F32), make(0.1, **F32), "qkv", blocks(sizes)
    )


def test_megatron_splits_qkv_by_query_group():
    """[q q k v | q q k v]: the blocks of one kind in all groups are one matrix."""

    def by_group(tree):
        parts = [np.split(np.asarray(x), 2, axis=1) for x in tree.values()]
        return np.concatenate([part[group] for group in range(2) for part in parts], axis=1)

    tx = recipes.megatron(0.1, qkv_split=(4, 2, 2), query_groups=2, **F32)
    check_fused(tx, recipes.megatron(0.1, **F32), "linear_qkv", blocks((8, 4, 4)), by_group)


def test_names_and_sizes_of_fused_leaves_are_checked():
    params: Any = {"qkv": jax.ShapeDtypeStruct((6, 12), "float32")}
    with pytest.raises(ValueError, match="match no leaf of qkv:\n  'linear_qkv' -> 'muon'"):
        recipes.megatron(qkv_split=(8, 2, 2)).init(params)
    with pytest.raises(ValueError, match=r"match no leaf of qkv:\n.*fused_w\(\?:1w3\|2\)"):
        recipes.xtuner(num_experts=2).init(params)
    with pytest.raises(ValueError, match="must fill the merged output axis"):
        recipes.dion(split_sizes={"qkv": (8, 2, 1)}).init(params)


def test_convolutions_of_keller_jordan_are_flattened():
    rng = np.random.default_rng(5)
    kernel = rng.normal(size=(3, 3, 4, 8)).astype(np.float32)
    params = {"Conv_0": {"kernel": kernel}}
    tx = recipes.keller_jordan(
        muon_weight_dimension_numbers=flax_matrix_views(params), ns_dtype=None, learning_rate=1.0
    )
    (got,), _, _ = run(tx, params, [params], jit=True)
    flat = np.asarray(kernel, np.float64).reshape(36, 8).T
    system = dataclasses.replace(SYSTEMS["keller_jordan"], learning_rate=1.0)
    want = system.muon(flat, flat, np.zeros_like(flat), 0.95) - flat
    assert relative_error(got["Conv_0"]["kernel"].reshape(36, 8).T, want) < 1e-5


def test_optax_muon_is_optax():
    params, grads = weights(0), weights(1, 4)
    got = run(recipes.optax_muon(0.02, weight_decay=0.1), params, grads, jit=True)
    want = run(optax.contrib.muon(0.02, weight_decay=0.1), params, grads, jit=True)
    errors = worst(got[0], want[0])
    assert errors["muon"] < 1e-5
    assert errors["adam"] < 1e-6


def test_adamw_has_no_nesterov_momentum():
    ones = np.ones(5, np.float32)
    params, grads = {"bias": ones}, [{"bias": np.arange(5, dtype=np.float32)}, {"bias": ones}]
    partition = (muon_optax.Rule("bias", "adam"),)
    with pytest.warns(MuonWarning, match="no leaf gets Muon"):
        got = run(recipes.moonlight(0.1, partition=partition), params, grads, jit=True)
    want = run(optax.adamw(0.1, b2=0.95, weight_decay=0.1), params, grads, jit=True)
    np.testing.assert_allclose(got[2]["bias"], want[2]["bias"], rtol=1e-6)


@pytest.mark.parametrize("name", [*SYSTEMS, "optax_muon"])
def test_the_state_is_that_of_muon(name):
    params = jax.eval_shape(lambda: weights(0))
    tx = getattr(recipes, name)(0.1, partition=())
    state, plain = tx.init(params), muon_optax.muon(0.1).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(plain)
    after = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(after) == jax.tree.structure(plain)


def test_recipes_are_scheduled_injected_and_masked_as_muon_is():
    params, grads = weights(0), weights(1, 3)
    rates = optax.linear_schedule(0.1, 0.2, 2)
    want, _, _ = run(recipes.moonlight(rates), params, grads, jit=True)
    injected = optax.inject_hyperparams(
        lambda learning_rate: recipes.moonlight(learning_rate), hyperparam_dtype=jnp.float32
    )(learning_rate=rates)
    got, state, _ = run(injected, params, grads, jit=True)
    assert max(worst(got, want).values()) < 1e-6
    assert state.hyperparams["learning_rate"] == rates(2)
    frozen = optax.partition(
        {"muon": recipes.dion(0.1), "none": optax.set_to_zero()},
        {n: "muon" for n in params} | {"b": "none"},
    )
    updates = run(frozen, params, grads[:1], jit=True)[0][-1]
    assert not updates["b"]["bias"].any()
    assert updates["up"]["kernel"].any()


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="nesterov_momentum"):
        recipes.torch_muon(nesterov_momentum=True)


def torch_steps(make: Any, params: Any, grads: list[Any]) -> list[Any]:
    """The kernels after each step of a torch optimizer on [out, in] weights."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    names = [name for name in params if name != "b"]
    held = {n: torch.tensor(np.array(params[n]["kernel"]).T.copy()) for n in names}
    optimizer, seen = make([torch.nn.Parameter(x) for x in held.values()]), []
    for grad in grads:
        for name, p in zip(names, optimizer.param_groups[0]["params"], strict=True):
            p.grad = torch.tensor(np.array(grad[name]["kernel"]).T.copy())
        optimizer.step()
        ps = optimizer.param_groups[0]["params"]
        seen.append(
            {n: {"kernel": p.detach().double().numpy().T} for n, p in zip(names, ps, strict=True)}
        )
    return seen


def differences(got: list[Any], want: list[Any]) -> tuple[float, float]:
    """The largest relative error of an update, and its mean signed part over leaves and steps."""
    signed, largest = [], 0.0
    for one, other in zip(got, want, strict=True):
        for name, leaf in other.items():
            u, v = np.asarray(one[name]["kernel"], np.float64), leaf["kernel"]
            largest = max(largest, relative_error(u, v))
            signed.append(np.vdot(u - v, v) / np.vdot(v, v))
    return largest, float(np.mean(signed))


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_optim_muon_itself(adjust, nesterov):
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    params, grads = weights(0, sizes=LARGER), weights(1, 6, LARGER)

    def make(ps):
        return torch.optim.Muon(ps, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust)

    seen = torch_steps(make, params, grads)
    want = updates_of({name: params[name] for name in seen[0]}, seen)
    scale = "shape_scaling" if adjust == "original" else adjust
    got = run(recipes.torch_muon(0.02, scale=scale, nesterov=nesterov), params, grads, jit=True)[0]
    largest, bias = differences(got, want)
    assert largest < 4e-2
    assert abs(bias) < 5e-3


def test_torch_rewrites_its_momentum_and_this_does_not():
    """torch 2.13 normalises bfloat16 momentum in place: 0.158 after one step, and right is 0.1."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    p = torch.nn.Parameter(torch.ones(8, 5, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    peer = torch.optim.Muon([p], lr=0.0, momentum=0.9, nesterov=False)
    peer.step()
    theirs = peer.state[p]["momentum_buffer"].double()
    ones = np.ones((5, 8), jnp.bfloat16)
    tx = recipes.torch_muon(0.0, beta=0.9, nesterov=False)
    _, state, _ = run(tx, ones, [ones], jit=True)
    ours = np.asarray(state.inner_states["muon"].inner_state[0].mu, np.float64)
    np.testing.assert_allclose(ours, 0.1, rtol=4e-3)
    if torch.__version__ < "2.14":
        np.testing.assert_allclose(theirs, 0.158, rtol=4e-3)


def test_torch_shrinks_tiny_gradients_and_this_does_not():
    """torch clamps the norm at 1e-7, so that its updates fade below; right is their full size."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    params, grads = weights(0, sizes=LARGER), weights(1, 1, LARGER)
    tiny = [jax.tree.map(lambda g: np.float32(1e-10) * g, grads[0])]
    seen = torch_steps(lambda ps: torch.optim.Muon(ps, lr=1.0, weight_decay=0.0), params, tiny)
    theirs = updates_of({name: params[name] for name in seen[0]}, seen)[0]
    tx = recipes.torch_muon(1.0, weight_decay=0.0)
    (ours,), _, _ = run(tx, params, tiny, jit=True)
    (right,), _, _ = run(tx, params, grads, jit=True)
    for name in theirs:
        size = np.linalg.norm(right[name]["kernel"])
        assert relative_error(ours[name]["kernel"], right[name]["kernel"]) < 4e-2
        assert np.linalg.norm(theirs[name]["kernel"]) < 0.5 * size


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        (
            {"nesterov": True, "scale_mode": "unit_rms_norm"},
            {"nesterov": True, "scale": "unit_rms_norm"},
        ),
        (
            {"scale_mode": "shape_scaling", "extra_scale_factor": 0.5},
            {"scale": "shape_scaling", "scale_factor": 0.5},
        ),
        ({"weight_decay_method": "independent"}, {"weight_decay_kind": "independent"}),
        ({"weight_decay_method": "l2"}, {"weight_decay_kind": "l2"}),
        ({"coefficient_type": "simple"}, {"ns_coeffs": "jordan"}),
        ({"fp32_matmul_prec": "highest"}, {"ns_dtype": None}),
    ],
)
def test_emerging_optimizers_itself(given, options):
    """Megatron-Core's own, which rounds each matmul to bfloat16 unless told 'highest'."""
    peer = pytest.importorskip(
        "emerging_optimizers.orthogonalized_optimizers",
        reason="emerging-optimizers (Python 3.12 and later, with triton) isn't installed",
        exc_type=ImportError,
    )
    params, grads = weights(0, sizes=LARGER), weights(1, 4, LARGER)
    seen = torch_steps(lambda ps: peer.Muon(ps, lr=0.01, weight_decay=0.1, **given), params, grads)
    want = updates_of({name: params[name] for name in seen[0]}, seen)
    tx = recipes.megatron(0.01, weight_decay=0.1, **options)
    largest, bias = differences(run(tx, params, grads, jit=True)[0], want)
    assert largest < (1e-5 if "fp32_matmul_prec" in given else 4e-2)
    assert abs(bias) < 1e-2


def test_thin_kernels_have_known_updates():
    """One singular value: jordan takes 1 to 0.696436, and the scale goes by role."""
    tx = recipes.torch_muon(1.0, weight_decay=0.0, ns_dtype=None, partition=())
    g = np.arange(1, 5, dtype=np.float32)
    grads = {"row": g[None], "column": g[:, None], "one": g[:1, None]}
    (got,), _, _ = run(tx, grads, [grads], jit=True)
    row = -np.array([0.2543, 0.5086, 0.7629, 1.0172])
    np.testing.assert_allclose(got["row"][0], row, atol=1e-4)
    np.testing.assert_allclose(got["column"][:, 0], row / 2, atol=1e-4)
    np.testing.assert_allclose(got["one"], -0.696436, atol=1e-5)


def test_partition_dim_is_the_parameters_sharding():
    """TransformerEngine's partition_dim 0, 1 and none on [in, out] kernels: one update for all."""
    mesh = jax.make_mesh((4,), ("tp",))
    specs = {
        "dim0": PartitionSpec(None, "tp"),
        "dim1": PartitionSpec("tp"),
        "none": PartitionSpec(),
    }
    grad = np.random.default_rng(2).normal(size=(8, 12)).astype(np.float32)
    params = {n: jax.device_put(grad, NamedSharding(mesh, spec)) for n, spec in specs.items()}
    (got,), _, _ = run(recipes.transformer_engine(0.1), params, [params], jit=True)
    (want,), _, _ = run(recipes.transformer_engine(0.1), grad, [grad], jit=True)
    for name, spec in specs.items():
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert relative_error(got[name], want) < 1e-5
