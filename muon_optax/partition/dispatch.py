"""Hands each leaf to its optimizer: `optax.partition` over an assignment made from the tree."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState as OptaxMuonState

from muon_optax._internal.leaf_types import check_arrays, dtype_of, is_float_leaf, kind_of
from muon_optax._internal.tree_paths import (
    Segments,
    filled,
    is_masked,
    leaves_with_segments,
    masked_unless,
    path_name,
    present_leaves,
    raise_all,
    whole_variables,
    without_absent,
)
from muon_optax.config import MuonConfig, note_if_searched
from muon_optax.partition import (
    NOT_FLOAT,
    Assignment,
    Partition,
    as_rules,
    assign,
    check_rules,
    find_warnings,
    warn,
)
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import declared_specs
from muon_optax.sharding.options import Shardings
from muon_optax.sharding.specs import read_sharding, whole_shapes
from muon_optax.transforms.binding import bound_leaves
from muon_optax.transforms.momentum_state import MuonState
from muon_optax.transforms.sharded_moments import MovedMoments, with_moved_moments
from muon_optax.transforms.stage import Stage, bound_transformation
from muon_optax.transforms.wrappers import passing_over, summing

__all__ = ["dispatch"]


def dispatch(
    muon_step: Stage, adam_step: optax.GradientTransformation, config: MuonConfig
) -> optax.GradientTransformationExtraArgs:
    """One transformation out of two, by the label of each leaf.

    This is the door: each leaf is bound once, in `init` and in `update`.

    Args:
      muon_step: the stages of Muon's leaves.
      adam_step: the transformation of AdamW's leaves.
      config: who gets which, and how leaves are sharded.

    Returns:
      A transformation with optax's `PartitionState`. Leaves that aren't floating point are left as
      they are.

    Raises:
      TypeError: for a partition of the wrong type.
    """
    views, partition = config.views, config.partition
    _check_partition(partition)
    adam_step = passing_over(adam_step)

    def partitioned(
        tree: Any, bound: _Bound, has_frozen: bool
    ) -> optax.GradientTransformationExtraArgs:
        transforms: dict[Hashable, optax.GradientTransformation] = {
            "muon": passing_over(bound_transformation(muon_step, bound.leaves)),
            "adam": with_moved_moments(adam_step, bound.moved),
        }
        if has_frozen:
            transforms["frozen"] = optax.set_to_zero()
        labels = whole_variables(bound.assignment.labels_of(tree))
        return summing(optax.partition(transforms, lambda _: labels))

    def init(params):
        if note_if_searched(config, params):
            return optax.EmptyState()
        bound = _bind(config, params, params, None)
        check_rules(partition, params)
        warn(find_warnings(params, bound.assignment, views, partition))
        has_frozen = views is None and _may_freeze(partition)
        return partitioned(params, bound, has_frozen).init(_only_floats(params))

    def update(updates, state, params=None, **extra_args) -> Any:
        _check_kind(state)
        by_label = _moments(state)
        momenta = by_label["muon"] | by_label["adam"]
        if updates is None and momenta:  # as None for each leaf, in a dict of the same paths
            return None, update(dict.fromkeys(momenta), state, params, **extra_args)[1]
        # Rules look at the whole tree, and must see what they saw at init.
        all_leaves = filled(updates, momenta)
        if params is not None:
            params = without_absent(params, updates)
        _check_gradients(updates, params, momenta)
        bound = _bind(config, all_leaves, updates, params)
        has_frozen = "frozen" in state.inner_states
        _check_labels(bound.assignment, by_label, has_frozen=has_frozen)
        wanted = None if params is None else _only_floats(params)
        floats, state = partitioned(updates, bound, has_frozen).update(
            _only_floats(updates), state, wanted, **extra_args
        )
        return _with_others(floats, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


class _Bound(NamedTuple):
    """What the door knows of a tree.

    Attributes:
      assignment: who gets each leaf.
      leaves: the records of Muon's leaves that have a gradient, in flattening order.
      whole: the tree, with the shapes of whole leaves.
      moved: AdamW's leaves whose moments are sharded otherwise, by path.
    """

    assignment: Assignment
    leaves: list[BoundLeaf]
    whole: Any
    moved: dict[Segments, MovedMoments]


def _bind(config: MuonConfig, tree: Any, updates: Any, params: Any) -> _Bound:
    """Assigns all leaves of a tree, and binds those of Muon's that are updated.

    Args:
      config: the configuration.
      tree: all leaves, as they were at `init`.
      updates: those that are updated, whose order the records have.
      params: how they are sharded; None is as the updates.

    Returns:
      What is known.
    """
    like = updates if params is None else params
    shardings = config.declared.of(like, config.views)
    whole = whole_shapes(tree, shardings.params)
    assignment = assign(whole, config.views, config.partition)
    views = {d.segments: d.view for d in assignment.decisions if d.view is not None}
    ours = masked_unless(lambda path, _: path in views, updates)
    paths = [path for path, _ in leaves_with_segments(ours)]
    if params is not None:  # which may have other containers, as NNX's have
        by_path = dict(leaves_with_segments(params))
        leaves = [by_path.get(path, x) for path, x in leaves_with_segments(ours)]
        ours = jax.tree.structure(ours).unflatten(leaves)
    leaves = bound_leaves(ours, [views[path] for path in paths], shardings)
    return _Bound(assignment, leaves, whole, _moved_moments(like, shardings))


def _moved_moments(like: Any, shardings: Shardings) -> dict[Segments, MovedMoments]:
    """The leaves whose moments are sharded otherwise than they are."""
    if shardings.moments is None:
        return {}
    specs = (declared_specs(where, like) for where in (shardings.moments, shardings.params))
    return {
        path: MovedMoments(moved, read_sharding(x, param))
        for (path, x), moved, param in zip(leaves_with_segments(like), *specs, strict=True)
        if moved is not None
    }


def _may_freeze(partition: Partition) -> bool:
    """Whether the state has a place for frozen leaves.

    Whatever the leaves are: `optax.tree_map_params` calls init on a placeholder that has none, and
    the states must be alike.
    """
    if callable(partition):
        return True
    rules = as_rules(partition)
    labels = jax.tree.leaves(partition) if rules is None else [rule.label for rule in rules]
    return "frozen" in labels


def _check_partition(partition: Partition) -> None:
    if callable(partition) or as_rules(partition) is not None:
        return
    for path, label in leaves_with_segments(partition):
        if not isinstance(label, str):
            raise TypeError(
                "partition must be a sequence of Rule, a tree of labels, a function that returns "
                f"one, or None; got {label!r} at {path_name(path)}"
            )


def _only_floats(tree: Any) -> Any:
    floats = masked_unless(lambda _, x: is_float_leaf(x), tree)
    return jax.tree.map(_as_array, floats)


def _as_array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a Python number


def _with_others(floats: Any, updates: Any, params: Any) -> Any:
    """Puts back the leaves that aren't floating point, as updates that change nothing."""

    def unchanged(old, param):
        dtype = dtype_of(param)
        if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
            return jnp.zeros_like(param)
        return old  # float0 and keys

    def merged(new, old, param):
        # What is masked may be a whole variable, of which the leaves are wanted.
        return jax.tree.map(unchanged, old, param) if is_masked(new) else new

    like = updates if params is None else params
    return jax.tree.map(merged, floats, updates, like, is_leaf=is_masked)


