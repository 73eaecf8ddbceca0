"""Imports published optimizers from checkouts, as far as they run on a CPU.

The environment variable MUON_OPTAX_PUBLISHED names the folder with the checkouts.
"""

import ast
import importlib
import os
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

__all__ = ["FOLDER", "emerging", "functions", "imported", "loaded", "package"]

FOLDER = Path(os.environ.get("MUON_OPTAX_PUBLISHED", "published"))


def not_compiled(function: Any = None, **options: Any) -> Any:
    """`torch.compile` that changes nothing."""
    return function or (lambda function: function)


def imported(name: str) -> Any:
    """A module of a checkout, with functions that are not compiled."""
    with mock.patch.object(torch, "compile", not_compiled):
        return importlib.import_module(name)


def package(name: str, folder: str) -> None:
    """A package whose modules can be imported, without what its __init__ would import."""
    module = types.ModuleType(name)
    module.__path__ = [str(FOLDER / folder)]
    sys.modules[name] = module


def loaded(path: str, words: Mapping[str, str] | None = None, **replaced: Any) -> Any:
    """A module of one file, some of whose words and names are replaced."""
    module = types.ModuleType(Path(path).stem)
    with mock.patch.object(torch, "compile", not_compiled):
        exec(compile(_text(path, words or {}), path, "exec"), vars(module))
    vars(module).update(replaced)
    return module


def functions(path: str, *names: str, words: Any = None, **constants: Any) -> list[Any]:
    """Functions of a training script, without their decorators."""
    tree = ast.parse(_text(f"modded-nanogpt/{path}", words or {}))
    found: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, **constants}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), path, "exec"), found)
    return [found[name] for name in names]


def _text(path: str, words: Mapping[str, str]) -> str:
    text = (FOLDER / path).read_text()
    for old, new in words.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def emerging(name: str) -> Any:
    """A module of Emerging-Optimizers, which is written for Python 3.12 and a GPU."""
    root = "emerging_optimizers"
    if root not in sys.modules:
        typing.override = getattr(typing, "override", lambda f: f)  # of Python 3.12
        package(root, f"Emerging-Optimizers/{root}")
        package(
            f"{root}.orthogonalized_optimizers",
            f"Emerging-Optimizers/{root}/orthogonalized_optimizers",
        )
        registry = types.ModuleType(f"{root}.registry")
        registry.register_optimizer = lambda name: lambda cls: cls
        sys.modules[registry.__name__] = sys.modules[root].registry = registry
        logging = types.SimpleNamespace(**dict.fromkeys(("debug", "warning"), lambda *a: None))
        sys.modules.setdefault("absl", types.SimpleNamespace(logging=logging))
    return imported(f"{root}.{name}")
