"""How an optimizer's state is sharded."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from muon_optax._internal.tree_paths import (
    is_masked,
    leaves_with_segments,
    path_name,
    raise_all,
    resolve,
)
from muon_optax.config import search_configs
from muon_optax.sharding.declared import (
    Declared,
    bare_spec,
    declared_specs,
    fits,
    is_spec,
    mesh_of,
    sharding_of_sums,
)
from muon_optax.sharding.metadata import annotations_of, usable
from muon_optax.sharding.options import Shardings
from muon_optax.sharding.placement import HOST_MEMORY, names_host
from muon_optax.transforms.momentum_state import MuonState

__all__ = ["state_shardings"]


def state_shardings(
    tx: optax.GradientTransformation,
    params: Any,
    param_shardings: Any = None,
    *,
    mu_shardings: Any = None,
) -> Any:
    """Shardings of a whole optimizer state, for `jit(out_shardings=...)` and checkpoints.

    Moments and momenta are sharded like their parameters, and those that are sums over some dims
    like the dims that are left; all else is replicated. A `muon` in `tx` is asked for its own
    options on shardings, `shard_moments_over` included.

    Args:
      tx: the optimizer: `muon`, or any chain of optax transformations around it.
      params: the parameters, as arrays or shape structs.
      param_shardings: how they are sharded, a tree (or a prefix of one) of NamedSharding,
        PartitionSpec or arrays, or a function of them that returns one; None is `muon`'s own
        option, else the shardings of `params` and of Flax's metadata. Leaves that a prefix's spec
        can't cut in equal blocks are replicated.
      mu_shardings: how Muon's momentum is sharded, if not like the parameters; None is `muon`'s
        own option.

    Returns:
      A tree like `tx.init(params)` of NamedSharding.

    Raises:
      ValueError: listing the leaves whose mesh or sharding isn't known or can't be.

    Example:
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> params = {"w": jax.ShapeDtypeStruct((4, 8), "float32")}
      >>> shardings = NamedSharding(mesh, PartitionSpec("fsdp"))
      >>> state = state_shardings(optax.trace(0.9), params, shardings)
      >>> state.trace["w"].spec
      P('fsdp',)
    """
    told = _told(tx, params, resolve(param_shardings, params))
    of_momentum = told.momentum if mu_shardings is None else resolve(mu_shardings, params)
    where = _named_shardings(params, told.params)
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(tx.init, structs)
    found = _like_params(tx, state, structs, where)
    for kind, of_moments in ((MuonState, of_momentum), (optax.ScaleByAdamState, told.moments)):
        if of_moments is not None:
            named = _named_shardings(params, of_moments, declared_specs(where, params))
            moved = _like_params(tx, state, structs, named)
            found = _with_moments(kind, found, moved)
    return found


def _with_moments(kind: type, old: Any, new: Any) -> Any:
    """The states `old`, where they are of a kind with the moments of `new`."""
    return jax.tree.map(
        lambda a, b: b._replace(count=a.count) if isinstance(a, kind) else a,
        old,
        new,
        is_leaf=lambda x: isinstance(x, kind),
    )


def _told(tx: optax.GradientTransformation, params: Any, where: Any) -> Shardings:
    """The shardings that the one `muon` in a transformation declares, unless `where` does."""
    found = search_configs(tx, params)
    if len(found) != 1:
        return Shardings(where)
    config = found[0].config
    return config.declared.of(params, config.views, where)


def _like_params(tx: optax.GradientTransformation, state: Any, params: Any, where: Any) -> Any:
    """The state with each parameter-like leaf replaced by its sharding, others replicated."""
    mesh = next((s.mesh for s in jax.tree.leaves(where)), None)
    rest = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return optax.tree_map_params(
        tx,
        lambda leaf, param, sharding: (
            leaf if is_masked(leaf) else sharding_of_sums(leaf.shape, param.shape, sharding)
        ),
        state,
        params,
        where,
        transform_non_params=lambda _: rest,
        is_leaf=is_masked,
    )


def _named_shardings(params: Any, where: Any, default: Sequence[Declared] | None = None) -> Any:
    """A NamedSharding for each parameter: by `where`, else `default`, else `params`."""
    own = {path for path, _ in leaves_with_segments(where, is_spec)}
    specs = declared_specs(where, params)
    if None in specs:  # of all leaves, or, in metadata, of some
        default = _own_specs(params) if default is None else default
        specs = [b if a is None else a for a, b in zip(specs, default, strict=True)]
    rows = zip(leaves_with_segments(params), specs, strict=True)
    found, problems = [], []
    for (path, leaf), spec in rows:
        try:
            found.append(_named_sharding(leaf, spec, from_prefix=path not in own))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_all(problems, "state_shardings doesn't know how these leaves are sharded:")
    return jax.tree.structure(params).unflatten(found)


def _own_specs(params: Any) -> list[Declared]:
    """The shardings of arrays and shape structs, by Flax's metadata where these have no mesh.

    To Flax, a leaf without metadata among others that have it is replicated.
    """
    own, said = declared_specs(params, params), annotations_of(params)
    annotated = usable(said, params)
    if annotated is None:
        return own
    leaves = leaves_with_segments(params)
    meshes = (mesh_of(x, annotated[path]) for path, x in leaves if annotated[path] is not None)
    replicated = NamedSharding(next(mesh for mesh in meshes if mesh), PartitionSpec())
    return [
        spec if isinstance(spec, NamedSharding) else annotated[path] if path in said else replicated
        for (path, _), spec in zip(leaves, own, strict=True)
    ]


def _named_sharding(leaf: Any, spec: Declared, *, from_prefix: bool) -> NamedSharding:
    # Shape structs from `eval_shape` name an abstract mesh; the declared one has devices.
    mesh = spec.mesh if isinstance(spec, NamedSharding) else mesh_of(leaf, spec)
    if spec is None or mesh is None:
        raise ValueError(f"give a NamedSharding; got {spec}")
    mesh = _with_devices(mesh)
    kind = HOST_MEMORY if names_host(leaf) or names_host(spec) else None
    sharding = NamedSharding(mesh, bare_spec(spec), memory_kind=kind)
    if fits(sharding.spec, leaf.shape, mesh):
        return sharding
    if from_prefix:
        return sharding.update(spec=PartitionSpec())
    raise ValueError(f"{sharding.spec} can't cut shape {tuple(leaf.shape)} on {mesh.shape}")


def _with_devices(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The context's mesh, where it is the one that an abstract mesh stands for."""
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # inside a jit JAX doesn't say which devices it will run on
        return mesh
    return context if not context.empty and context.abstract_mesh == mesh else mesh
