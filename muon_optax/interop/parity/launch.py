"""Starts torch's ranks and sees them end, whatever happens."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from muon_optax.interop.parity.case import Case, write_cases

__all__ = ["ParityError", "leave_with_parent", "run_cases", "run_ranks"]

_POLL_SECONDS = 0.1
_LINES_SHOWN = 15


class ParityError(RuntimeError):
    """The torch side couldn't be run; the message says why and what to do."""


def run_cases(
    folder: Path, cases: Sequence[Case], *, port: int | None = None, timeout: float = 600.0
) -> None:
    """Runs cases of one number of ranks in torch; their records are then in the folder.

    Args:
      folder: an empty folder.
      cases: all with the same number of ranks.
      port: where the ranks meet on this machine; None: in a file in the folder.
      timeout: in seconds, for all cases together.

    Raises:
      ParityError: where torch isn't installed, the port is taken, a rank dies, or time is up.
    """
    worlds = {case.world for case in cases}
    if len(worlds) != 1:
        raise ValueError(f"cases of one launch must have one number of ranks, got {sorted(worlds)}")
    if importlib.util.find_spec("torch") is None:
        raise ParityError("the torch side needs PyTorch: pip install 'muon-optax[torch]'")
    if any(case.optimizer == "muon_fsdp2" for case in cases):
        _need("muon_fsdp2", "muon-optax[peers]")
    folder = folder.resolve()
    write_cases(folder / "cases.json", cases)
    where = f"file://{folder}/store"
    if port is not None:
        _check_port(port)
        where = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "muon_optax.interop.parity.ranks", str(folder)]
    # torch.compile would want a C++ compiler for the peers' loops, and minutes.
    env = {"MUON_PARITY_RENDEZVOUS": where, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    run_ranks(command, worlds.pop(), folder, env=env, timeout=timeout)


def _need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ParityError(f"this case needs {module}: pip install '{package}'")


def _check_port(port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        raise ParityError(
            f"port {port} can't be used ({error.strerror}); give another, or none to meet in a file"
        ) from error


def run_ranks(
    command: Sequence[str],
    world: int,
    folder: Path,
    *,
    env: dict[str, str] | None = None,
    timeout: float = 600.0,
) -> None:
    """Runs a command once for each rank, with RANK and WORLD_SIZE in its environment.

    None of the processes, nor any that they started, is left when this returns or raises.

    Args:
      command: the program and its arguments.
      world: number of ranks.
      folder: takes each rank's output, as rankN.log.
      env: more environment variables.
      timeout: in seconds.

    Raises:
      ParityError: when a rank fails, with the end of its output, or time is up.
    """
    with _ended_processes() as processes, contextlib.ExitStack() as files:
        for rank in range(world):
            log = files.enter_context(open(folder / f"rank{rank}.log", "wb"))
            own = {**os.environ, **(env or {}), "RANK": str(rank), "WORLD_SIZE": str(world)}
            processes.append(
                subprocess.Popen(
                    command,
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        _wait(processes, folder, time.monotonic() + timeout)


@contextlib.contextmanager
def _ended_processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that are gone, with their children, when the block is left."""
    processes: list[subprocess.Popen[bytes]] = []

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    try:
        old = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not in the main thread, which signals go to
        old = None
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
        if old is not None:
            signal.signal(signal.SIGTERM, old)


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while True:
        codes = [_exit_code(process) for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise ParityError(_death(failed[0], codes[failed[0]] or 0, folder))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            tail = _tail(folder / f"rank{late[0]}.log")
            raise ParityError(
                f"time is up and ranks {late} still run; rank {late[0]} said:\n{tail}"
            )
        time.sleep(_POLL_SECONDS)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """How a process ended, or None; it isn't reaped, so that its number stays its own.

    The number of a reaped process may be given to another, whose group would then be killed.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _death(rank: int, code: int, folder: Path) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"rank {rank} {how}; its last words:\n{_tail(folder / f'rank{rank}.log')}"


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"


def leave_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
