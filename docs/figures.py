"""Draws all pictures of the pages beside it: `python docs/figures.py [FOLDER]`.

Measurements are read from benchmarks/results, where the benchmarks write them; all else is
computed here.
"""

import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from muon_optax import muon, plan
from muon_optax.orthogonalization import SCHEDULES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}
BOUND = {"color": "black", "linewidth": 0.9, "linestyle": "--"}
# Who is compared has one color in all pictures.
COLORS = {"muon_optax": "C0", "optax": "C1", "maxtext": "C2", "torch": "C3", "adamw": "C4"}
LOSS = "validation loss, nats a byte"


def record(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# What Muon does to a matrix

SHOWN = ("jordan", "dion", "polar_express", "tight", "fast")


def sigma() -> Figure:
    """What schedules make of a singular value, and of all those of a Gaussian matrix."""
    figure = Figure(figsize=(9, 3.4))
    curves, values = figure.subplots(1, 2)
    before = np.geomspace(1e-4, 1, 2000)
    for name in SHOWN:
        norm = "Schatten-8" if _order(name) == 8 else "Frobenius"
        curves.plot(before, _after(name, before), label=f"{name} ({norm})")
    curves.set(xscale="log", xlabel="singular value / norm, before", ylabel="after", ylim=(0, 1.3))
    curves.legend()
    x = np.random.default_rng(0).normal(size=(256, 256)) / 16
    found = np.linalg.svd(x, compute_uv=False)
    values.plot(found, "k", label="before")
    for name in ("jordan", "tight"):
        after = _after(name, found / np.linalg.norm(found, _order(name)))
        values.plot(np.sort(after)[::-1], label=f"after {name}")
    values.set(xlabel="singular values of a Gaussian 256 × 256, largest first", ylim=(0, 2.1))
    values.legend()
    return figure


def _order(name: str) -> int:
    """The order of the Schatten norm that a schedule divides by; Frobenius's is 2."""
    return 8 if SCHEDULES[name].preconditioning == "schatten8" else 2


def _after(name: str, sigma: np.ndarray) -> np.ndarray:
    for a, b, c in SCHEDULES[name].rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


# What is sent

DEVICES = (8, 16, 32, 64, 128, 256)
LETTERS = "ABCD"
COUNT, ROWS, COLUMNS = 64, 4096, 14336


def all_to_all() -> Figure:
    """Who owns what in a round: pieces of four matrices, before, between and after it."""
    figure = Figure(figsize=(9, 2.8))
    axes = figure.subplots(1, 3)
    titles = ("sharded", "whole on one device each:\nNewton–Schulz", "sharded again")
    for i, (part, title) in enumerate(zip(axes, titles, strict=True)):
        for device, place in itertools.product(range(4), range(4)):
            matrix, piece = (device, place) if i == 1 else (place, device)
            _piece(part, device, place, matrix, f"{LETTERS[matrix]}{piece}")
        part.set(xlim=(-0.1, 4.9), ylim=(-3.6, 0.7), title=title)
        part.set_yticks([-d for d in range(4)], [f"device {d}" for d in range(4)])
        part.set_xticks([])
        part.grid(visible=False)
        part.spines[:].set_visible(False)
        part.tick_params(length=0)
    for part in axes[:2]:
        part.annotate("", (4.9, -1.5), (4.2, -1.5), arrowprops={"arrowstyle": "->", "lw": 2})
        part.text(4.55, -1.2, "all_to_all", ha="center", fontsize=7)
    return figure


def _piece(axes: Any, device: int, place: int, matrix: int, text: str) -> None:
    axes.bar(place + 0.45, 0.8, 0.85, -device - 0.4, color=f"C{matrix}", alpha=0.75)
    axes.text(place + 0.45, -device, text, ha="center", va="center")


def bytes_by_strategy() -> Figure:
    """What a device receives for the same matrices under each strategy, by the plan."""
    figure = Figure(figsize=(6, 3.4))
    axes = figure.subplots()
    for strategy in ("gather", "gram", "all_to_all"):
        received = [_received(devices, strategy) / 1e9 for devices in DEVICES]
        axes.plot(DEVICES, received, "o-", ms=4, label=strategy)
    # Each matrix goes to one device and comes back, but for the part that is there already.
    owned = [math.ceil(COUNT / n) * (n - 1) / n for n in DEVICES]
    size = 2 * ROWS * COLUMNS / 1e9
    axes.plot(DEVICES, [2 * size * count for count in owned], **BOUND, label="bound")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="GB a device receives")
    axes.set_xticks(DEVICES, map(str, DEVICES))
    axes.minorticks_off()
    axes.set_title(f"{COUNT} matrices of {ROWS} × {COLUMNS}, bfloat16, columns sharded")
    axes.legend()
    return figure


