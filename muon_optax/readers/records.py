"""Records of the parameters that a reader finds in a model."""

import dataclasses
from collections.abc import Mapping

from muon_optax._internal.tree_paths import Segments, path_name
from muon_optax.partition import Shape
from muon_optax.readers.kernels import Kernel
from muon_optax.readers.stacks import Axes
from muon_optax.readers.usage import Usage

__all__ = ["ModuleLeaf", "Reading"]


@dataclasses.dataclass(frozen=True)
class ModuleLeaf:
    """A parameter and its module's knowledge of it.

    Attributes:
      segments: its path in the tree that is trained.
      shape: its shape there.
      module: the name of its module's class.
      kernel: the kernel that the module declares; None where the reader doesn't know the module.
    """

    segments: Segments
    shape: Shape
    module: str
    kernel: Kernel | None = None

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)


@dataclasses.dataclass(frozen=True)
class Reading:
    """A model's floating-point parameters.

    Attributes:
      leaves: in the order in which the modules define them, where that is known.
      usage: the operations of a traced call on them; None without example inputs.
      heads: the parameters of the layers that make the logits, where the framework says so.
      stacked: the axes of leaves that a transform is known to have stacked.
      is_input_first: whether the framework's own layers keep weights as [in, out].
      takes_inputs: whether the reader could have traced a call.
      is_ordered: whether the modules' order is known.
    """

    leaves: tuple[ModuleLeaf, ...]
    usage: Usage | None = None
    heads: frozenset[Segments] = frozenset()
    stacked: Mapping[Segments, Axes] = dataclasses.field(default_factory=dict)
    is_input_first: bool = True
    takes_inputs: bool = True
    is_ordered: bool = True
