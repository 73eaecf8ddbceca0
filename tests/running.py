"""Runs a transformation over some gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

apply_updates: Any = optax.apply_updates  # whose declared result is any tree of arrays
# One program for all leaves, which transformations with the same leaves share.
apply_compiled: Any = jax.jit(optax.apply_updates)


def first_update(tx: Any, grads: Any, params: Any = None, *, jit: bool = False) -> Any:
    """The update of a fresh state; the parameters are the gradients where not given."""
    params = grads if params is None else params
    first = lambda grads, params: tx.update(grads, tx.init(params), params)[0]  # noqa: E731
    return (jax.jit(first) if jit else first)(grads, params)


def first_updates(txs: Mapping[Any, Any], grads: Any) -> Any:
    """The first updates by each of several transformations, made by one program."""
    return first_update(side_by_side(dict(txs)), dict.fromkeys(txs, grads), jit=True)


def traced_update(tx: Any, grads: Any) -> tuple[str, Any, Any]:
    """The Jaxpr of the first step, its update, and the state after it; it is traced once."""
    first = jax.jit(lambda grads: tx.update(grads, tx.init(grads)))
    return str(first.trace(grads).jaxpr), *first(grads)


def run(tx: Any, params: Any, grads: Any, *, jit: bool = False) -> tuple[Any, Any, Any]:
    """All updates of a training run, the last state and the last parameters."""
    state, updates = tx.init(params), []
    update, apply = (jax.jit(tx.update), apply_compiled) if jit else (tx.update, apply_updates)
    for grad in grads:
        new, state = update(grad, state, params)
        params = apply(params, new)
        updates.append(new)
    return updates, state, params


def side_by_side(pieces: dict[Any, Any]) -> Any:
    """Updates each tree of a dict by its own transformation, so that one program serves for all."""

    def init(params: Any) -> Any:
        return {name: tx.init(params[name]) for name, tx in pieces.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        pairs = {k: tx.update(updates[k], state[k], params[k]) for k, tx in pieces.items()}
        new, states = zip(*pairs.values(), strict=True)
        return dict(zip(pairs, new, strict=True)), dict(zip(pairs, states, strict=True))

    return optax.GradientTransformation(init, update)


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype, tree)