def _received(devices: int, strategy: str) -> int:
    where = NamedSharding(AbstractMesh((devices,), ("fsdp",)), PartitionSpec(None, "fsdp"))
    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), "bfloat16")
    matrices = {f"layer_{i}": shape for i in range(COUNT)}
    tx = muon(0.02, param_shardings=where, strategy=strategy, device="h100")
    return plan(tx, matrices).bytes


# Key, title and the bound of each panel.
COMPILED = (
    ("ratio_to_fewest", "bytes received / fewest possible", 1),
    ("share_overlapped", "share of the bytes with matmuls under them", 1),
    ("workspace_in_largest_matrices", "workspace / largest matrix", 1),
)
PLATFORMS = {"cuda": "H100", "tpu": "TPU v5p"}


def compiled() -> Figure:
    """A bar for each compiled program of Llama-3-8B, contestants side by side."""
    records = [r for r in record("aot_bytes")["records"] if r["scanned"]]
    records = [r for r in records if r["model"] == "llama3-8b"]
    cases = sorted({_case(r) for r in records})
    names = [name for name in COLORS if any(r["contestant"] == name for r in records)]
    width = 0.85 / len(names)
    figure = Figure(figsize=(9, 7))
    panels = figure.subplots(len(COMPILED), 1, sharex=True)
    for panel, (key, title, bound) in zip(panels, COMPILED, strict=True):
        for side, name in enumerate(names):
            mine = [r for r in records if r["contestant"] == name]
            places = [cases.index(_case(r)) + width * (side + 0.5 - len(names) / 2) for r in mine]
            panel.bar(places, [r[key] for r in mine], width, color=COLORS[name], label=name)
        panel.axhline(bound, **BOUND)
        panel.set(title=title, yscale="linear" if key == "share_overlapped" else "log")
        panel.grid(visible=False, axis="x")
    panels[0].legend()
    labels = [f"{layout}, {devices} {PLATFORMS[platform]}" for platform, devices, layout in cases]
    panels[-1].set_xticks(range(len(cases)), labels, rotation=90, fontsize=7)
    return figure


def _case(found: Mapping[str, Any]) -> tuple[str, int, str]:
    return found["platform"], found["devices"], found["layout"]


# How long a step takes


def step_time() -> Figure:
    """A bar for each contestant's speed in each case, in CPU time."""
    cases = record("step_time")
    found = dict.fromkeys(n for case in cases.values() for n in case["contestants"])
    # optax's preconditionings are as fast as its default, or slower.
    names = [n for n in found if not n.startswith("optax ") or n == "optax dion"]
    figure = Figure(figsize=(9, 1 + 0.9 * len(cases)))
    axes = figure.subplots()
    height = 0.85 / len(names)
    for i, name in enumerate(names):
        speeds = {
            row: case["contestants"][name]["cpu"]["speed"]
            for row, case in enumerate(cases.values())
            if name in case["contestants"]
        }
        middle = [s["median"] for s in speeds.values()]
        ends = [[abs(s["median"] - s[q]) for s in speeds.values()] for q in ("q1", "q3")]
        where = [row + (i - len(names) / 2) * height for row in speeds]
        is_other = name.startswith(("optax", "torch"))
        label = name if is_other else f"muon_optax {name}"
        axes.barh(where, middle, height, xerr=ends, label=label, error_kw={"lw": 0.7})
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xlabel("speed of a whole step (CPU time), optax's default = 1")
    axes.axvline(1, **BOUND)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside right upper")
    return figure


# How training goes


