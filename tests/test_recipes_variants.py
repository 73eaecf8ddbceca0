"""Recipes of variants against their sources written out in float64, on [out, in] weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import variants_oracle as oracle
from oracle import newton_schulz, relative_error
from running import apply_updates, run
from test_recipes import (
    POLAR_102,
    QUINTIC,
    SYSTEMS,
    System,
    original,
    spectral,
    trajectory,
    unit_rms_norm,
    updates_of,
    weights,
    worst,
)

from muon_optax import Attention, HeadWeight, momentum, recipes, report

SIZES = {"up": (6, 10), "down": (10, 6)}


@dataclasses.dataclass(frozen=True)
class Variant(System):
    """A system with a piece of state for each matrix, after orthogonalisation."""

    make: Callable[..., Any] = oracle.Neuron
    is_sign: bool = False
    is_cautious: bool = False
    squared_decay: bool = False
    is_sphere: bool = False
    states: dict[int, Any] = dataclasses.field(default_factory=dict)

    def muon(self, p: np.ndarray, g: np.ndarray, buffer: np.ndarray, beta: float) -> np.ndarray:
        state = self.states.setdefault(id(buffer), self.make())
        if isinstance(state, oracle.Namo | oracle.Dion2 | oracle.Chain):
            u = state.update(g, p)
        else:
            gain = 1.0 if self.sums else 1 - beta
            buffer *= beta
            buffer += gain * g
            mix = gain * g + beta * buffer if self.nesterov else buffer
            u = self.orthogonalized(np.sign(mix) if self.is_sign else mix)
            if self.is_sphere:
                return p + state.update(u, p)
            u = state.update(u, p)
        rate, scale = self.learning_rate, self.scale(*p.shape)
        decay = self.decay * rate * scale if self.squared_decay else self.decay
        decayed = np.where(u * p >= 0, p, 0) if self.is_cautious else p
        return p - rate * (scale * u + decay * decayed)


def no_scale(out: int, fan_in: int) -> float:
    return 1.0


def longer(beta2: float, eps: float) -> Callable[[], Any]:
    return lambda: oracle.Neuron(beta2, eps, each="longer", guard="clamp")


def quintic(x: np.ndarray) -> np.ndarray:
    return newton_schulz(x / np.linalg.norm(x), QUINTIC, "none")


def polar(x: np.ndarray) -> np.ndarray:
    return newton_schulz(x / (1.02 * np.linalg.norm(x)), POLAR_102, "none")


def nordion2(**options: Any) -> Any:
    neuron = oracle.Neuron(skip_zeros=True)
    return oracle.Chain(oracle.Dion2(polar, each="output", **options), neuron)


PLAIN_ADAM: dict[str, Any] = {"betas": (0.9, 0.999)}
MEGATRON: dict[str, Any] = {"rows": QUINTIC, "nesterov": False, **PLAIN_ADAM}
NEURON, DION = (lambda: oracle.Neuron(0.95, 1e-10)), {"rows": POLAR_102, "norm": 1.02}
# Options of the recipe beside its defaults, and the system that they make.
VARIANTS: dict[str, tuple[str, dict[str, Any], Variant]] = {
    "normuon": (
        "normuon",
        {},
        Variant(0.02, 0.0, original, adam_rate=3e-4, eps=1e-10, adam_decay=0.0, make=NEURON),
    ),
    "dion_normuon": (
        "dion_normuon",
        {},
        Variant(0.01, 0.01, unit_rms_norm, sums=True, nesterov=False, **DION),
    ),
    "dion_normuon, cautious": (
        "dion_normuon",
        {"weight_decay_kind": "cautious", "weight_decay": 0.5, "adam_weight_decay": 0.01},
        Variant(
            0.01,
            0.5,
            unit_rms_norm,
            sums=True,
            nesterov=False,
            adam_decay=0.01,
            is_cautious=True,
            **DION,
        ),
    ),
    "dion2": (
        "dion2",
        {},
        Variant(0.01, 0.01, unit_rms_norm, make=lambda: oracle.Dion2(polar)),
    ),
    "nordion2": (
        "nordion2",
        {"fraction": 0.5},
        Variant(0.01, 0.01, unit_rms_norm, make=lambda: nordion2(fraction=0.5)),
    ),
    "emerging_optimizers, adamuon": (
        "emerging_optimizers",
        {},
        Variant(3e-4, 0.01, spectral, make=lambda: oracle.Entry(rms=None), **MEGATRON),
    ),
    "emerging_optimizers, normuon": (
        "emerging_optimizers",
        {"method": "normuon"},
        Variant(3e-4, 0.01, spectral, make=longer(0.95, 1e-8), **MEGATRON),
    ),
    "emerging_optimizers, namo": (
        "emerging_optimizers",
        {"method": "namo"},
        Variant(
            3e-4,
            0.01,
            spectral,
            make=lambda: oracle.Namo(quintic, beta2=0.95, nesterov=False, corrected=False),
            **MEGATRON,
        ),
    ),
    "adamuon": ("adamuon", {}, Variant(6e-4, 0.1, no_scale, make=oracle.Entry, is_sign=True)),
    "muonh": (
        "muonh",
        {},
        Variant(
            0.018,
            0.0,
            no_scale,
            rows=((2.0, -1.5, 0.5),) * 12,
            adam_rate=0.01,
            betas=(0.8, 0.95),
            eps=1e-10,
            make=lambda: oracle.Hyperball(lambda _: 0.018, "current"),
            is_sphere=True,
        ),
    ),
    "modded_nanogpt": (
        "modded_nanogpt",
        {},
        Variant(
            0.023,
            1.2,
            original,
            rows=POLAR_102,
            norm=1.02,
            adam_rate=0.008,
            betas=(0.9, 0.99),
            eps=1e-10,
            adam_decay=0.005 * 0.008,
            make=longer(0.9, 1e-10),
            is_cautious=True,
            squared_decay=True,
        ),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_updates_are_the_sources(name):
    recipe, options, system = VARIANTS[name]
    tx = getattr(recipes, recipe)(**options, ns_dtype=None)
    params, grads = weights(0, sizes=SIZES), weights(1, 10, SIZES)
    got, _, _ = run(tx, params, grads, jit=True)
    errors = worst(got, updates_of(params, trajectory(system, params, grads)))
    assert errors["muon"] < 1e-5
    assert errors["adam"] < 3e-5  # optax's 1 - b2^t in float32


@pytest.mark.parametrize("name", sorted({recipe for recipe, _, _ in VARIANTS.values()}))
def test_recipes_take_any_argument_of_muon_and_schedules(name):
    params, rate = weights(0, sizes=SIZES), optax.linear_schedule(0.1, 0.2, 2)
    tx = getattr(recipes, name)(rate, mu_dtype="bfloat16", ns_coeffs="tight")
    state = jax.eval_shape(tx.init, params)
    mu = state.inner_states["muon"].inner_state[0]
    mu = mu.muon.mu if hasattr(mu, "muon") else mu.mu
    assert mu["up"]["kernel"].dtype == jnp.bfloat16
    program = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert "bf16" in program


def test_a_variant_may_be_taken_out_of_a_recipe():
    params, grads = weights(0, sizes=SIZES), weights(1, 2, SIZES)
    got = run(recipes.normuon(0.1, after_orthogonalization=None), params, grads, jit=True)[0]
    want = run(recipes.keller_jordan(0.1), params, grads, jit=True)[0]
    assert max(worst(got, want).values()) < 1e-6


def test_the_decay_rate_of_adamuons_moments_is_the_momentums():
    params, grads = weights(0, sizes=SIZES), weights(1, 4, SIZES)
    system = dataclasses.replace(VARIANTS["adamuon"][2], make=lambda: oracle.Entry(0.8), states={})
    got, _, _ = run(recipes.adamuon(beta=0.8, ns_dtype=None), params, grads, jit=True)
    want = updates_of(params, trajectory(system, params, grads, 0.8))
    assert worst(got, want)["muon"] < 1e-5


def test_decay_of_modded_nanogpt_may_be_masked():
    params, grads = weights(0, sizes=SIZES), weights(1, 1, SIZES)
    masked = recipes.modded_nanogpt(weight_decay_mask={"up": False, "down": True, "b": True})
    got, none, all_ = (
        run(tx, params, grads, jit=True)[0][0]
        for tx in (masked, recipes.modded_nanogpt(weight_decay=0.0), recipes.modded_nanogpt())
    )
    np.testing.assert_array_equal(got["up"]["kernel"], none["up"]["kernel"])
    np.testing.assert_array_equal(got["down"]["kernel"], all_["down"]["kernel"])
    assert relative_error(none["down"]["kernel"], all_["down"]["kernel"]) > 1e-4


def test_fused_blocks_of_dion_have_moments_and_norms_of_their_own():
    params = {"qkv": jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)}
    split = recipes.dion_normuon(split_sizes={"qkv": (8, 4, 4)}, ns_dtype=None)
    got = run(split, params, [params, params], jit=True)[0][-1]["qkv"]
    parts = {k: params["qkv"][:, a:b] for k, (a, b) in {"q": (0, 8), "k": (8, 12)}.items()}
    alone = recipes.dion_normuon(ns_dtype=None, partition=())
    for name, (a, b) in {"q": (0, 8), "k": (8, 12)}.items():
        one = {name: parts[name]}
        want = run(alone, one, [one, one], jit=True)[0][-1][name]
        np.testing.assert_allclose(got[:, a:b], want, rtol=1e-5, atol=1e-7)


QK_SIZES = {"q": (6, 10), "k": (6, 10), "v": (6, 10)}
QK_HEADS = {
    "": Attention(5, {"q/kernel": HeadWeight("query", 1), "k/kernel": HeadWeight("key", 1)})
}


def clipped_moonlight(
    params: Any, grads: list[Any], logits: np.ndarray, tau: float, alpha: float
) -> list[Any]:
    """The kernels [in, out] after each step of Moonlight's Muon and of QK-clip, in float64."""
    system = dataclasses.replace(SYSTEMS["moonlight"], learning_rate=2e-4)
    p = {name: np.asarray(params[name]["kernel"], np.float64).T for name in QK_SIZES}
    buffers, seen = {name: np.zeros_like(x) for name, x in p.items()}, []
    for grad, of_heads in zip(grads, logits, strict=True):
        g = [min(1.0, tau / s) if s > 0 else 1.0 for s in of_heads]
        g_of_rows = np.repeat(g, 2)[:, None]  # heads of two dims, side by side
        powers = {"q": alpha, "k": 1 - alpha, "v": 0.0}
        for name, x in p.items():
            gradient = np.asarray(grad[name]["kernel"], np.float64).T
            moved = system.muon(x, gradient, buffers[name], 0.95)
            p[name] = moved * g_of_rows ** powers[name]
        seen.append({name: x.T for name, x in p.items()})
    return seen


