"""Draws the pictures of the pages beside it: `python docs/figures.py [FOLDER]`."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from PIL import Image

from muon_optax import muon, plan
from muon_optax.orthogonalization import SCHEDULES

SHOWN = ("jordan", "dion", "polar_express", "tight", "fast")
DEVICES = (8, 16, 32, 64, 128, 256)
LETTERS = "ABCD"


def sigma() -> Figure:
    """What schedules make of a singular value, and of all those of a Gaussian matrix."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curves, values = figure.subplots(1, 2)
    before = np.geomspace(1e-4, 1, 2000)
    for name in SHOWN:
        norm = "Schatten-8" if _order(name) == 8 else "Frobenius"
        curves.plot(before, _after(name, before), lw=1.2, label=f"{name} ({norm})")
    curves.set(xscale="log", xlabel="singular value / norm, before", ylabel="after", ylim=(0, 1.3))
    curves.legend(fontsize=7)
    x = np.random.default_rng(0).normal(size=(256, 256)) / 16
    found = np.linalg.svd(x, compute_uv=False)
    values.plot(found, "k", lw=1.2, label="before")
    for name in ("jordan", "tight"):
        after = _after(name, found / np.linalg.norm(found, _order(name)))
        values.plot(np.sort(after)[::-1], lw=1.2, label=f"after {name}")
    values.set(xlabel="singular values of a Gaussian 256 × 256, largest first", ylim=(0, 2.1))
    values.legend(fontsize=7)
    return figure


def _order(name: str) -> int:
    """The order of the Schatten norm that a schedule divides by; Frobenius's is 2."""
    return 8 if SCHEDULES[name].preconditioning == "schatten8" else 2


def _after(name: str, sigma: np.ndarray) -> np.ndarray:
    for a, b, c in SCHEDULES[name].rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def all_to_all() -> Figure:
    """Pieces of four matrices on four devices, before, between and after the two all-to-alls."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = ("sharded", "whole on one device each:\nNewton–Schulz", "sharded again")
    for i, (part, title) in enumerate(zip(axes, titles, strict=True)):
        for device in range(4):
            for place in range(4):
                matrix, piece = (device, place) if i == 1 else (place, device)
                _piece(part, device, place, matrix, f"{LETTERS[matrix]}{piece}")
        part.set(xlim=(-0.1, 4.9), ylim=(-3.6, 0.7), title=title)
        part.set_yticks([-d for d in range(4)], [f"device {d}" for d in range(4)])
        part.set_xticks([])
        part.spines[:].set_visible(False)
        part.tick_params(length=0)
        part.title.set_fontsize(10)
    for part in axes[:2]:
        part.annotate("", (4.9, -1.5), (4.2, -1.5), arrowprops={"arrowstyle": "->", "lw": 2})
        part.text(4.55, -1.2, "all_to_all", ha="center", fontsize=7)
    return figure


def _piece(axes: Any, device: int, place: int, matrix: int, text: str) -> None:
    axes.bar(place + 0.45, 0.8, 0.85, -device - 0.4, color=f"C{matrix}", alpha=0.75)
    axes.text(place + 0.45, -device, text, ha="center", va="center", fontsize=9)


def bytes_by_strategy() -> Figure:
    """What a device receives for the same matrices under each strategy, by the plan."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for strategy in ("gather", "gram", "all_to_all"):
        received = [_received(devices, strategy) / 1e9 for devices in DEVICES]
        axes.plot(DEVICES, received, "o-", ms=4, label=strategy)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="GB a device receives")
    axes.set_xticks(DEVICES, map(str, DEVICES))
    axes.minorticks_off()
    axes.set_title("64 matrices of 4096 × 14336, bfloat16, columns sharded", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _received(devices: int, strategy: str) -> int:
    where = NamedSharding(AbstractMesh((devices,), ("fsdp",)), PartitionSpec(None, "fsdp"))
    shape = jax.ShapeDtypeStruct((4096, 14336), "bfloat16")
    matrices = {f"layer_{i}": shape for i in range(64)}
    tx = muon(0.02, param_shardings=where, strategy=strategy, device="h100")
    return plan(tx, matrices).bytes


FIGURES: dict[str, Callable[[], Figure]] = {
    "sigma.png": sigma,
    "all_to_all.png": all_to_all,
    "bytes.png": bytes_by_strategy,
}


def main(folder: Path) -> None:
    """Writes all of them, in few colours, as small files."""
    for name, draw in FIGURES.items():
        file = io.BytesIO()
        draw().savefig(file, dpi=100)
        Image.open(file).quantize(64).save(folder / name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
