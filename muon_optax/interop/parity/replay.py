"""torch's gradients through `muon_optax` on the like mesh, and how far apart the two end up."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from muon_optax import recipes
from muon_optax._internal.tree_paths import leaves_with_segments, path_name
from muon_optax.interop.parity.case import Case
from muon_optax.interop.parity.verdict import TOLERANCES, Row, Tolerances, Verdict

__all__ = ["exact_update", "need_devices", "replay"]

Record = Mapping[str, np.ndarray]


def need_devices(count: int) -> list[Any]:
    """The first `count` CPU devices, which are made where JAX hasn't started yet.

    Raises:
      RuntimeError: where JAX runs already, with fewer.
    """
    with contextlib.suppress(RuntimeError):  # it runs already
        have = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", max(count, have))
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(
            f"the mesh needs {count} devices and JAX has started with {len(devices)}; set "
            f"jax_num_cpu_devices={count} before JAX is used"
        )
    return devices[:count]


def replay(case: Case, path: Path) -> Verdict:
    """Replays what rank 0 recorded, on a JAX mesh of the case's axes.

    Args:
      case: the case that torch ran.
      path: the record.

    Returns:
      The comparison, step by step.

    Raises:
      ValueError: where other leaves get Muon than in torch.
    """
    devices = need_devices(case.world)
    with np.load(path) as file:
        record = dict(file)
    with jax.enable_x64(case.dtype == "float64"):
        return _compare(case, record, _JaxSide(case, record, devices))


def _compare(case: Case, record: Record, side: "_JaxSide") -> Verdict:
    is_exact = case.optimizer == "reference"
    tolerances = TOLERANCES[case.dtype if is_exact else "bfloat16"]
    rows, signed = [], []
    before = _leaves(record, "param/0/")
    for step in range(1, case.steps + 1):
        grads, after, momenta = (
            _leaves(record, f"{kind}/{step}/") for kind in ("grad", "param", "momentum")
        )
        updates, momentum, params = side.step(grads), side.momentum(), side.params()
        for leaf, update in updates.items():
            theirs = after[leaf].astype(np.float64) - before[leaf]
            errors = (
                _relative(update, theirs),
                _relative(momentum[leaf], momenta[leaf]),
                _relative(params[leaf], after[leaf]),
            )
            exact = None
            if leaf in side.muon:
                signed.append(np.vdot(update - theirs, theirs) / np.vdot(theirs, theirs))
                if not is_exact:
                    exact = exact_update(case, grads[leaf], momenta[leaf], before[leaf])
            rows.append(_row(leaf, step, errors, tolerances, update, theirs, exact))
        before = after
    rows.sort(key=lambda row: (row.leaf, row.step))
    losses = tuple(float(record[f"loss/{step}"]) for step in range(1, case.steps + 1))
    return Verdict(case, tolerances, tuple(rows), float(np.mean(signed)), losses)


def _row(
    leaf: str,
    step: int,
    errors: tuple[float, float, float],
    tolerances: Tolerances,
    update: np.ndarray,
    theirs: np.ndarray,
    exact: np.ndarray | None,
) -> Row:
    off = None if exact is None else _relative(theirs, exact)
    if tolerances.allow(*errors):
        return Row(leaf, step, *errors, off, "PASS")
    if exact is not None and off is not None:
        own = (_relative(update, exact), *errors[1:])
        if tolerances.allow(*own) and off > own[0]:
            return Row(leaf, step, *errors, off, "TORCH")
    return Row(leaf, step, *errors, off, "FAIL")


def exact_update(
    case: Case, grad: np.ndarray, momentum: np.ndarray, param: np.ndarray
) -> np.ndarray:
    """The update that torch.optim.Muon defines, in float64, from its own momentum.

    Args:
      case: its learning rate and weight decay.
      grad: the gradient, [in, out].
      momentum: the momentum after this gradient.
      param: the parameter before the update.
    """
    grad, x = grad.astype(np.float64), momentum.astype(np.float64)
    x = 0.05 * grad + 0.95 * x
    x /= np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    scale = math.sqrt(max(1.0, param.shape[1] / param.shape[0]))
    return -case.learning_rate * (scale * x + case.weight_decay * param.astype(np.float64))


class _JaxSide:
    """Parameters and optimizer of a case on a JAX mesh; leaves are named by path."""

    def __init__(self, case: Case, record: Record, devices: list[Any]) -> None:
        names = tuple(name for name, _ in case.mesh)
        sizes = tuple(size for _, size in case.mesh)
        self.mesh = jax.make_mesh(sizes, names, devices=devices)
        self.tx = _optimizer(case, {_flax_name(str(key)) for key in record["muon"]})
        self.tree = self._placed(_leaves(record, "param/0/"))
        self.state = jax.jit(self.tx.init)(self.tree)
        self.muon = set(self._named(self.state.inner_states["muon"].inner_state[0].mu))
        wanted = {_flax_name(str(key)) for key in record["muon"]}
        if self.muon != wanted:
            raise ValueError(f"Muon is for {sorted(self.muon)} here, in torch for {sorted(wanted)}")
        self.update = jax.jit(self._update)

    def _update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        updates, state = self.tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    def step(self, grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes a step; returns its updates."""
        updates, self.state, self.tree = self.update(self._placed(grads), self.state, self.tree)
        return self._named(updates)

    def params(self) -> dict[str, np.ndarray]:
        """The parameters."""
        return self._named(self.tree)

    def momentum(self) -> dict[str, np.ndarray]:
        """Muon's momentum and AdamW's first moment."""
        states = self.state.inner_states
        halves = [states[name].inner_state[0].mu for name in ("muon", "adam")]
        return {name: x for half in halves for name, x in self._named(half).items()}

    def _named(self, tree: Any) -> dict[str, np.ndarray]:
        return {path_name(path): np.asarray(x) for path, x in leaves_with_segments(tree)}

    def _placed(self, leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, x in leaves.items():
            layer, leaf = name.split("/")
            spec = _spec(layer, leaf, x.shape, dict(self.mesh.shape))
            tree.setdefault(layer, {})[leaf] = jax.device_put(x, NamedSharding(self.mesh, spec))
        return tree


def _optimizer(case: Case, muon: set[str]) -> optax.GradientTransformationExtraArgs:
    """The recipe, with one learning rate and decay for all leaves as torch's side has."""
    options: dict[str, Any] = {
        "weight_decay": case.weight_decay,
        "adam_learning_rate": case.learning_rate,
        "adam_weight_decay": case.weight_decay,
    }
    if case.optimizer == "reference":
        options["ns_dtype"] = None
    else:
        options["partition"] = lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if "/".join(key.key for key in path) in muon else "adam", params
        )
    return getattr(recipes, case.recipe)(case.learning_rate, **options)


