"""torch models: `dict(module.named_parameters())`, with the axes that torch keeps."""

from collections.abc import Callable
from typing import Any

from torch import nn

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Shape
from muon_optax.partition.systems import is_vector_in_disguise
from muon_optax.readers.inputs import Inputs
from muon_optax.readers.kernels import Kernel, convolution, other, weight
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.views.matrix_view import MatrixView

__all__ = ["read"]

Owner = tuple[nn.Module, str]


def read(model: nn.Module, inputs: Inputs) -> Reading:
    """Reads a model's modules.

    Raises:
      TypeError: for example inputs, which torch's reader has no use for.
    """
    if inputs:
        raise TypeError("model_rules reads a torch model's modules alone; give it no inputs")
    owners = _owners(model)
    leaves = [
        _leaf(name, parameter, owners[id(parameter)])
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    ]
    return Reading(tuple(leaves), heads=_heads(model), is_input_first=False, takes_inputs=False)


def _owners(model: nn.Module) -> dict[int, list[Owner]]:
    """The modules that have each parameter, and its name there: of tied ones there are several."""
    owners: dict[int, list[Owner]] = {}
    lists = {
        id(parametrized): (module, tensor)
        for module in model.modules()
        for tensor, parametrized in getattr(module, "parametrizations", {}).items()
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            # A reparametrised weight is a child's `original`, or weight_norm's `weight_v`; its
            # lengths, which weight_norm keeps apart, are no matrix.
            is_length = is_vector_in_disguise((name,), tuple(parameter.shape))
            owner = (module, "weight" if name == "weight_v" else name)
            owner = owner if is_length else lists.get(id(module), owner)
            owners.setdefault(id(parameter), []).append(owner)
    return owners


def _leaf(name: str, parameter: nn.Parameter, owners: list[Owner]) -> ModuleLeaf:
    shape = tuple(parameter.shape)
    known = [(module, _declared(module, own, shape)) for module, own in owners]
    # A tied embedding is looked up, whatever else it does.
    known.sort(key=lambda pair: _rank(pair[1]))
    module, kernel = known[0]
    return ModuleLeaf((name,), shape, type(module).__name__, kernel)


def _rank(kernel: Kernel | None) -> int:
    if kernel is None:
        return 2
    return 1 if kernel.view is not None else 0


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a Linear whose weight is [in, out]."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1}


def _declared(module: nn.Module, name: str, shape: Shape) -> Kernel | None:
    """The kernel that one of torch's modules declares for its own parameter."""
    if isinstance(module, _EMBEDDINGS):
        return other(shape, "embedding table")
    if isinstance(module, _NORMS):
        return other(shape, "norm")
    if name == "bias" or name.startswith(("bias_", "in_proj_bias")):
        return other(shape, "bias") if len(shape) == 1 else None
    if _is_conv1d(module) and name == "weight":
        return weight(shape, 0, 1)
    if isinstance(module, nn.Linear) and name == "weight":
        return weight(shape, 1, 0)
    if isinstance(module, nn.Bilinear) and name == "weight":  # [out, in1, in2]
        return weight(shape, (1, 2), 0)
    if isinstance(module, _CONVS) and name == "weight":
        return convolution(shape, 1, 0, groups=module.groups)
    if isinstance(module, _TRANSPOSED) and name == "weight":  # [in, out / groups, *window]
        return convolution(shape, 0, 1, groups=module.groups, grouped="reduction")
    if isinstance(module, nn.MultiheadAttention):
        return _attention(name, shape)
    return _recurrent(module, name, shape) or _experts(module, name, shape)


def _attention(name: str, shape: Shape) -> Kernel | None:
    if name == "in_proj_weight":
        return weight(shape, 1, 0, blocks=3)
    if name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return weight(shape, 1, 0)
    return other(shape, "bias") if name in ("bias_k", "bias_v") else None


def _recurrent(module: nn.Module, name: str, shape: Shape) -> Kernel | None:
    gates = next((n for cell, n in _GATES.items() if isinstance(module, cell)), None)
    if gates is None:
        return None
    if name.startswith("weight_hr"):  # an LSTM's projection of its state
        return weight(shape, 1, 0)
    return weight(shape, 1, 0, blocks=gates) if name.startswith("weight_") else None


def _experts(module: nn.Module, name: str, shape: Shape) -> Kernel | None:
    """A stack of experts in transformers: [experts, out, in], or [experts, in, out] transposed."""
    is_transposed = getattr(module, "is_transposed", None)
    if not isinstance(is_transposed, bool) or len(shape) != 3:
        return None
    sums, outs = ((1,), (2,)) if is_transposed else ((2,), (1,))
    if name in ("gate_proj", "up_proj", "down_proj"):
        return weight(shape, sums, outs)
    if name != "gate_up_proj":
        return None
    if getattr(module, "is_concatenated", True):
        return weight(shape, sums, outs, blocks=2)
    pairs = MatrixView(sums, outs, split=(1, 1), groups=shape[outs[0]] // 2)
    return Kernel(shape, "weight", pairs)


def _heads(model: nn.Module) -> frozenset[Segments]:
    """The weights of the layers that a transformers or timm model names as its head."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [_asked(model, method) for method in ("get_output_embeddings", "get_classifier")]
    weights = [_last_weight(module) for head in found for module in head]
    return frozenset((names[id(weight)],) for weight in weights if weight is not None)


def _asked(model: nn.Module, method: str) -> list[nn.Module]:
    """The modules that a method without arguments returns, where the model has it."""
    ask: Callable[[], Any] | None = getattr(model, method, None)
    try:
        heads = ask() if callable(ask) else ()
    except (AttributeError, NotImplementedError, TypeError):  # a base class's that can't answer
        heads = ()
    heads = heads if isinstance(heads, list | tuple) else [heads]
    return [head for head in heads if isinstance(head, nn.Module)]


def _last_weight(module: nn.Module) -> nn.Parameter | None:
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return weights[-1] if weights else None
