"""Runs Python programs, as those of examples and notebooks, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def printed_by(program: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What a program prints that ends well, warns of no leaf, and compiles quickly."""
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment,
    )
    assert process.returncode == 0, process.stderr
    assert "MuonWarning" not in process.stderr
    return process.stdout
