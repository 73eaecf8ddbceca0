"""Muon's variants beside the code that others publish, in float64 on a CPU.

    export MUON_OPTAX_PUBLISHED=published
    python benchmarks/published_variants.py benchmarks/results/published_variants.json

The folder `published` has checkouts by name, each with its commit in a file `COMMIT`:
`Emerging-Optimizers`, `dion`, `NorMuon`, `AdaMuon`, `namo`, `timm` and `modded-nanogpt`. Of the
last, only single functions are taken from the training scripts, which can't be imported.

Both sides orthogonalise by the same five Newton-Schulz steps in float64, since theirs are in
bfloat16; all that follows is the published code. The error is the distance of the weights after
ten steps, as a share of the way that they went.
"""

import argparse
import functools
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import muon_optax as mo
from benchmarks.published_code import FOLDER, emerging, functions, imported, loaded, package

SHAPES = ((8, 16), (16, 8), (12, 12))  # (fan-out, fan-in), as torch has them
STEPS = 10
RATE, DECAY = 0.05, 0.1
VIEW = mo.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
VIEWED = {"weight_dimension_numbers": VIEW}

Arrays = Sequence[np.ndarray]


def arrays(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    """Matrices with rows and columns of unequal size."""
    rng = np.random.default_rng(seed)
    sizes = [np.exp(rng.normal(size=(m, 1)) + rng.normal(size=(1, n))) for m, n in SHAPES]
    found = [scale * rng.normal(size=x.shape) * x for x in sizes]
    return [x.astype("float32").astype("float64") for x in found]  # some of theirs is float32


def first_weights() -> list[np.ndarray]:
    return arrays(0, 0.2)


def distance(ours: Arrays, theirs: Arrays) -> float:
    """The largest distance of two weights, as a share of the way from the first ones."""
    rows = zip(ours, theirs, first_weights(), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b - w)) for a, b, w in rows)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Keller Jordan's five steps, in float64."""
    y = x.double()
    y = y / torch.linalg.matrix_norm(y, keepdim=True)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.to(x.dtype)


def direction(nesterov: bool = True, **options: Any) -> optax.GradientTransformation:
    """Muon's direction, as torch's optimizers form it."""
    return mo.scale_by_muon(nesterov=nesterov, bias_correction=False, **VIEWED, **options)


def after(tx: optax.GradientTransformation, weights: Arrays | None = None) -> list[np.ndarray]:
    """The weights after ten steps of ours."""
    with jax.enable_x64(True):
        params: Any = list(map(jnp.asarray, weights or first_weights()))
        state = tx.init(params)
        update = jax.jit(tx.update)
        for t in range(STEPS):
            updates, state = update(list(map(jnp.asarray, arrays(1 + t))), state, params)
            params = optax.apply_updates(params, updates)
        return list(map(np.asarray, params))


def torch_after(
    make: Callable[[list], Any], weights: Arrays | None = None, dtype: torch.dtype = torch.float64
) -> list[np.ndarray]:
    """The weights after ten steps of a torch optimizer."""
    params = [torch.nn.Parameter(torch.tensor(w, dtype=dtype)) for w in weights or first_weights()]
    optimizer = make(params)
    for t in range(STEPS):
        for p, grad in zip(params, arrays(1 + t), strict=True):
            p.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return [p.detach().numpy() for p in params]


def chained(*pieces: Any, rate: float = RATE, decay: float = DECAY) -> Any:
    """Pieces, then decoupled decay and the learning rate."""
    return optax.chain(
        *pieces, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    )


def normuon_authors() -> float:
    replaced = {"zeropower_via_newtonschulz5": lambda g, steps: orthogonalized(g)}
    theirs = loaded("NorMuon/normuon.py", **replaced).SingleDeviceNorMuon
    neuron = mo.scale_by_neuron(0.95, 1e-10, **VIEWED)
    ours = chained(direction(), neuron, mo.scale_by_shape(VIEW))
    return distance(after(ours), torch_after(lambda p: theirs(p, lr=RATE, weight_decay=DECAY)))


