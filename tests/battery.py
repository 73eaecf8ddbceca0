"""A small model on one device and on meshes, and what its plain training on one device gives.

The conventions of `test_conventions_*.py` each run it in another way and must come to the same.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import apply_compiled

from muon_optax import muon

# A matrix of Muon's, and two leaves of AdamW's; the mesh cuts two of the three.
SPECS = {"mlp": {"kernel": P("f"), "bias": P()}, "embed": {"embedding": P(None, "f")}}
OPTIONS: dict[str, Any] = {
    "learning_rate": 0.1,
    "ns_coeffs": sharded.FAST,
    "weight_decay": 0.02,
    "adam_weight_decay": 0.01,
}
SHAPES = {"kernel": (16, 32), "bias": (32,), "embedding": (24, 16)}


def _tree(kernel: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    bias, embedding = (rng.normal(size=SHAPES[k]).astype("float32") for k in ("bias", "embedding"))
    return {"mlp": {"kernel": kernel, "bias": bias}, "embed": {"embedding": embedding}}


TREES = [_tree(g, i) for i, g in enumerate(reference.gradients(0, 16, 32, steps=3))]
PARAMS, *GRADS = TREES


@dataclasses.dataclass(frozen=True)
class Place:
    """One device, or a mesh of eight with axes of one kind."""

    name: str

    @property
    def where(self) -> Any:
        """How each leaf is sharded."""
        if self.name == "one":
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda _: one, PARAMS)
        mesh = sharded.make_mesh({"f": 8}, self.name)
        return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), PARAMS, SPECS)

    @property
    def declared(self) -> dict[str, Any]:
        """What `muon` must be told: on Auto meshes, how the parameters are sharded."""
        return {"param_shardings": self.where} if self.name == "auto" else {}

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.where)

    def muon(self, **options: Any) -> Any:
        return muon(**{**OPTIONS, **self.declared, **options})


PLACES = [Place(name) for name in ("one", "explicit", "auto")]
everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)


def train(
    tx: Any, place: Place, grads: Sequence[Any] = GRADS, params: Any = PARAMS
) -> tuple[list[Any], Any]:
    """The updates of a training run whose steps are compiled, and the last state."""
    params, updates = place.put(params), []
    state, step = jax.jit(tx.init)(params), jax.jit(tx.update)
    for grad in grads:
        new, state = step(place.put(grad), state, params)
        params = apply_compiled(params, new)
        updates.append(new)
    return updates, state


@functools.cache
def plain(**options: Any) -> list[Any]:
    """The updates of a plain training run on one device."""
    return train(PLACES[0].muon(**options), PLACES[0])[0]


def assert_close(got: Any, want: Any, bound: float = 1e-5) -> None:
    """Leaf by leaf, in a tree or a list of trees."""
    for (path, g), (_, w) in zip(_leaves(got), _leaves(want), strict=True):
        error = np.linalg.norm(g.astype(float) - w) / (np.linalg.norm(w.astype(float)) or 1.0)
        assert error <= bound, f"{path}: {error}"


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in flat]


def assert_right(place: Place, got: Sequence[Any], want: Sequence[Any], bound=1e-5) -> None:
    """The updates of each step, their values and their shardings."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, bound)
        jax.tree.map(sharded.assert_sharded, g, place.where)


def momentum(state: Any) -> Any:
    """Muon's momentum, wherever in the state it is."""
    is_muons = lambda path, _: "MuonState" in str(path[-1])  # noqa: E731
    return optax.tree.get(state, "mu", filtering=is_muons)
