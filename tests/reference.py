"""Muon on one matrix, written out in float64 numpy, and input of a given condition number."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Rows = Sequence[Sequence[float]]

JORDAN: Rows = ((3.4445, -4.7750, 2.0315),) * 5


def singular_vectors(rng: np.random.Generator, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rank = min(m, n)
    u, _ = np.linalg.qr(rng.normal(size=(m, rank)))
    v, _ = np.linalg.qr(rng.normal(size=(n, rank)))
    return u, v


def matrix(seed: int, m: int, n: int, kappa: float = 50.0) -> np.ndarray:
    """A float32 matrix whose singular values fall log-uniformly from 1 to 1 / kappa."""
    u, v = singular_vectors(np.random.default_rng(seed), m, n)
    return ((u * np.geomspace(1, 1 / kappa, min(m, n))) @ v.T).astype(np.float32)


def gradients(seed: int, m: int, n: int, steps: int, kappa: float = 50.0) -> list[np.ndarray]:
    """Gradients with common singular vectors, so that every mix of them has condition <= kappa."""
    rng = np.random.default_rng(seed)
    u, v = singular_vectors(rng, m, n)
    values = [np.exp(rng.uniform(-np.log(kappa), 0, min(m, n))) for _ in range(steps)]
    return [((u * s) @ v.T).astype(np.float32) for s in values]


def newton_schulz(x: Any, rows: Rows = JORDAN, norm: float | None = None) -> np.ndarray:
    """The standard iteration in float64 after division by `norm`, Frobenius's where None."""
    x = np.asarray(x)
    x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    x = x / (norm or np.linalg.norm(x) or 1.0)
    for a, b, c in rows:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


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


def relative_error(got: Any, want: Any) -> float:
    """The Frobenius norm of the difference over that of what is right."""
    got, want = np.asarray(got), np.asarray(want)
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    return float(np.linalg.norm(got.astype(wide) - want) / np.linalg.norm(want))
