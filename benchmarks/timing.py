"""Interleaved timing: one run of each function a round, so that all meet the same machine."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Samples = dict[str, dict[str, list[float]]]


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int) -> Samples:
    """Seconds of every function in every round, by wall clock and in the process's CPU time.

    Args:
      functions: each runs once and waits for its result; all run once more before, untimed.
      rounds: how often the whole list is run.

    Returns:
      For each name and clock, one entry a round.
    """
    for function in functions.values():
        function()
    samples: Samples = {name: {clock: [] for clock in CLOCKS} for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            starts = {clock: read() for clock, read in CLOCKS.items()}
            function()
            for clock, read in CLOCKS.items():
                samples[name][clock].append(read() - starts[clock])
    return samples


def spread(values: Any) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return {"median": float(middle), "q1": float(low), "q3": float(high)}


def ratio(samples: Samples, of: str, to: str, clock: str) -> dict[str, float]:
    """How many times the seconds of `of` are those of `to`: of each round, then the spread."""
    return spread(np.divide(samples[of][clock], samples[to][clock]))


def use_cores(count: int) -> None:
    """Keeps this process on some cores; before JAX and torch make their threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    device = jax.devices()[0]
    return {
        "device": f"{platform.machine()} {device.device_kind}",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
