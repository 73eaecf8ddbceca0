"""MaxText's own Muon, read from a checkout; none of its code is kept here.

The environment variable MUON_OPTAX_MAXTEXT names the checkout, of August 2026 or later.
"""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax

from muon_optax.views.matrix_view import is_view

__all__ = ["maxtext_muon", "numbers_of"]

SOURCE = "src/maxtext/optimizers"


def maxtext_muon() -> Any:
    """The module `maxtext.optimizers.muon`, without what its package would import."""
    if "maxtext.optimizers.muon" not in sys.modules:
        for name in ("maxtext", "maxtext.optimizers"):
            sys.modules[name] = types.ModuleType(name)
        optimizers: Any = sys.modules["maxtext.optimizers"]
        optimizers.reshape_utils = _module("reshape_utils")
        optimizers.muon = _module("muon")
    return sys.modules["maxtext.optimizers.muon"]


def numbers_of(views: Any, shardings: Any) -> Any:
    """MaxText's dimension numbers, which carry shardings, for a tree of plain views."""
    numbers = maxtext_muon().MuonDimensionNumbers
    return jax.tree.map(
        lambda view, where: view and numbers(*view, where),
        views,
        shardings,
        is_leaf=lambda x: x is None or is_view(x),
    )


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(f"maxtext.optimizers.{name}")
    sys.modules[module.__name__] = module
    exec(compile(_text(f"{SOURCE}/{name}.py"), f"{name}.py", "exec"), vars(module))
    return module


def _text(path: str) -> str:
    """A file of the checkout, which may have no work tree."""
    folder = Path(os.environ.get("MUON_OPTAX_MAXTEXT", "maxtext"))
    if (folder / path).exists():
        return (folder / path).read_text()
    show = ["git", "-C", str(folder), "show", f"HEAD:{path}"]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout
