"""What commands print and write."""

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["show", "write_json"]


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
