"""What README and pages say was measured is what the benchmarks recorded, and so are pictures."""

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from test_docs import rows_of

from muon_optax.inspect.tables import quantity

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONTESTANTS = ("muon_optax", "optax")


def benchmarked(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def speeds_of_gpt2() -> dict[str, float]:
    """The median speed of each contestant's step on two cores, by CPU time."""
    contestants = benchmarked("step_time")["gpt2-124m, 12 of 12 layers"]["contestants"]
    return {name: row["cpu"]["speed"]["median"] for name, row in contestants.items()}


def test_the_figures_of_the_readme():
    records = benchmarked("aot_bytes")["records"]
    where = {"platform": "cuda", "devices": 64, "layout": "fsdp_rows", "scanned": True}
    found = [r for r in records if where.items() <= r.items() and r["model"] == "llama3-8b"]
    received = {r["contestant"]: quantity(r["received"], "B") for r in found}
    speeds = {name: round(speed, 1) for name, speed in speeds_of_gpt2().items()}
    text = (ROOT / "README.md").read_text()
    assert f"| {received['optax']} on Auto axes" in text
    assert f"| {received['muon_optax']}, with the update of whole matrices |" in text
    assert f"| {speeds['jordan']}, or {speeds['tight']} with the more accurate schedule" in text


def test_the_figures_of_the_results():
    text = " ".join((DOCS / "results.md").read_text().split())
    shares = [f"{run['share_of_steps'] + 1e-9:.2f}" for run in benchmarked("demo_grid")["tuned"]]
    assert "| {}, {} and {} of AdamW's |".format(*shares) in text
    summary = {row["optimizer"]: row["difference"] for row in benchmarked("convergence")["summary"]}
    for name in ("tight", "fast"):
        high, low = (f"{-x:.3f}" for x in summary[f"muon_optax {name}"])
        assert f"`{name}` {low} to {high} lower" in text
    assert "AdamW {:.2f} to {:.2f} higher".format(*summary["optax.adamw"]) in text
    speed = {name: f"{x:.2f}" for name, x in speeds_of_gpt2().items()}
    theirs = f"(its 'dion' {speed['optax dion']}, `torch.optim.Muon` {speed['torch']})"
    ours = f"| {speed['jordan']}; `tight` {speed['tight']}, `fast` {speed['fast']}, "
    assert theirs in text
    assert f"{ours}`fast` in bfloat16 {speed['fast bf16']} |" in text


def test_the_best_rates_of_the_demo():
    tuned = benchmarked("demo_grid")["tuned"]
    assert {(run["muon_rate"], run["adamw_rate"]) for run in tuned} == {(0.02, 0.008)}
    page = (DOCS / "scaling.md").read_text()
    assert "0.02 for Muon and 0.008 for AdamW" in " ".join(page.split())


def test_the_bytes_of_compiled_programs():
    records = benchmarked("aot_bytes")["records"]
    ours = [record for record in records if "formula" in record]
    places = {(record["platform"], record["devices"]) for record in ours}
    assert {("cuda", 8), ("cuda", 64), ("cuda", 512), ("cuda", 1024)} <= places
    assert "tpu" in {platform for platform, _ in places}
    for record in ours:
        assert record["received"] == record["formula"], record
    names = ("platform", "devices", "layout", "contestant", "scanned")
    llama = [record for record in records if record["model"] == "llama3-8b"]
    received = {tuple(record[n] for n in names): record["received"] for record in llama}
    for layout, *cells in rows_of("sharding.md", "| Llama-3-8B, 64 H100s"):
        found = [received["cuda", 64, layout.strip("`"), who, True] for who in CONTESTANTS]
        assert cells == [*(quantity(x, "B") for x in found), f"{found[1] / found[0]:.0f}"]


def test_the_hidden_bytes_of_experts():
    records = benchmarked("aot_bytes")["records"]
    found = {(r["devices"], r["layout"]): r for r in records if r["model"] == "olmoe-7b"}
    share = {k: f"{math.floor(100 * r['share_overlapped'])}%" for k, r in found.items()}
    plain, replicas, last = (
        [share[devices, layout] for devices in sizes]
        for layout, sizes in (
            ("fsdp_experts", (8, 64)),
            ("hsdp_experts", (8, 64)),
            ("experts_fsdp", (64,)),
        )
    )
    text = (DOCS / "results.md").read_text()
    assert "| {} and {}; {} and {} |".format(*plain, *replicas) in text
    inner = share[64, "replica_experts_fsdp"]
    assert f"| {last[0]}; with two replicas {inner} |" in text
    page = " ".join((DOCS / "sharding.md").read_text().split())
    ms = {k[1]: f"{1000 * r['model_seconds']:.1f}" for k, r in found.items() if k[0] == 64}
    for layout, names in (
        ("replica_experts_fsdp", "replica=2, expert=8, fsdp=4"),
        ("hsdp_experts", "replica=2, fsdp=4, expert=8"),
        ("experts_fsdp", "expert=8, fsdp=8"),
        ("fsdp_experts", "fsdp=8, expert=8"),
    ):
        assert names == ", ".join(f"{a}={n}" for a, n in found[64, layout]["mesh"].items())
        assert re.search(rf"{ms[layout]}( ms)? on `{names}`", page), layout


def test_the_bytes_of_a_training_step():
    records = benchmarked("training_step")
    kinds = {"ddp": "Auto", "hsdp": "Explicit"}
    rows = rows_of("zero1.md", "| program | mesh axes | received |")
    assert [row[0].strip("`") for row in rows] == [record["program"] for record in records]
    for (name, kind, units), record in zip(rows, records, strict=True):
        is_typed = "reduced" in name
        assert kind == ("Explicit" if is_typed else kinds[name.strip("`").split(",")[0]])
        received = record["received"] - record["forward"]
        assert float(units) == pytest.approx(received / record["weights"], abs=0.006)
    found = next(record for record in records if record["program"] == "hsdp, Muon, reduced")
    by_kind = dict(found["received_by_kind"])
    by_kind["all-gather"] -= found["forward"]
    said = {"reduce-scatter": 0.875, "all-to-all": 7 / 64 + 6 / 64, "all-gather": 0.125}
    assert {kind: x / found["weights"] for kind, x in by_kind.items()} == said


def test_the_figures_are_drawn_as_they_are_kept(tmp_path):
    pytest.importorskip("matplotlib")
    figures = runpy.run_path(str(DOCS / "figures.py"))
    figures["main"](tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in DOCS.glob("*.png")}
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name in drawn:
        assert (DOCS / name).stat().st_size < 60_000
        assert f"]({name})" in text, name


def test_the_bytes_of_maxtexts_muon():
    names = ("devices", "layout", "contestant")
    records = [r for r in benchmarked("aot_bytes")["records"] if r["scanned"]]
    records = [r for r in records if (r["platform"], r["model"]) == ("cuda", "llama3-8b")]
    found = {tuple(r[n] for n in names): r for r in records}
    theirs = {k[:2]: r for k, r in found.items() if k[2] == "maxtext"}
    ours = {k: found[*k, "muon_optax"] for k in theirs}
    times = {k: f"{r['received'] / ours[k]['received']:.2f}" for k, r in theirs.items()}
    fsdp = {
        devices: {times[devices, f"fsdp_{x}"] for x in ("rows", "columns")} for devices in (8, 64)
    }
    row = "| {} and {} times ours; {} and {} times |".format(
        *fsdp[8], *fsdp[64], times[8, "hsdp"], times[8, "fsdp_tp"]
    )
    assert row in (DOCS / "results.md").read_text()
    workspaces = [
        [r["workspace_in_largest_matrices"] for r in each.values()] for each in (theirs, ours)
    ]
    said = [f"{min(x):.2g} to {max(x):.3g}" for x in workspaces]
    assert said == ["5 to 247", "4.4 to 5"]
    text = " ".join((DOCS / "sharding.md").read_text().split())
    assert "needs 5 to 247 of the largest matrices of workspace" in text


def test_the_speeds_on_a_mesh():
    layouts = benchmarked("mesh_time")["layouts"]
    text = (DOCS / "results.md").read_text()

    def speed(name: str) -> str:
        found = [rows[name]["cpu"]["median"] for rows in layouts.values()]
        return f"{min(found):.3g} to {max(found):.3g}"

    def received(name: str) -> str:
        found = [rows[name]["bytes"] / 1e6 for on, rows in layouts.items() if on != "DDP"]
        return f"{min(found):.3g} to {max(found):.3g}"

    ours, stacked = "muon_optax jordan", "muon_optax jordan, stacked"
    theirs = "maxtext", "maxtext, stacked"
    assert f"(its 'dion' {speed('optax dion')}) | {speed(ours)}; `fast` " in text
    assert f"; `fast` {speed('muon_optax fast')} |" in text
    assert "| {}; {} and {} |".format(speed(stacked), *map(speed, theirs)) in text
    sent = map(received, (ours, stacked, *theirs))
    assert "| {} and {}; {} and {} |".format(*sent) in text
    assert [layouts["DDP"][name]["bytes"] for name in theirs] == [0, 0]
    assert f"| {layouts['DDP'][ours]['bytes'] / 1e6:.3g}; 0 |" in text
