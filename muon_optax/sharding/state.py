"""Where an optimizer's state lies."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from muon_optax.momentum import MuonState
from muon_optax.sharding.placement import HOST_MEMORY, names_host
from muon_optax.sharding.specs import bare_spec, declared_specs, mesh_of
from muon_optax.tree_paths import is_masked, leaves_with_segments, path_name, raise_together

__all__ = ["state_shardings"]


def state_shardings(
    tx: optax.GradientTransformation,
    params: Any,
    param_shardings: Any = None,
    *,
    mu_shardings: Any = None,
) -> Any:
    """Shardings of a whole optimizer state, for `jit(out_shardings=...)` and checkpoints.

    Moments and momenta lie like their parameters, those that are summed over some dims like what
    is left of them; all else is replicated.

    Args:
      tx: the optimizer: `muon`, or any chain of optax transformations around it.
      params: the parameters, as arrays or shape structs.
      param_shardings: how they lie, a tree (or a prefix of one) of NamedSharding, PartitionSpec or
        arrays; None reads it off `params`.
      mu_shardings: as given to `muon`: where Muon's momentum lies, if not like the parameters.

    Returns:
      A tree like `tx.init(params)` of NamedSharding.

    Raises:
      ValueError: listing the leaves whose mesh or layout isn't known.

    Example:
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> params = {"w": jax.ShapeDtypeStruct((4, 8), "float32")}
      >>> lies = NamedSharding(mesh, PartitionSpec("fsdp"))
      >>> state = state_shardings(optax.trace(0.9), params, lies)
      >>> state.trace["w"].spec
      P('fsdp',)
    """
    where = _named_shardings(params, param_shardings)
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(tx.init, structs)
    found = _like_params(tx, state, structs, where)
    if mu_shardings is None:
        return found
    moved = _like_params(tx, state, structs, _named_shardings(params, mu_shardings))
    is_muon = lambda x: isinstance(x, MuonState)  # noqa: E731
    return jax.tree.map(
        lambda old, new: old._replace(mu=new.mu) if is_muon(old) else old,
        found,
        moved,
        is_leaf=is_muon,
    )


def _like_params(tx: optax.GradientTransformation, state: Any, params: Any, where: Any) -> Any:
    """The state with each parameter-like leaf replaced by its sharding, others replicated."""
    mesh = next((s.mesh for s in jax.tree.leaves(where)), None)
    rest = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return optax.tree_map_params(
        tx,
        lambda leaf, *like: leaf if is_masked(leaf) else _of_kept_dims(leaf.shape, *like),
        state,
        params,
        where,
        transform_non_params=lambda _: rest,
        is_leaf=is_masked,
    )


def _of_kept_dims(
    shape: tuple[int, ...], param: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> NamedSharding:
    """The sharding of an array that has the dims of a parameter, or 1 where it was summed over."""
    if shape == param.shape:
        return sharding
    rows = zip(shape, param.shape, (*sharding.spec, *[None] * len(param.shape)), strict=False)
    spec = [axes if n == whole else None for n, whole, axes in rows]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _named_shardings(params: Any, declared: Any) -> Any:
    specs = declared_specs(params if declared is None else declared, params)
    rows = zip(leaves_with_segments(params), specs, strict=True)
    found, problems = [], []
    for (path, leaf), spec in rows:
        # Shape structs from `eval_shape` name an abstract mesh; the declared one has devices.
        mesh = spec.mesh if isinstance(spec, NamedSharding) else mesh_of(leaf, spec)
        if spec is None or mesh is None:
            problems.append(f"{path_name(path)}: give a NamedSharding; got {spec}")
        else:
            kind = HOST_MEMORY if names_host(leaf) or names_host(spec) else None
            found.append(NamedSharding(mesh, bare_spec(spec), memory_kind=kind))
    raise_together(problems, "state_shardings doesn't know where these leaves lie:")
    return jax.tree.structure(params).unflatten(found)
