"""The examples run as a newcomer runs them: as programs, with a command line.

All but the demo run in this process, which has imported JAX already.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import Ended, printed_by, run_file

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


def words_of(options: dict[str, object]) -> list[str]:
    pairs = [(f"--{option.replace('_', '-')}", str(value)) for option, value in options.items()]
    return [word for pair in pairs for word in pair]


def run_program(*words: object) -> subprocess.CompletedProcess[str]:
    """Python, in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )


def run_example(name: str, **options: object) -> Ended:
    return run_file(EXAMPLES / name, *words_of(options))


def test_demo_trains_with_both_optimizers_and_compares_them(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    words = words_of({**TINY, "seed": 3, "output": folder})
    process = run_program(EXAMPLES / "train_gpt.py", *words)
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


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ loss (\S+)", printed, re.MULTILINE)]


def test_quickstart_prints_a_falling_loss():
    losses = losses_in(printed_by(EXAMPLES / "quickstart.py"))
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(
    ("name", "bound", "lines"),
    [
        (
            "flax_nnx.py",
            0.1,
            [
                "embed/embedding 32 x 64 adam embedding",
                "up/kernel 64 x 256 1 of 64 x 256 muon 2 weight matrix",
                "up/kernel 1 of 64 x 256 float32 fsdp, - groups 0 B",
                "down/kernel 1 of 256 x 64 float32 fsdp, - groups 75.8 kB",
            ],
        ),
        (
            "flax_linen.py",
            0.1,
            [
                "layers/attention/query/kernel 2 x 32 x 4 x 8 2 of 32 x 32 muon 1 ",
                "layers/attention/out/kernel 2 x 4 x 8 x 32 2 of 32 x 32 muon 1 ",
                "layers/up/kernel 2 x 32 x 128 2 of 32 x 128 muon 2 ",
                "layers/RMSNorm_*/scale x 2 2 x 32 adam ",
            ],
        ),
        (
            "shard_map.py",
            0.15,
            [
                "down + 1 2 of 128 x 64 float32 -, fsdp all_to_all 57.3 kB",
            ],
        ),
        (
            "zero1.py",
            0.1,
            [
                "down 1 of 128 x 64 float32 fsdp*replica, - all_to_all 61.4 kB",
                "down 1 of 128 x 64 float32 fsdp, - -> fsdp*replica, - reshard 4.1 kB",
            ],
        ),
        (
            "scanned_layers.py",
            0.1,
            [
                "layers/up 4 x 32 x 128 4 of 32 x 128 muon 2 ",
                "layers/down + 1 8 of 128 x 32 float32 tp, fsdp all_to_all 28.7 kB",
            ],
        ),
        (
            "mixture_of_experts.py",
            0.2,
            [
                "up 8 x 32 x 64 8 of 32 x 64 muon 1.414 ",
                "up 2 of 32 x 64 float32 fsdp, - all_to_all 8.19 kB",
                "router 32 x 8 adam ",
            ],
        ),
    ],
)
def test_a_model_trains_and_its_tables_say_how(name: str, bound: float, lines: list[str]):
    printed = printed_by(EXAMPLES / name)
    losses = losses_in(printed)
    assert losses[0] > 1.0
    assert losses[-1] < bound
    for line in lines:
        assert f"\n{line}" in printed


def test_devices_are_asked_for_before_there_are_any():
    """JAX raises where it has made its devices; no example is run any further than that."""
    ask = 'jax.config.update("jax_num_cpu_devices", 8)\n'
    names = [path for path in EXAMPLES.glob("*.py") if ask in path.read_text()]
    assert len(names) == 5
    read = "text, ask, _ = open(name).read().partition(sys.argv[1])"
    start = f"import sys\nfor name in sys.argv[2:]:\n    {read}\n    exec(text + ask, {{}})"
    process = run_program("-c", start, ask, *names)
    assert process.returncode == 0, process.stderr


def test_a_convolutional_network_learns_to_read_digits():
    printed = printed_by(EXAMPLES / "convolution.py")
    assert "\nsecond/kernel 3 x 3 x 16 x 32 1 of 144 x 32 muon 1 " in printed
    assert "\nfirst/kernel 3 x 3 x 1 x 16 adam " in printed
    assert losses_in(printed)[-1] < 0.2
    accuracy = float(printed.split()[-1])
    assert accuracy > 0.93


def test_lora_factors_train_by_either_optimizer_on_a_frozen_base():
    printed = printed_by(EXAMPLES / "lora.py")
    by_adamw, by_muon = printed.split("the base is as it was: True\n\n")[:2]
    assert "\nlayer/lora_a 64 x 4 adam LoRA factor\n" in by_adamw
    assert "\nlayer/lora_a 64 x 4 1 of 64 x 4 muon 1 LoRA factor\n" in by_muon
    for printed in (by_adamw, by_muon):
        assert "\nlayer/base 64 x 64 frozen pretrained\n" in printed
        losses = losses_in(printed)
        assert losses[-1] < losses[0] / 10


def test_qk_clip_keeps_logits_below_the_bound():
    printed = printed_by(EXAMPLES / "qk_clip.py")
    sections = re.split(r"^with.*:$|^the weights.*:$", printed, flags=re.MULTILINE)
    rows = [re.findall(r"max logits (.*)", section) for section in sections[1:]]
    without, clipped, (before, after) = [np.array([r.split() for r in x], float) for x in rows]
    assert without.shape == clipped.shape == (5, 4)
    np.testing.assert_array_equal(without[0], clipped[0])  # one start, which is below the bound
    assert np.all(without[0] < 20)
    # Every head passes the bound; with the clip by no more than a step adds.
    assert np.all(without[-1] > 1.5 * 20)
    assert np.all(clipped < 1.1 * 20)
    assert np.all(clipped[-1] < 1.01 * 20)
    assert np.all(before > 1.5 * 20)
    np.testing.assert_allclose(after, 20, atol=0.01)
    losses = losses_in(printed)
    assert losses[9] < losses[5] / 100


def both_losses(printed: str, other: str) -> np.ndarray:
    pairs = re.findall(rf"loss (\S+) with {other} (\S+)", printed)
    return np.array(pairs, float).T


def test_a_run_of_optax_goes_on_with_the_same_losses():
    printed = printed_by(EXAMPLES / "from_optax.py")
    ours, theirs = both_losses(printed, "optax")
    assert len(ours) == 6
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[-1] < losses_in(printed)[0] / 10


def test_a_run_of_torch_goes_on_with_the_same_losses():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on few cores they get in each other's way
    printed = printed_by(EXAMPLES / "from_torch.py")
    torch.set_num_threads(threads)
    ours, theirs = both_losses(printed, "torch")
    assert len(ours) == 5
    assert ours[0] == pytest.approx(theirs[0], abs=2e-4)  # the same weights, as printed
    np.testing.assert_allclose(ours, theirs, rtol=0.02)  # updates are of bfloat16
    assert ours[-1] < losses_in(printed)[0] / 5


def test_without_torch_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is an ImportError
    process = run_example("from_torch.py")
    assert process.returncode == 1
    assert process.stderr == "this example needs PyTorch: pip install 'muon-optax[torch]'\n"


def test_the_list_of_examples_is_whole():
    listed = re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
