"""Leaves by their paths: names for messages, and trees aligned by path, not by container.

Labels, views and shardings are often written as plain dicts while the parameters are an NNX state,
a dataclass or a tree with masked nodes. Aligning by path lets all of these meet.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath

from muon_optax._internal.dtypes import as_dtype

__all__ = [
    "Segments",
    "align",
    "cast_like",
    "filled",
    "has_unnamed",
    "is_absent",
    "is_box",
    "is_function",
    "is_masked",
    "leaves_with_segments",
    "masked_unless",
    "path_name",
    "present_leaves",
    "raise_all",
    "resolve",
    "restructured_like",
    "segments_of",
    "short",
    "unnumbered",
    "whole_variables",
    "with_leaves",
    "without_absent",
]

Segments = tuple[str, ...]

_NUMBER = re.compile(r"(?:(?<=[/._])|^)\d+(?=[/.]|$)")  # 'layers/3/up', 'h.3.up', 'Block_3'


def is_masked(x: object) -> bool:
    """Whether `x` marks a place that another optimizer owns."""
    return isinstance(x, optax.MaskedNode)


def is_absent(x: object) -> bool:
    """Whether `x` marks a place without a leaf: None or `optax.MaskedNode`."""
    return x is None or is_masked(x)


def segments_of(path: KeyPath) -> Segments:
    """The path's keys as strings; a tuple key of a flattened dict is several of them."""
    return tuple(name for key in path for name in _names(key))


def _names(key: Any) -> tuple[str, ...]:
    if isinstance(key, DictKey) and isinstance(key.key, tuple):
        return tuple(map(str, key.key))
    if isinstance(key, FlattenedIndexKey):  # a container registered without the names of its parts
        return (f"<{key.key}>",)
    return (jax.tree_util.keystr((key,), simple=True),)


def has_unnamed(segments: Segments) -> bool:
    """Whether a container on the path was registered without names, so that rules can't see any."""
    return any(s.startswith("<") and s.endswith(">") and s[1:-1].isdigit() for s in segments)


def path_name(segments: Segments) -> str:
    """A path as messages and tables show it.

    Example:
      >>> path_name(("decoder", "mlp", "kernel"))
      'decoder/mlp/kernel'
    """
    return "/".join(segments) or "(root)"


def unnumbered(path: str) -> str:
    """A path with a star for each number: those of equal layers are alike.

    Example:
      >>> unnumbered("layers/3/fc1/Dense_0")
      'layers/*/fc1/Dense_*'
    """
    return _NUMBER.sub("*", path)


def short(x: Any, most: int = 80) -> str:
    """A value's repr on one line, cut where it is long."""
    text = " ".join(repr(x).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def is_function(tree: Any) -> bool:
    """Whether an argument that may be a tree is a function; a callable tree (a model) is a tree."""
    is_leaf = callable(tree) and jax.tree_util.all_leaves([tree]) and not isinstance(tree, type)
    return is_leaf or isinstance(tree, jax.tree_util.Partial)


def resolve(tree: Any, params: Any) -> Any:
    """The tree itself, or its result where it is a function of the parameters."""
    return tree(params) if is_function(tree) else tree


@functools.cache
def is_box(kind: type) -> bool:
    """Whether Flax wraps variables in this type: an NNX Variable, or a Linen box."""
    boxes = {("flax.nnx.variablelib", "Variable"), ("flax.core.meta", "AxisMetadata")}
    return any((c.__module__, c.__name__) in boxes for c in kind.__mro__)


def leaves_with_segments(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[Segments, Any]]:
    """The tree's leaves with their paths, in flattening order.

    Flax's wrappers of variables leave no trace in the paths: parameters have them, but not the
    updates that NNX hands to optax.

    Raises:
      ValueError: naming leaves that have one path, which are matched by path.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf)
    try:
        paths = _paths(treedef)
    except TypeError:  # a container with static parts that can't be hashed
        paths = _paths.__wrapped__(treedef)
    return list(zip(paths, leaves, strict=True))


# An update asks for the paths of the same few trees dozens of times.
@functools.lru_cache(maxsize=128)
def _paths(treedef: Any) -> tuple[Segments, ...]:
    """The paths of a tree's leaves, in flattening order."""
    keyed = _unboxed(treedef.unflatten(range(treedef.num_leaves)))
    paths = tuple(segments_of(path) for path in keyed)
    if len(set(paths)) < len(paths):
        _raise_of_twins(keyed)
    return paths


def _raise_of_twins(keyed: Sequence[KeyPath]) -> None:
    ways: dict[Segments, list[str]] = {}
    for path in keyed:
        ways.setdefault(segments_of(path), []).append(jax.tree_util.keystr(path))
    raise_all(
        [f"{path_name(p)}: {' and '.join(keys)}" for p, keys in ways.items() if len(keys) > 1],
        "leaves are matched by their paths, and these are alike; rename all but one of each:",
    )


def _unboxed(tree: Any) -> list[KeyPath]:
    """The paths of a tree of placeholders, without the keys that Flax's wrappers add."""

    def is_inner_box(x: Any) -> bool:
        return x is not tree and is_box(type(x))

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_inner_box)
    paths = []
    for path, leaf in flat:
        is_wrapped = is_box(type(tree)) and path[:1] == (GetAttrKey("value"),)
        inner = _unboxed(leaf) if is_inner_box(leaf) else [()]
        paths += [(*path[is_wrapped:], *rest) for rest in inner]
    return paths


