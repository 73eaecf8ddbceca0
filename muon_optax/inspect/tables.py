"""Tables as plain text, and for rich; the columns of each are beside its rows' class."""

from collections.abc import Sequence
from typing import Any

__all__ = ["format_table", "quantity", "rich_table"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, columns aligned."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Any:
    """The same table for rich (the `report` extra)."""
    from rich.box import SIMPLE_HEAD  # rich is optional
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=note, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names may hold rich's markup
    return table


def quantity(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix.

    Example:
      >>> quantity(763_000_000, "B"), quantity(0.00025, "s"), quantity(0, "B")
      ('763 MB', '250 us', '0 B')
    """
    for power, prefix in zip(range(15, -10, -3), "PTGMk mun", strict=True):
        if value >= 10.0**power:
            return f"{value / 10.0**power:.3g} {prefix.strip()}{unit}"
    return f"{value:.3g} {unit}"
