"""The model that `plan` and `report` speak of: by name, or from files, with rules of one's own."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from muon_optax.checks import is_float_dtype
from muon_optax.cli.rules_file import RulesFile, read_rules
from muon_optax.cli.shape_files import read_shapes
from muon_optax.interop.torch_axes import with_output_second
from muon_optax.layouts import ROLES, usual_specs
from muon_optax.leaf_kinds import is_float_leaf
from muon_optax.matrix_view import MuonDimensionNumbers, View, bind_view, is_view
from muon_optax.models import MODELS, model_shapes
from muon_optax.partition import NO_VIEW, NOT_FLOAT, check_rules
from muon_optax.rules import (
    Label,
    Shape,
    default_rules,
    first_match,
    first_rule,
    has_run,
    unmatched,
)
from muon_optax.tree_paths import Segments, align, leaves_with_segments, path_name, raise_together

__all__ = ["LeafChoice", "Target", "add_arguments", "check_dtype", "read_target", "shardings"]


@dataclasses.dataclass(frozen=True)
class LeafChoice:
    """What a leaf gets: its optimizer, why, and for Muon its view."""

    label: Label
    reason: str
    view: View | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A model and what is said of it.

    Attributes:
      name: as shown.
      params: its parameters, as shapes.
      views: the tree of matrix views, None where Muon isn't meant.
      choices: one a leaf, in flattening order.
      rules: the file of rules.
    """

    name: str
    params: Any
    views: Any
    choices: tuple[LeafChoice, ...]
    rules: RulesFile

    @property
    def title(self) -> str:
        """A line that says which model it is."""
        size = sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        return f"{self.name}: {size:,} parameters"

    @property
    def notes(self) -> list[str]:
        """What was probably not meant."""
        pairs = list(zip(_paths(self.params), self.choices, strict=True))
        bare = [path_name(path) for path, choice in pairs if choice.reason == NO_VIEW]
        muons = [path for path, choice in pairs if choice.label == "muon"]
        beaten = [path_name(path) for path in muons if self._is_overruled(path)]
        notes = {
            "leaves with three or more dims and no [[views]] entry get AdamW": bare,
            "[[views]] beat [[rules]], which say otherwise of": beaten,
        }
        return [f"{text}: {_first_names(names)}" for text, names in notes.items() if names]

    def _is_overruled(self, path: Segments) -> bool:
        rule = first_rule(self.rules.rules, path, ())
        return rule is not None and rule.label != "muon"

    @property
    def has_muon(self) -> bool:
        """Whether any leaf gets Muon."""
        return any(choice.label == "muon" for choice in self.choices)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which model is meant."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="NAME", help=f"a published model: {', '.join(MODELS)}")
    which.add_argument(
        "--shapes",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="safetensors files, of which only the headers are read, or JSON of names and shapes",
    )
    parser.add_argument(
        "--rules",
        type=Path,
        metavar="FILE",
        help="TOML with [[rules]] (pattern, label, reason), [[views]] (pattern and the fields of "
        "MatrixView) and [[shardings]] (pattern, spec)",
    )
    parser.add_argument(
        "--torch", action="store_true", help="the files' weights are [out, in], as torch has them"
    )
    parser.add_argument("--scanned", action="store_true", help="the model's layers are stacked")
    parser.add_argument(
        "--dtype",
        help="of the model and of JSON shapes without one (default: bfloat16), and of all "
        "floating-point tensors of safetensors files (default: as saved)",
    )


def read_target(args: argparse.Namespace) -> Target:
    """The model that the arguments mean.

    Raises:
      OSError: for files that can't be read.
      ValueError: for files and arguments that can't be used.
    """
    if args.dtype is not None:
        check_dtype("--dtype", args.dtype)
    if args.torch and args.model:
        raise ValueError("--torch is for --shapes: the models by name are [in, out]")
    if args.scanned and args.shapes:
        raise ValueError("--scanned is for --model: files say themselves what is stacked")
    rules = RulesFile() if args.rules is None else read_rules(args.rules, torch=args.torch)
    if args.model:
        shapes = model_shapes(args.model, scanned=args.scanned, dtype=args.dtype or "bfloat16")
        known = dict(zip(_paths(shapes.params), _aligned(shapes.views, shapes.params), strict=True))
        return _target(args.model, shapes.params, rules, _Conventions(lambda path, _: known[path]))
    params = read_shapes(args.shapes, args.dtype)
    name = args.shapes[0].name + (f" + {len(args.shapes) - 1}" if len(args.shapes) > 1 else "")
    return _target(name, params, rules, _torch_conventions(params) if args.torch else _PLAIN)


def check_dtype(option: str, name: str) -> None:
    """Raises ValueError for what is no real floating-point dtype of 16 bits or more."""
    if not is_float_dtype(name, jnp.floating):
        raise ValueError(
            f"{option} must be a floating-point dtype of 16 bits or more, got {name!r}"
        )


