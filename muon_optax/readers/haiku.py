"""Haiku models: the parameters of `hk.transform(f).init`, seen while it makes them."""

import importlib
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon_optax._internal.leaf_types import is_float_leaf
from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.partition import Shape
from muon_optax.readers.inputs import Inputs
from muon_optax.readers.kernels import Kernel, convolution, other, weight
from muon_optax.readers.names import adapters
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.readers.stacks import Declared, choices
from muon_optax.readers.usage import Usage, read_usage

__all__ = ["read"]

hk: Any = importlib.import_module("haiku")  # not `import haiku`: type checkers find this file


class _Owner(NamedTuple):
    """A module that holds a parameter, the module that called it, and the parameter's shape."""

    module: Any
    caller: Any
    shape: Shape


_Owners = dict[tuple[str, str], list[_Owner]]


def read(model: Any, inputs: Inputs) -> Reading:
    """Reads the modules that `init` calls, and how `apply` uses their parameters.

    Raises:
      TypeError: without example inputs.
    """
    if not inputs:
        raise TypeError(
            "model_rules needs example inputs for a Haiku model, whose parameters its call makes: "
            "model_rules(transformed, *inputs), where jax.ShapeDtypeStruct will do for an array"
        )
    owners: _Owners = {}

    def init(arrays: Any) -> Any:
        with hk.intercept_methods(_noting(owners)):
            return inputs.into(lambda *a, **k: model.init(jax.random.key(0), *a, **k), arrays)

    made = jax.eval_shape(init, inputs.arrays)
    params, state = made if isinstance(model, hk.TransformedWithState) else (made, None)
    found = [
        _leaf(path, tuple(jnp.shape(leaf)), owners)
        for path, leaf in leaves_with_segments(params)
        if is_float_leaf(leaf)
    ]
    return Reading(tuple(found), _usage(model, params, state, inputs, found))


def _noting(owners: _Owners) -> Any:
    """An interceptor that notes each parameter's module and its shape there."""
    callers: list[Any] = []

    def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":  # `params_dict` is a method too
            return method(*args, **kwargs)
        callers.append(module)
        try:
            result = method(*args, **kwargs)
        finally:
            callers.pop()
        caller = callers[-1] if callers else None
        for full_name, value in module.params_dict().items():
            name, _, parameter = full_name.rpartition("/")
            if name == module.module_name:
                owner = _Owner(module, caller, tuple(jnp.shape(value)))
                owners.setdefault((name, parameter), []).append(owner)
        return result

    return intercept


def _leaf(path: Segments, shape: Shape, owners: _Owners) -> ModuleLeaf:
    names = path[0].split("/")
    # Within `layer_stack` and `lift` a module doesn't know the names in front of its own.
    for i in range(len(names)):
        for owner in owners.get(("/".join(names[i:]), path[-1]), ()):
            if choices(Declared(shape, owner.shape)):
                kernel = _declared(owner, path[-1])
                return ModuleLeaf(path, shape, type(owner.module).__name__, kernel)
    return ModuleLeaf(path, shape, "a function")


_NORMS = (hk.BatchNorm, hk.GroupNorm, hk.InstanceNorm, hk.LayerNorm, hk.RMSNorm)
_CONVS = (hk.ConvND, hk.Conv1D, hk.Conv2D, hk.Conv3D)
_TRANSPOSED = (hk.ConvNDTranspose, hk.Conv1DTranspose, hk.Conv2DTranspose, hk.Conv3DTranspose)
_DEPTHWISE = (hk.DepthwiseConv1D, hk.DepthwiseConv2D, hk.DepthwiseConv3D)
_CONV_LSTMS = (hk.Conv1DLSTM, hk.Conv2DLSTM, hk.Conv3DLSTM)


def _declared(owner: _Owner, name: str) -> Kernel | None:
    """The kernel that one of Haiku's modules declares for its own parameter."""
    module, caller, shape = owner
    last = len(shape) - 1
    if isinstance(module, _NORMS):
        return other(shape, "norm")
    if isinstance(module, hk.Embed):
        return other(shape, "embedding table")
    if isinstance(module, _DEPTHWISE) and name == "w":
        return other(shape, "depthwise kernel")
    if isinstance(module, hk.Linear) and name == "w":
        return weight(shape, 0, 1, blocks=4 if isinstance(caller, hk.LSTM) else 1)
    if isinstance(module, hk.GRU) and name in ("w_i", "w_h"):
        return weight(shape, 0, 1, blocks=3)
    if isinstance(module, _CONVS) and name == "w":
        gates = 4 if isinstance(caller, _CONV_LSTMS) else 1
        groups = module.feature_group_count
        return convolution(shape, last - 1, last, groups=groups, blocks=gates)
    if isinstance(module, _TRANSPOSED) and name == "w":  # [*window, out, in]
        return convolution(shape, last, last - 1)
    known = (hk.Bias, hk.GRU, hk.Linear, *_CONVS, *_DEPTHWISE, *_TRANSPOSED)
    return other(shape, "bias") if isinstance(module, known) and name == "b" else None


def _usage(model: Any, params: Any, state: Any, inputs: Inputs, leaves: list[ModuleLeaf]) -> Usage:
    rest = (jax.random.key(0),) if _takes_key(model, has_state=state is not None) else ()

    def call(params: Any, data: Any) -> Any:
        state, arrays = data
        before = (params, *rest) if state is None else (params, state, *rest)
        made = inputs.into(lambda *a, **k: model.apply(*before, *a, **k), arrays)
        return made if state is None else made[0]

    return read_usage(call, params, (state, inputs.arrays), adapters(leaves))


def _takes_key(model: Any, *, has_state: bool) -> bool:
    """Whether `apply` takes a key: `hk.without_apply_rng` returns the same type without one.

    `init(key, *inputs)` always has one, where `apply` has the parameters, perhaps states and a key.
    """
    count = {
        name: len(inspect.signature(getattr(model, name)).parameters) for name in model._fields
    }
    return count["apply"] - count["init"] > has_state
