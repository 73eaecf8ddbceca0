"""The cases that both sides run: plain data, known to torch's ranks and to JAX's replay."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from muon_optax.sharding.usual_specs import parse_sizes

__all__ = [
    "AXES",
    "SEQUENCES",
    "Case",
    "Dtype",
    "Optimizer",
    "parse_mesh",
    "read_cases",
    "write_cases",
]

Optimizer = Literal["reference", "torch", "muon_fsdp2"]
Dtype = Literal["float32", "float64"]
Mesh = tuple[tuple[str, int], ...]

# The part each mesh axis plays, in the order in which torch wants them.
AXES = ("replica", "fsdp", "tp")
SEQUENCES = 8  # of a batch: each replica and shard has one at least


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
      recipe: a recipe's name.
      mesh: (axis, size) pairs, of 'replica', 'fsdp' and 'tp' in this order; 'fsdp' is a must.
      optimizer: torch's optimizer: our own 'reference', which gathers each matrix,
        orthogonalises it in the parameters' dtype and shards it again; 'torch', `torch.optim.Muon`
        on DTensors; or 'muon_fsdp2', the package of this name.
      dtype: of parameters and gradients.
      steps: number of updates.
      learning_rate: of Muon and AdamW alike.
      weight_decay: of Muon and AdamW alike.
      seed: of parameters and data.

    Raises:
      ValueError: for an unknown optimizer or dtype, a mesh that torch couldn't build, or numbers
        out of range.

    Example:
      >>> Case("torch_muon", parse_mesh("replica=2,fsdp=2")).world
      4
    """

    recipe: str
    mesh: Mesh
    optimizer: Optimizer = "reference"
    dtype: Dtype = "float32"
    steps: int = 10
    learning_rate: float = 0.02
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple((name, size) for name, size in self.mesh))
        for name, allowed in (("optimizer", get_args(Optimizer)), ("dtype", get_args(Dtype))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.optimizer != "reference" and self.recipe != "torch_muon":
            raise ValueError(
                f"optimizer {self.optimizer!r} has the conventions of torch_muon, not of "
                f"{self.recipe!r}"
            )
        if self.steps < 1:
            raise ValueError(f"steps must be positive, got {self.steps}")
        _check_mesh(self.mesh)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def name(self) -> str:
        """A short name."""
        return f"{self.recipe} {self.optimizer} {self.dtype} {self.mesh_name}"

    @property
    def mesh_name(self) -> str:
        """The mesh as `parse_mesh` takes it."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)


def _check_mesh(mesh: Mesh) -> None:
    names = [name for name, _ in mesh]
    allowed = [name for name in AXES if name in names]
    if "fsdp" not in names or names != allowed or any(size < 1 for _, size in mesh):
        raise ValueError(
            f"mesh must have the axis fsdp, and may have replica before it and tp behind it, each "
            f"of a positive size, got {mesh}"
        )
    if names == list(AXES):
        raise ValueError(f"mesh may have replica or tp beside fsdp, not both, got {mesh}")
    if math.prod(size for name, size in mesh if name != "tp") > SEQUENCES:
        raise ValueError(f"mesh may have at most {SEQUENCES} replicas and shards, got {mesh}")


def parse_mesh(text: str) -> Mesh:
    """Reads 'fsdp=2,tp=2'.

    Raises:
      ValueError: for another form, or a mesh that torch couldn't build.

    Example:
      >>> parse_mesh("fsdp=2,tp=2")
      (('fsdp', 2), ('tp', 2))
    """
    mesh = tuple(parse_sizes(text).items())
    _check_mesh(mesh)
    return mesh


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    """Writes cases as JSON, for the ranks to read."""
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))


def read_cases(path: Path) -> list[Case]:
    """Reads what `write_cases` wrote."""
    return [Case(**fields) for fields in json.loads(path.read_text())]
