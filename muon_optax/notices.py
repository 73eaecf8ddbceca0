"""Warnings of what is right but may not be what was meant: one for all leaves concerned."""

import warnings
from collections.abc import Sequence
from typing import Protocol

__all__ = ["MuonWarning", "warn_about"]


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


def warn_about(message: str, leaves: Sequence[_Named], most: int = 8) -> None:
    """One warning for all these leaves, of which it names some; nothing where there are none."""
    if leaves:
        names = ", ".join(f"{leaf.path} {leaf.shape}" for leaf in leaves[:most])
        more = f" and {len(leaves) - most} more" if len(leaves) > most else ""
        warnings.warn(f"{message}: {names}{more}", MuonWarning, stacklevel=3)
