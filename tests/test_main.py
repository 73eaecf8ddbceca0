"""The command line: `python -m muon_optax`."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from muon_optax.cli import main, parity
from muon_optax.interop.parity import launch
from muon_optax.interop.parity.case import Case
from muon_optax.interop.parity.verdict import TOLERANCES, Mark, Row, Verdict
from muon_optax.recipes import systems


def test_parity_on_two_ranks(tmp_path, capsys):
    pytest.importorskip("torch", reason="torch isn't installed")
    path = tmp_path / "rows.json"
    argv = ["parity", "--recipe", "torch_muon", "--ranks", "2", "--mesh", "fsdp=2"]
    assert main([*argv, "--steps", "10", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "torch_muon reference float32 fsdp=2"
    assert lines[1].split() == [
        "leaf",
        "step",
        "update",
        "momentum",
        "parameter",
        "torch",
        "off",
        "verdict",
    ]
    assert sum(line.endswith("PASS") for line in lines) == 12 * 10
    assert lines[-1].startswith("PASS: 120 rows, 0 failed; bias")
    (verdict,) = json.loads(path.read_text())
    assert verdict["passed"]
    assert max(row["parameter"] for row in verdict["rows"]) < 1e-5
    assert max(row["momentum"] for row in verdict["rows"]) < 1e-6


def verdict(case: Case, mark: Mark = "PASS") -> Verdict:
    row = Row("w", 1, 1e-3, 1e-3, 1e-3, None, mark)
    return Verdict(case, TOLERANCES["float32"], (row,), 0.0, (1.0,))


def test_the_exit_code_says_whether_it_holds(monkeypatch, capsys):
    outcomes: tuple[tuple[Mark, int], ...] = (("PASS", 0), ("FAIL", 1))
    for mark, code in outcomes:
        judged = [verdict(case, mark) for case in parity.grid()[:1]]
        monkeypatch.setattr(parity, "judge", lambda cases, given=judged, **_: given * len(cases))
        assert main(["parity", "--worst"]) == code
    assert capsys.readouterr().out.endswith("failed: torch_muon reference float32 fsdp=2\n")
    assert main(["parity", "--grid"]) == 1
    assert f"0 cases passed, {len(parity.grid())} failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "3", "--mesh", "fsdp=2"], "--mesh fsdp=2 is of 2 ranks, not --ranks 3"),
        (["--recipe", "dion", "--optimizer", "torch"], "has the conventions of torch_muon"),
        (["--mesh", "tp=2"], "mesh must have the axis fsdp"),
        (["--mesh", "fsdp"], "a mesh is written like replica=4,fsdp=16"),
        (["--ranks", "9"], "at most 8 replicas and shards, got (('fsdp', 9),)"),
        (["--steps", "0"], "steps must be positive"),
    ],
)
def test_errors_are_told_with_exit_code_2(capsys, argv, message):
    assert main(["parity", *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert main(["parity"]) == 2
    assert "pip install 'muon-optax[torch]'" in capsys.readouterr().err


def test_interrupts_end_it_quietly(monkeypatch, capsys):
    def judge(cases, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "judge", judge)
    assert main(["parity"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("argv", [[], ["parity", "--recipe", "adam"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: python -m muon_optax" in capsys.readouterr().err


def test_the_grid_has_every_mesh_and_system():
    cases = parity.grid()
    assert {case.recipe for case in cases} == set(systems.__all__)
    of_torch = [c for c in cases if c.recipe == "torch_muon"]
    assert {c.mesh_name for c in of_torch} == {
        "fsdp=2",
        "fsdp=4",
        "replica=2,fsdp=2",
        "fsdp=2,tp=2",
    }
    kinds = {(c.optimizer, c.dtype) for c in of_torch if c.mesh_name == "fsdp=2,tp=2"}
    assert kinds == {("reference", "float32"), ("reference", "float64"), ("torch", "float32")}


def test_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["muon_optax", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("muon_optax", run_name="__main__")
    assert "prove that a recipe does what PyTorch does" in capsys.readouterr().out


# Imports all, without a device: any use of one would raise. Then plans and reports.
ALONE = """
import sys
import muon_optax, muon_optax.cli, muon_optax.interop, muon_optax.interop.torch, muon_optax.recipes

print(muon_optax.model_rules.__name__, {'flax', 'equinox', 'haiku', 'torch'} & set(sys.modules))
main, model = muon_optax.cli.main, ['--model', 'gpt2-124m']
codes = [main(['plan', *model, '--mesh', 'fsdp=8']), main(['report', *model])]
sys.exit(any(codes) or 'torch' in sys.modules)
"""


def test_importing_imports_no_framework_and_plans_touch_no_device():
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "model_rules set()"
    assert "a device receives" in done.stdout
