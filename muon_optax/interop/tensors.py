"""Single arrays to and from PyTorch, in their own dtype or not at all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["from_torch", "import_torch", "to_torch"]


def import_torch() -> Any:
    """The torch module.

    Raises:
      ImportError: if it isn't installed, saying how to get it.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("this needs PyTorch: pip install 'muon-optax[torch]'") from error


def to_torch(x: jax.typing.ArrayLike, *, copy: bool = True) -> torch.Tensor:
    """An array as a tensor of the same dtype, on the same device where it is on one.

    Args:
      x: a JAX or numpy array. One that is sharded over devices is gathered on the host.
      copy: False shares memory where dlpack can; the tensor must then not be written to, since JAX
        takes its arrays to be immutable.

    Returns:
      A tensor.

    Raises:
      TypeError: for a dtype that torch doesn't have.

    Example:
      >>> import pytest
      >>> _ = pytest.importorskip("torch")
      >>> to_torch(jnp.ones((2, 3), jnp.bfloat16)).dtype
      torch.bfloat16
    """
    torch = import_torch()
    dtype = jnp.result_type(x)
    wanted: Any = getattr(torch, str(dtype), None)
    is_packed = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    if is_packed or not isinstance(wanted, torch.dtype):
        raise TypeError(f"torch has no dtype {dtype} to copy to")
    if isinstance(x, jax.Array) and len(x.sharding.device_set) == 1:
        try:
            tensor = torch.from_dlpack(x)
        except (BufferError, RuntimeError, ValueError):  # a dtype that dlpack can't carry
            tensor = _from_bytes(np.asarray(x), wanted)
    else:
        tensor = _from_bytes(np.asarray(x), wanted)
    return tensor.clone() if copy else tensor


def _from_bytes(x: np.ndarray, dtype: Any) -> torch.Tensor:
    torch = import_torch()
    raw = torch.from_numpy(np.array(x, copy=True, order="C").reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(x.shape)


def from_torch(tensor: torch.Tensor, *, copy: bool = True) -> jax.Array:
    """A tensor as an array of the same dtype, on the same device.

    Args:
      tensor: of any layout; gradients don't flow through.
      copy: False shares memory where dlpack can; the tensor must then not be written to, as an
        optimizer would.

    Returns:
      An array on the tensor's device.

    Raises:
      TypeError: for a DTensor, which only all ranks together can gather, and for a dtype that JAX
        doesn't have, or only with `jax_enable_x64`.

    Example:
      >>> import pytest
      >>> torch = pytest.importorskip("torch")
      >>> from_torch(torch.arange(6.0).reshape(2, 3).T).tolist()
      [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    if hasattr(tensor, "full_tensor"):
        raise TypeError("got a DTensor; call its full_tensor() on every rank and pass the result")
    name = str(tensor.dtype).removeprefix("torch.")
    _check_dtype(name)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.clone() if copy else tensor
    tensor = tensor.contiguous()
    try:
        return jnp.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError, jax.errors.JaxRuntimeError):
        torch = import_torch()
        raw = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        return jnp.asarray(raw.view(jnp.dtype(name)).reshape(tensor.shape))


def _check_dtype(name: str) -> None:
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise TypeError(f"JAX has no dtype {name}") from error
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"got a tensor of {name}, which JAX would round to "
            f"{jax.dtypes.canonicalize_dtype(dtype)}; set jax_enable_x64, or cast it first"
        )
