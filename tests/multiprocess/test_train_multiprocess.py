"""The example of many processes, launched as its page says, killed, ended and resumed."""

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_processes import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "multiprocess.md").read_text()
EXAMPLE = "python examples/train_multiprocess.py"
SECONDS = 300
FOREVER = 10**6
LEARNED = 20  # steps after which the loss is 0.5 lower, at least


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def plain(port: int) -> list[tuple[str, dict[str, str]]]:
    """Command and environment of each process, as on machines of one's own."""
    block = next(b for b in blocks("sh") if "--coordinator" in b)
    lines = [line.rstrip(" &") for line in block.splitlines() if line.startswith(EXAMPLE)]
    return [(line.replace("9999", str(port)), {}) for line in reversed(lines)]


def slurm() -> list[tuple[str, dict[str, str]]]:
    """The same, with what srun sets; JAX makes a port of 61440 to 65535 of the job's number."""
    port = next(p for p in random.sample(range(61440, 65536), 100) if is_free(p))
    block = next(b for b in blocks("sh") if "srun" in b).replace("\\\n", "")
    found = re.search(rf"({EXAMPLE} [^|]*)\|\|", block)
    assert found
    shared = {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    ranks = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    return [(found[1].replace("--fsdp 8", ""), {**shared, **rank}) for rank in ranks]


def is_free(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("localhost", port)) != 0


def kubernetes(port: int) -> list[tuple[str, dict[str, str]]]:
    """The same, with what an Indexed Job sets."""
    service, job = yaml.safe_load_all(blocks("yaml")[0])
    pods = job["spec"]["template"]["spec"]
    host = f"{job['metadata']['name']}-0.{pods['subdomain']}"
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    shell, flag, command = pods["containers"][0]["command"]
    assert (shell, flag) == ("sh", "-c")
    command = command.replace(f"{host}:9999", f"localhost:{port}").replace("--fsdp 8", "")
    return [(command, {"JOB_COMPLETION_INDEX": str(i)}) for i in range(2)]


class Run:
    """Processes of the example that train together; leaving the context ends them."""

    def __init__(
        self, commands: list[tuple[str, dict[str, str]]], folder: Path, devices: int, **options: Any
    ):
        self.processes = [
            self._start(command, environment, folder, devices, options)
            for command, environment in commands
        ]
        self.watchdog = threading.Timer(SECONDS, self.kill)

    def _start(
        self, command: str, added: dict[str, str], folder: Path, devices: int, options: Any
    ) -> subprocess.Popen[str]:
        program = EXAMPLE.replace("python", shlex.quote(sys.executable), 1)
        for name, value in {"checkpoints": folder / "run", **options}.items():
            command += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            **added,
        }
        return subprocess.Popen(
            ["sh", "-c", "exec " + command.removeprefix("exec ").replace(EXAMPLE, program)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("a"),
            text=True,
        )

    def __enter__(self) -> "Run":
        self.watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.cancel()
        self.kill()
        for process in self.processes:
            process.communicate()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def losses(self, until: int = FOREVER) -> dict[int, str]:
        """The losses that process 0 prints, up to a step or until it ends."""
        found = {}
        assert self.processes[0].stdout
        for line in self.processes[0].stdout:
            if match := re.fullmatch(r"step (\d+)  loss (\S+)\n", line):
                found[int(match[1])] = match[2]
                if int(match[1]) == until:
                    break
        return found

    def codes(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.processes]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"{i} is one of ten digits. " * 50)
    return folder


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, text: Path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    stopped.mkdir()
    whole.mkdir()
    options = {"data": text, "save_every": 3}

    # One of two processes is killed: the other ends too, with an error.
    with Run(slurm(), stopped, 2, **options, steps=FOREVER, heartbeat=20) as run:
        seen = run.losses(until=7)
        run.processes[1].kill()
        seen |= run.losses()
        codes = run.codes()
    assert codes[0] != 0
    assert codes[1] == -signal.SIGKILL
    saved = last_step(stopped)
    assert 1 <= saved <= max(seen)

    # The pair goes on from the checkpoint, until one process is told that the job ends.
    with Run(kubernetes(free_port()), stopped, 2, **options, steps=FOREVER) as run:
        resumed = run.losses(until=saved + 4)
        run.processes[1].terminate()
        resumed |= run.losses()
        codes = run.codes()
    last = max(resumed)
    errors = (stopped / "errors").read_text()
    assert codes == [1, 1], errors
    assert errors.count(f"told to end; step {last} is saved") == 2
    assert list(resumed) == list(range(saved + 1, last + 1))
    assert last_step(stopped) == last

    # One process with other devices goes on from there.
    alone = [(f"{EXAMPLE} --coordinator localhost:{free_port()} --processes 1 --process-id 0", {})]
    with Run(alone, stopped, 1, **options, steps=last + 2) as run:
        other = run.losses()
        assert run.codes() == [0], (stopped / "errors").read_text()
    assert list(other) == [last + 1, last + 2]

    # All of it is what a run makes that nothing happens to; where it was stopped is chance.
    steps = max(last + 2, LEARNED)
    with Run(plain(free_port()), whole, 2, **options, steps=steps) as run:
        want = run.losses()
        assert run.codes() == [0, 0], (whole / "errors").read_text()
    assert list(want) == list(range(1, steps + 1))
    assert {**seen, **resumed}.items() <= want.items()
    for step, loss in other.items():
        assert float(loss) == pytest.approx(float(want[step]), rel=1e-5)
    assert float(want[LEARNED]) < float(want[1]) - 0.5


def last_step(folder: Path) -> int:
    return max(int(entry.name) for entry in (folder / "run").iterdir() if entry.name.isdigit())
