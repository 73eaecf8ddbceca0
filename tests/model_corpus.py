"""Paths and shapes of models of other people's libraries, and what each of their leaves should get.

`data/models.json.gz` is {model: [[path, shape, want, why]]}, from the modules of transformers,
diffusers, timm and torchvision, layers that are alike told once; want is 'adam', 'muon', 'view'
(three dims or more: AdamW until a view is declared) or 'either'. `data/jax_models.json.gz` is
{model: {framework, tree, leaves: [[path, shape, want, why, axes, heads]]}}.
`data/more_models.json.gz` is {'torch': {model: [[path, shape, want]]}, 'jax': {model: {tree,
leaves: [[path, shape, want]]}}}, of 375 other models. `data/blind_models.json.gz` is of the same
form, of 194 models that were labelled before any rule was asked about them, and so are 120 of
`data/third_models.json.gz` and 83 of `data/fourth_models.json.gz`. `data/scanned_models.json.gz` is
of that form too: 220 of 2,800 models of installed libraries, labelled by the types of their
modules, of which a person looked at what was doubtful alone. `data/scanned_jax_models.json.gz` is
of the form of `jax_models`, from a scan of 300 JAX models.
"""

import collections
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from shown import report

from muon_optax import ParameterReport

DATA = Path(__file__).parent / "data"


class Leaf(NamedTuple):
    path: str
    shape: tuple[int, ...]
    want: str


class Model(NamedTuple):
    leaves: Sequence[Leaf]
    tree: str  # how paths nest: 'nested', 'haiku', 'attributes', 'flat', 'haiku_flat'


Models = Mapping[str, Model]


def read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def _torch(found: Any) -> Models:
    return {f"torch {model}": Model(_leaves(rows), "flat") for model, rows in found.items()}


def _jax(found: Any) -> Models:
    return {f"jax {m}": Model(_leaves(x["leaves"]), x["tree"]) for m, x in found.items()}


def _leaves(rows: Iterable[Any]) -> list[Leaf]:
    return [Leaf(path, tuple(shape), want) for path, shape, want, *_ in rows]


TORCH = _torch(read("models.json.gz"))
JAX = _jax(read("jax_models.json.gz"))
MORE = read("more_models.json.gz")
BLIND = read("blind_models.json.gz")
THIRD = read("third_models.json.gz")
FOURTH = read("fourth_models.json.gz")
SCANNED = read("scanned_models.json.gz")
SCANNED_JAX = read("scanned_jax_models.json.gz")
CORPORA: dict[str, Models] = {
    "PyTorch": TORCH,
    "JAX": JAX,
    "PyTorch, more": _torch(MORE["torch"]),
    "JAX, more": _jax(MORE["jax"]),
    "PyTorch, blind": _torch(BLIND["torch"]),
    "JAX, blind": _jax(BLIND["jax"]),
    "PyTorch, third round": _torch(THIRD["torch"]),
    "PyTorch, fourth round": _torch(FOURTH["torch"]),
    "JAX, fourth round": _jax(FOURTH["jax"]),
    "PyTorch, scanned": _torch(SCANNED["torch"]),
    "JAX, scanned": _jax(SCANNED_JAX),
}


def tree_of(model: Model) -> Any:
    """PyTorch's flat names, Keras' flat paths, Haiku's modules, and nested dicts for the rest."""
    leaves = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in model.leaves}
    if model.tree in ("flat", "haiku_flat"):
        return leaves
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.rsplit("/", 1) if model.tree == "haiku" else path.split("/")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def doubted(found: ParameterReport, leaf: Leaf) -> bool:
    """Whether a warning of a doubtful choice names the leaf, or one like it but for numbers."""
    doubts = [text for text in found.warnings if "Rule(" in text]
    if not doubts:
        return False
    path = re.sub(r"\d+", r"\\d+", re.escape(leaf.path))
    named = re.compile(rf"(?<![\w./]){path} {re.escape(str(leaf.shape))}")
    return any(named.search(text) for text in doubts)


class Counts(NamedTuple):
    """Leaves of a corpus, hidden ones of two dims, and AdamW's that got Muon.

    Attributes:
      models: of the corpus.
      hidden: leaves of two dims that are Muon's.
      on_muon: of these, how many got Muon.
      named: of these, how many a warning names.
      adam_warned: AdamW's leaves that got Muon with a warning that names them.
      adam_silent: the others.
    """

    models: int
    hidden: int
    on_muon: int
    named: int
    adam_warned: int
    adam_silent: int


def count(models: Models) -> Counts:
    """Counts what a whole corpus gets."""
    total: collections.Counter[str] = collections.Counter()
    for model in models.values():
        found = report(tree_of(model))
        optimizers = {row.path: row.optimizer for row in found.rows}
        for leaf in model.leaves:
            is_muon = optimizers[leaf.path] == "muon"
            if leaf.want == "muon" and len(leaf.shape) == 2:
                total["hidden"] += 1
                total["on_muon"] += is_muon
                total["named"] += doubted(found, leaf)
            elif leaf.want == "adam" and is_muon:
                total["warned" if doubted(found, leaf) else "silent"] += 1
    keys = ("hidden", "on_muon", "named", "warned", "silent")
    return Counts(len(models), *(total[key] for key in keys))
