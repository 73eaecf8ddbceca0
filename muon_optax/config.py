"""The configuration of a `muon`, kept beside its two functions, and how it is found again.

`report`, `plan` and others take the transformation and ask it, so that their tables can't differ
from the update. The transformation may be anywhere in an `optax.chain`, under `optax.masked`,
`optax.inject_hyperparams`, `optax.MultiSteps` or `optax.partition`: its `init` is traced, and each
`muon` in it writes down its configuration and the leaves that reach it.
"""

import contextvars
import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from muon_optax._internal.leaf_types import check_arrays
from muon_optax._internal.tree_paths import (
    Segments,
    leaves_with_segments,
    masked_unless,
    path_name,
    raise_all,
)
from muon_optax.partition import Partition, Views
from muon_optax.sharding.options import ShardingOptions
from muon_optax.transforms.direction import Direction
from muon_optax.transforms.shape_scale import Scaling

__all__ = ["Found", "MuonConfig", "find_configs", "note_if_searched", "search_configs"]


@dataclasses.dataclass(frozen=True)
class MuonConfig:
    """The options of a `muon` that plans, reports and statistics need.

    Attributes:
      direction: momentum, orthogonalisation and how they are run.
      scaling: the scale by shape.
      declared: shardings of parameters and momentum.
      views: which axes make matrices.
      partition: who gets Muon.
    """

    direction: Direction
    scaling: Scaling
    declared: ShardingOptions
    views: Views
    partition: Partition


class Found(NamedTuple):
    """A `muon` in a transformation.

    Attributes:
      config: its configuration.
      params: the leaves that reach it, in the caller's arrays; the others are masked.
      paths: the paths of the leaves that reach it, where a wrapper made other leaves of them too.
    """

    config: MuonConfig
    params: Any
    paths: frozenset[Segments]


_Note = tuple[MuonConfig, frozenset[Segments]]
_notes: contextvars.ContextVar[list[_Note] | None] = contextvars.ContextVar(
    "muon_optax_configs", default=None
)


def note_if_searched(config: MuonConfig, params: Any) -> bool:
    """Writes down a configuration where `find_configs` calls `init` to find it.

    Args:
      config: the configuration.
      params: the tree that `init` got.

    Returns:
      Whether that is so; `init` has nothing else to do then.
    """
    notes = _notes.get()
    if notes is None:
        return False
    notes.append((config, frozenset(path for path, _ in leaves_with_segments(params))))
    return True


def find_configs(tx: optax.GradientTransformation, params: Any) -> list[Found]:
    """As `search_configs`, but there must be one, and all its leaves must be in `params`.

    Raises:
      ValueError: if there is none, or naming leaves that a wrapper made for it of other ones.
    """
    found = search_configs(tx, params)
    if not found:
        raise ValueError(f"there is no muon_optax.muon in {tx}")
    known = {path for path, _ in leaves_with_segments(params)}
    others = {path_name(path) for each in found for path in each.paths - known}
    raise_all(
        sorted(others),
        "in this transformation muon gets leaves that aren't in the given tree (as under "
        "optax.lookahead, which hands on the fast parameters); give the tree that reaches it:",
    )
    return found


def search_configs(tx: optax.GradientTransformation, params: Any) -> list[Found]:
    """Every `muon` in a transformation, with the leaves that reach it.

    Args:
      tx: `muon`, or any optax transformation around it.
      params: the parameters, as arrays or shape structs.

    Returns:
      One entry for each `muon`.
    """
    check_arrays(leaves_with_segments(params))
    notes: list[_Note] = []
    token = _notes.set(notes)
    try:
        # A function of its own: JAX keeps traces by function, and a kept one would note nothing.
        jax.eval_shape(lambda p: (tx.init(p), ())[1], params)
    finally:
        _notes.reset(token)
    return [
        Found(config, masked_unless(lambda path, _, paths=paths: path in paths, params), paths)
        for config, paths in notes
    ]
