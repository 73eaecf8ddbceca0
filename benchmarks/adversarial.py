"""Input on which a singular value grows most: searched for, not drawn at random.

    python benchmarks/adversarial.py [--schedules jordan turbo] [--rounds 10] [--seeds 0]
        [--output benchmarks/results/adversarial.json]

For each schedule, method and kind of rounding: the largest singular value of a result, as a part of
the schedule's own maximum. It must stay below 1.05 in half precision and 1.005 in float32. What
hurts is rounding that goes the same way in many entries, so that most input here has few different
entries. A search by mutation starts there, and gradient ascent goes on from the worst it finds.
Matmuls that round float32 to TF32 or bfloat16, as those of GPUs and TPUs do, are emulated.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks import timing
from muon_optax.orthogonalization import (
    SCHEDULES,
    GramCollectives,
    NewtonSchulz,
    Schedule,
    orthogonalizer,
)
from muon_optax.sharding.strategies.group_sums import DeviceGroups, maximum

Function = Callable[[jax.Array], jax.Array]

# The dtype of the matmuls, and how many bits of its mantissa a matmul of float32 takes in.
ROUNDINGS: dict[str, tuple[str, int | None]] = {
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "float32": ("float32", None),
    "float32, TF32 matmuls": ("float32", 10),
    "float32, bfloat16 matmuls": ("float32", 7),
}
METHODS = ("standard", "standard on slices", "gram", "gram on slices")
QUICK = {"xla_backend_optimization_level": 0}
SLICES = 8


def bound(rounding: str) -> float:
    """How large a part of the schedule's own maximum a singular value may be."""
    return 1.005 if rounding in ("float32", "float32, TF32 matmuls") else 1.05


@functools.cache
def own_maximum(schedule: Schedule) -> float:
    """The largest singular value that the schedule's polynomials give, on a fine grid."""
    x = np.linspace(0, 1 / schedule.norm_factor, 1_000_001)
    for a, b, c in schedule.rows:
        square = x * x
        x = x * (a + square * (b + square * c))
    return float(np.abs(x).max())


def iteration(schedule: Schedule, method: str, rounding: str) -> Function:
    """The iteration on a stack of wide matrices, to be compiled, with a kind of rounding."""
    dtype, bits = ROUNDINGS[rounding]
    name: Literal["standard", "gram"] = "gram" if method.startswith("gram") else "standard"
    config = NewtonSchulz(schedule, name, dtype)

    def run(x: jax.Array) -> jax.Array:
        with products_that_round(bits):
            if method.endswith("on slices"):
                return _on_slices(config, x, name)
            traced_anew: Any = orthogonalizer._orthogonalize
            return traced_anew.__wrapped__(config, x)

    return run


def compiled(function: Function) -> Function:
    """Compiled quickly, as most of the time goes there."""
    return jax.jit(function, compiler_options=QUICK)


def _on_slices(
    config: NewtonSchulz, x: jax.Array, method: Literal["standard", "gram"]
) -> jax.Array:
    groups = DeviceGroups("d", SLICES, SLICES)
    collectives = GramCollectives(
        maximum=lambda x: groups.all_reduce(jax.lax.stop_gradient(x), maximum),
        reduce=lambda a: groups.all_reduce_gram(a, config.sent_gram_dtype(method, x.dtype)),
    )
    local = jax.vmap(lambda x: config.on_slices(x, collectives, method=method), axis_name="d")
    return jnp.concatenate(list(local(jnp.stack(jnp.split(x, SLICES, -1)))), -1)


@contextlib.contextmanager
def products_that_round(bits: int | None) -> Iterator[None]:
    """Rounds float32 input of the matmuls traced within, unless they ask for 'highest'.

    On GPUs 'high' means TF32 too.
    """
    exact: Any = jax.lax.dot_general

    def rounded(x: jax.Array, y: jax.Array, *args: Any, **options: Any) -> jax.Array:
        if bits and x.dtype == jnp.float32 and options.get("precision") != "highest":
            x, y = (jax.lax.reduce_precision(z, 8, bits) for z in (x, y))
        return exact(x, y, *args, **options)

    with mock.patch.object(jax.lax, "dot_general", rounded):
        yield


