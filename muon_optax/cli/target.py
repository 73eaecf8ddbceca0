"""The model that `plan` and `report` speak of: by name, or from files, with rules of one's own."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from muon_optax._internal.checks import is_float_dtype
from muon_optax._internal.tree_paths import (
    Segments,
    align,
    leaves_with_segments,
    path_name,
    raise_all,
)
from muon_optax._internal.warnings import about
from muon_optax.cli.rules_file import RulesFile, read_rules
from muon_optax.cli.shape_files import read_shapes
from muon_optax.interop.torch_axes import with_output_second
from muon_optax.models import MODELS, model_shapes
from muon_optax.partition import (
    Assignment,
    Decision,
    Rule,
    assign,
    check_rules,
    default_rules,
    find_warnings,
    first_match,
    first_rules,
    has_run,
    unmatched,
)
from muon_optax.partition.defaults import ADAM_RULES
from muon_optax.sharding.usual_specs import ROLES, usual_specs
from muon_optax.views.matrix_view import MuonDimensionNumbers, is_view

__all__ = ["Target", "add_arguments", "check_dtype", "read_target", "shardings"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A model and the options about it.

    Attributes:
      name: as shown.
      params: its parameters, as shapes.
      partition: the rules that say who gets Muon, as `muon` takes them.
      assignment: their decisions.
      rules: the file of rules.
    """

    name: str
    params: Any
    partition: tuple[Rule, ...]
    assignment: Assignment
    rules: RulesFile

    @property
    def title(self) -> str:
        """A line that says which model it is."""
        size = sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        return f"{self.name}: {size:,} parameters"

    @property
    def views(self) -> Any:
        """The tree of matrix views, None where Muon isn't meant."""
        views = [decision.view for decision in self.assignment.decisions]
        return jax.tree.structure(self.params).unflatten(views)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The library's warnings."""
        return find_warnings(self.params, self.assignment)

    @property
    def notes(self) -> list[str]:
        """Entries that the file of rules has twice."""
        beaten = about("[[views]] beat [[rules]], which say otherwise of", self._beaten())
        return [beaten] if beaten else []

    def _beaten(self) -> list[Decision]:
        decisions = self.assignment.decisions
        leaves = [(d.segments, d.shape) for d in decisions]
        found = zip(
            decisions,
            first_rules(self.rules.views, leaves),
            first_rules(self.rules.rules, leaves),
            strict=True,
        )
        return [d for d, view, rule in found if view and rule and rule.label != "muon"]

    @property
    def has_muon(self) -> bool:
        """Whether any leaf gets Muon."""
        return any(decision.label == "muon" for decision in self.assignment.decisions)


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
        raise ValueError("--scanned is for --model: files say themselves which leaves are stacked")
    rules = RulesFile() if args.rules is None else read_rules(args.rules, torch=args.torch)
    if args.model:
        shapes = model_shapes(args.model, scanned=args.scanned, dtype=args.dtype or "bfloat16")
        known = zip(_paths(shapes.params), _aligned(shapes.views, shapes.params), strict=True)
        named = [_of_model(path, view) for path, view in known if view is not None]
        return _target(args.model, shapes.params, rules, (*named, *default_rules()))
    params = read_shapes(args.shapes, args.dtype)
    name = args.shapes[0].name + (f" + {len(args.shapes) - 1}" if len(args.shapes) > 1 else "")
    usual = (*ADAM_RULES, *_torch_rules(params)) if args.torch else default_rules()
    return _target(name, params, rules, usual)


def check_dtype(option: str, name: str) -> None:
    """Raises ValueError unless it is a real floating-point dtype of 16 bits or more."""
    if not is_float_dtype(name, jnp.floating):
        raise ValueError(
            f"{option} must be a floating-point dtype of 16 bits or more, got {name!r}"
        )


def shardings(target: Target, sizes: Mapping[str, int], fsdp: Any) -> Any:
    """How the leaves are sharded on a mesh that need not be there.

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
    raise_all(problems, "these leaves can't be sharded as [[shardings]] says:")
    return jax.tree.structure(target.params).unflatten(found)


def _paths(params: Any) -> list[Segments]:
    return [path for path, _ in leaves_with_segments(params)]


def _aligned(views: Any, params: Any) -> list[Any]:
    return align(views, params, what="matrix views", is_leaf=is_view)


def _of_model(path: Segments, view: Any) -> Rule:
    return Rule(path, "muon", "weight matrix", view, optional=True)


def _torch_rules(params: Any) -> tuple[Rule, ...]:
    """Muon for torch's weights: [out, in, *window], or [in, out, *window] where a bias says so."""
    leaves = [(path, tuple(leaf.shape)) for path, leaf in leaves_with_segments(params)]
    second = with_output_second({path_name(path): shape for path, shape in leaves})
    return tuple(
        _torch_rule(path, len(shape), output=int(path_name(path) in second))
        for path, shape in leaves
        if len(shape) == 2 or (2 < len(shape) < 6 and has_run(path, "conv*"))
    )


def _torch_rule(path: Segments, rank: int, output: int) -> Rule:
    view = MuonDimensionNumbers((1 - output, *range(2, rank)), output)
    return Rule(path, "muon", "weight matrix", view, optional=True)


def _target(name: str, params: Any, rules: RulesFile, usual: tuple[Rule, ...]) -> Target:
    for own in (rules.views, rules.rules):
        check_rules((*own, *usual), params)
    _check_patterns(rules, _paths(params))
    # They are checked now; a view may take each leaf of a rule, of which a note tells.
    own = (dataclasses.replace(r, optional=True) for r in (*rules.views, *rules.rules))
    partition = (*own, *usual)
    return Target(name, params, partition, assign(params, None, partition), rules)


def _check_patterns(rules: RulesFile, paths: list[Segments]) -> None:
    unused = unmatched((pattern for pattern, _ in rules.shardings), paths)
    raise_all([f"[[shardings]] {pattern!r}" for pattern in unused], "these patterns match no leaf:")