@pytest.mark.parametrize(("tau", "alpha"), [(100.0, 0.5), (5.0, 0.3)])
def test_muonclip_is_moonlight_and_then_the_clip(tau, alpha):
    """Over ten steps, with logits of both signs on both sides of the bound."""
    params, grads = weights(0, sizes=QK_SIZES), weights(1, 10, QK_SIZES)
    logits = 1.2 * tau * np.random.default_rng(2).normal(size=(10, 5))
    assert {-1, 0, 1} == {int(np.sign(s) * (abs(s) > tau)) for s in logits.flat}
    given = {} if (tau, alpha) == (100.0, 0.5) else {"tau": tau, "alpha": alpha}
    tx: Any = recipes.muonclip(heads=QK_HEADS, ns_dtype=None, **given)
    state, update = tx.init(params), jax.jit(tx.update)
    want = clipped_moonlight(params, grads, logits, tau, alpha)
    for t, grad in enumerate(grads):
        updates, state = update(grad, state, params, max_logits={"": logits[t]})
        params = apply_updates(params, updates)
        for name, x in want[t].items():
            assert relative_error(params[name]["kernel"], x) < 1e-5, f"{name}, step {t}"


def test_muonclip_is_muon_to_who_asks():
    """It takes any argument of `muon` and schedules, and shows what runs as `muon` does."""
    params, rate = weights(0, sizes=QK_SIZES), optax.linear_schedule(0.1, 0.2, 2)
    tx: Any = recipes.muonclip(rate, heads=QK_HEADS, mu_dtype="bfloat16", ns_coeffs="tight")
    state = tx.init(params)
    assert momentum(state)["q"]["kernel"].dtype == jnp.bfloat16
    assert {row.optimizer for row in report(tx, params).rows} == {"muon", "adam"}
    with pytest.raises(ValueError, match="needs the parameters and the largest logits"):
        jax.eval_shape(tx.update, params, state, params)


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="method must be one of"):
        recipes.emerging_optimizers(method="adam")  # pyright: ignore[reportArgumentType]
