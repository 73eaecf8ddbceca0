"""Runs Python programs, as those of examples and notebooks, in this process.

It has imported JAX already, and has made its devices.
"""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest


class Ended(NamedTuple):
    """What a program printed, and the code it ended with."""

    returncode: int
    stdout: str
    stderr: str


def run_file(path: Path, *words: str) -> Ended:
    """Runs a file as `__main__`, with the words of a command line."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(path), *words])
        patched.syspath_prepend(path.parent)
        return run(lambda: runpy.run_path(str(path), run_name="__main__"))


def printed_by(path: Path) -> str:
    """What a file prints, with single spaces; nothing went wrong, and nothing surprised."""
    ended = run_file(path)
    assert ended.returncode == 0, ended.stderr
    assert "MuonWarning" not in ended.stderr
    return re.sub(" +", " ", ended.stdout)


def run_code(code: str, folder: Path) -> Ended:
    """Runs a notebook's code in the folder that it is in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", sys.path.copy())
        return run(lambda: exec(compile(code, "notebook", "exec"), {}))


def run(program: Callable[[], object]) -> Ended:
    """Runs a program until its end; what it warns of is an error, as in all tests."""
    set_mesh, contexts = jax.set_mesh, contextlib.ExitStack()

    def until_its_end(mesh: jax.sharding.Mesh) -> Any:
        context = set_mesh(mesh)
        contexts.push(context.__exit__)
        return context

    code, out, err = 0, io.StringIO(), io.StringIO()
    with contexts, pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.config, "update", _updated_unless_started(jax.config.update))
        patched.setattr(jax, "set_mesh", until_its_end)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                program()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
                if isinstance(end.code, str):
                    print(end.code, file=err)
    return Ended(code, out.getvalue(), err.getvalue())


def _updated_unless_started(update: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """JAX takes no other number of devices than those that it has made."""

    def wrapped(name: str, value: Any) -> None:
        if name == "jax_num_cpu_devices":
            assert value <= jax.device_count()
        else:
            update(name, value)

    return wrapped
