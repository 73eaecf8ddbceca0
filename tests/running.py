"""Runs a transformation over some gradients."""

from typing import Any

import jax
import optax

apply_updates: Any = optax.apply_updates  # whose declared result is any tree of arrays


def first_update(tx: Any, grads: Any, params: Any = None, *, jit: bool = False) -> Any:
    """The update of a fresh state; the parameters are the gradients where not given."""
    params = grads if params is None else params
    return _update(tx, jit)(grads, tx.init(params), params)[0]


def run(tx: Any, params: Any, grads: Any, *, jit: bool = False) -> tuple[Any, Any, Any]:
    """All updates of a training run, the last state and the last parameters."""
    state = tx.init(params)
    update = _update(tx, jit)
    updates = []
    for grad in grads:
        new, state = update(grad, state, params)
        params = apply_updates(params, new)
        updates.append(new)
    return updates, state, params


def _update(tx: Any, jit: bool) -> Any:
    return jax.jit(tx.update) if jit else tx.update


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype, tree)
