"""Optimizer states to and from PyTorch's, buffer by buffer and bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice, check_decay
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.tree_paths import (
    Segments,
    leaves_with_segments,
    path_name,
    raise_all,
)
from muon_optax.interop.tensors import import_torch
from muon_optax.interop.torch_layout import (
    FLAX_LAYOUT,
    Place,
    TorchLayout,
    contradictions,
    mismatch,
    read_leaf,
    write_leaf,
)
from muon_optax.transforms.momentum_state import MuonState

__all__ = [
    "DION_FIELDS",
    "MOONLIGHT_FIELDS",
    "TORCH_FIELDS",
    "StateFields",
    "convert_momentum",
    "from_optimizer_state",
    "to_optimizer_state",
]

Dump = Mapping[str, Any]
Names = Sequence[Sequence[str]] | None
Missing = Literal["raise", "zero"]


@dataclasses.dataclass(frozen=True)
class StateFields:
    """The names of a torch optimizer's buffers.

    Attributes:
      momentum: Muon's momentum.
      first: AdamW's first moment.
      second: AdamW's second moment.
      step: AdamW's count of updates; None where the parameter group has it, as 'step'.
      tensor_step: whether the count is a float32 tensor, as torch's own; else a Python integer.
    """

    momentum: str = "momentum_buffer"
    first: str = "exp_avg"
    second: str = "exp_avg_sq"
    step: str | None = "step"
    tensor_step: bool = True


TORCH_FIELDS = StateFields()
MOONLIGHT_FIELDS = StateFields(first="moment1", second="moment2", tensor_step=False)
DION_FIELDS = StateFields("momentum", "momentum", "variance", None, tensor_step=False)
"""torch.optim.Muon and AdamW; Moonlight and LLaMA-Factory; Dion and XTuner."""


def from_optimizer_state(
    state: Any,
    params: Any,
    dumps: Dump | Sequence[Dump],
    *,
    count: int,
    layout: TorchLayout = FLAX_LAYOUT,
    names: Names = None,
    fields: StateFields = TORCH_FIELDS,
    missing: Missing = "raise",
) -> Any:
    """Goes on from torch optimizers: their buffers in the place of a fresh state's.

    The buffer of Muon's momentum is kept as it is, never rescaled, so that the optimizer must have
    the same momentum form ('ema' for torch's, 'sum' for Moonlight's and Dion's): a recipe has it.

    Args:
      state: `tx.init(params)`, of which structure, dtypes and shardings are taken.
      params: the parameters, or their shapes.
      dumps: `optimizer.state_dict()`, of one or of several optimizers that share the parameters.
        Keys may be numbers, or names as `torch.distributed.checkpoint.state_dict` gives them.
      count: how many updates the run has made. torch's Muon doesn't keep it; bias correction and
        schedules need it.
      layout: names and axes in torch.
      names: for each optimizer the names of its parameters, in its order; not needed where the
        state dict has names, as keys or as 'param_names'.
      fields: the names of the optimizers' buffers.
      missing: 'zero' begins parameters of which an optimizer has no state with zeros, as torch does
        when they get their first gradient. Under `count` AdamW's bias correction of these is that
        of the others.

    Returns:
      A state like `state`.

    Raises:
      ValueError: listing each parameter whose buffers are missing, have another shape or dtype, or
        belong to the other optimizer; each name that no leaf has; and counts that aren't `count`.

    Example:
      >>> import pytest
      >>> from muon_optax.recipes import torch_muon
      >>> torch = pytest.importorskip("torch")
      >>> weight = torch.nn.Parameter(torch.ones(3, 2))
      >>> weight.grad = torch.full((3, 2), 2.0)
      >>> run = torch.optim.Muon([("up.weight", weight)])
      >>> run.step()
      >>> params = {"up": {"kernel": jnp.ones((2, 3))}}
      >>> fresh = torch_muon().init(params)
      >>> state = from_optimizer_state(fresh, params, run.state_dict(), count=1)
      >>> print(state.inner_states["muon"].inner_state[0].mu["up"]["kernel"])
      [[0.1 0.1 0.1]
       [0.1 0.1 0.1]]
    """
    check_choice("missing", missing, get_args(Missing))
    entries, problems = _entries(_as_sequence(dumps), names)
    places = layout.places(params)
    known = {place.key for place in places.values()}
    problems += [f"{key}: no leaf has this name" for key in entries if key not in known]
    against = contradictions(layout, params, _shapes(entries))
    reader = _Reader(entries, places, fields, count, missing, against, problems)
    new = jax.tree.map(
        lambda x: reader.read(x) if _is_moments(x) else x, state, is_leaf=_is_moments
    )
    raise_all(problems, "the torch optimizer states don't fit:")
    return jax.tree_util.tree_map_with_path(lambda path, x: _counted(path, x, count), new)


def to_optimizer_state(
    state: Any,
    params: Any,
    dumps: Dump | Sequence[Dump],
    *,
    layout: TorchLayout = FLAX_LAYOUT,
    names: Names = None,
    fields: StateFields = TORCH_FIELDS,
) -> list[dict[str, Any]]:
    """Hands a state to torch optimizers, as the dict that `load_state_dict` takes.

    Args:
      state: the state of `muon`, alone or inside other transformations.
      params: the parameters, or their shapes.
      dumps: `state_dict()` of the torch optimizers, fresh ones or running: their parameter groups
        are kept.
      layout: as in `from_optimizer_state`.
      names: as in `from_optimizer_state`.
      fields: as in `from_optimizer_state`.

    Returns:
      One state dict for each of `dumps`.

    Raises:
      ValueError: listing the leaves that no optimizer holds, and the names that no leaf has.

    Example:
      >>> import pytest
      >>> from muon_optax.recipes import torch_muon
      >>> torch = pytest.importorskip("torch")
      >>> params = {"up": {"kernel": jnp.ones((2, 3))}}
      >>> run = torch.optim.Muon([("up.weight", torch.nn.Parameter(torch.ones(3, 2)))])
      >>> (dump,) = to_optimizer_state(torch_muon().init(params), params, run.state_dict())
      >>> run.load_state_dict(dump)
      >>> tuple(dump["state"][0]["momentum_buffer"].shape)
      (3, 2)
    """
    places = layout.places(params)
    buffers = _written(state, places, fields)
    counts = {int(x.count) for x in _all_moments(state)}
    entries, _ = _entries(_as_sequence(dumps), names)
    against = contradictions(layout, params, _shapes(entries))
    problems = [f"{key}: {reason}" for key, reason in against.items()]
    held, results = set(), []
    for dump, keys in zip(_as_sequence(dumps), _keys(_as_sequence(dumps), names), strict=True):
        problems += [f"{key}: no leaf has this name" for key in keys.values() if key not in buffers]
        held |= set(keys.values())
        old = dump.get("state", {})
        filled = {
            i: {**old.get(i, {}), **buffers[key]} for i, key in keys.items() if key in buffers
        }
        groups = [dict(group) for group in dump["param_groups"]]
        if fields.step is None and counts:
            groups = [{**group, "step": max(counts)} for group in groups]
        results.append({**dump, "state": filled, "param_groups": groups})
    problems += [f"{key}: no optimizer has this parameter" for key in buffers if key not in held]
    raise_all(problems, "the state doesn't fit the torch optimizers:")
    return results


def convert_momentum(state: Any, beta: jax.typing.ArrayLike, to: Literal["ema", "sum"]) -> Any:
    """Turns the buffers of one momentum form into those of the other.

    From zero, m of m <- beta m + (1 - beta) g is (1 - beta) times M of M <- beta M + g. The result
    is rounded once; nothing else here rescales a buffer.

    Args:
      state: a state with `MuonState` in it.
      beta: the decay rate.
      to: the form that the result is of; `state` is of the other.

    Returns:
      A state like `state`.

    Example:
      >>> state = MuonState(jnp.array(1), {"w": jnp.array([0.5, 1.0])})
      >>> convert_momentum(state, 0.75, to="sum").mu["w"].tolist()
      [2.0, 4.0]
    """
    check_decay("beta", beta)
    check_choice("to", to, ("ema", "sum"))

    def scaled(m: jax.Array) -> jax.Array:
        wide = m.astype(wide_dtype(m.dtype))
        return (wide * (1 - beta) if to == "ema" else wide / (1 - beta)).astype(m.dtype)

    def convert(x: Any) -> Any:
        if not isinstance(x, MuonState):
            return x
        return x._replace(mu=jax.tree.map(scaled, x.mu))

    return jax.tree.map(convert, state, is_leaf=lambda x: isinstance(x, MuonState))


@dataclasses.dataclass
class _Reader:
    """Fills moments from torch's buffers; each that doesn't fit is added to `problems`."""

    entries: Mapping[str, dict[str, Any]]
    places: Mapping[Segments, Place]
    fields: StateFields
    count: int
    missing: Missing
    against: Mapping[str, str]
    problems: list[str]

    def read(self, moments: Any) -> Any:
        """The moments with torch's values."""
        if isinstance(moments, MuonState):
            return moments._replace(mu=self._tree(moments.mu, self.fields.momentum))
        for path, _ in leaves_with_segments(moments.mu):
            self._check_step(path)
        return moments._replace(
            mu=self._tree(moments.mu, self.fields.first, of_adam=True),
            nu=self._tree(moments.nu, self.fields.second, of_adam=True),
        )

    def _tree(self, tree: Any, field: str, *, of_adam: bool = False) -> Any:
        leaves = [
            self._leaf(path, leaf, field, of_adam) for path, leaf in leaves_with_segments(tree)
        ]
        return jax.tree.structure(tree).unflatten(leaves)

    def _leaf(self, path: Segments, leaf: Any, field: str, of_adam: bool) -> Any:
        place = self.places.get(path)
        entry = self.entries.get(place.key, {}) if place else {}
        if self.missing == "zero" and self._is_new(place):
            return jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
        problem = self._problem(place, entry, leaf, field, of_adam)
        if place is None or problem is not None:
            self.problems.append(f"{path_name(path)}: {problem}")
            return leaf
        return read_leaf(entry[field], leaf, place)

    def _is_new(self, place: Place | None) -> bool:
        """Whether an optimizer holds the parameter, but has no state of it yet."""
        return place is not None and self.entries.get(place.key) == {}

    def _problem(
        self, place: Place | None, entry: dict[str, Any], leaf: Any, field: str, of_adam: bool
    ) -> str | None:
        if place is None:
            return "not among the parameters"
        if of_adam != (self.fields.second in entry) and entry:
            there, here = ("Muon", "AdamW") if of_adam else ("AdamW", "Muon")
            return f"{place.key} has buffers of {there} in torch, and gets {here} here"
        if field not in entry:
            is_new = self._is_new(place)
            hint = ", as before a first gradient: missing='zero' begins it" if is_new else ""
            return f"{place.key} has no {field}; it has {list(entry) or 'no state'}{hint}"
        wrong = [mismatch(entry[field], leaf, place), self.against.get(place.key)]
        found = "; ".join(filter(None, wrong))
        return f"{field} of {place.key} {found}" if found else None

    def _check_step(self, path: Segments) -> None:
        place = self.places.get(path)
        step = self.entries.get(place.key, {}).get(_step(self.fields)) if place else None
        if place and step is not None and int(step) != self.count:
            self.problems.append(
                f"{path_name(path)}: {place.key} has made {int(step)} updates, and count says "
                f"{self.count}"
            )


def _step(fields: StateFields) -> str:
    return fields.step or "step"


def _is_moments(x: Any) -> bool:
    return isinstance(x, MuonState | optax.ScaleByAdamState)


def _all_moments(state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(state, is_leaf=_is_moments) if _is_moments(x)]


def _as_sequence(dumps: Dump | Sequence[Dump]) -> Sequence[Dump]:
    return [dumps] if isinstance(dumps, Mapping) else dumps


def _keys(dumps: Sequence[Dump], names: Names) -> list[dict[Any, str]]:
    """For each optimizer, its parameters' identifiers and their names."""
    if names is not None and len(names) != len(dumps):
        raise ValueError(f"names has {len(names)} entries for {len(dumps)} optimizers")
    found = []
    for i, dump in enumerate(dumps):
        groups = dump["param_groups"]
        ids = [p for group in groups for p in group["params"]]
        known = [name for group in groups for name in group.get("param_names", ())]
        if names is not None:
            known = list(names[i])
        elif all(isinstance(p, str) for p in ids):
            known = ids
        if len(known) != len(ids):
            raise ValueError(
                f"optimizer {i} has {len(ids)} parameters and {len(known)} names; give names=, for "
                "each optimizer the names in the order of its parameters"
            )
        found.append(dict(zip(ids, known, strict=True)))
    return found


def _entries(dumps: Sequence[Dump], names: Names) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Each parameter's buffers by its name, with the step of its group; and the problems found."""
    entries, problems = {}, []
    for dump, keys in zip(dumps, _keys(dumps, names), strict=True):
        steps = {p: g["step"] for g in dump["param_groups"] if "step" in g for p in g["params"]}
        for i, key in keys.items():
            own = dict(dump["state"].get(i, {}))
            if own and i in steps:
                own.setdefault("step", steps[i])
            if key in entries:
                problems.append(f"{key}: two optimizers have it")
            entries[key] = own
        unknown = [i for i in dump["state"] if i not in keys]
        problems += [f"{i}: has state, and is in no parameter group" for i in unknown]
    return entries, problems


def _shapes(entries: Mapping[str, dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Each parameter's shape, which its buffers have."""
    buffers = {
        key: [x for x in own.values() if getattr(x, "ndim", 0)] for key, own in entries.items()
    }
    return {key: tuple(found[0].shape) for key, found in buffers.items() if found}


def _counted(path: Any, x: Any, count: int) -> Any:
    """Sets the counts of updates, of moments and of schedules alike."""
    is_count = path and getattr(path[-1], "name", None) == "count"
    if not is_count or x.ndim or not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    array = jnp.asarray(count, x.dtype)
    sharding = getattr(x, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def _written(
    state: Any, places: Mapping[Segments, Place], fields: StateFields
) -> dict[str, dict[str, Any]]:
    """Each parameter's buffers as torch has them, by its name."""
    torch = import_torch()
    buffers: dict[str, dict[str, Any]] = {}
    for moments in _all_moments(state):
        is_muon = isinstance(moments, MuonState)
        for path, leaf in leaves_with_segments(moments.mu):
            name = fields.momentum if is_muon else fields.first
            buffers[places[path].key] = {name: write_leaf(leaf, places[path])}
        if is_muon:
            continue
        count = int(moments.count)
        for path, leaf in leaves_with_segments(moments.nu):
            step = torch.tensor(float(count)) if fields.tensor_step else count
            entry = {} if fields.step is None else {fields.step: step}
            entry |= buffers[places[path].key]
            buffers[places[path].key] = entry | {fields.second: write_leaf(leaf, places[path])}
    return buffers
