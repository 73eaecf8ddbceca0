"""Which axes of a kernel its Flax layer sums over, read from the modules themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # batch, reduction, output


class Layer(NamedTuple):
    """What a module says of its kernel: axes of one layer's, and the number of channel groups."""

    axes: Axes
    groups: int = 1


def stacked(axes: Axes, place: int) -> Axes:
    """The axes once a stack has put one at a place."""
    batch, reduction, output = (tuple(a + (a >= place) for a in group) for group in axes)
    return (place, *batch), reduction, output


def _general(batch: int, inputs: int, outputs: int) -> Axes:
    ends = batch, batch + inputs, batch + inputs + outputs
    return tuple(range(ends[0])), tuple(range(*ends[:2])), tuple(range(*ends[1:]))


def _conv(rank: int, is_transposed: bool = False) -> Axes:
    last = rank - 1
    if is_transposed:
        return (), (*range(rank - 2), last), (last - 1,)
    return (), tuple(range(last)), (last,)


def _einsum(formula: str) -> Axes:
    operands, result = formula.replace(" ", "").replace("...", "").split("->")
    x, kernel = operands.split(",")
    batch = tuple(i for i, c in enumerate(kernel) if c in x and c in result)
    reduction = tuple(i for i, c in enumerate(kernel) if c in x and c not in result)
    return batch, reduction, tuple(i for i, c in enumerate(kernel) if c not in x)


def _count(x: Any) -> int:
    return len(x) if isinstance(x, tuple | list) else 1


def _of_linen(module: nn.Module, rank: int) -> Layer | None:
    if isinstance(module, nn.Dense):
        return Layer(_general(0, 1, 1))
    if isinstance(module, nn.DenseGeneral):
        return Layer(
            _general(_count(module.batch_dims), _count(module.axis), _count(module.features))
        )
    if isinstance(module, nn.ConvTranspose):
        return Layer(_conv(rank, module.transpose_kernel))
    if isinstance(module, nn.ConvLocal):
        return Layer(_general(rank - 2, 1, 1))
    if isinstance(module, nn.Conv):
        return Layer(_conv(rank), module.feature_group_count)
    if isinstance(module, nn.Einsum):
        assert module.einsum_str is not None
        return Layer(_einsum(module.einsum_str))
    return None


def linen_layers(module: nn.Module, *inputs: Any) -> tuple[Any, dict[str, Layer]]:
    """Parameter shapes of a Linen model, and its layers' by the paths of their kernels."""
    found: dict[str, Layer] = {}

    def record(call: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        result = call(*args, **kwargs)
        part = context.module
        kernel = part.variables.get("params", {}).get("kernel") if part.scope is not None else None
        layer = None if kernel is None else _of_linen(part, jnp.ndim(kernel))
        if layer is not None:
            found["/".join((*part.path, "kernel"))] = layer
        return result

    def init(key: jax.Array) -> Any:
        with nn.intercept_methods(record):
            return module.init({"params": key}, *inputs)["params"]

    params = jax.eval_shape(init, jax.random.key(0))
    return params, {path: found[path] for path in flatten_dict(params, sep="/") if path in found}


def _of_nnx(module: nnx.Module) -> Layer | None:
    if isinstance(module, nnx.Linear):
        return Layer(_general(0, 1, 1))
    if isinstance(module, nnx.LinearGeneral):
        return Layer(
            _general(len(module.batch_axis), len(module.in_features), len(module.out_features))
        )
    if isinstance(module, nnx.ConvTranspose):
        return Layer(_conv(len(module.kernel_size) + 2, module.transpose_kernel))
    if isinstance(module, nnx.Conv):
        return Layer(_conv(len(module.kernel_size) + 2), module.feature_group_count)
    if isinstance(module, nnx.Einsum):
        assert module.einsum_str is not None
        return Layer(_einsum(module.einsum_str))
    return None


def nnx_layers(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, dict[str, Layer]]:
    """The abstract parameters of an NNX model, and its layers' by the paths of their kernels."""
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    modules = [(path, part) for path, part in nnx.iter_graph(model) if isinstance(part, nnx.Module)]
    layers = {"/".join((*map(str, path), "kernel")): _of_nnx(part) for path, part in modules}
    return nnx.state(model, nnx.Param), {p: layer for p, layer in layers.items() if layer}
