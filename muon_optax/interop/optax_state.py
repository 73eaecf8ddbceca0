"""A running `optax.contrib.muon` goes on as ours."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState as OptaxMuonState

from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import (
    Segments,
    is_masked,
    leaves_with_segments,
    masked_unless,
    path_name,
    raise_all,
    with_leaves,
)
from muon_optax.transforms.momentum_state import MuonState

__all__ = ["from_optax"]


def from_optax(state: Any, params: Any, tx: optax.GradientTransformation | None = None) -> Any:
    """Converts the state of `optax.contrib.muon`, alone or inside other transformations.

    optax's `MuonState` has the coefficients as a third field, which ours leaves to the options.
    Moments of leaves that aren't floating point go, since `muon` leaves these as they are; all else
    stays as it is, bit for bit. Go on with an optimizer that gives each leaf what optax gave it:
    `recipes.optax_muon`, or `muon` with the same `muon_weight_dimension_numbers`.

    Args:
      state: a state with one or more of optax's `MuonState` in it, of arrays or shape structs.
      params: the parameters, or their shapes; the moments are checked against them. Those masked in
        the state, as frozen ones are under `optax.partition`, need no moments.
      tx: the optimizer to go on with, where it has states that optax's doesn't, as the second
        moments of `muon(after_orthogonalization=scale_by_neuron())`: these begin as its `init`
        makes them.

    Returns:
      The state with our `MuonState` in its place.

    Raises:
      ValueError: if there is none of optax's `MuonState`, or a parameter has no moments, moments of
        another shape, or there are moments of no parameter; listing the leaves of the
        state that `tx` has no place for, as that of another choice of leaves.

    Example:
      >>> from muon_optax.recipes import optax_muon
      >>> params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
      >>> state = from_optax(optax.contrib.muon(0.02).init(params), params)
      >>> state.inner_states["muon"].inner_state[0]._fields
      ('count', 'mu')
      >>> jax.tree.structure(state) == jax.tree.structure(optax_muon(0.02).init(params))
      True
    """
    moments = _moments(state)
    if not any(isinstance(x, OptaxMuonState) for x in moments):
        kinds = sorted({type(x).__name__ for x in moments}) or "neither that nor Adam's"
        raise ValueError(f"the state has no optax.contrib MuonState to convert; it has {kinds}")
    _check_shapes(moments, params)
    others = {path for path, leaf in leaves_with_segments(params) if not is_float_leaf(leaf)}
    converted = jax.tree.map(
        lambda x: _converted(x, others) if _is_moments(x) else x, state, is_leaf=_is_moments
    )
    return converted if tx is None else _in_state_of(tx, converted, params)


def _in_state_of(tx: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """A fresh state of `tx`, with the leaves of another at their paths."""
    fresh = tx.init(params)
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves_with_segments(fresh)}
    problems = [
        f"{path_name(path)}: {jnp.shape(leaf)} in the state, {shapes.get(path, 'none')} wanted"
        for path, leaf in leaves_with_segments(state)
        if shapes.get(path) != jnp.shape(leaf)
    ]
    raise_all(problems, "this state can't go on with this optimizer:")
    return with_leaves(fresh, state)


def _moments(state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(state, is_leaf=_is_moments) if _is_moments(x)]


def _is_moments(x: Any) -> bool:
    return isinstance(x, OptaxMuonState | MuonState | optax.ScaleByAdamState)


def _converted(moments: Any, others: set[Segments]) -> Any:
    """Our state of these moments, without those of the leaves that aren't floating point."""

    def kept(tree: Any) -> Any:
        return masked_unless(lambda path, _: path not in others, tree)

    if isinstance(moments, optax.ScaleByAdamState):
        return moments._replace(mu=kept(moments.mu), nu=kept(moments.nu))
    return MuonState(moments.count, kept(moments.mu))


def _check_shapes(moments: list[Any], params: Any) -> None:
    want = {path: jnp.shape(leaf) for path, leaf in leaves_with_segments(params)}
    have = {
        path: tuple(leaf.shape)
        for state in moments
        for path, leaf in leaves_with_segments(state.mu)
    }
    problems = [
        f"{path_name(p)}: parameter {want[p]}, no moments"
        for p in want
        if p not in have and not all(_is_masked_in(state.mu, p) for state in moments)
    ]
    problems += [f"{path_name(p)}: moments {have[p]}, no parameter" for p in have if p not in want]
    problems += [
        f"{path_name(p)}: parameter {want[p]}, moments {have[p]}"
        for p in want
        if p in have and want[p] != have[p]
    ]
    raise_all(problems, "this state doesn't belong to these parameters:")


def _is_masked_in(tree: Any, path: Segments) -> bool:
    """Whether a leaf, or a subtree that holds it, is masked in the tree."""
    masked = {p for p, leaf in leaves_with_segments(tree, is_masked) if is_masked(leaf)}
    return any(path[:n] in masked for n in range(len(path) + 1))
