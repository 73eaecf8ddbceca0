"""The TOML file of `--rules`: who gets Muon, matrix views, and how leaves are sharded.

[[rules]]
pattern = "router"
label = "adam"
reason = "router"

[[views]]
pattern = "c_attn/kernel"
split = [768, 768, 768]

[[shardings]]
pattern = "experts"
spec = ["expert", "", ["fsdp", "tensor"]]
"""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from muon_optax._internal.tree_paths import short
from muon_optax.cli.shape_files import read_regular
from muon_optax.partition import Rule
from muon_optax.views.matrix_view import MatrixView

__all__ = ["RulesFile", "read_rules"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RulesFile:
    """The tables of a file of rules; in each the first pattern that matches a leaf counts.

    Attributes:
      rules: who gets Muon; they go before the default rules.
      views: rules that carry the matrix views; they go before all others.
      shardings: specs by pattern.
    """

    rules: tuple[Rule, ...] = ()
    views: tuple[Rule, ...] = ()
    shardings: tuple[tuple[str, PartitionSpec], ...] = ()

    @property
    def axes(self) -> set[str]:
        """Mesh axes that specs name."""
        return {axis for _, spec in self.shardings for dim in spec for axis in dim or ()}


def read_rules(path: Path, *, torch: bool = False) -> RulesFile:
    """Reads the file.

    Args:
      path: where it is.
      torch: whether matrices are [out, in] where a view doesn't say it.

    Returns:
      The rules in it.

    Raises:
      OSError: if it can't be read.
      ValueError: for text that isn't TOML, unknown tables and keys, and wrong types.
    """
    try:
        tables = tomllib.loads(read_regular(path).decode())
        if unknown := set(tables) - {"rules", "views", "shardings"}:
            raise ValueError(
                f"the tables are [[rules]], [[views]] and [[shardings]], got {sorted(unknown)}"
            )
        axes = {"reduction_axis": 1, "output_axis": 0} if torch else {}
        return RulesFile(
            _read(tables, "rules", _rule),
            _read(tables, "views", lambda row: _view(axes | row)),
            _read(tables, "shardings", _sharding),
        )
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(tables: dict[str, Any], name: str, make: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    rows = tables.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} must be written as [[{name}]] tables, got {short(rows)}")
    found = []
    for i, row in enumerate(rows, 1):
        try:
            Rule(_field(row, "pattern", _is_text, "a string"), "muon")  # checks the pattern
            found.append(make(row))
        except ValueError as error:
            raise ValueError(f"[[{name}]] number {i}: {error}") from None
    return tuple(found)


def _rule(row: dict[str, Any]) -> Rule:
    _check_keys(row, {"pattern", "label", "reason"})
    label: Any = _field(row, "label", _is_text, "a string")
    reason = _field(row, "reason", _is_text, "a string", "a rule")
    return Rule(row["pattern"], label, reason)


def _view(row: dict[str, Any]) -> Rule:
    fields = {f.name for f in dataclasses.fields(MatrixView)}
    _check_keys(row, {"pattern"} | fields)
    for name in fields & set(row):
        if name == "axis":
            _field(row, name, _is_text, "a string")
        elif name in ("heads", "groups"):
            _field(row, name, _is_int, "an integer")
        else:
            _field(row, name, _is_int_or_ints, "an integer or a list of them")
    if isinstance(row.get("split"), int):
        raise ValueError(f"split must be a list of sizes, got {row['split']}")
    view = MatrixView(**{name: row[name] for name in fields & set(row)})
    return Rule(row["pattern"], "muon", "matrix view given", view)


def _sharding(row: dict[str, Any]) -> tuple[str, PartitionSpec]:
    _check_keys(row, {"pattern", "spec"})
    entries = _field(row, "spec", _is_spec, 'a list of mesh axes, "" for none, or lists of axes')
    dims = [
        ((entry,) if entry else ()) if isinstance(entry, str) else tuple(entry) for entry in entries
    ]
    axes = [axis for dim in dims for axis in dim]
    if len(set(axes)) < len(axes):
        raise ValueError(f"spec must name each mesh axis once, got {short(entries)}")
    return row["pattern"], PartitionSpec(*(dim or None for dim in dims))


def _check_keys(row: dict[str, Any], allowed: set[str]) -> None:
    if unknown := set(row) - allowed:
        raise ValueError(f"keys must be among {sorted(allowed)}, got {sorted(unknown)}")


_MISSING = object()


def _field(
    row: dict[str, Any],
    name: str,
    is_right: Callable[[Any], bool],
    allowed: str,
    default: Any = _MISSING,
) -> Any:
    value = row.get(name, default)
    if value is _MISSING:
        raise ValueError(f"{name} is missing")
    if not is_right(value):
        raise ValueError(f"{name} must be {allowed}, got {short(value)}")
    return value


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and x.isprintable()


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_int_or_ints(x: Any) -> bool:
    return _is_int(x) or (isinstance(x, list) and all(map(_is_int, x)))


def _is_spec(x: Any) -> bool:
    def is_axes(entry: Any) -> bool:
        return isinstance(entry, str) or (isinstance(entry, list) and all(map(_is_text, entry)))

    return isinstance(x, list) and all(map(is_axes, x))
