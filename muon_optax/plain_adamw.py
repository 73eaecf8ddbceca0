"""Muon with Nesterov momentum beside an AdamW without it, as in PyTorch's systems."""

from typing import Any

import jax
import optax

from muon_optax.alias import muon
from muon_optax.tree_paths import leaves_with_segments

__all__ = ["with_plain_adamw"]


def with_plain_adamw(
    learning_rate: optax.ScalarOrSchedule, *, nesterov: bool = True, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """`muon` whose AdamW never has Nesterov momentum; in `muon` one flag is for both, as in optax.

    Nesterov momentum changes an update, not the state it leaves. So AdamW's updates are taken from
    a second `muon` without it, on the same state. Its matrices aren't orthogonalised, and under
    `jit` they cost nothing at all.

    Args:
      learning_rate: as in `muon`.
      nesterov: for Muon's leaves alone.
      **options: any other argument of `muon`.

    Returns:
      A transformation with the state of `muon`.
    """
    tx = muon(learning_rate, nesterov=nesterov, **options)
    if not nesterov:
        return tx
    unused = {"orthogonalizer": lambda x: x, "strategy": "auto", "adaptive": False}
    plain = muon(learning_rate, nesterov=False, **(options | unused))

    def update(updates, state, params=None, **extra_args):
        new, new_state = tx.update(updates, state, params, **extra_args)
        without, _ = plain.update(updates, state, params, **extra_args)
        return _choose(new, without, _paths_of_adam(state)), new_state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _paths_of_adam(state: Any) -> set[tuple[str, ...]]:
    return {path for path, _ in leaves_with_segments(state.inner_states["adam"].inner_state[0].mu)}


def _choose(new: Any, without: Any, paths: set[tuple[str, ...]]) -> Any:
    rows = zip(leaves_with_segments(new), jax.tree.leaves(without), strict=True)
    leaves = [plain if path in paths else leaf for (path, leaf), plain in rows]
    return jax.tree.structure(new).unflatten(leaves)
