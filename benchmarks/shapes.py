"""Real models on the usual meshes: shapes, views and specs for every benchmark.

>>> llama = model_on("llama3-8b", "fsdp_tp", devices=64, scanned=True)
>>> llama.sizes, tuple(llama.specs["blocks"]["mlp"]["down"]["kernel"])
({'fsdp': 8, 'tensor': 8}, (None, 'tensor', 'fsdp'))
"""

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from muon_optax import MatrixView, MuonDimensionNumbers
from muon_optax.models import model_shapes
from muon_optax.sharding.usual_specs import usual_specs
from muon_optax.views.matrix_view import is_view

__all__ = [
    "LAYOUTS",
    "MeshLayout",
    "ModelOnMesh",
    "gpt2_layers",
    "like_params",
    "model_on",
    "placed",
    "plain_views",
]


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A kind of mesh, and how matrices are sharded on it.

    Attributes:
      axes: names of its axes, the last within a host.
      inner: size of the last of several axes, at most; the first of three has size 2.
      fsdp: which dim of a matrix fsdp shards.
    """

    axes: tuple[str, ...]
    inner: int = 8
    fsdp: Literal["rows", "columns"] = "rows"

    def sizes(self, devices: int) -> dict[str, int]:
        """Size of each axis on so many devices."""
        if len(self.axes) == 1:
            return {self.axes[0]: devices}
        if len(self.axes) == 3:
            rest = dataclasses.replace(self, axes=self.axes[1:])
            return {self.axes[0]: 2, **rest.sizes(devices // 2)}
        inner = min(self.inner, devices // 2)
        return dict(zip(self.axes, (devices // inner, inner), strict=True))


LAYOUTS = {
    "ddp": MeshLayout(("replica",)),
    "fsdp_rows": MeshLayout(("fsdp",)),
    "fsdp_columns": MeshLayout(("fsdp",), fsdp="columns"),
    "hsdp": MeshLayout(("replica", "fsdp")),
    "hsdp_64": MeshLayout(("replica", "fsdp"), inner=64),
    "fsdp_tp": MeshLayout(("fsdp", "tensor")),
    "fsdp_experts": MeshLayout(("fsdp", "expert")),
    "experts_fsdp": MeshLayout(("expert", "fsdp")),
    "hsdp_experts": MeshLayout(("replica", "fsdp", "expert")),
    "replica_experts_fsdp": MeshLayout(("replica", "expert", "fsdp"), inner=4),
}


@dataclasses.dataclass(frozen=True)
class ModelOnMesh:
    """A model on a mesh.

    Attributes:
      params: its parameters, as shapes.
      views: its matrix views, None for AdamW's leaves.
      sizes: size of each mesh axis.
      specs: a PartitionSpec a leaf.
    """

    params: Any
    views: Any
    sizes: dict[str, int]
    specs: Any

    def shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """A NamedSharding a leaf, on a mesh of these sizes."""
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs)


def model_on(
    model: str, layout: str, *, devices: int, scanned: bool = False, dtype: Any = "bfloat16"
) -> ModelOnMesh:
    """A model of `muon_optax.models` under one of `LAYOUTS`."""
    shapes = model_shapes(model, scanned=scanned, dtype=dtype)
    kind = LAYOUTS[layout]
    sizes = kind.sizes(devices)
    specs = usual_specs(shapes.params, shapes.views, sizes, fsdp=kind.fsdp)
    return ModelOnMesh(shapes.params, shapes.views, sizes, specs)


def gpt2_layers(count: int, width: int = 768) -> dict[str, tuple[int, int]]:
    """The matrices of GPT-2's layers by name, [fan-in, fan-out], with q, k and v in one."""
    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return {f"layer_{i}.{name}": shape for i in range(count) for name, shape in layer.items()}


def like_params(state: Any, where: Any) -> Any:
    """How a state is sharded: each moment like its parameter, whose path its own ends with."""
    flat = jax.tree_util.tree_leaves_with_path(where)
    whole = NamedSharding(flat[0][1].mesh, PartitionSpec())

    def find(path, _):
        return next((s for end, s in flat if path[-len(end) :] == end), whole)

    return jax.tree_util.tree_map_with_path(find, state)


def placed(shapes: Any, where: Any) -> Any:
    """The shapes with their shardings, as `jit(f).lower` takes them."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where
    )


def plain_views(views: Any) -> Any:
    """The views without their blocks, as `optax.contrib.muon` takes them: fused is one matrix."""

    def plain(view: Any) -> Any:
        if isinstance(view, MatrixView):
            return MuonDimensionNumbers(view.reduction_axis, view.output_axis)
        return view

    return jax.tree.map(plain, views, is_leaf=is_view)