def whole_variables(tree: Any) -> Any:
    """The tree with one label, or one mask, for each of Flax's variables that has no other in it.

    A variable is one place to whoever walks a state by `nnx.Variable`: one that is left with an
    `optax.MaskedNode` alone has no value that they could read.

    Args:
      tree: a tree of labels, or of anything and `optax.MaskedNode`.

    Returns:
      The tree. Variables with different labels, or with anything but strings and masks, stay.
    """

    def only(variable: Any) -> Any:
        entries = jax.tree.leaves(variable, is_leaf=is_masked)
        are_marks = all(isinstance(x, str) or is_masked(x) for x in entries)
        return entries[0] if are_marks and len(set(entries)) == 1 else variable

    is_variable = lambda x: is_box(type(x))  # noqa: E731
    return jax.tree.map(lambda x: only(x) if is_variable(x) else x, tree, is_leaf=is_variable)


def masked_unless(keep: Callable[[Segments, Any], bool], tree: Any) -> Any:
    """The tree with all leaves masked but those to keep, and Flax's variables as a whole.

    Example:
      >>> masked_unless(lambda path, _: path == ("a",), {"a": 1, "b": 2})
      {'a': 1, 'b': MaskedNode()}
    """
    leaves = leaves_with_segments(tree)
    kept = [leaf if keep(path, leaf) else optax.MaskedNode() for path, leaf in leaves]
    return whole_variables(jax.tree.structure(tree).unflatten(kept))


