"""Draws what `aot_bytes.py` measured: bytes, overlap and workspace beside their bounds.

python benchmarks/aot_plot.py benchmarks/results/aot_bytes.json benchmarks/results/aot_bytes.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"muon_optax": "tab:blue", "optax": "tab:orange"}
# (key, title, bound)
PANELS = (
    ("ratio_to_fewest", "bytes received / fewest possible", 1.02),
    ("share_overlapped", "share of the bytes with products under them", 0.8),
    ("workspace_in_largest_matrices", "workspace / largest matrix", 6),
)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """One bar a program of Llama-3-8B and panel, contestants side by side."""
    records = [r for r in records if r["scanned"] and r["model"] == "llama3-8b"]
    keys = ("platform", "devices", "layout")
    cases = sorted({tuple(r[k] for k in keys) for r in records})
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(2 + 0.4 * len(cases), 9), sharex=True)
    for panel, (key, title, bound) in zip(axes, PANELS, strict=True):
        for side, (name, colour) in enumerate(COLOURS.items()):
            mine = [r for r in records if r["contestant"] == name]
            places = [cases.index(tuple(r[k] for k in keys)) + 0.4 * side for r in mine]
            panel.bar(places, [r[key] for r in mine], 0.4, color=colour, label=name)
        panel.axhline(bound, color="black", linewidth=0.8, linestyle="--")
        panel.set_title(title, fontsize=9)
        if key != "share_overlapped":
            panel.set_yscale("log")
    axes[0].legend()
    labels = [f"{layout}, {devices} {platform}" for platform, devices, layout in cases]
    axes[-1].set_xticks(range(len(cases)), labels, rotation=90, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text())["records"], arguments.output)


if __name__ == "__main__":
    main()
