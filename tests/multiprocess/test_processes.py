"""Two processes with four devices each do what one process with eight does."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import reference
import sharded
import worker

SECONDS = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def run_together(processes: int, devices: int, results: pathlib.Path) -> list[tuple[int, str]]:
    """Exit codes and outputs of processes that train together; none is left behind."""
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, worker.__file__, *map(str, (i, processes, devices, port, results))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, out) for process, out in zip(started, outputs, strict=True)]


def test_two_processes_do_what_one_process_and_what_one_device_does(tmp_path):
    results = tmp_path / "results.npz"
    for code, output in run_together(2, 4, results):
        assert code == 0, output
    with np.load(results) as found:
        together = dict(found)
    grads = worker.initial()
    for kind in ("explicit", "auto"):
        for step, updates in enumerate(worker.train(kind)):
            for name, x in updates.items():
                got = together[f"{kind}/{step}/{name}"]
                assert reference.relative_error(got, np.asarray(x)) <= 1e-6, (kind, step, name)
        for name, leaf in worker.LEAVES.items():
            want = [
                reference.muon(b, [b], learning_rate=0.1, rows=sharded.FAST)[0]
                for b in leaf.blocks(grads[name])
            ]
            assert sharded.worst_error(leaf, together[f"{kind}/0/{name}"], want) <= 1e-5