def align(
    prefix: Any, tree: Any, *, what: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Broadcasts a tree that may be a prefix of `tree` to the leaves of `tree`, by path.

    Args:
      prefix: a tree with an entry for each leaf of `tree` or for a subtree above it. None is an
        entry.
      tree: the tree whose leaves get entries. None and `optax.MaskedNode` are places without a
        leaf, or without a whole subtree; entries for leaves that would be there are allowed.
      what: the name of the entries, for messages.
      is_leaf: which nodes of `prefix` are one entry, besides None and `optax.MaskedNode`.

    Returns:
      One entry for each leaf of `tree`, in flattening order.

    Raises:
      ValueError: listing every path that only one of the two trees has.

    Example:
      >>> align({"mlp": 1, "head": 2}, {"mlp": {"w": 0.0, "b": 0.0}, "head": 0.0}, what="labels")
      [2, 1, 1]
    """

    def is_entry(x: Any) -> bool:
        return is_absent(x) or (is_leaf is not None and is_leaf(x))

    entries = dict(leaves_with_segments(prefix, is_entry))
    places = leaves_with_segments(tree, is_absent)
    absent = _absent(places)
    leaves = [(path, leaf) for path, leaf in places if path not in absent]
    owners = {path: owner for path, _ in places if (owner := _owner(path, entries)) is not None}
    problems = [
        f"{path_name(path)}: a leaf of shape {getattr(leaf, 'shape', ())} without an entry"
        for path, leaf in leaves
        if path not in owners or is_masked(entries[owners[path]])
    ]
    used = set(owners.values())
    problems += [
        f"{path_name(path)}: an entry ({short(entry)}) that no leaf has"
        for path, entry in entries.items()
        if path not in used and not is_masked(entry) and _owner(path, absent) is None
    ]
    raise_all(
        problems,
        f"the tree of {what} doesn't match the parameters; each leaf needs one entry, at its path "
        "or above it:",
    )
    return [entries[owners[path]] for path, _ in leaves]


def _absent(places: Sequence[tuple[Segments, Any]]) -> dict[Segments, None]:
    """The paths of the places without a leaf, in a dict for `_owner`."""
    return {path: None for path, x in places if is_absent(x)}


def _owner(path: Segments, entries: Mapping[Segments, Any]) -> Segments | None:
    """The longest path among the entries that is `path` or leads to it."""
    return next(
        (path[:n] for n in range(len(path), -1, -1) if path[:n] in entries),
        None,
    )


def raise_all(problems: Sequence[str], headline: str) -> None:
    """Raises one ValueError for all the bad leaves, or nothing where there are none."""
    if problems:
        raise ValueError(headline + "\n" + "\n".join(f"  {p}" for p in problems))


def present_leaves(tree: Any, updates: Any) -> dict[Segments, Any]:
    """The tree's leaves by path, without those in the places where `updates` has none.

    None and `optax.MaskedNode` mark such a place, which may be a whole subtree.
    """
    absent = _absent(leaves_with_segments(updates, is_absent))
    return {p: x for p, x in leaves_with_segments(tree) if _owner(p, absent) is None}


def without_absent(tree: Any, updates: Any) -> Any:
    """The tree in the containers of `updates`, without leaves in whose places that has none.

    A tree that differs elsewhere too is returned as it is, for its user to complain of.

    Example:
      >>> without_absent({"w": 1.0, "f": jax.nn.relu}, {"w": 2.0, "f": None})
      {'f': None, 'w': 1.0}
    """
    treedef = jax.tree.structure(updates)
    if jax.tree.structure(tree) == treedef:
        return tree
    leaves, paths = present_leaves(tree, updates), [p for p, _ in leaves_with_segments(updates)]
    # A tree of moments may have none for some leaves.
    masked = {p: x for p, x in leaves_with_segments(tree, is_masked) if is_masked(x)}
    leaves |= {path: masked[path] for path in paths if path in masked}
    if leaves.keys() != set(paths):
        return tree
    return treedef.unflatten([leaves[path] for path in paths])


def filled(tree: Any, leaves: Mapping[Segments, Any]) -> Any:
    """The tree, with leaves in the places where it has None or `optax.MaskedNode`.

    Args:
      tree: a tree.
      leaves: by path; those in other places are left out.

    Example:
      >>> filled({"a": 1, "b": None}, {("a",): 2, ("b",): 3})
      {'a': 1, 'b': 3}
    """
    places = leaves_with_segments(tree, is_absent)
    absent = _absent(places)
    below: dict[Segments, dict[Segments, Any]] = {}
    for path, leaf in leaves.items():
        owner = _owner(path, absent)
        if owner is not None:
            below.setdefault(owner, {})[path[len(owner) :]] = leaf
    # A dict keyed by the rest of the paths has these paths, as nested containers would.
    found = [below[p].get((), below[p]) if p in below else x for p, x in places]
    return jax.tree.structure(tree, is_leaf=is_absent).unflatten(found)


def with_leaves(tree: Any, new: Any) -> Any:
    """The tree with the leaves of `new` at their paths; leaves that `new` lacks stay."""
    fresh = dict(leaves_with_segments(new))
    leaves = [fresh.get(path, leaf) for path, leaf in leaves_with_segments(tree)]
    return jax.tree.structure(tree).unflatten(leaves)


def restructured_like(tree: Any, structure: Any) -> Any:
    """The leaves of `tree` in the containers of `structure`, by path.

    NNX changes its containers between calls, and a restored checkpoint may have other ones, which
    flatten in another order.

    Raises:
      ValueError: listing every path that only one of the two trees has.
    """
    return jax.tree.structure(structure).unflatten([new for new, _ in _pairs(tree, structure)])


def cast_like(new: Any, old: Any) -> Any:
    """The leaves of `new` in the dtypes and containers of `old`: a state keeps its type."""
    return jax.tree.structure(old).unflatten([as_dtype(n, o.dtype) for n, o in _pairs(new, old)])


def _pairs(tree: Any, structure: Any) -> list[tuple[Any, Any]]:
    """Leaves at the same path, in the flattening order of `structure`."""
    leaves, treedef = jax.tree.flatten(tree)
    same, wanted_treedef = jax.tree.flatten(structure)
    if treedef == wanted_treedef:
        return list(zip(leaves, same, strict=True))
    have, want = dict(leaves_with_segments(tree)), leaves_with_segments(structure)
    missing = [path_name(path) for path, _ in want if path not in have]
    wanted = {path for path, _ in want}
    missing += [path_name(path) for path in have if path not in wanted]
    raise_all(missing, "two trees of one structure are needed; only one of them has:")
    return [(have[path], leaf) for path, leaf in want]