def spectra(rng: np.random.Generator, m: int, n: int) -> NDArray:
    """Matrices of many kinds: aligned, decaying, clustered, of low rank, with large rows, sparse.

    Args:
      rng: where random numbers come from.
      m: rows.
      n: columns, at least as many.

    Returns:
      (count, m, n), float64.
    """
    normal, place = rng.standard_normal, np.arange(1, m + 1)
    values = [
        *(np.geomspace(1, 1 / condition, m) for condition in (1e1, 1e2, 1e3, 1e4, 1e6, 1e6, 1e6)),
        *(place**-power for power in (0.5, 1.0, 2.0)),
        *(np.where(place <= k, 1.0, low) for k in (2, m // 3, m) for low in (1e-2, 1e-3)),
        *(np.where(place <= rank, 1.0, 0.0) for rank in (1, 2, m // 2)),
    ]
    rotations = [[np.linalg.qr(normal((k, m)))[0] for k in (m, n)] for _ in values]
    found = [(u * v) @ w.T for (u, w), v in zip(rotations, values, strict=True)]
    for noise in (1.0, 0.3, 0.1, 0.03, 0.01, 0.001):
        for row in (np.ones(n), np.sign(normal(n)), normal(n)):
            found.append(np.outer(np.ones(m), row) + noise * normal((m, n)))
    for rows in (1, m // 2):
        found.append(normal((m, n)) * np.where(place <= rows, 100.0, 1.0)[:, None])
    found.append(normal((m, n)) * (rng.random((m, n)) < 0.05))
    found.append(np.tril(np.ones((m, n))))
    return np.stack(found)


def blocks(rng: np.random.Generator, count: int, m: int, n: int) -> NDArray:
    """Matrices of few different entries: sums of block diagonals of equal entries, side by side.

    Args:
      rng: where random numbers come from.
      count: how many.
      m: rows.
      n: columns, a multiple of m.

    Returns:
      (count, m, n), float64.
    """
    widths = [k for k in range(1, m + 1) if m % k == 0]
    parts = np.stack([np.kron(np.eye(m // k), np.ones((k, k))) for k in widths])

    def drawn() -> NDArray:
        sizes = np.exp(rng.uniform(np.log(1e-4), 0, (count, len(widths))))
        signs = rng.choice([-1, 0, 1], sizes.shape)
        return np.einsum("ck,kij->cij", signs * sizes, parts)

    return np.concatenate([drawn() for _ in range(n // m)], -1)


def search(
    function: Function, rng: np.random.Generator, start: NDArray, rounds: int, keep: int = 100
) -> tuple[NDArray, NDArray]:
    """Looks for large singular values by mutation of those that gave the largest so far.

    Args:
      function: takes and gives a stack of matrices; compiled.
      rng: where random numbers come from.
      start: (count, m, n), where n is a multiple of m.
      rounds: how often so many mutations are tried.
      keep: how many matrices are kept from each round, and mutated.

    Returns:
      Matrices, those that were kept first, and the largest singular value of each one's result.
    """
    x, values = start, largest(function, start)
    for _ in range(rounds):
        best = np.argsort(-values)[:keep]
        new = _mutated(rng, x[best], len(start))
        x = np.concatenate([x[best], new])
        values = np.concatenate([values[best], largest(function, new)])
    return x, values


def _mutated(rng: np.random.Generator, parents: NDArray, count: int) -> NDArray:
    """So many variants of some matrices: with blocks or noise added, or with rows scaled."""
    x = parents[rng.integers(len(parents), size=count)]
    m, n = x.shape[1:]
    size = 10 ** rng.uniform(-4.5, 0, (count, 1, 1))
    noise = size * np.abs(x).max((1, 2), keepdims=True)
    variants = [
        x + noise * blocks(rng, count, m, n),
        x + noise * rng.standard_normal(x.shape),
        x * np.exp(size * rng.standard_normal((count, m, 1))),
    ]
    return np.choose(rng.integers(3, size=(count, 1, 1)), variants)


def largest(function: Function, x: NDArray) -> NDArray:
    """The largest singular value of each result; infinity for one that isn't finite."""
    return _largest_of(function(jnp.asarray(x, jnp.float32)))


def _largest_of(results: jax.Array) -> NDArray:
    y = np.asarray(results, np.float64)
    finite = np.asarray(np.isfinite(y).all((1, 2)))
    y = np.where(finite[:, None, None], y, 0.0)
    return np.where(finite, np.linalg.eigvalsh(y @ y.swapaxes(1, 2))[:, -1] ** 0.5, np.inf)


def ascent(function: Function, x: NDArray, steps: int, rates: NDArray) -> NDArray:
    """Gradient ascent of the results' largest singular values; rounding counts as the identity.

    Args:
      function: takes and gives a stack of matrices; not compiled.
      x: where it begins, (count, m, n).
      steps: how many.
      rates: (count,), the length of each one's steps, as a part of the norm of `x`.

    Returns:
      The largest singular values before each step, (steps, count).
    """

    def loss(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = function(x)
        return jnp.linalg.norm(result, 2, (-2, -1)).sum(), result

    slope_at = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)
    y, seen = jnp.asarray(x, jnp.float32), []
    for _ in range(steps):
        slope, result = slope_at(y)
        seen.append(_largest_of(result))
        slope = jnp.nan_to_num(slope)
        size, length = (jnp.linalg.norm(z, axis=(1, 2), keepdims=True) for z in (y, slope))
        y = y + rates[:, None, None] * size * slope / jnp.where(length == 0, 1, length)
    return np.stack(seen)


def strong_search(schedule: Schedule, method: str, rounding: str, seed: int, rounds: int) -> float:
    """The largest singular value that is found, as a part of the schedule's own maximum."""
    rng, found = np.random.default_rng(seed), []
    iterated = iteration(schedule, method, rounding)
    function = compiled(iterated)
    for m, n, count in ((8, 16, 1000), (24, 48, 200)):
        start = np.concatenate([spectra(rng, m, n), spectra(rng, m, n), blocks(rng, count, m, n)])
        x, values = search(function, rng, start, rounds)
        best = np.repeat(x[np.argsort(-values)[:16]], 2, 0)
        found += [values.max(), ascent(iterated, best, 10, np.tile([1e-3, 1e-2], 16)).max()]
    found += [largest(function, x).max() for x in reported(rng)]
    return float(max(found) / own_maximum(schedule))


def reported(rng: np.random.Generator) -> list[NDArray]:
    """Stacks of two kinds, spread and aligned, whose results grew in bfloat16."""
    values = np.geomspace(1, 1e-6, 48)
    spread = [
        (np.linalg.qr(rng.standard_normal((48, 48)))[0] * values)
        @ np.linalg.qr(rng.standard_normal((96, 48)))[0].T
        for _ in range(60)
    ]
    aligned = np.outer(np.ones(512), rng.standard_normal(2048))
    return [np.stack(spread), aligned[None] + 0.01 * rng.standard_normal((1, 512, 2048))]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--roundings", nargs="+", default=list(ROUNDINGS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    worst: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.schedules:
        worst[name] = {}
        for rounding in options.roundings:
            worst[name][rounding] = {
                method: max(
                    strong_search(SCHEDULES[name], method, rounding, seed, options.rounds)
                    for seed in options.seeds
                )
                for method in options.methods
            }
            print(name, rounding, worst[name][rounding], flush=True)
    if options.output:
        found = {"rounds": options.rounds, "seeds": options.seeds, "worst": worst}
        found["machine"] = timing.machine()
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