def _check_kind(state: Any) -> None:
    """Raises for the state of another transformation."""
    halves = getattr(state, "inner_states", {})
    firsts = [_moments_of(halves.get(label)) for label in ("muon", "adam")]
    if isinstance(firsts[0], OptaxMuonState):
        raise TypeError(
            "got a state of optax.contrib.muon; convert it: "
            "muon_optax.interop.from_optax(state, params)"
        )
    if not isinstance(firsts[0], MuonState) or not hasattr(firsts[1], "mu"):
        raise TypeError(
            "muon goes on with a state of its own, PartitionState{muon: (MuonState, ...), adam: "
            f"(ScaleByAdamState, ...)}}, got {_kind(state)}; make one with init"
        )


def _moments_of(masked: Any) -> Any:
    """The state of the moments, among those of the stages under a mask."""
    kinds = (MuonState, optax.ScaleByAdamState, OptaxMuonState)
    states = jax.tree.leaves(masked, is_leaf=lambda x: isinstance(x, kinds))
    return next((x for x in states if isinstance(x, kinds)), None)


def _kind(state: Any) -> str:
    """Names of a state's types, as far as they tell which transformation made it."""
    if isinstance(state, optax.MaskedState):
        return _kind(state.inner_state)
    if hasattr(state, "inner_states"):
        halves = [f"{label}: {_kind(half)}" for label, half in state.inner_states.items()]
        return f"{type(state).__name__}{{{', '.join(halves)}}}"
    if type(state) is tuple:
        return f"({', '.join(map(_kind, state))})"
    return type(state).__name__


def _moments(state: Any) -> dict[str, dict[Segments, Any]]:
    """The momenta by label and path."""
    firsts = {label: _moments_of(state.inner_states[label]) for label in ("muon", "adam")}
    return {label: dict(leaves_with_segments(first.mu)) for label, first in firsts.items()}


def _check_gradients(updates: Any, params: Any, momenta: Mapping[Segments, Any]) -> None:
    """Raises for gradients that aren't those of the parameters, or of the state's momenta.

    Where there is no gradient, None or masked, the parameters may have anything.
    """
    trees = {"gradient": updates} | ({} if params is None else {"parameter": params})
    leaves = {what: present_leaves(tree, updates) for what, tree in trees.items()}
    check_arrays(list(leaves.get("parameter", {}).items()))
    problems = []
    for path in {path: None for tree in leaves.values() for path in tree}:
        found = {what: tree.get(path) for what, tree in leaves.items()}
        if path in momenta:
            found["momentum"] = momenta[path]
        if len(set(map(_fit, found.values()))) > 1:
            kinds = [f"{what} {kind_of(leaf)}" for what, leaf in found.items()]
            problems.append(f"{path_name(path)}: got {', '.join(kinds)}")
    raise_all(
        problems,
        "each gradient must be floating point, and of its parameter's and momentum's shape:",
    )


def _fit(leaf: Any) -> Any:
    """What gradient, parameter and momentum have in common."""
    if leaf is None:
        return None
    return tuple(jnp.shape(leaf)) if is_float_leaf(leaf) else "no float"


def _check_labels(
    assignment: Assignment, by_label: Mapping[str, Mapping[Segments, Any]], *, has_frozen: bool
) -> None:
    """Raises where a leaf goes on with another optimizer than its state was made for."""
    had = {path: label for label, moments in by_label.items() for path in moments}
    has = {d.segments: d.label for d in assignment.decisions if d.reason != NOT_FLOAT}
    stateless = "frozen" if has_frozen else "absent"
    changed = [
        f"{path_name(p)}: {had.get(p, stateless)} in the state, {has.get(p, 'absent')} now"
        for p in {**had, **has}
        if had.get(p, stateless) != has.get(p, "absent")
    ]
    raise_all(
        sorted(changed),
        "these leaves changed their optimizer; keep the rules the state was made with, or make a "
        "new state:",
    )
