"""Runs of the command line, and files for it."""

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

from muon_optax.cli import main


def run(*argv: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in argv])
    return code, out.getvalue(), err.getvalue()


def data_of(*argv: Any) -> dict[str, Any]:
    code, out, _ = run(*argv, "--json", "-")
    assert code == 0
    return json.loads(out)


def error_of(*argv: Any) -> str:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


def write(path: Path, header: Any, held: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(prefix + text + bytes(held))
    return path


def rules_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path
