"""Warnings of choices that are valid but may not be meant: one for all leaves concerned."""

import warnings
from collections.abc import Sequence
from typing import Protocol

from muon_optax._internal.tree_paths import unnumbered

__all__ = ["MuonWarning", "about", "warn_about"]


class MuonWarning(UserWarning):
    """A choice of muon_optax that is right but may not be what was meant.

    Example:
      >>> import jax.numpy as jnp, muon_optax
      >>> with warnings.catch_warnings(record=True) as caught:
      ...     warnings.simplefilter("always")
      ...     state = muon_optax.muon(0.02).init({"bias": jnp.zeros(4)})
      >>> caught[0].category is muon_optax.MuonWarning, str(caught[0].message)[:22]
      (True, 'no leaf gets Muon; all')
    """


class _Named(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def about(message: str, leaves: Sequence[_Named], most: int | None = 8) -> str:
    """The message and the leaves; '' where there are none.

    Args:
      message: the text about them.
      leaves: with their paths and shapes. Of those that differ in the numbers of their paths alone
        the first is named.
      most: how many are named; None is all.
    """
    if not leaves:
        return ""
    groups: dict[tuple[str, tuple[int, ...]], list[_Named]] = {}
    for leaf in leaves:
        groups.setdefault((unnumbered(leaf.path), leaf.shape), []).append(leaf)
    shown = list(groups.values())[:most]
    rest = len(leaves) - sum(map(len, shown))
    names = ", ".join(map(_name, shown)) + (f" and {rest} more" if rest else "")
    return f"{message}: {names}"


def _name(group: Sequence[_Named]) -> str:
    alike = f" and {len(group) - 1} like it" if len(group) > 1 else ""
    return f"{group[0].path} {group[0].shape}{alike}"


def warn_about(message: str, leaves: Sequence[_Named], most: int | None = 8) -> None:
    """One warning for all these leaves, of which it names some; nothing where there are none."""
    if leaves:
        warnings.warn(about(message, leaves, most), MuonWarning, stacklevel=3)
