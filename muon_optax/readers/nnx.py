"""Flax NNX models: `nnx.state(model, nnx.Param)`, the tree that `nnx.Optimizer` hands to optax."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.partition import Shape
from muon_optax.readers.inputs import Inputs
from muon_optax.readers.kernels import Kernel, convolution, einsum, other, weight
from muon_optax.readers.names import adapters
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.readers.stacks import Axes, Declared, choices
from muon_optax.readers.usage import Usage, read_usage

__all__ = ["read"]


def read(model: nnx.Module, inputs: Inputs) -> Reading:
    """Reads a model's modules, and its call where there are inputs."""
    leaves = leaves_with_segments(nnx.state(model, nnx.Param))
    chains = {path: _chain(model, path) for path, leaf in leaves if is_float_leaf(leaf)}
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in leaves}
    tables = _tables(model)
    found = [_leaf(path, shapes[path], nodes, tables) for path, (_, nodes) in chains.items()]
    by_name = [leaf.segments for leaf in found]
    found.sort(key=lambda leaf: chains[leaf.segments][0])
    # `nnx.eval_shape` sorts a module's attributes by their names.
    is_ordered = by_name != [leaf.segments for leaf in found]
    usage = _usage(model, inputs, found) if inputs else None
    variables = {path: nodes[-1] for path, (_, nodes) in chains.items()}
    return Reading(
        tuple(found), usage, stacked=_named_axes(found, variables), is_ordered=is_ordered
    )


def _chain(model: nnx.Module, path: Segments) -> tuple[tuple[int, ...], list[Any]]:
    """The nodes from the model to a parameter, and their places among their siblings.

    They end before a container that isn't Flax's or Python's own.
    """
    places, nodes = [], [model]
    for name in path:
        children = dict(_children(nodes[-1]))
        if name not in children:
            break
        places.append(list(children).index(name))
        nodes.append(children[name])
    return tuple(places), nodes


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """A node's attributes, in the order in which they were set."""
    if isinstance(node, list | tuple):
        yield from ((str(i), child) for i, child in enumerate(node))
    elif isinstance(node, Mapping) and not isinstance(node, nnx.Module):
        yield from ((str(key), child) for key, child in node.items())
    else:
        yield from getattr(node, "__dict__", {}).items()


def _tables(model: nnx.Module) -> dict[int, nnx.Embed]:
    """The embeddings by their tables' identities: another layer may share one and name it."""
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Embed)]
    return {id(module.embedding): module for module in modules}


def _leaf(
    path: Segments, shape: Shape, nodes: list[Any], tables: Mapping[int, nnx.Embed]
) -> ModuleLeaf:
    if id(nodes[-1]) in tables:
        embed = tables[id(nodes[-1])]
        return ModuleLeaf(path, shape, type(embed).__name__, _declared(embed, None, "embedding"))
    places = [i for i, node in enumerate(nodes) if isinstance(node, nnx.Module)]
    owner, parent = nodes[places[-1]], nodes[places[-2]] if len(places) > 1 else None
    is_own = places[-1] == len(path) - 1  # not in a list or dict of the module's
    kernel = _declared(owner, parent, path[-1]) if is_own else None
    return ModuleLeaf(path, shape, type(owner).__name__, kernel or _by_equation(owner, shape))


_NORMS = (nnx.BatchNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)
_GATES = {nnx.OptimizedLSTMCell: 4, nnx.GRUCell: 3}


def _declared(module: Any, parent: Any, name: str) -> Kernel | None:
    """The kernel that one of Flax's modules declares for its own parameter."""
    match module, name:
        case nnx.Embed(), "embedding":
            return other((module.num_embeddings, module.features), "embedding table")
        case nnx.Linear(), "kernel":
            gates = next((n for cell, n in _GATES.items() if isinstance(parent, cell)), 1)
            kernel = weight((module.in_features, module.out_features), 0, 1, blocks=gates)
            return dataclasses.replace(kernel, is_adapted=isinstance(module, nnx.LoRALinear))
        case nnx.Linear(), "bias":
            return other((module.out_features,), "bias")
        case nnx.LinearGeneral(), _:
            return _linear_general(module, name)
        case nnx.Einsum(), "kernel" if module.einsum_str:
            return einsum(module.einsum_str, module.kernel_shape)
        case nnx.Einsum(), "bias":
            return other(module.bias_shape or (), "bias")
        case ((nnx.Conv() | nnx.ConvTranspose()), _):
            return _convolution(module, name)
        case nnx.LoRA(), ("lora_a" | "lora_b"):
            return other(getattr(module, name).shape, "LoRA factor")
        case nnx.GroupNorm(), ("scale" | "bias"):
            return other((module.num_groups * module.group_size,), "norm")
        case norm, ("scale" | "bias") if isinstance(norm, _NORMS):
            return other((norm.num_features,), "norm")
    return None


def _linear_general(module: nnx.LinearGeneral, name: str) -> Kernel | None:
    batch = tuple(module.batch_axis.values())
    sums, outs = module.in_features, module.out_features
    if name == "bias":
        return other((*batch, *outs), "bias")
    if name != "kernel":
        return None
    split = len(batch) + len(sums)
    shape = (*batch, *sums, *outs)
    return weight(shape, range(len(batch), split), range(split, len(shape)))


def _convolution(module: nnx.Conv | nnx.ConvTranspose, name: str) -> Kernel | None:
    if name == "bias":
        return other((module.out_features,), "bias")
    if name != "kernel":
        return None
    shape = module.kernel_shape
    last = len(shape) - 1
    if isinstance(module, nnx.Conv):
        return convolution(shape, last - 1, last, groups=module.feature_group_count)
    inputs, outputs = (last, last - 1) if module.transpose_kernel else (last - 1, last)
    return convolution(shape, inputs, outputs)


def _by_equation(module: Any, shape: Shape) -> Kernel | None:
    """The operand of an einsum whose equation a module of the user's own keeps as Flax's does."""
    equation = getattr(module, "einsum_str", None)
    return einsum(equation, shape) if isinstance(equation, str) else None


def _named_axes(
    leaves: list[ModuleLeaf], variables: Mapping[Segments, Any]
) -> dict[Segments, Axes]:
    """The axes with the name that all stacked parameters share and no other has.

    That is the name which a transform has as `nnx.PARTITION_NAME`.
    """
    named: dict[Segments, dict[str, Axes]] = {}
    others: set[str] = set()
    for leaf in leaves:
        variable = variables[leaf.segments]
        is_variable = isinstance(variable, nnx.Variable)
        names = (variable.get_metadata().get("out_sharding") if is_variable else None) or ()
        found = choices(Declared(leaf.shape, leaf.kernel.shape)) if leaf.kernel else []
        if found == [()]:
            others.update(names)
        elif len(names) == len(leaf.shape) and found and len(found[0]) == 1:
            named[leaf.segments] = {names[axes[0]]: axes for axes in found}
    common = set.intersection(*map(set, named.values())) - others if named else set()
    if len(common) != 1:
        return {}
    (name,) = common
    return {path: axes[name] for path, axes in named.items()}


def _usage(model: nnx.Module, inputs: Inputs, leaves: list[ModuleLeaf]) -> Usage:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def call(params: Any, data: Any) -> Any:
        rest, arrays = data
        return inputs.into(nnx.merge(graph, params, rest), arrays)

    return read_usage(call, params, (rest, inputs.arrays), adapters(leaves))