def normuon_dion(is_fused: bool = False) -> float:
    """With cautious decay. Dion rounds the momentum to bfloat16 before it is orthogonalised."""
    package("dion", "dion/dion")
    theirs = imported("dion.normuon").NorMuon
    blocks = [(m // 2, m // 4, m // 4) for m, _ in SHAPES]
    views: Any = [mo.MatrixView(1, 0, split=split if is_fused else None) for split in blocks]

    def optimizer(params: list) -> Any:
        groups = [{"params": [p]} for p in params]
        if is_fused:
            groups = [g | {"split_sizes": split} for g, split in zip(groups, blocks, strict=True)]
        orthogonalize = lambda x, epsilon: orthogonalized(x.double())  # noqa: E731
        options = {"cautious_wd": True, "newton_schulz_func": orthogonalize}
        return theirs(groups, lr=RATE, weight_decay=DECAY, **options)

    rounded = lambda x: mo.newton_schulz(x.astype("bfloat16").astype(x.dtype))  # noqa: E731
    ours = optax.chain(
        mo.scale_by_momentum(nesterov=False, bias_correction=False, momentum="sum"),
        mo.orthogonalize(orthogonalizer=rounded, weight_dimension_numbers=views),
        mo.scale_by_neuron(weight_dimension_numbers=views),
        mo.scale_by_shape(views, scale="unit_rms_norm"),
        mo.add_cautious_weight_decay(DECAY),
        optax.scale_by_learning_rate(RATE),
    )
    return distance(after(ours), torch_after(optimizer))


def dion2(name: str, ours: Callable[..., Any], *pieces: Any) -> float:
    """Dion2 and NorDion2, where nothing is sharded. Dion rounds what it orthogonalises."""
    package("dion", "dion/dion")
    theirs = getattr(imported(f"dion.{name.lower()}"), name)
    orthogonalize = lambda x, epsilon: orthogonalized(x.double())  # noqa: E731
    options = {"lr": RATE, "weight_decay": DECAY, "fraction": 0.3}
    rounded = lambda x: mo.newton_schulz(x.astype("bfloat16").astype(x.dtype))  # noqa: E731
    direction = ours(0.3, orthogonalizer=rounded, **VIEWED)
    scale = mo.scale_by_shape(VIEW, scale="unit_rms_norm")
    return distance(
        after(chained(direction, *pieces, scale)),
        torch_after(lambda params: theirs(params, newton_schulz_func=orthogonalize, **options)),
    )


def nordion2() -> float:
    ours = functools.partial(mo.scale_by_dion2, each="output")
    return dion2("NorDion2", ours, mo.scale_by_neuron(skip_zeros=True, **VIEWED))


def emerging_adaptive(method: str, piece: Any, first: Any = None) -> float:
    adaptive = emerging("orthogonalized_optimizers.adaptive_muon").AdaptiveMuon

    def optimizer(params: list) -> Any:
        made = adaptive(params, RATE, 0.95, DECAY, nesterov=True, moment2_method=method)
        made.scaled_orthogonalize_fn = orthogonalized
        return made

    pieces = [piece] if first else [direction(), piece]
    ours = chained(*pieces, mo.scale_by_shape(VIEW, scale="spectral"))
    return distance(after(ours), torch_after(optimizer))


def emerging_normuon() -> float:
    return emerging_adaptive("normuon", mo.scale_by_neuron(each="longer", guard="clamp", **VIEWED))


def emerging_adamuon() -> float:
    return emerging_adaptive("adamuon", mo.scale_by_entry(rms=None, **VIEWED))


def emerging_namo() -> float:
    piece = mo.scale_by_namo(beta2=0.95, bias_correction=False, **VIEWED)
    return emerging_adaptive("namo", piece, first=True)


def emerging_hook(make: Callable[[Any], Any], *pieces: Any, weights: Any = None) -> float:
    """Of plain Muon, with a hook of the weight update."""
    muon, hooks = emerging("orthogonalized_optimizers.muon"), emerging("weight_update_hooks")

    def optimizer(params: list) -> Any:
        hook = make(hooks)
        made = muon.Muon(params, RATE, 0.95, 0.0, nesterov=True, weight_update_hook=hook)
        made.scaled_orthogonalize_fn = lambda x: orthogonalized(x) * max(x.shape) ** 0.5
        return made

    scale = mo.scale_by_shape(VIEW, scale="spectral")
    ours = after(optax.chain(direction(), scale, *pieces), weights)
    return distance(ours, torch_after(optimizer, weights, torch.float32))  # its norms are


def emerging_hyperball() -> float:
    weights = [2.0 * w / np.linalg.norm(w) for w in first_weights()]
    ours = mo.hyperball(RATE, radius=2.0, **VIEWED)
    return emerging_hook(lambda hooks: hooks.HyperballHook(2.0), ours, weights=weights)


def emerging_relative() -> float:
    ours = (mo.relative_update(**VIEWED), optax.scale_by_learning_rate(RATE))
    return emerging_hook(lambda hooks: hooks.RelativeUpdateHook(), *ours)


def emerging_brake() -> float:
    ours = (optax.scale_by_learning_rate(RATE), mo.radial_brake(**VIEWED))
    return emerging_hook(lambda hooks: hooks.RadialBrakeHook(), *ours)


def timm_adamuon() -> float:
    for name in ("timm", "timm.optim"):
        package(name, "timm/" + name.replace(".", "/"))
    theirs = imported("timm.optim.muon")
    theirs.zeropower_via_newtonschulz = lambda g, *args, **options: orthogonalized(g)

    def optimizer(params: list) -> Any:
        return theirs.Muon(
            params, lr=RATE, weight_decay=DECAY, nesterov=True, algo="adamuon", betas=(0.9, 0.95)
        )

    ours = chained(direction(), mo.scale_by_entry(0.95, 1e-7, **VIEWED))
    return distance(after(ours), torch_after(optimizer))


def adamuon_authors() -> float:
    """Which is written for CUDA, and rounds what it sends to itself."""

    def send(received: torch.Tensor, x: torch.Tensor, async_op: bool) -> Any:
        received.copy_(x.view_as(received))
        return types.SimpleNamespace(wait=lambda: None)

    theirs = loaded(
        "AdaMuon/gpt2/models/optimizers/adamuon.py",
        {'dtype=torch.bfloat16, device="cuda"': "dtype=torch.float64"},
        zeropower_via_newtonschulz5=lambda g, steps: orthogonalized(g),
        dist=types.SimpleNamespace(all_gather_into_tensor=send),
    ).AdaMuon
    ours = chained(
        mo.scale_by_momentum(0.95, bias_correction=False),
        optax.scale_by_sign(),
        mo.orthogonalize(**VIEWED),
        mo.scale_by_entry(0.95, **VIEWED),
    )
    make = functools.partial(theirs, lr=RATE, weight_decay=DECAY, rank=0, world_size=1)
    return distance(after(ours), torch_after(make))


def namo_authors(name: str, each: Any) -> float:
    """With their decay, which the factor multiplies too."""
    replaced = {"zeropower_via_newtonschulz5": lambda g, steps: orthogonalized(g)}
    theirs = getattr(loaded("namo/src/namo.py", **replaced), name)
    then: Any = optax.chain(
        mo.scale_by_shape(VIEW, scale="match_rms_adamw"), optax.add_decayed_weights(DECAY)
    )
    namo = mo.scale_by_namo(each=each, then=then, **VIEWED)
    ours = optax.chain(namo, optax.scale_by_learning_rate(RATE))
    return distance(after(ours), torch_after(lambda p: theirs(lr=RATE, wd=DECAY, muon_params=p)))


def speedrun() -> float:
    """Second moments and cautious decay of modded-nanogpt; its weights and rates are float32."""
    names = ("_apply_normuon_variance_reduction", "_cautious_wd_and_update_inplace")
    words = {"torch.uint32": "torch.int32"}  # of which torch can shift the bits on a CPU
    reduce, update = functions("train_gpt.py", *names, words=words)
    weights = [torch.tensor(w, dtype=torch.float32) for w in first_weights()]
    momenta = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    moments: list[Any] = [None] * len(weights)
    for t in range(STEPS):
        for i, grad in enumerate(map(torch.tensor, arrays(1 + t))):
            momenta[i].lerp_(grad, 0.05)
            x = orthogonalized(grad.lerp(momenta[i], 0.95))
            dim = -1 if x.shape[-2] >= x.shape[-1] else -2
            if moments[i] is None:
                moments[i] = torch.zeros_like(x.sum(dim, keepdim=True))
            x = reduce(x, moments[i], 0.9, dim)
            # Weights are bfloat16, with the rest of their bits beside them.
            bits = weights[i].view(torch.int32)
            high, low = (bits >> 16).to(torch.uint16), bits.to(torch.uint16)
            update(high, low, x, torch.tensor(DECAY * RATE), torch.tensor(RATE))
            bits = (high.to(torch.int32) << 16) | low.to(torch.int32)
            weights[i] = bits.view(torch.float32)
    decay: Any = mo.coupled_decay(DECAY, RATE, 1.0)
    ours = optax.chain(
        direction(),
        mo.scale_by_neuron(0.9, 1e-10, each="longer", guard="clamp", **VIEWED),
        mo.add_cautious_weight_decay(decay),
        optax.scale_by_learning_rate(RATE),
    )
    return distance(after(ours), [w.numpy() for w in weights])


def track_3(step: Callable[[torch.Tensor, torch.Tensor], None], *pieces: Any) -> float:
    """Weights under a function (weights, direction) of a record's training script."""
    weights = [torch.tensor(w) for w in first_weights()]
    momenta = [torch.zeros_like(w) for w in weights]
    for t in range(STEPS):
        for w, m, grad in zip(weights, momenta, map(torch.tensor, arrays(1 + t)), strict=True):
            m.lerp_(grad, 0.05)
            step(w, orthogonalized(grad.lerp(m, 0.95)))
    return distance(after(optax.chain(direction(), *pieces)), [w.numpy() for w in weights])


def track_3_muonh() -> float:
    (move,) = functions("train_gpt_simple_muonh.py", "scale_invariant_update_")
    ours = mo.hyperball(RATE, radius="current", **VIEWED)
    return track_3(lambda w, u: move(w, u, RATE), ours)


def track_3_brake() -> float:
    """The brake, the floor and the pinned radius, in its order."""
    names = ("scale_radial_update", "target_radius_after_update", "rescale_to_radius")
    constants = {"RADIAL_OUTWARD_SCALE": 0.5, "RADIAL_INWARD_SCALE": 1.0}
    brake, radius, rescale = functions("train_gpt_cwd_SOTA.py", *names, **constants)

    def step(w: torch.Tensor, u: torch.Tensor) -> None:
        u = brake(u, w)
        u = u * max(1.0, 0.3825 * float(w.norm() / u.norm()))  # inline in the training loop
        wanted = radius(w, u, RATE)
        w.add_(u, alpha=-RATE)
        rescale(w, wanted)

    return track_3(
        step,
        optax.scale(-1.0),
        mo.radial_brake(form="component", **VIEWED),
        mo.floor_update(0.3825, **VIEWED),
        optax.scale(RATE),
        mo.radial_brake(1.0, 1.0, form="pinned", **VIEWED),
    )


COMPARISONS: dict[str, Callable[[], float]] = {
    "NorMuon, its authors": normuon_authors,
    "NorMuon with cautious decay, Dion": normuon_dion,
    "NorMuon of fused blocks, Dion": functools.partial(normuon_dion, is_fused=True),
    "Dion2, Dion": functools.partial(dion2, "Dion2", mo.scale_by_dion2),
    "NorDion2, Dion": nordion2,
    "NorMuon, Emerging-Optimizers": emerging_normuon,
    "NorMuon with cautious decay, modded-nanogpt": speedrun,
    "AdaMuon, its authors": adamuon_authors,
    "AdaMuon, timm": timm_adamuon,
    "AdaMuon, Emerging-Optimizers": emerging_adamuon,
    "NAMO, its authors": functools.partial(namo_authors, "NAMO", "matrix"),
    "NAMO-D, its authors": functools.partial(namo_authors, "NAMO_D", "input"),
    "NAMO, Emerging-Optimizers": emerging_namo,
    "hyperball, Emerging-Optimizers": emerging_hyperball,
    "hyperball, modded-nanogpt": track_3_muonh,
    "relative update, Emerging-Optimizers": emerging_relative,
    "radial brake, Emerging-Optimizers": emerging_brake,
    "radial brake and floor, modded-nanogpt": track_3_brake,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    record = {
        "commits": {
            path.parent.name: path.read_text().strip() for path in sorted(FOLDER.glob("*/COMMIT"))
        },
        "torch": torch.__version__,
        "jax": jax.__version__,
        "steps": STEPS,
        "distance": {name: float(f"{run():.1e}") for name, run in COMPARISONS.items()},
    }
    output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
