"""Float64 numpy references, written apart from the library: plain loops and an SVD."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = Sequence[Sequence[float]]

JORDAN: Rows = ((3.4445, -4.7750, 2.0315),) * 5


def _wide(dtype: np.dtype) -> type:
    return np.complex128 if np.issubdtype(dtype, np.complexfloating) else np.float64


def polar_factor(x: ArrayLike) -> NDArray:
    """UVᴴ of each matrix, over the singular values above rounding."""
    x = np.asarray(x)
    u, s, vh = np.linalg.svd(x.astype(_wide(x.dtype)), full_matrices=False)
    kept = s > s.max(-1, keepdims=True, initial=0) * 1e-12
    return (u * kept[..., None, :]) @ vh


def newton_schulz(x: ArrayLike, rows: Rows = JORDAN, norm: str = "frobenius") -> NDArray:
    """The iteration of one (m, n) matrix, divided by a norm first.

    `norm` is 'frobenius', 'spectral', 'schatten' (Schatten-4), 'schatten8', 'aol' or 'none'.
    """
    x = np.asarray(x)
    x = x.astype(_wide(x.dtype))
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, rows, norm).T
    x = x / _norm(x, norm)
    for a, b, c in rows:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _norm(x: NDArray, kind: str) -> NDArray | float:
    if not x.any() or kind == "none":
        return 1.0
    if kind == "aol":
        rows = np.abs(x @ x.conj().T).sum(1, keepdims=True)
        return np.sqrt(np.where(rows == 0, 1, rows))
    if kind == "frobenius":
        return float(np.linalg.norm(x))
    powers = {"schatten": 4, "schatten8": 8, "spectral": np.inf}
    return float(np.linalg.norm(np.linalg.svd(x, compute_uv=False), powers[kind]))


def singular_values(x: ArrayLike) -> NDArray:
    """In float64, largest first."""
    x = np.asarray(x)
    return np.linalg.svd(x.astype(_wide(x.dtype)), compute_uv=False)


def relative_error(x: ArrayLike, reference: ArrayLike) -> float:
    """‖x − reference‖_F / ‖reference‖_F in float64."""
    x, reference = np.asarray(x), np.asarray(reference)
    wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(reference) else np.float64
    x, reference = x.astype(wide), reference.astype(wide)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def singular_vectors(
    rng: np.random.Generator, m: int, n: int, rank: int
) -> tuple[NDArray, NDArray]:
    """Random orthonormal columns, (m, rank) and (n, rank)."""
    u, v = (np.linalg.qr(rng.standard_normal((k, rank)))[0] for k in (m, n))
    return u, v


def with_spectrum(values: ArrayLike, m: int, n: int, seed: int = 0) -> NDArray:
    """An (m, n) float64 matrix with these singular values and random singular vectors."""
    values = np.asarray(values, np.float64)
    u, v = singular_vectors(np.random.default_rng(seed), m, n, len(values))
    return (u * values) @ v.T


def gaussian(*shape: int, seed: int = 0) -> NDArray:
    """A float64 array of standard normal entries."""
    return np.random.default_rng(seed).standard_normal(shape)


def log_uniform(m: int, n: int, condition: float, seed: int = 0) -> NDArray:
    """An (m, n) matrix whose singular values fall evenly on a log scale to 1 / condition."""
    return with_spectrum(np.geomspace(1, 1 / condition, min(m, n)), m, n, seed)


def spiked(m: int, n: int, seed: int = 0) -> NDArray:
    """An (m, n) matrix with a few large singular values over a flat floor at 1e-2."""
    values = np.full(min(m, n), 1e-2)
    values[:4] = 1
    return with_spectrum(values, m, n, seed)
