"""State and parameters from and to other libraries.

`muon_optax.interop.torch` is the part that needs PyTorch: arrays, state dicts and optimizer states.
It imports PyTorch itself when a function is called.
"""

from muon_optax.interop import torch as torch
from muon_optax.interop.optax_state import from_optax
from muon_optax.interop.torch_layout import (
    TensorRule,
    TorchLayout,
    conv1d_rules,
    default_torch_rules,
)

__all__ = ["TensorRule", "TorchLayout", "conv1d_rules", "default_torch_rules", "from_optax"]
