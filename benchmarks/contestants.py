"""The optimizers that the benchmarks compare, as functions that take one whole step.

A step is the optimizer's update and its addition to the parameters, on donated buffers; torch's
works in place. All get the same trees of gradients, matrices as [fan-in, fan-out].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from muon_optax import muon
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule

Tree = dict[str, np.ndarray]
OPTAX = "optax"
TORCH = "torch"
OURS = {
    "jordan": {},
    "tight": {"ns_coeffs": "tight"},
    "fast": {"ns_coeffs": "fast"},
    "jordan bf16": {"ns_dtype": "bfloat16"},
    "tight bf16": {"ns_coeffs": "tight", "ns_dtype": "bfloat16"},
    "fast bf16": {"ns_coeffs": "fast", "ns_dtype": "bfloat16"},
}
THEIRS = {
    OPTAX: {},
    "optax dion": {"ns_coeffs": "dion"},
    "optax aol": {"preconditioning": "aol"},
    "optax schatten": {"preconditioning": "schatten"},
    "optax spectral": {"preconditioning": "spectral"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree of gradients, one case of a benchmark.

    Attributes:
      name: as shown.
      shapes: of each leaf; three dims are a stack of matrices.
      others: leaves for AdamW.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    others: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shape of every matrix."""
        return [s[-2:] for s in self.shapes.values() for _ in range(math.prod(s[:-2]))]

    def gradients(self, seed: int = 0) -> Tree:
        """Gaussian entries."""
        rng = np.random.default_rng(seed)
        shapes = {**self.shapes, **self.others}
        return {k: rng.standard_normal(s, np.float32) for k, s in shapes.items()}

    def views(self) -> dict[str, MuonDimensionNumbers | None]:
        """Muon's leaves by dimension numbers, None for AdamW's."""
        muons = {k: MuonDimensionNumbers(len(s) - 2, len(s) - 1) for k, s in self.shapes.items()}
        return {**muons, **dict.fromkeys(self.others)}


def jax_transformation(name: str, case: Case) -> optax.GradientTransformation:
    """The optimizer of that name, at learning rate 1 so that its updates can be looked at."""
    make = functools.partial(optax.contrib.muon, **THEIRS[name]) if name in THEIRS else None
    make = make or functools.partial(muon, **OURS[name])
    return make(1.0, muon_weight_dimension_numbers=case.views(), adam_learning_rate=1e-3)


def step_of(name: str, case: Case, grads: Tree, dtype: str = "float32") -> Callable[[], None]:
    """A function that takes one step, of JAX's contestants in `dtype`, and waits for it."""
    if name == TORCH:
        return _torch_step(case, grads)[0]
    tx = jax_transformation(name, case)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), grads)
    params = jax.tree.map(jnp.zeros_like, arrays)
    held = [params, jax.jit(tx.init)(params)]

    def run() -> None:
        held[:] = step(*held, arrays)
        jax.block_until_ready(held)

    return run


def direction_of(
    name: str, case: Case, grads: Tree, leaf: str, dtype: str = "float32"
) -> np.ndarray:
    """What the first step makes of the case's one leaf: nearly its polar factor, unscaled."""
    if name == TORCH:
        step, params = _torch_step(case, grads)
        step()
        update = params[leaf].detach().T.float().cpu().numpy()
    else:
        tx = jax_transformation(name, case)
        arrays = {leaf: jnp.asarray(grads[leaf], dtype)}
        updates, _ = jax.jit(tx.update)(arrays, tx.init(arrays), arrays)
        update = np.asarray(updates[leaf], np.float32)
    fan_in, fan_out = update.shape[-2:]
    return -update / math.sqrt(max(1, fan_out / fan_in))


def _torch_step(case: Case, grads: Tree) -> tuple[Callable[[], None], dict[str, Any]]:
    """Torch's Muon on [fan-out, fan-in] matrices, a stack as so many leaves, and its AdamW."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrices, others = {}, []
    for name, grad in grads.items():
        arrays = [grad] if name in case.others or grad.ndim < 3 else list(grad)
        for i, array in enumerate(arrays):
            array = array if name in case.others else np.ascontiguousarray(array.T)
            param = torch.zeros(array.shape, device=device, requires_grad=True)
            param.grad = torch.from_numpy(array).to(device)
            if name in case.others:
                others.append(param)
            else:
                matrices[name if len(arrays) == 1 else f"{name}.{i}"] = param
    optimizers: list[Any] = [torch.optim.Muon(list(matrices.values()), lr=1.0, weight_decay=0.0)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-3, fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step, matrices


def polar_factor(gradient: np.ndarray) -> np.ndarray:
    """UVᵀ by a float64 SVD."""
    u, _, vt = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    return u @ vt


def accuracy(direction: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Distance to the polar factor, ‖O − UVᵀ‖_F / √m, and the range of singular values."""
    wide = np.asarray(direction if direction.shape[0] <= direction.shape[1] else direction.T)
    wide = wide.astype(np.float64)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(wide @ wide.T), 0))
    error = np.linalg.norm(direction - exact) / math.sqrt(len(values))
    return {"pol": float(error), "low": float(values.min()), "high": float(values.max())}


def needed_flops(name: str, case: Case) -> dict[str, int]:
    """FLOPs that an update of ours can't do without, by dtype: symmetric matmuls at half.

    Standard: T(3m²n + m³); Gram with r restarts: 3(r + 1)m²n + (4T − 3(r + 1))m³, of which the m³
    are float32 at least.
    """
    options: dict[str, Any] = OURS[name]
    schedule = resolve_schedule(options.get("ns_coeffs", "jordan"))
    solver = NewtonSchulz(schedule, dtype=options.get("ns_dtype"))
    steps, passes = len(schedule.rows), schedule.passes
    flops = dict.fromkeys(("float32", "bfloat16"), 0)
    own = options.get("ns_dtype", "float32")
    for m, n in (sorted(shape) for shape in case.matrices):
        if solver.chosen_method(m, n, "float32") == "standard":
            flops[own] += steps * (3 * m * m * n + m**3)
        else:
            flops[own] += 3 * passes * m * m * n
            flops["float32"] += (4 * steps - 3 * passes) * m**3
    return flops
