"""The examples run as a newcomer runs them: as programs, from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "steps": 30,
    "layers": 1,
    "width": 32,
    "context": 16,
    "batch": 8,
    "lr": 0.05,
    "adamw_lr": 0.02,
}


def run_example(name: str, **options: object) -> subprocess.CompletedProcess[str]:
    pairs = [(f"--{option.replace('_', '-')}", str(value)) for option, value in options.items()]
    command = [sys.executable, str(EXAMPLES / name), *(word for pair in pairs for word in pair)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_demo_trains_with_both_optimizers_and_compares_them(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    process = run_example("train_gpt.py", **TINY, seed=3, output=folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""

    printed = " ".join(process.stdout.split())
    for words in ("weight matrix", "embedding", "head", "standard library", "tokens/s"):
        assert words in printed
    assert "Muon reached AdamW's" in printed or "Muon did not reach AdamW's" in printed

    record = json.loads((folder / "curves.json").read_text())
    assert record["config"].items() >= {**TINY, "seed": 3}.items()
    assert record["corpus"].startswith("the standard library of Python")
    assert record["runs"].keys() == {"muon", "adamw"}
    for curve in record["runs"].values():
        assert curve["steps"] == list(range(1, 31))
        assert curve["seconds"] == sorted(curve["seconds"])
        for losses in (curve["train_loss"], curve["val_loss"]):
            assert losses[-1] < losses[0] - 0.5

    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_demo_trains_with_one_optimizer_on_another_text(tmp_path: Path):
    text, output = tmp_path / "text", tmp_path / "output"
    text.mkdir()
    for i in range(10):
        (text / f"{i}.txt").write_text("abcdefgh" * 20)
    options = {"optimizer": "muon", "schedule": "polar_express", "mesh": "fsdp=1", "data": text}
    process = run_example("train_gpt.py", **TINY, **options, output=output)
    assert process.returncode == 0, process.stderr
    runs = json.loads((output / "curves.json").read_text())["runs"]
    assert runs.keys() == {"muon"}
    assert runs["muon"]["val_loss"][-1] < 1.0  # a repeated alphabet is soon known by heart


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("steps", 0, "--steps: must be at least 1, got 0"),
        ("width", 33, "width must be a multiple of 32, got 33"),
        ("schedule", "nonsense", "'nonsense'"),
        ("mesh", "fsdp=3", "the batch must divide over 3 devices (see --mesh), got 16"),
        ("mesh", "rows=8", "must be like data=2,fsdp=4"),
        ("data", "no-such-folder", "at least 10 files"),
    ],
)
def test_demo_explains_bad_options_in_one_line(
    option: str, value: object, words: str, tmp_path: Path
):
    process = run_example("train_gpt.py", output=tmp_path, **{option: value})
    assert process.returncode != 0
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert words in line


def test_quickstart_prints_a_falling_loss():
    process = run_example("quickstart.py")
    assert process.returncode == 0, process.stderr
    losses = [float(line.split()[-1]) for line in process.stdout.splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 10
