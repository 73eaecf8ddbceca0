"""Muon on one matrix, written out in float64 numpy, and input of a given condition number."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracle import JORDAN, Rows, log_uniform, newton_schulz, relative_error, singular_vectors

__all__ = [
    "JORDAN",
    "Rows",
    "gradients",
    "matrix",
    "mixes",
    "muon",
    "newton_schulz",
    "relative_error",
]


def matrix(seed: int, m: int, n: int, kappa: float = 50.0) -> np.ndarray:
    """A float32 matrix whose singular values fall log-uniformly from 1 to 1 / kappa."""
    return log_uniform(m, n, kappa, seed).astype(np.float32)


def gradients(seed: int, m: int, n: int, steps: int, kappa: float = 50.0) -> list[np.ndarray]:
    """Gradients with common singular vectors, so that every mix of them has condition <= kappa."""
    rng = np.random.default_rng(seed)
    u, v = singular_vectors(rng, m, n, min(m, n))
    values = [np.exp(rng.uniform(-np.log(kappa), 0, min(m, n))) for _ in range(steps)]
    return [((u * s) @ v.T).astype(np.float32) for s in values]


def mixes(
    grads: Sequence[Any],
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    bias_correction: bool = True,
    form: str = "ema",
    rounded: Callable[[np.ndarray], Any] = np.asarray,
) -> list[np.ndarray]:
    """What is orthogonalised at each step; the buffer is rounded between steps."""
    buffer, result = np.zeros_like(np.asarray(grads[0], np.float64)), []
    gain = 1 - beta if form == "ema" else 1.0
    for t, grad in enumerate((np.asarray(g, np.float64) for g in grads), start=1):
        buffer = beta * buffer + gain * grad
        if not bias_correction:
            mix = gain * grad + beta * buffer if nesterov else buffer
        else:
            average = buffer if form == "ema" else (1 - beta) * buffer
            mix = average / (1 - beta**t)
            if nesterov:
                mix = beta * average / (1 - beta ** (t + 1)) + (1 - beta) * grad / (1 - beta**t)
        result.append(mix)
        buffer = np.asarray(rounded(buffer), np.float64)
    return result


def muon(
    param: Any,
    grads: Sequence[Any],
    *,
    learning_rate: float | Callable[[int], float],
    rows: Rows = JORDAN,
    weight_decay: float | Callable[[int], float] = 0.0,
    kind: str = "decoupled",
    factor: float | None = None,
    **momentum: Any,
) -> list[np.ndarray]:
    """The updates of one [fan-in, fan-out] matrix; `factor` is Keller Jordan's where None."""
    param = np.asarray(param, np.float64)
    fan_in, fan_out = param.shape
    scale = max(1.0, fan_out / fan_in) ** 0.5 if factor is None else factor
    updates, seen = [], []
    for count, grad in enumerate(grads):
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        decay = weight_decay(count) if callable(weight_decay) else weight_decay
        seen.append(np.asarray(grad, np.float64) + (decay * param if kind == "l2" else 0.0))
        direction = scale * newton_schulz(mixes(seen, **momentum)[-1], rows)
        decoupled = {"decoupled": rate * decay, "independent": decay, "l2": 0.0}[kind]
        updates.append(-rate * direction - decoupled * param)
        param = param + updates[-1]
    return updates
