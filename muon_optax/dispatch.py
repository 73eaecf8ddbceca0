"""Hands each leaf to its optimizer: `optax.partition` over an assignment made from the tree."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_optax.partition import (
    Assignment,
    Partition,
    Views,
    as_rules,
    assign,
    check_rules,
    is_float_leaf,
    warn_of_surprises,
)
from muon_optax.tree_paths import is_masked, leaves_with_segments, path_name, raise_together

__all__ = ["dispatch"]


def dispatch(
    muon_half: Callable[[Views], optax.GradientTransformation],
    adam_half: optax.GradientTransformation,
    views: Views,
    partition: Partition,
) -> optax.GradientTransformationExtraArgs:
    """One transformation out of two, by the label of each leaf.

    Args:
      muon_half: the transformation of Muon's leaves, given a function from their tree to their
        views.
      adam_half: the transformation of AdamW's leaves.
      views: as in `assign`.
      partition: as in `assign`.

    Returns:
      A transformation with optax's `PartitionState`. Leaves that aren't floating point are left as
      they are.
    """

    def partitioned(assignment: Assignment) -> optax.GradientTransformationExtraArgs:
        transforms: dict[Hashable, optax.GradientTransformation] = {
            "muon": muon_half(assignment.views_of),
            "adam": adam_half,
        }
        if _has_frozen(assignment, partition):
            transforms["frozen"] = optax.set_to_zero()
        return optax.partition(transforms, lambda _: assignment.labels())

    def init(params):
        assignment = assign(params, views, partition)
        check_rules(partition, params)
        warn_of_surprises(params, assignment)
        return partitioned(assignment).init(_only_floats(params))

    def update(updates, state, params=None, **extra_args):
        assignment = assign(updates, views, partition)
        _check_labels(assignment, state)
        wanted = None if params is None else _only_floats(params)
        floats, state = partitioned(assignment).update(
            _only_floats(updates), state, wanted, **extra_args
        )
        return _with_others(floats, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _has_frozen(assignment: Assignment, partition: Partition) -> bool:
    if assignment.decisions:
        return bool(assignment.segments("frozen"))
    # `optax.tree_map_params` calls init on a placeholder without leaves: rules of the user's that
    # freeze must match a leaf, so they tell what the state looks like.
    return any(rule.label == "frozen" for rule in as_rules(partition) or ())


def _only_floats(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if is_float_leaf(x) else optax.MaskedNode(), tree)


def _with_others(floats: Any, updates: Any, params: Any) -> Any:
    """Puts back what isn't floating point: an update that leaves the parameter as it is."""

    def leaf(new, old, param):
        if not is_masked(new):
            return new
        if jnp.issubdtype(param.dtype, jnp.integer) or param.dtype == jnp.bool_:
            return jnp.zeros_like(param)
        return old  # float0 and keys

    like = updates if params is None else params
    return jax.tree.map(leaf, floats, updates, like, is_leaf=is_masked)


def _check_labels(assignment: Assignment, state: Any) -> None:
    """Raises where a leaf goes on with another optimizer than its state was made for."""
    had = {path for path, _ in leaves_with_segments(state.inner_states["muon"].inner_state[0].mu)}
    has = assignment.segments("muon")
    changed = [f"{path_name(p)}: was 'muon' in the state, is another now" for p in had - has]
    changed += [f"{path_name(p)}: is 'muon' now, was another in the state" for p in has - had]
    raise_together(
        sorted(changed),
        "these leaves changed their optimizer; keep the rules the state was made with, or make a "
        "new state:",
    )
