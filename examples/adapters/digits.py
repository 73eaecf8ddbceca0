"""Scikit-learn's handwritten digits, which all adapters' examples learn to read."""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

__all__ = ["batches", "check_loss"]


def batches(steps: int, size: int = 128) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields random batches: float32 rows of pixels (size, 8, 8) in [0, 1], and labels (size,)."""
    digits = load_digits()
    images, labels = digits.images.astype(np.float32) / 16, digits.target
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, len(images), size)
        yield images[chosen], labels[chosen]


def check_loss(name: str, losses: list[float], below: float) -> None:
    """Prints the first loss and the mean of the last five, in nats; raises unless it fell."""
    last = float(np.mean(losses[-5:]))
    print(f"{name}: loss {losses[0]:.3f} -> {last:.3f}, below {below}")
    assert last < below < losses[0], (losses[0], last, below)