def _spec(layer: str, leaf: str, shape: tuple[int, ...], mesh: dict[str, int]) -> PartitionSpec:
    """How torch shards it: rows over fsdp, and the MLP over tp; whole where that isn't even."""
    rows = 1 if leaf == "kernel" else 0
    dims: list[tuple[str, ...]] = [()] * len(shape)
    dims[rows] = ("fsdp",)
    if "tp" in mesh and layer == "up":
        dims[rows] = ("tp", "fsdp")
    if "tp" in mesh and (layer, leaf) == ("down", "kernel"):
        dims[0] = ("tp",)
    even = [
        axes if n % math.prod(mesh[a] for a in axes) == 0 else ()
        for n, axes in zip(shape, dims, strict=True)
    ]
    return PartitionSpec(*(axes or None for axes in even))


def _flax_name(key: str) -> str:
    layer, leaf = key.split(".")
    if leaf == "bias":
        return f"{layer}/bias"
    return f"{layer}/{ {'embed_tokens': 'embedding', 'norm': 'scale'}.get(layer, 'kernel') }"


def _leaves(record: Record, prefix: str) -> dict[str, np.ndarray]:
    """The record's weights under a prefix, [in, out] and named as in Flax."""
    leaves = {}
    for key, x in record.items():
        if key.startswith(prefix):
            name = _flax_name(key.removeprefix(prefix))
            leaves[name] = x.T if name.endswith("/kernel") else x
    return leaves


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))