def shardings(target: Target, sizes: Mapping[str, int], fsdp: Any) -> Any:
    """How the leaves lie on a mesh that need not be there.

    Args:
      target: the model.
      sizes: size of each mesh axis; none of them, and there is one device.
      fsdp: 'rows' or 'columns', which dim fsdp would rather shard.

    Returns:
      A tree of NamedSharding, or None for one device.

    Raises:
      ValueError: for specs that don't fit or have no mesh, and axes of which nothing is known.
    """
    if not sizes and target.rules.shardings:
        raise ValueError("the file of rules has [[shardings]], which need --mesh")
    if not sizes:
        return None
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    usual = {a: n for a, n in sizes.items() if a in ROLES or a not in target.rules.axes}
    specs = usual_specs(target.params, target.views, usual, fsdp=fsdp)
    found, problems = [], []
    for path, spec in zip(_paths(target.params), jax.tree.leaves(specs), strict=True):
        given = first_match(target.rules.shardings, path)
        try:
            found.append(NamedSharding(mesh, spec if given is None else given))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {' '.join(str(error).split())}")
    raise_together(problems, "these leaves can't lie as [[shardings]] says:")
    return jax.tree.structure(target.params).unflatten(found)


def _paths(params: Any) -> list[Segments]:
    return [path for path, _ in leaves_with_segments(params)]


def _aligned(views: Any, params: Any) -> list[View | None]:
    return align(views, params, what="matrix views", is_leaf=is_view)


@dataclasses.dataclass(frozen=True)
class _Conventions:
    """How a model's weights are laid out.

    Attributes:
      view: the view of a leaf, if it can be a matrix.
      order: a leaf's shape with the axes in the order [*window, in, out] that the rules know.
    """

    view: Callable[[Segments, Shape], View | None]
    order: Callable[[Segments, Shape], Shape] = lambda _, shape: shape


def _plain_view(path: Segments, shape: Shape) -> View | None:
    del path
    return MuonDimensionNumbers(0, 1) if len(shape) == 2 else None


def _is_torch_kernel(path: Segments, shape: Shape) -> bool:
    return len(shape) == 2 or (len(shape) > 2 and has_run(path, "conv*"))


def _torch_conventions(params: Any) -> _Conventions:
    """[out, in, *window], or [in, out, *window] where a bias says so."""
    shapes = {path_name(path): tuple(leaf.shape) for path, leaf in leaves_with_segments(params)}
    second = with_output_second(shapes)

    def view(path: Segments, shape: Shape) -> View | None:
        if not _is_torch_kernel(path, shape):
            return None
        output = int(path_name(path) in second)
        return MuonDimensionNumbers((1 - output, *range(2, len(shape))), output)

    def order(path: Segments, shape: Shape) -> Shape:
        if not _is_torch_kernel(path, shape):
            return shape
        output = int(path_name(path) in second)
        return (*shape[2:], shape[1 - output], shape[output])

    return _Conventions(view, order)


# Weights as [in, out].
_PLAIN = _Conventions(_plain_view)


def _target(name: str, params: Any, rules: RulesFile, conventions: _Conventions) -> Target:
    check_rules((*rules.rules, *default_rules()), params)
    _check_patterns(rules, _paths(params))
    choices, problems = [], []
    for path, leaf in leaves_with_segments(params):
        try:
            choices.append(_choose(path, leaf, rules, conventions))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_together(problems, "Muon can't take these leaves as declared:")
    views = jax.tree.structure(params).unflatten([choice.view for choice in choices])
    return Target(name, params, views, tuple(choices), rules)


def _check_patterns(rules: RulesFile, paths: list[Segments]) -> None:
    tables: dict[str, tuple[tuple[str, Any], ...]] = {
        "views": rules.views,
        "shardings": rules.shardings,
    }
    unused = [
        f"[[{table}]] {pattern!r}"
        for table, rows in tables.items()
        for pattern in unmatched((pattern for pattern, _ in rows), paths)
    ]
    raise_together(unused, "these patterns match no leaf:")


def _choose(path: Segments, leaf: Any, rules: RulesFile, conventions: _Conventions) -> LeafChoice:
    """As `muon` does: views that are given come first, then rules."""
    shape = tuple(leaf.shape)
    if not is_float_leaf(leaf):
        return LeafChoice("frozen", NOT_FLOAT)
    given = first_match(rules.views, path)
    if given is not None:
        return LeafChoice("muon", "matrix view given", bind_view(given, shape))
    rule = first_rule((*rules.rules, *default_rules()), path, conventions.order(path, shape))
    if rule is not None and rule.label != "muon":
        return LeafChoice(rule.label, rule.reason)
    view = conventions.view(path, shape)
    if view is not None:
        return LeafChoice("muon", rule.reason if rule else "weight matrix", view)
    if rule is not None:
        raise ValueError(f"shape {shape}, labelled 'muon': needs two dims, or a [[views]] entry")
    return LeafChoice("adam", NO_VIEW)
