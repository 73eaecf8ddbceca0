"""The pages in docs/: their code runs, their tables and messages are what the library says."""

import doctest
import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

import muon_optax
from muon_optax import report
from muon_optax.polar import SCHEDULES
from muon_optax.scaling import Scale

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# These have tests beside what they describe.
ELSEWHERE = {"torch.md", "command_line.md", "multiprocess.md"}
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in ELSEWHERE)


def run_page(name: str) -> dict[str, Any]:
    """Runs a page's code from top to bottom as one program; prompts show what is printed."""
    names: dict[str, Any] = {}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    report: list[str] = []
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL):
        if not block.startswith(">>>"):
            exec(compile(block, name, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, name, name, 0)
        runner.run(test, out=report.append, clear_globs=False)
        names.update(test.globs)
    assert not report, "".join(report)
    return names


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name):
    run_page(name)


def rows_of(name: str, header: str) -> list[list[str]]:
    """The cells of the table in a page whose header line begins like this."""
    lines = iter((DOCS / name).read_text().splitlines())
    assert any(line.startswith(header) for line in lines), header
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1:]]


def test_the_intervals_of_the_schedules():
    rows = rows_of("algorithm.md", "| `ns_coeffs` | steps")
    assert [row[0].strip("`") for row in rows] == list(SCHEDULES)
    before = np.union1d(np.geomspace(1e-3, 1, 100001), np.linspace(1e-3, 1, 100001))
    for name, steps, norm, interval, _ in rows:
        schedule = SCHEDULES[name.strip("`")]
        assert (int(steps), norm.strip("`")) == (len(schedule.rows), schedule.preconditioning)
        sigma = before / schedule.norm_factor
        for a, b, c in schedule.rows:
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        assert interval == f"{sigma.min():.3f}–{sigma.max():.3f}", name


def test_the_matrices_of_the_views():
    rows = rows_of("matrix_views.md", "| leaf | shape | view")
    assert len(rows) >= 15
    for _, shape, view, matrices in rows:
        leaf = jax.ShapeDtypeStruct(eval(f"({shape},)"), "float32")
        declared = eval(view.strip("`"), vars(muon_optax))
        (row,) = report(leaf, muon_weight_dimension_numbers=declared).rows
        assert ", ".join(" × ".join(map(str, m)) for m in row.matrices) == matrices


def test_the_factors_of_the_scales():
    rows = rows_of("scaling.md", "| `scale` | factor")
    assert [row[0].strip("`") for row in rows] == list(get_args(Scale))
    for name, _, sizes, _ in rows:
        shapes = [(1024, 1024), (1024, 4096), (4096, 1024)]
        leaves = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        scales = [row.scales[0] for row in report(leaves, scale=name.strip("`")).rows]
        rms = [s / max(shape) ** 0.5 for s, shape in zip(scales, shapes, strict=True)]
        assert sizes == ", ".join(f"{x:.3g}" for x in rms)


def test_the_best_rates_of_the_demo():
    tuned = json.loads((ROOT / "benchmarks/results/demo_grid.json").read_text())["tuned"]
    assert {(run["muon_rate"], run["adamw_rate"]) for run in tuned} == {(0.02, 0.008)}
    assert "0.02 for Muon and 0.008 for AdamW" in (DOCS / "scaling.md").read_text()
