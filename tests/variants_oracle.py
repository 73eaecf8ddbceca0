"""Muon's variants in float64, one matrix [out, in] at a time, with no code of the library's.

Each class has the state of one matrix; `update(u, w)` gives the new direction, or the step, of a
direction (or step) `u` and weights `w`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from muon_optax import MatrixView, MuonDimensionNumbers

View = MuonDimensionNumbers | MatrixView


def norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.abs(x) ** 2)))


def unit(x: np.ndarray) -> np.ndarray:
    return x / norm(x) if norm(x) else np.zeros_like(x)


class Neuron:
    """NorMuon."""

    def __init__(
        self,
        beta2=0.95,
        eps=1e-8,
        *,
        each="output",
        restore="norm",
        guard="root",
        skip_zeros=False,
    ):
        self.beta2, self.eps, self.each, self.restore, self.guard = beta2, eps, each, restore, guard
        self.skip_zeros = skip_zeros
        self.v: Any = 0.0

    def update(self, u, w):
        out, fan_in = u.shape
        axis = 1 if self.each == "output" or out >= fan_in else 0
        a = np.mean(u**2, axis, keepdims=True)
        moved = self.beta2 * self.v + (1 - self.beta2) * a
        self.v = np.where(a == 0, self.v, moved) if self.skip_zeros else moved
        if self.guard == "root":
            x = u / (np.sqrt(self.v) + self.eps)
        else:
            x = u / np.sqrt(np.maximum(self.v, self.eps))
        if self.restore is None:
            return x
        wanted = norm(u) if self.restore == "norm" else self.restore * np.sqrt(u.size)
        return unit(x) * wanted


class Entry:
    """AdaMuon after the signs."""

    def __init__(self, beta2=0.95, eps=1e-8, *, rms: float | None = 0.2):
        self.beta2, self.eps, self.rms = beta2, eps, rms
        self.v: Any = 0.0

    def update(self, u, w):
        self.v = self.beta2 * self.v + (1 - self.beta2) * u**2
        x = u / (np.sqrt(self.v) + self.eps)
        return x if self.rms is None else x * self.rms * np.sqrt(u.size) / (norm(x) + self.eps)


class Namo:
    """NAMO and NAMO-D: of a gradient, with an orthogonalisation."""

    def __init__(
        self,
        orthogonalize,
        beta=0.95,
        beta2=0.99,
        eps=1e-8,
        *,
        each="matrix",
        nesterov=True,
        corrected=True,
        clamp=0.75,
        then=None,
    ):
        self.orthogonalize, self.betas, self.eps = orthogonalize, (beta, beta2), eps
        self.each, self.nesterov, self.corrected = each, nesterov, corrected
        self.clamp, self.then = clamp, then
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = 0

    def update(self, u, w):
        beta, beta2 = self.betas
        self.t += 1
        self.m = beta * self.m + (1 - beta) * u
        x = beta * self.m + (1 - beta) * u if self.nesterov else self.m
        axis = None if self.each == "matrix" else 0
        sums = lambda y: np.sum(y**2, axis, keepdims=True)  # noqa: E731
        self.v = beta2 * self.v + (1 - beta2) * sums(u)
        divisor = np.sqrt(self.v) + self.eps
        f = np.where(divisor == 0, 0, np.sqrt(sums(x)) / np.where(divisor == 0, 1, divisor))
        if self.each == "input":
            f = np.clip(f, self.clamp * f.mean(), f.mean() / self.clamp)
        if self.corrected:
            f = f * np.sqrt(1 - beta2**self.t) / (1 - beta**self.t)
        direction = self.orthogonalize(x)
        return (direction if self.then is None else self.then(direction, w)) * f


@dataclasses.dataclass
class BlockPeriodic:
    """MuonBP, of a gradient: the direction with its scale. Blocks are (along in, along out)."""

    orthogonalize: Callable[[np.ndarray], np.ndarray]
    scale: Callable[[int, int], float]
    blocks: tuple[int, int]
    period: int = 5
    ratio: float = 1.0
    beta: float = 0.95
    nesterov: bool = False
    count: int = 0
    m: Any = 0.0

    def update(self, u, w):
        self.m = self.beta * self.m + u
        x = self.beta * self.m + u if self.nesterov else self.m
        is_whole = self.count % self.period == 0
        self.count += 1
        if is_whole:
            return self.scale(*x.shape) * self.orthogonalize(x)
        along_in, along_out = self.blocks
        rows = [
            np.hstack([self._block(y) for y in np.split(band, along_in, axis=1)])
            for band in np.split(x, along_out, axis=0)
        ]
        return np.vstack(rows)

    def _block(self, x):
        return self.ratio * self.scale(*x.shape) * self.orthogonalize(x)


@dataclasses.dataclass
class Dion2:
    """Of a gradient, with an orthogonalisation; `chosen` has each step's rows or columns."""

    orthogonalize: Callable[[np.ndarray], np.ndarray]
    fraction: float = 0.25
    decay: float = 0.95
    each: str = "shorter"
    m: Any = 0.0
    chosen: list[list[int]] = dataclasses.field(default_factory=list)

    def update(self, u, w):
        self.m = self.m + u
        out, fan_in = u.shape
        has_rows = self.each == "output" or (self.each == "shorter" and out <= fan_in)
        m = self.m if has_rows else self.m.T
        norms = np.sum(np.abs(m), axis=1)
        count = max(1, math.ceil(self.fraction * len(norms)))
        picked = sorted(np.argsort(-norms, kind="stable")[:count])  # of ties the first
        self.chosen.append(picked)
        x = m[picked]
        direction = np.zeros_like(m)
        direction[picked] = self.orthogonalize(x) if has_rows else self.orthogonalize(x.T).T
        m = m.copy()
        m[picked] *= self.decay
        self.m = m if has_rows else m.T
        return direction if has_rows else direction.T


