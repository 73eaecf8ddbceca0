"""Output of the commands: tables, warnings and files."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muon_optax.cli.target import Target

__all__ = ["present", "show", "write_json"]


def present(
    target: Target, title: str, table: Any, data: Any, path: Path | None, notes: Sequence[str]
) -> int:
    """Prints a table about a model, and the choices that were probably not meant.

    Args:
      target: the model.
      title: a line to go before the table.
      table: the table to show.
      data: the same as plain data.
      path: where to write the data, '-' to print it instead of the table, None for the table alone.
      notes: warnings of choices that were probably not meant.

    Returns:
      The exit code: 1 where no leaf gets Muon.
    """
    if path is not None:
        write_json(data, path)
    if path != Path("-"):
        print(title)
        show(table)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0 if target.has_muon else 1


def show(table: Any) -> None:
    """Prints a table, with rich where that is installed and someone looks."""
    if sys.stdout.isatty():
        try:
            from rich import print as print_table
        except ImportError:
            print_table = print
        print_table(table)
    else:
        print(table, flush=True)


def write_json(data: Any, path: Path) -> None:
    """Writes JSON to a file, or prints it where the path is '-'."""
    text = json.dumps(data, indent=1)
    if path == Path("-"):
        print(text, flush=True)
    else:
        path.write_text(text + "\n")
