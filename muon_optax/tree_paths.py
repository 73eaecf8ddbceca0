"""Leaves by their paths: names for messages, and trees aligned by path, not by container.

Labels, views and shardings are often written as plain dicts while the parameters are an NNX state,
a dataclass or a tree with masked nodes. Aligning by path lets all of these meet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.tree_util import GetAttrKey, KeyPath

__all__ = [
    "Segments",
    "align",
    "cast_like",
    "graft",
    "is_masked",
    "leaves_with_segments",
    "path_name",
    "raise_together",
    "segments_of",
]

Segments = tuple[str, ...]


def is_masked(x: object) -> bool:
    """Whether `x` marks a place that another optimizer owns."""
    return isinstance(x, optax.MaskedNode)


def _canonical(path: KeyPath) -> KeyPath:
    # Flax variables (NNX Param, Linen's boxes) show up as one more attribute, `value`, in
    # parameters but not in the updates that NNX hands to optax.
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        return path[:-1]
    return path


def segments_of(path: KeyPath) -> Segments:
    """The path's keys as strings, without the wrapper that Flax puts around each variable."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in _canonical(path))


def path_name(segments: Segments) -> str:
    """A path as messages and tables show it.

    Example:
      >>> path_name(("decoder", "mlp", "kernel"))
      'decoder/mlp/kernel'
    """
    return "/".join(segments) or "(root)"


def leaves_with_segments(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[Segments, Any]]:
    """The tree's leaves with their paths, in flattening order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(segments_of(path), leaf) for path, leaf in flat]


def align(
    prefix: Any, tree: Any, *, what: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Spreads a tree that may be a prefix of `tree` over the leaves of `tree`, by path.

    Args:
      prefix: a tree with an entry for each leaf of `tree` or for a subtree above it. None is an
        entry.
      tree: the tree to spread over. None and `optax.MaskedNode` are places without a leaf.
      what: what the entries are, for messages.
      is_leaf: what counts as one entry of `prefix` besides None and `optax.MaskedNode`.

    Returns:
      One entry for each leaf of `tree`, in flattening order.

    Raises:
      ValueError: listing every path that only one of the two trees has.

    Example:
      >>> align({"mlp": 1, "head": 2}, {"mlp": {"w": 0.0, "b": 0.0}, "head": 0.0}, what="labels")
      [2, 1, 1]
    """

    def is_entry(x: Any) -> bool:
        return x is None or is_masked(x) or (is_leaf is not None and is_leaf(x))

    entries = dict(leaves_with_segments(prefix, is_entry))
    places = leaves_with_segments(tree, lambda x: x is None or is_masked(x))
    leaves = [(path, leaf) for path, leaf in places if leaf is not None and not is_masked(leaf)]
    owners = {path: owner for path, _ in places if (owner := _owner(path, entries)) is not None}
    problems = [
        f"  {path_name(path)}: a leaf of shape {getattr(leaf, 'shape', ())} without an entry"
        for path, leaf in leaves
        if path not in owners or is_masked(entries[owners[path]])
    ]
    used = set(owners.values())
    problems += [
        f"  {path_name(path)}: an entry ({entry}) that no leaf has"
        for path, entry in entries.items()
        if path not in used and not is_masked(entry)
    ]
    if problems:
        raise ValueError(
            f"the tree of {what} doesn't match the parameters; each leaf needs one entry, at its "
            "path or above it:\n" + "\n".join(problems)
        )
    return [entries[owners[path]] for path, _ in leaves]


def _owner(path: Segments, entries: Mapping[Segments, Any]) -> Segments | None:
    """The longest path among the entries that is `path` or leads to it."""
    return next(
        (path[:n] for n in range(len(path), -1, -1) if path[:n] in entries),
        None,
    )


def raise_together(problems: Sequence[str], headline: str) -> None:
    """Raises one ValueError for all the bad leaves, or nothing where there are none."""
    if problems:
        raise ValueError(headline + "\n" + "\n".join(f"  {p}" for p in problems))


def graft(tree: Any, structure: Any) -> Any:
    """The leaves of `tree` in the containers of `structure`; NNX changes its own between calls."""
    return jax.tree.structure(structure).unflatten(jax.tree.leaves(tree))


def cast_like(new: Any, old: Any) -> Any:
    """The leaves of `new` in the dtypes and containers of `old`: a state keeps its type."""
    leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return jax.tree.structure(old).unflatten([n.astype(o.dtype) for n, o in leaves])