@dataclasses.dataclass
class Hyperball:
    """The step W_new - W; `radius` may be 'initial', 'current' or a number."""

    rate: Callable[[int], float]
    radius: Any = "initial"
    count: int = 0
    first: float | None = None

    def update(self, u, w):
        if self.first is None:
            self.first = norm(w)
        radius: Any = {"initial": self.first, "current": norm(w)}.get(self.radius, self.radius)
        rate = self.rate(self.count)
        self.count += 1
        return radius * unit(w - rate * radius * unit(u)) - w


@dataclasses.dataclass
class Cautious:
    decay: Callable[[int], float]
    count: int = 0

    def update(self, u, w):
        decay = self.decay(self.count)
        self.count += 1
        return u + decay * np.where(u * w >= 0, w, 0)


@dataclasses.dataclass
class Floor:
    target: float
    each: str

    def update(self, u, w):
        axis = None if self.each == "matrix" else 1
        sizes = [np.sqrt(np.sum(x**2, axis, keepdims=True)) for x in (w, u)]
        ratio = np.where(sizes[1] == 0, 0, sizes[0] / np.where(sizes[1] == 0, 1, sizes[1]))
        return u * np.maximum(1, self.target * ratio)


class Relative:
    def update(self, u, w):
        return unit(u) * norm(w)


@dataclasses.dataclass
class Brake:
    """The step W_new - W, of a step."""

    outward: float = 0.5
    inward: float = 1.0
    form: str = "norm"

    def update(self, u, w):
        if self.form == "norm":
            new = w + u
            grown = norm(new) - norm(w)
            part = self.outward if grown > 0 else self.inward
            return unit(new) * (norm(w) + part * grown) - w
        along = np.sum(u * w) / norm(w) ** 2 if norm(w) else 0.0
        u = u + ((self.outward if along > 0 else self.inward) - 1) * along * w
        if self.form == "component":
            return u
        radius = norm(w) + np.sum(u * w) / norm(w) if norm(w) else 0.0
        return unit(w + u) * max(radius, 0.0) - w


class Chain:
    """Several, one after the other; a number multiplies."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def update(self, u, w):
        for part in self.parts:
            u = part * u if isinstance(part, float) else part.update(u, w)
        return u


def matrices(view: View, x: Any) -> list[np.ndarray]:
    """All matrices [out, in] of a leaf, in float64."""
    x, shape, cuts = _as_rows(view, np.asarray(x, np.float64))
    del shape
    return [y[np.ix_(rows, columns)] for y in x for rows, columns in cuts]


def joined(view: View, blocks: Sequence[np.ndarray], like: Any) -> np.ndarray:
    """Undoes `matrices` for a leaf like another."""
    like = np.asarray(like, np.float64)
    x, (order, sizes), cuts = _as_rows(view, np.zeros_like(like))
    x, blocks = x.copy(), list(blocks)
    for y in x:
        for rows, columns in cuts:
            y[np.ix_(rows, columns)] = blocks.pop(0)
    return x.swapaxes(1, 2).reshape(sizes).transpose(np.argsort(order))


def _as_rows(view: View, x: np.ndarray) -> Any:
    """The leaf as (batch, out, in), how it was brought there, and each block's rows and columns."""
    reduction, output = (
        [a] if isinstance(a, int) else list(a) for a in (view.reduction_axis, view.output_axis)
    )
    batch = [a for a in range(x.ndim) if a not in (*reduction, *output)]
    order = [*batch, *reduction, *output]
    sizes = [x.shape[a] for a in order]
    fan_in, fan_out = (int(np.prod([x.shape[a] for a in axes])) for axes in (reduction, output))
    rows = x.transpose(order).reshape(-1, fan_in, fan_out).swapaxes(1, 2)
    if isinstance(view, MuonDimensionNumbers):
        return rows, (order, sizes), [(range(fan_out), range(fan_in))]
    length = fan_out if view.axis == "output" else fan_in
    each = length // view.groups // (view.heads or 1)
    widths = view.split or (each,) * (view.heads or 1)
    block = np.tile(np.repeat(range(len(widths)), widths), view.groups)
    cuts = [np.flatnonzero(block == i) for i in range(len(widths))]
    if view.axis == "output":
        return rows, (order, sizes), [(cut, range(fan_in)) for cut in cuts]
    return rows, (order, sizes), [(range(fan_out), cut) for cut in cuts]
