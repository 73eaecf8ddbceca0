"""Names, shapes and dtypes of parameters from files: safetensors headers, and JSON.

Files are taken to be hostile: every length and type is checked before it is used. Of a safetensors
file only the header is read.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp

from muon_optax.models import as_trained

__all__ = ["read_regular", "read_shapes"]

Shapes = dict[str, jax.ShapeDtypeStruct]

_MOST_BYTES = 100_000_000  # what the safetensors library allows a header
_MOST_DIMS = 64  # as NumPy
_MOST_SIZE = 2**63 - 1
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def read_shapes(paths: Sequence[Path], dtype: str | None = None) -> Shapes:
    """The parameters that files describe.

    A name that ends in .safetensors is read as such. Anything else is JSON: an object of shapes as
    [4096, 14336] or {"shape": [4096, 14336], "dtype": "float32"}, nested as one likes.

    Args:
      paths: the files, as a checkpoint in parts has several.
      dtype: of all floating-point tensors of safetensors files, whatever they are saved in, and of
        JSON's shapes that come without one. None is the files' own, and bfloat16.

    Returns:
      Shape structs by name, nested names joined by '/'.

    Raises:
      OSError: for files that can't be read.
      ValueError: for files of another format, or that share a name.
    """
    found: Shapes = {}
    for path in paths:
        for name, leaf in _read(path, dtype).items():
            if name in found:
                raise ValueError(f"{path}: {name!r} is in an earlier file too")
            found[name] = leaf
    return found


def _read(path: Path, dtype: str | None) -> Shapes:
    is_safetensors = path.suffix == ".safetensors"
    try:
        if is_safetensors:
            leaves = _from_header(path)
            return leaves if dtype is None else as_trained(leaves, dtype)
        return _from_json(_parsed(read_regular(path)), dtype or "bfloat16")
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_regular(path: Path) -> bytes:
    """A file's bytes.

    Raises:
      OSError: where there is none.
      ValueError: where it is no regular file, or too large.
    """
    with _opened(path) as file:
        return _take(file, os.fstat(file.fileno()).st_size)


def _opened(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ValueError("not a regular file")
    return path.open("rb")


def _take(file: BinaryIO, count: int) -> bytes:
    if count > _MOST_BYTES:
        raise ValueError(f"{count:,} bytes to read, at most {_MOST_BYTES:,} are allowed")
    return file.read(count)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} comes twice")
    return found


def _from_header(path: Path) -> Shapes:
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise ValueError(
                f"not a whole safetensors header: it says {length:,} bytes, the file has {size:,}"
            )
        header = _parsed(_take(file, length))
    if not isinstance(header, dict):
        raise ValueError(f"the header must be a JSON object, got {_short(header)}")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    leaves = {_checked_name(name): _tensor(name, entry) for name, entry in entries.items()}
    _check_end(entries, size - 8 - length)
    return leaves


def _tensor(name: str, entry: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} must have dtype, shape and data_offsets, got {_short(entry)}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{name!r} has dtype {_short(entry['dtype'])}, must be one of {tuple(_DTYPES)}"
        )
    leaf = _struct(name, entry["shape"], _DTYPES[entry["dtype"]])
    offsets = entry["data_offsets"]
    is_pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))
    want = math.prod(leaf.shape) * leaf.dtype.itemsize
    if not is_pair or offsets[1] - offsets[0] != want:
        raise ValueError(f"{name!r} needs {want:,} bytes, its data_offsets are {_short(offsets)}")
    return leaf


def _check_end(entries: Mapping[str, Any], held: int) -> None:
    """A file may end after its header, which is all that is needed, but not in the middle."""
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if held not in (0, end):
        raise ValueError(f"truncated or damaged: {end:,} bytes of tensors expected, {held:,} there")


def _from_json(data: Any, dtype: str) -> Shapes:
    if not isinstance(data, dict):
        raise ValueError(f"must be a JSON object of names and shapes, got {_short(data)}")
    found: Shapes = {}
    for name, shape, kind in _entries(data, "", dtype):
        if name in found:
            raise ValueError(f"the name {name!r} comes twice")
        found[name] = _struct(name, shape, kind)
    return found


def _entries(data: dict[str, Any], above: str, dtype: str) -> Iterator[tuple[str, Any, Any]]:
    for key, value in data.items():
        name = above + _checked_name(key)
        if isinstance(value, dict) and not isinstance(value.get("shape"), list):
            yield from _entries(value, f"{name}/", dtype)
        elif isinstance(value, dict):
            if extra := set(value) - {"shape", "dtype"}:
                raise ValueError(f"{name!r} has {sorted(extra)} beside shape and dtype")
            yield name, value["shape"], value.get("dtype", dtype)
        else:
            yield name, value, dtype


def _struct(name: str, shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{name!r} must have a list of sizes as shape, got {_short(shape)}")
    if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_SIZE:
        raise ValueError(f"{name!r} has an impossible shape: {_short(shape)}")
    try:
        kind = jnp.dtype(dtype) if isinstance(dtype, str) else None
    except TypeError:
        kind = None
    if kind is None:
        raise ValueError(f"{name!r} has an unknown dtype: {_short(dtype)}")
    return jax.ShapeDtypeStruct(tuple(shape), kind)


def _checked_name(name: str) -> str:
    """A name that is safe to print."""
    if not name or not name.isprintable():
        raise ValueError(f"a name must be of printable characters, got {_short(name)}")
    return name


def _is_size(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= _MOST_SIZE


def _short(x: Any) -> str:
    text = ascii(x)
    return text if len(text) <= 60 else f"{text[:57]}..."