def convergence() -> Figure:
    """The demo's model with every preset, with optax's Muon and with AdamW."""
    curves = record("convergence")["curves"]
    figure = Figure(figsize=(9, 3.6))
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    _losses(by_steps, curves, lambda runs: runs[0]["steps"])
    _losses(by_time, curves, lambda runs: np.median([run["seconds"] for run in runs], axis=0))
    by_time.set(xlabel="seconds of steps", ylabel=None)
    by_time.get_legend().remove()
    return figure


def convergence_variants() -> Figure:
    """The demo's model with Muon's variants, each at its best rate.

    Not against time: their runs didn't have the machine to themselves.
    """
    found = record("convergence_variants")["variants"]
    figure = Figure(figsize=(5.5, 3.6))
    curves = {f"{name} at {x['rate']:g}": x["curves"] for name, x in found.items()}
    _losses(figure.subplots(), curves, lambda runs: runs[0]["steps"])
    return figure


def _losses(
    axes: Axes,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    x_of: Callable[[Sequence[Mapping[str, Any]]], Any],
) -> None:
    """Mean validation losses, with bands from seed to seed."""
    for i, (name, runs) in enumerate(curves.items()):
        x, losses = x_of(runs), np.array([run["val_loss"] for run in runs])
        axes.plot(x, losses.mean(0), color=f"C{i}", label=name)
        axes.fill_between(x, losses.min(0), losses.max(0), color=f"C{i}", alpha=0.2)
    axes.set(xlabel="steps", ylabel=LOSS, ylim=(None, 3))
    axes.legend()


def demo_grid() -> Figure:
    """The demo's final loss against the learning rate, and the curves at the best rates."""
    found = record("demo_grid")
    figure = Figure(figsize=(9, 3.6))
    grid, curves = figure.subplots(1, 2)
    for name, option in (("muon", "lr"), ("adamw", "adamw_lr")):
        color = COLORS["muon_optax" if name == "muon" else name]
        best = found["tuned"][0][f"{name}_rate"]
        runs = [r for r in found["runs"] if r["optimizer"] == name]
        tried = sorted((r["rate"], _last(r)) for r in runs if r["config"]["seed"] == 0)
        grid.plot(*zip(*tried, strict=True), "o-", ms=4, color=color, label=name)
        for run in (r for r in runs if r["config"][option] == best):
            curves.plot(run["curve"]["steps"], run["curve"]["val_loss"], color=color)
    grid.set(xscale="log", xlabel="peak learning rate", ylabel=f"final {LOSS}")
    curves.set(xlabel="steps", ylabel=LOSS, title=f"best rates, {len(found['tuned'])} seeds")
    grid.legend()
    return figure


def _last(run: Mapping[str, Any]) -> float:
    return run["curve"]["val_loss"][-1]


PARITY = {"reference": "float32 reference", "torch": "torch.optim.Muon (bfloat16 inside)"}


def parity_curve() -> Figure:
    """Losses of PyTorch's FSDP2 and of JAX above, their relative gaps below."""
    results = record("parity_curve")
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots(2, len(results), sharex=True, sharey="row", height_ratios=(3, 1))
    for (above, below), found in zip(axes.T, results, strict=True):
        theirs, ours = np.array(found["torch"]), np.array(found["jax"])
        steps = np.arange(1, len(ours) + 1)
        wide = {"color": COLORS["torch"], "lw": 4, "alpha": 0.35}
        above.plot(steps, theirs, label="torch FSDP2, 4 ranks", **wide)
        above.plot(steps, ours, color=COLORS["muon_optax"], label="muon_optax, 8 devices")
        above.set_title(PARITY[found["optimizer"]])
        above.legend()
        below.axhspan(-1, 1, color="0.93")
        below.plot(steps, 100 * (ours / theirs - 1), color=COLORS["muon_optax"])
        below.set_xlabel("step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("gap, %")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "sigma.png": sigma,
    "all_to_all.png": all_to_all,
    "bytes.png": bytes_by_strategy,
    "compiled.png": compiled,
    "step_time.png": step_time,
    "convergence.png": convergence,
    "convergence_variants.png": convergence_variants,
    "demo_grid.png": demo_grid,
    "parity_curve.png": parity_curve,
}


def main(folder: Path, names: Iterable[str] = tuple(FIGURES)) -> None:
    """Writes pictures, in few colors, as small files."""
    for name in names:
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            FIGURES[name]().savefig(file, dpi=100)
        Image.open(file).quantize(64).save(folder / name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
