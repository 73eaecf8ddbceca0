"""Arrays, parameters and optimizer states to and from PyTorch.

torch is imported when a function here is called, never before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from muon_optax._internal.tree_paths import leaves_with_segments, path_name, raise_all
from muon_optax.interop.tensors import from_torch, to_torch
from muon_optax.interop.torch_layout import (
    FLAX_LAYOUT,
    TensorRule,
    TorchLayout,
    contradictions,
    conv1d_rules,
    default_torch_rules,
    mismatch,
    read_leaf,
    write_leaf,
)
from muon_optax.interop.torch_optimizer import (
    DION_FIELDS,
    MOONLIGHT_FIELDS,
    TORCH_FIELDS,
    StateFields,
    convert_momentum,
    from_optimizer_state,
    to_optimizer_state,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "DION_FIELDS",
    "FLAX_LAYOUT",
    "MOONLIGHT_FIELDS",
    "TORCH_FIELDS",
    "StateFields",
    "TensorRule",
    "TorchLayout",
    "conv1d_rules",
    "convert_momentum",
    "default_torch_rules",
    "from_optimizer_state",
    "from_state_dict",
    "from_torch",
    "to_optimizer_state",
    "to_state_dict",
    "to_torch",
]


def to_state_dict(
    params: Any,
    layout: TorchLayout = FLAX_LAYOUT,
) -> dict[str, torch.Tensor]:
    """A parameter tree as a module's state dict.

    Args:
      params: the tree.
      layout: names and axes in torch.

    Returns:
      Contiguous copies, by key.

    Raises:
      ValueError: listing the leaves that have no place, or share one.

    Example:
      >>> import pytest, jax.numpy as jnp
      >>> _ = pytest.importorskip("torch")
      >>> state = to_state_dict({"up": {"kernel": jnp.ones((2, 3))}})
      >>> {key: tuple(tensor.shape) for key, tensor in state.items()}
      {'up.weight': (3, 2)}
    """
    places = layout.places(params)
    rows = [(places[path], leaf) for path, leaf in leaves_with_segments(params)]
    return {place.key: write_leaf(leaf, place) for place, leaf in rows}


def from_state_dict(
    tensors: Mapping[str, torch.Tensor],
    like: Any,
    layout: TorchLayout = FLAX_LAYOUT,
) -> Any:
    """A module's state dict as a parameter tree.

    Args:
      tensors: by key; DTensors must have been gathered.
      like: a tree of arrays or shape structs, whose structure, shapes, dtypes and shardings the
        result has.
      layout: names and axes in torch.

    Returns:
      A tree like `like`.

    Raises:
      ValueError: listing every missing or extra key, and every tensor of another shape or dtype.

    Example:
      >>> import pytest, jax.numpy as jnp
      >>> torch = pytest.importorskip("torch")
      >>> tensors = torch.nn.Linear(2, 3).state_dict()
      >>> params = from_state_dict(tensors, {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)})
      >>> params["kernel"].shape
      (2, 3)
    """
    places = layout.places(like)
    leaves = leaves_with_segments(like)
    there = ", ".join(list(tensors)[:20])
    shapes = {key: tuple(getattr(tensor, "shape", ())) for key, tensor in tensors.items()}
    against = contradictions(layout, like, shapes)
    problems, found = [], []
    for path, leaf in leaves:
        key = places[path].key
        if key not in tensors:
            problems.append(f"{path_name(path)}: no key {key}; there are {there}")
            continue
        wrong = [mismatch(tensors[key], leaf, places[path]), against.get(key)]
        if any(wrong):
            problems.append(f"{path_name(path)}: {key} {'; '.join(filter(None, wrong))}")
        else:
            found.append(read_leaf(tensors[key], leaf, places[path]))
    known = {place.key for place in places.values()}
    problems += [f"{key}: no leaf has this key" for key in tensors if key not in known]
    raise_all(problems, "the state dict doesn't fit the parameters:")
    return jax.tree.structure(like).unflatten(found)
