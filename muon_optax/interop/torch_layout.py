"""How a parameter tree is written in PyTorch: the names of its leaves and the order of their axes.

torch stores a Linear's weight [out, in], Flax its kernel [in, out]; which leaf is transposed is
said by rules, never guessed from a shape, since a square matrix fits either way. What torch's
biases say against a rule is an error.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from muon_optax._internal.tree_paths import (
    Segments,
    leaves_with_segments,
    path_name,
    raise_all,
)
from muon_optax.interop.tensors import from_torch, to_torch
from muon_optax.interop.torch_axes import TRANSPOSED_CONVS, with_output_second
from muon_optax.partition import Rule, Shape, has_run, words

__all__ = [
    "FLAX_LAYOUT",
    "Place",
    "TensorRule",
    "TorchLayout",
    "contradictions",
    "conv1d_rules",
    "default_torch_rules",
    "mismatch",
    "read_leaf",
    "write_leaf",
]


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """Says how the leaves whose path, or path and shape, match are written in torch.

    Attributes:
      pattern: as in `Rule`.
      axes: the leaf's axes in the order in which torch has them; None leaves them as they are.
      name: the last name of the key; None keeps the leaf's.
      flipped: axes of the leaf that run backwards in torch.

    Raises:
      ValueError: for axes that are no permutation, or flipped ones that aren't among them.

    Example:
      >>> TensorRule("kernel", (1, 0), "weight").matches(("mlp", "kernel"), (16, 64))
      True
    """

    pattern: str | re.Pattern[str] | Callable[[Segments, Shape], bool]
    axes: tuple[int, ...] | None = None
    name: str | None = None
    flipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Rule(self.pattern, "muon")  # checks the pattern
        if self.axes is not None and sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"TensorRule axes must be a permutation, got {self.axes}")
        if not set(self.flipped) <= set(self.axes or ()):
            raise ValueError(
                f"TensorRule flipped must be among axes, got {self.flipped} and axes {self.axes}"
            )

    def matches(self, segments: Segments, shape: Shape) -> bool:
        """Whether a leaf at this path, of this shape, falls under the rule."""
        return Rule(self.pattern, "muon").matches(segments, shape)


def _is_kernel(rank: int, *, of: tuple[str, ...] = ()) -> Callable[[Segments, Shape], bool]:
    def matches(segments: Segments, shape: Shape) -> bool:
        is_kernel = words(segments)[-1:] == ("kernel",) and len(shape) == rank
        return is_kernel and (not of or any(has_run(segments, name) for name in of))

    return matches


def _is_statistic(name: str) -> Callable[[Segments, Shape], bool]:
    def matches(segments: Segments, shape: Shape) -> bool:
        is_of_norm = any(has_run(segments, of) for of in ("batch_stats", "*norm*", "bn*"))
        return words(segments)[-1:] == (name,) and len(shape) == 1 and is_of_norm

    return matches


_CONVS = ("conv*",)
_DEFAULT = (
    TensorRule(_is_kernel(2), (1, 0), "weight"),  # Dense, Linear: [in, out] -> [out, in]
    # [w, in, out] -> [in, out, w]: torch's is the gradient of a convolution, so its window is read
    # from the other end.
    TensorRule(_is_kernel(3, of=TRANSPOSED_CONVS), (1, 2, 0), "weight", (0,)),
    TensorRule(_is_kernel(4, of=TRANSPOSED_CONVS), (2, 3, 0, 1), "weight", (0, 1)),
    TensorRule(_is_kernel(5, of=TRANSPOSED_CONVS), (3, 4, 0, 1, 2), "weight", (0, 1, 2)),
    TensorRule(_is_kernel(3, of=_CONVS), (2, 1, 0), "weight"),  # [w, in, out] -> [out, in, w]
    TensorRule(_is_kernel(4, of=_CONVS), (3, 2, 0, 1), "weight"),
    TensorRule(_is_kernel(5, of=_CONVS), (4, 3, 0, 1, 2), "weight"),
    TensorRule(lambda path, _: words(path)[-1:] == ("embedding",), None, "weight"),
    TensorRule(lambda path, _: words(path)[-1:] == ("scale",), None, "weight"),
    TensorRule(_is_statistic("mean"), None, "running_mean"),
    TensorRule(_is_statistic("var"), None, "running_var"),
)


def default_torch_rules() -> tuple[TensorRule, ...]:
    """The rules for Flax's names.

    They know kernels of Dense, Linear, Conv and ConvTranspose (by these names or as deconv*, with
    Flax's default `transpose_kernel=False`), embeddings, scales and the statistics of BatchNorm.
    Other leaves keep name and axes. A kernel of three or more dims outside a module named conv* has
    no rule and is an error: only its author knows which axes torch merges.

    Returns:
      An ordered tuple, to be put after rules of one's own.

    Example:
      >>> len(default_torch_rules())
      11
    """
    return _DEFAULT


def conv1d_rules(*names: str) -> tuple[TensorRule, ...]:
    """Rules for the kernels of transformers' Conv1D, whose weight is [in, out] in torch too.

    Args:
      names: modules, with patterns as in `Rule`; none stands for those of GPT-2 and its kin,
        c_attn, c_fc, c_proj and q_attn.

    Returns:
      A tuple, to be put before `default_torch_rules()`.

    Example:
      >>> layout = TorchLayout((*conv1d_rules(), *default_torch_rules()))
      >>> layout.place(("h", "0", "attn", "c_proj", "kernel"), (64, 64))
      Place(key='h.0.attn.c_proj.weight', axes=None, flipped=())
    """
    names = names or ("c_attn", "c_fc", "c_proj", "q_attn")
    return tuple(TensorRule(f"{name}/kernel", None, "weight") for name in names)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how one leaf is written.

    Attributes:
      key: its key in a state dict.
      axes: its axes in torch's order; None where they are the same.
      flipped: those of its axes that run backwards in torch.
    """

    key: str
    axes: tuple[int, ...] | None
    flipped: tuple[int, ...] = ()

    def shape(self, shape: Shape) -> Shape:
        """The shape in torch of a leaf of this shape."""
        return shape if self.axes is None else tuple(shape[a] for a in self.axes)


@dataclasses.dataclass(frozen=True)
class TorchLayout:
    r"""Names and axes of a whole tree in torch.

    Attributes:
      rules: ordered; the first that matches a leaf decides. () leaves all axes and names as they
        are, for a tree that holds torch's own.
      rename: (regular expression, replacement) pairs applied one after the other to the key that
        the path, joined with dots, and the rules give.

    Example:
      >>> layout = TorchLayout(rename=((r"layers_(\d+)", r"layers.\1"),))
      >>> layout.place(("layers_3", "up", "kernel"), (16, 64))
      Place(key='layers.3.up.weight', axes=(1, 0), flipped=())
    """

    rules: tuple[TensorRule, ...] = _DEFAULT
    rename: tuple[tuple[str, str], ...] = ()

    def place(self, segments: Segments, shape: Shape) -> Place:
        """Where a leaf goes.

        Raises:
          ValueError: if a rule's axes don't fit the shape, or a kernel of more dims has no rule.
        """
        rule = self.rule(segments, shape)
        if rule is None and self.rules and len(shape) > 2 and words(segments)[-1] == "kernel":
            raise ValueError(
                f"shape {shape}: no rule says how torch orders the axes of this kernel; give a "
                "TensorRule"
            )
        axes = rule.axes if rule else None
        if axes is not None and len(axes) != len(shape):
            raise ValueError(f"shape {shape}: the rule's axes {axes} are of another rank")
        last = rule.name if rule and rule.name else segments[-1]
        key = ".".join((*segments[:-1], last))
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return Place(key, axes, rule.flipped if rule else ())

    def rule(self, segments: Segments, shape: Shape) -> TensorRule | None:
        """The rule that decides about a leaf."""
        return next((r for r in self.rules if r.matches(segments, shape)), None)

    def places(self, tree: Any) -> dict[Segments, Place]:
        """Where each leaf of a tree goes.

        Raises:
          ValueError: listing the leaves without a place, and those that share one.
        """
        found: dict[Segments, Place] = {}
        problems, owners = [], {}
        for path, leaf in leaves_with_segments(tree):
            try:
                found[path] = place = self.place(path, tuple(leaf.shape))
            except ValueError as error:
                problems.append(f"{path_name(path)}: {error}")
                continue
            other = owners.setdefault(place.key, path)
            if other != path:
                problems.append(
                    f"{path_name(path)}: has the key of {path_name(other)}, {place.key}"
                )
        raise_all(problems, "these leaves can't be written in torch:")
        return found


FLAX_LAYOUT = TorchLayout()
"""Flax's names and axes."""


def mismatch(tensor: Any, like: Any, place: Place) -> str | None:
    """The reason why a tensor can't be this leaf, or None."""
    want = place.shape(tuple(like.shape))
    got = tuple(getattr(tensor, "shape", ()))
    if got != want:
        return f"has shape {got}, expected {want}"
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if dtype != str(like.dtype):
        return f"has dtype {dtype}, expected {like.dtype}: cast it first if that is meant"
    return None


def contradictions(layout: TorchLayout, tree: Any, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Weights whose bias or name in torch contradicts the order of axes that a layout gives them.

    Args:
      layout: names and axes in torch.
      tree: the parameters.
      shapes: the shapes in torch, by key.

    Returns:
      The end of a sentence about a weight, by its key. A weight from and to the same size, whose
      shape is no error, is among them only where a default rule takes it for [out, in].
    """
    second = with_output_second(shapes)
    found = {}
    for path, leaf in leaves_with_segments(tree):
        shape = tuple(leaf.shape)
        place = layout.place(path, shape)
        if place.key not in second:
            continue
        outputs, inputs, *window = shapes[place.key]
        want = place.shape(shape)
        is_usual = bool(place.axes) and not place.flipped and layout.rule(path, shape) in _DEFAULT
        if (inputs, outputs, *window) == want and (outputs != inputs or is_usual):
            found[place.key] = _CONV_TRANSPOSE if window else _CONV1D
    return found


_CONV1D = "is [in, out] in torch, as biases there tell: give conv1d_rules() before the default ones"
_CONV_TRANSPOSE = "is [in, out, *window] in torch, as bias or name there tell: a ConvTranspose"


def read_leaf(tensor: Any, like: Any, place: Place) -> jax.Array:
    """A tensor as the leaf that it was written from, sharded like `like`."""
    if place.axes is not None:
        tensor = tensor.permute(*np.argsort(place.axes).tolist()).flip(place.flipped)
    array = from_torch(tensor)
    sharding = getattr(like, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def write_leaf(leaf: Any, place: Place) -> Any:
    """A leaf as a contiguous tensor in torch's order of axes."""
    tensor = to_torch(leaf)
    if place.axes is None:
        return tensor
    return tensor.flip(place.flipped).permute(*place.axes).contiguous()
