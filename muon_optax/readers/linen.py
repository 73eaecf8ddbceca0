"""Flax Linen models: the "params" of `model.init`, whose modules are seen while it is traced."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList, meta
from flax.linen.recurrent import DenseParams

from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.partition import Shape
from muon_optax.readers.inputs import Inputs
from muon_optax.readers.kernels import Kernel, convolution, einsum, other, weight
from muon_optax.readers.names import adapters
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.readers.usage import Usage, read_usage

__all__ = ["read"]


class _Owner(NamedTuple):
    """A module that holds a parameter, the module that called it, and the parameter's shape."""

    module: nn.Module
    caller: nn.Module | None
    shape: Shape


_Owners = dict[Segments, _Owner]


def read(model: nn.Module, inputs: Inputs) -> Reading:
    """Reads the modules that `init` calls, and how `apply` uses their parameters.

    Raises:
      TypeError: without example inputs.
    """
    if not inputs:
        raise TypeError(
            "model_rules needs example inputs for a Linen model, whose parameters its call makes: "
            "model_rules(model, *inputs), where jax.ShapeDtypeStruct will do for an array"
        )
    owners: _Owners = {}

    def init(arrays: Any) -> Any:
        with nn.intercept_methods(_noting(owners)):
            return inputs.into(lambda *a, **k: model.init(jax.random.key(0), *a, **k), arrays)

    variables = dict(jax.eval_shape(init, inputs.arrays))
    params = _without_boxes(variables.pop("params", {}))
    found = [
        _leaf(path, tuple(jnp.shape(leaf)), owners)
        for path, leaf in leaves_with_segments(params)
        if is_float_leaf(leaf)
    ]
    return Reading(tuple(found), _usage(model, params, variables, inputs, found))


def _without_boxes(tree: Any) -> Any:
    """The tree with what Flax's boxes hold in their places.

    `meta.unbox` would also constrain the sharding of each value to the box's annotation, which
    within `jax.set_mesh` is an error for the shapes that `jax.eval_shape` returns.
    """

    def inside(box: Any) -> Any:
        # Partitioned and LogicallyPartitioned have a value; a box of one's own need not.
        return _without_boxes(box.value if hasattr(box, "value") else box.unbox())

    return meta.map_axis_meta(inside, tree)


def _noting(owners: _Owners) -> Any:
    """An interceptor that notes each parameter's module and its shape there.

    Inside `nn.scan` and `nn.vmap` that is the shape of one layer. The note of a module's own method
    comes before the call of a transform around it, so that the first note is the one to keep.
    """
    callers: list[nn.Module] = []

    def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        callers.append(module)
        try:
            result = method(*args, **kwargs)
        finally:
            callers.pop()
        if module.scope is not None:
            caller = callers[-1] if callers else None
            for name, value in module.variables.get("params", {}).items():
                leaf = _without_boxes(value)
                if hasattr(leaf, "shape"):
                    owner = _Owner(module, caller, tuple(leaf.shape))
                    owners.setdefault((*module.path, name), owner)
        return result

    return intercept


def _leaf(path: Segments, shape: Shape, owners: _Owners) -> ModuleLeaf:
    if path not in owners:
        return ModuleLeaf(path, shape, "a function")
    kernel = _declared(owners[path], path[-1])
    return ModuleLeaf(path, shape, type(owners[path].module).__name__, kernel)


_NORMS = (nn.BatchNorm, nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm, nn.RMSNorm, nn.WeightNorm)


def _declared(owner: _Owner, name: str) -> Kernel | None:
    """The kernel that one of Flax's modules declares for its own parameter."""
    module, caller, shape = owner
    last = len(shape) - 1
    match module, name:
        case nn.Embed(), "embedding":
            return other(shape, "embedding table")
        case norm, _ if isinstance(norm, _NORMS):
            return other(shape, "norm")
        case _, "bias" if isinstance(module, _WITH_BIAS):
            return other(shape, "bias")
        case ((nn.Dense() | DenseParams()), "kernel"):
            return weight(shape, 0, 1)
        case nn.DenseGeneral(), "kernel":
            return _dense_general(module, shape)
        case nn.Einsum(), "kernel" if module.einsum_str:
            return einsum(module.einsum_str, shape)
        case nn.Conv(), "kernel":
            gates = 4 if isinstance(caller, nn.ConvLSTMCell) else 1
            groups = module.feature_group_count
            return convolution(shape, last - 1, last, groups=groups, blocks=gates)
        case nn.ConvLocal(), "kernel":  # a matrix for each place, [*places, window * in, out]
            return weight(shape, last - 1, last)
        case nn.ConvTranspose(), "kernel":
            flip = module.transpose_kernel
            return convolution(shape, last - (not flip), last - flip)
    return None


_WITH_BIAS = (
    nn.Conv,
    nn.ConvLocal,
    nn.ConvTranspose,
    nn.Dense,
    nn.DenseGeneral,
    nn.Einsum,
    DenseParams,
)


def _dense_general(module: nn.DenseGeneral, shape: Shape) -> Kernel:
    features = module.features
    outputs = 1 if isinstance(features, int) else len(features)
    batch, split = len(tuple(module.batch_dims)), len(shape) - outputs
    return weight(shape, range(batch, split), range(split, len(shape)))


def _usage(
    model: nn.Module, params: Any, variables: Any, inputs: Inputs, leaves: list[ModuleLeaf]
) -> Usage:
    def call(params: Any, data: Any) -> Any:
        variables, arrays = data

        def apply(*args: Any, **kwargs: Any) -> Any:
            everything = {"params": params, **variables}
            # A stream that isn't given falls back to "params"; collections may be written to.
            options = {"rngs": jax.random.key(0), "mutable": DenyList("params"), **kwargs}
            return model.apply(everything, *args, **options)

        return inputs.into(apply, arrays)[0]

    return read_usage(call, params, (_without_boxes(variables), inputs.arrays), adapters(leaves))
