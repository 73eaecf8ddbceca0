"""Text as bytes: the files of a folder, every tenth of them held out whole."""

import dataclasses
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["Corpus", "load_corpus", "sample_windows", "spread_windows"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on and text to validate on.

    Attributes:
      name: what the text is.
      train: the bytes to train on, uint8 of shape (train_bytes,).
      held_out: the bytes of other files, to validate on, uint8 of shape (held_out_bytes,).
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray

    def __str__(self) -> str:
        train, held_out = len(self.train) / 1e6, len(self.held_out) / 1e6
        return f"{self.name}: {train:.1f} MB to train on, {held_out:.1f} MB of other files held out"


def load_corpus(folder: Path | None, window: int) -> Corpus:
    """Reads the text of a folder, in the order of its paths.

    Args:
      folder: a folder of at least ten text files; None for Python's own standard library.
      window: the number of bytes that either part must at least have.

    Raises:
      ValueError: where there are fewer files or bytes.
    """
    files = _standard_library() if folder is None else _visible_files(folder)
    if len(files) < 10:
        raise ValueError(f"the folder of text must hold at least 10 files, found {len(files)}")
    python = f"the standard library of Python {platform.python_version()}"
    corpus = Corpus(
        name=python if folder is None else folder.name,
        train=_read(file for i, file in enumerate(files, start=1) if i % 10),
        held_out=_read(files[9::10]),
    )
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest < window:
        raise ValueError(f"the text is too short: {shortest} bytes for windows of {window}")
    return corpus


def sample_windows(
    text: np.ndarray, rng: np.random.Generator, count: int, length: int
) -> np.ndarray:
    """Takes windows at random places: int32 of shape (count, length)."""
    return _windows(text, rng.integers(len(text) - length + 1, size=count), length)


def spread_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Takes windows at even distances over the whole text: int32 of shape (count, length)."""
    return _windows(text, np.linspace(0, len(text) - length, count, dtype=int), length)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = root.rglob("*.py")
    return sorted(file for file in files if skipped.isdisjoint(file.relative_to(root).parts))


def _visible_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*") if path.is_file())
    return sorted(file for file in files if "/." not in f"/{file.relative_to(root).as_posix()}")


def _read(files: Iterable[Path]) -> np.ndarray:
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
