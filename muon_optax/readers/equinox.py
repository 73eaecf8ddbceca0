"""Equinox models: `eqx.filter(model, eqx.is_inexact_array)`."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.readers.inputs import Inputs, is_array
from muon_optax.readers.kernels import Kernel, convolution, other, weight
from muon_optax.readers.names import adapters
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.readers.usage import Usage, read_usage

__all__ = ["read"]


def read(model: eqx.Module, inputs: Inputs) -> Reading:
    """Reads a model's modules, and its call where there are inputs."""
    params = jax.tree.map(lambda x: x if _is_trained(x) else None, model)
    found = [_leaf(path, tuple(leaf.shape), model) for path, leaf in leaves_with_segments(params)]
    usage = _usage(model, inputs, found) if inputs else None
    return Reading(tuple(found), usage, is_input_first=False)


def _is_trained(leaf: Any) -> bool:
    """As `eqx.is_inexact_array`, which shape structs are not."""
    return is_array(leaf) and is_float_leaf(leaf)


def _leaf(path: Segments, shape: tuple[int, ...], model: eqx.Module) -> ModuleLeaf:
    nodes: list[Any] = [model]
    for name in path[:-1]:
        child = _child(nodes[-1], name)
        if child is None:  # in a container that isn't Equinox' or Python's own
            break
        nodes.append(child)
    owner = next(node for node in reversed(nodes) if isinstance(node, eqx.Module))
    kernel = _declared(owner, path[-1]) if owner is nodes[-1] and len(nodes) == len(path) else None
    return ModuleLeaf(path, shape, type(owner).__name__, kernel)


def _child(node: Any, name: str) -> Any:
    if isinstance(node, Mapping):
        return next((child for key, child in node.items() if str(key) == name), None)
    if isinstance(node, Sequence) and name.isdigit():
        return node[int(name)]
    return getattr(node, name, None)


_NORMS = (eqx.nn.BatchNorm, eqx.nn.GroupNorm, eqx.nn.LayerNorm, eqx.nn.RMSNorm)


def _declared(module: Any, name: str) -> Kernel | None:
    """The kernel that one of Equinox's modules declares for its own parameter."""
    match module, name:
        case eqx.nn.Linear(), "weight":
            return weight((_size(module.out_features), _size(module.in_features)), 1, 0)
        case eqx.nn.Linear(), "bias":
            return other((_size(module.out_features),), "bias")
        case ((eqx.nn.Conv() | eqx.nn.ConvTranspose()), "weight"):
            channels = module.out_channels, module.in_channels // module.groups
            return convolution((*channels, *module.kernel_size), 1, 0, groups=module.groups)
        case ((eqx.nn.Conv() | eqx.nn.ConvTranspose()), "bias"):
            return other((module.out_channels, *(1 for _ in module.kernel_size)), "bias")
        case eqx.nn.Embedding(), "weight":
            return other((module.num_embeddings, module.embedding_size), "embedding table")
        case ((eqx.nn.GRUCell() | eqx.nn.LSTMCell()), ("weight_ih" | "weight_hh")):
            gates = 3 if isinstance(module, eqx.nn.GRUCell) else 4
            inputs = module.input_size if name == "weight_ih" else module.hidden_size
            return weight((gates * module.hidden_size, inputs), 1, 0, blocks=gates)
        case norm, ("weight" | "bias") if isinstance(norm, _NORMS):
            return other(_norm_shape(norm), "norm")
        case eqx.nn.WeightNorm(), "g":
            return other(module.g.shape, "norm")
    return None


def _size(features: int | str) -> int:
    return 1 if isinstance(features, str) else features  # 'scalar'


def _norm_shape(norm: Any) -> tuple[Any, ...]:
    if isinstance(norm, eqx.nn.GroupNorm):
        return (norm.channels,)
    return (norm.input_size,) if isinstance(norm, eqx.nn.BatchNorm) else tuple(norm.shape)


def _usage(model: eqx.Module, inputs: Inputs, leaves: list[ModuleLeaf]) -> Usage:
    params, rest = eqx.partition(model, _is_trained)
    arrays, static = eqx.partition(rest, is_array)

    def call(params: Any, data: Any) -> Any:
        arrays, given = data
        results = inputs.into(eqx.combine(params, arrays, static), given)
        return eqx.filter(results, eqx.is_array)

    return read_usage(call, params, (arrays, inputs.arrays), adapters(leaves))
