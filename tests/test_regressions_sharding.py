"""Regressions from public reports: sharded meshes."""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import FAST, STACK, Leaf, make_mesh

from benchmarks.compiled import read_program
from muon_optax import MuonDimensionNumbers, muon, scale_by_muon

Sharded = list[tuple[tuple[int, int], P]]


def largest_error(kernels: Sharded, mesh: jax.sharding.Mesh) -> float:
    """That of the first update of any of these kernels on a mesh; one program updates all."""
    where = {f"{shape}, {spec}": NamedSharding(mesh, spec) for shape, spec in kernels}
    grads = {k: reference.matrix(0, *shape) for k, (shape, _) in zip(where, kernels, strict=True)}
    view = MuonDimensionNumbers()  # thin ones look like heads
    tx = muon(0.1, FAST, param_shardings=where, muon_weight_dimension_numbers=view)
    got = first_update(tx, jax.device_put(grads, where), jit=True)
    return float(
        np.max([reference.relative_error(got[k], whole_update(x)) for k, x in grads.items()])
    )


def whole_update(kernel: np.ndarray, rate: float = 0.1) -> np.ndarray:
    return reference.muon(kernel, [kernel], learning_rate=rate, rows=FAST)[0]


# Newton-Schulz of a shard: the update depends on the mesh.
# https://github.com/deepspeedai/DeepSpeed/issues/8437
# https://github.com/NVIDIA/Megatron-LM/issues/2583 https://github.com/KellerJordan/Muon/issues/45
# https://github.com/MoonshotAI/Moonlight/issues/27


@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (8, 1), (2, 4), (4, 2)],
)
def test_the_update_does_not_depend_on_the_mesh(sizes):
    kernel = reference.matrix(0, 256, 256)
    specs = (P("x"), P(None, "x"), P("x", "y"), P(("x", "y")), P(None, ("y", "x")))
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("x", "y"), devices=devices)
    where = {f"kernel_{i}": NamedSharding(mesh, spec) for i, spec in enumerate(specs)}
    placed = jax.device_put(dict.fromkeys(where, kernel), where)
    tx = muon(0.1, FAST)
    updates = first_update(tx, placed, jit=True)
    want = whole_update(kernel)
    for name, sharding in where.items():
        assert reference.relative_error(updates[name], want) <= 1e-5
        sharded.assert_sharded(updates[name], sharding)


def test_blocks_orthogonalised_alone_would_be_far_off():
    """The bar tells the bug from the right update."""
    kernel = reference.matrix(0, 256, 256)
    halves = [0.1 * reference.newton_schulz(h, FAST) for h in np.split(kernel, 2)]
    assert reference.relative_error(-np.concatenate(halves), whole_update(kernel)) > 0.2


# Sizes or numbers of matrices that the mesh axis doesn't divide.
# https://github.com/microsoft/dion/issues/83 https://github.com/KellerJordan/Muon/issues/28
# https://github.com/KellerJordan/Muon/issues/29
# https://github.com/marin-community/marin/issues/6493
# https://github.com/pytorch/torchtitan/issues/4593


@pytest.mark.parametrize(("shape", "spec"), [((18, 4), P("f")), ((1, 8), P("f"))])
def test_an_axis_that_does_not_divide_is_a_clear_error(shape, spec):
    mesh = make_mesh({"f": 8}, "auto")  # on Explicit ones there can't be such an array
    whole = NamedSharding(mesh, P())
    tx = muon(0.1, param_shardings={"mlp": {"kernel": spec}})
    params = {"mlp": {"kernel": jax.device_put(jnp.ones(shape), whole)}}
    message = rf"mlp/kernel: dim 0 of shape \({shape[0]}, {shape[1]}\) must be a multiple of 8"
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update).lower(params, tx.init(params), params)


def test_other_sizes_work():
    kernels: Sharded = [
        ((18, 4), P()),
        ((1, 8), P(None, "f")),
        ((1, 8), P()),
        ((8, 1), P("f")),
        ((18, 8), P(None, "f")),
    ]
    assert largest_error(kernels, make_mesh({"f": 8})) <= 1e-5


def test_nineteen_matrices_and_a_stack_of_three_of_two_dtypes():
    mesh = make_mesh({"f": 2, "r": 4})
    leaves = {f"layer_{i}": Leaf((4, 6), P("f")) for i in range(19)}
    leaves["stack"] = Leaf((3, 4, 6), P(None, "f"), STACK)
    grads = sharded.gradients(leaves)
    halves = {f"layer_{i}" for i in range(0, 19, 2)}
    grads = {k: x.astype("bfloat16" if k in halves else "float32") for k, x in grads.items()}
    options: Any = {"weight_dimension_numbers": sharded.views(leaves), "device": sharded.SLOW}
    placed = jax.device_put(grads, sharded.shardings(leaves, mesh))
    want = sharded.answers(leaves, grads)
    for strategy in ("auto", "gather", "all_to_all"):
        tx = scale_by_muon(FAST, strategy=strategy, **options)
        updates = first_update(tx, placed, jit=True)
        for name, leaf in leaves.items():
            bar = 4e-2 if name in halves else 1e-5
            assert np.isfinite(np.asarray(updates[name], np.float32)).all()
            assert sharded.worst_error(leaf, updates[name], want[name]) <= bar
            assert updates[name].dtype == grads[name].dtype


# HSDP gathers over all devices, or over the wrong group.
# https://github.com/ByteDance-Seed/VeOmni/issues/1011 https://github.com/microsoft/dion/issues/44


def test_hybrid_sharding_gathers_within_a_replica():
    mesh = make_mesh({"replica": 2, "fsdp": 4})
    spec = P("fsdp", None)
    assert largest_error([((16, 32), spec)], mesh) <= 1e-5
    found = read_program(sharded.compile_update({"w": Leaf((16, 32), spec)}, mesh))
    groups = {frozenset(g) for c in found.collectives for g in c.groups}
    assert groups == {frozenset(range(4)), frozenset(range(4, 8))}


# State that is made replicated, or on device 0.
# https://github.com/google-deepmind/optax/issues/548
# https://github.com/google-deepmind/optax/issues/1714
# https://github.com/deepspeedai/DeepSpeed/issues/8438


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_the_state_is_born_like_its_parameter(kind):
    mesh = make_mesh({"x": 2, "y": 4}, kind)
    where = NamedSharding(mesh, P("x", "y"))
    params = {"kernel": jax.device_put(jnp.ones((16, 32), jnp.bfloat16), where)}
    tx = muon(0.1)
    state: Any = jax.jit(tx.init)(params)
    mu = state.inner_states["muon"].inner_state[0].mu["kernel"]
    sharded.assert_sharded(mu, where)
    structs: Any = {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)}
    for abstract in (jax.eval_shape(tx.init, params), tx.init(structs)):
        assert jax.tree.structure(abstract) == jax.tree.structure(state)
        assert [x.dtype for x in jax.tree.leaves(abstract)] == [
            x.dtype for x in jax.tree.leaves(state)
        ]


# Constants of one trace leak into another; code that needs a context mesh.
# https://github.com/google-deepmind/optax/issues/1186
# https://github.com/google-deepmind/optax/issues/1193
# https://github.com/marin-community/marin/issues/5278


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("with_context", [False, True])
def test_an_optimizer_made_in_one_trace_works_in_another(kind, with_context):
    mesh = make_mesh({"f": 8}, kind)
    where = {"kernel": NamedSharding(mesh, P("f")), "bias": NamedSharding(mesh, P("f"))}
    params: Any = {"kernel": reference.matrix(0, 16, 32), "bias": np.ones(32, np.float32)}
    params = jax.device_put(params, where)
    made: list[Any] = []

    def create(params):
        made.append(muon(0.1, FAST, param_shardings=where))
        return made[0].init(params)

    with jax.set_mesh(mesh) if with_context else contextlib.nullcontext():
        state = jax.jit(create)(params)
        updates, _ = jax.jit(made[0].update)(params, state, params)
    want = whole_update(np.asarray(params["kernel"]))
    assert reference.relative_error(updates["kernel"], want) <= 1e-5


# Matrices of one row or column.
# https://github.com/vllm-project/speculators/issues/821
# https://github.com/pytorch/pytorch/issues/150490


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((1, 4), [-0.2543, -0.5086, -0.7629, -1.0172]),
        ((4, 1), [-0.12715, -0.2543, -0.38145, -0.5086]),
        ((1, 1), [-0.6964]),
    ],
)
def test_matrices_of_one_row_or_column(shape, want):
    grad = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    tx: Any = muon(1.0, muon_weight_dimension_numbers=MuonDimensionNumbers())
    params = {"kernel": grad}
    updates = first_update(tx, params, jit=True)["kernel"]
    np.testing.assert_allclose(np.ravel(updates), want, atol=6e-5)


def test_thin_matrices_on_two_devices():
    kernels: Sharded = [
        ((1, 8), P(None, "f")),
        ((8, 1), P("f")),
        ((3, 8), P(None, "f")),
        ((18, 4), P("f")),
        ((4, 8), P(None, "f")),
        ((4, 8), P("f")),
    ]
    mesh = jax.make_mesh((2,), ("f",), devices=jax.devices()[:2])
    assert largest_error(kernels, mesh) <= 1e-6


# Collectives in every Newton-Schulz step.
# https://github.com/goodfire-ai/spd/issues/978 https://github.com/NVIDIA/Megatron-LM/issues/6683
# https://github.com/marin-community/marin/issues/6493


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize(
    ("leaf", "most"),
    [
        (Leaf((64, 64), P(("x", "y"))), 2),
        (Leaf((64, 64), P("x", "y")), 2),
        (Leaf((8, 64, 64), P(("x", "y")), STACK), 0),
    ],
)
def test_one_exchange_in_and_one_out(leaf, most, kind):
    mesh = make_mesh({"x": 2, "y": 4}, kind)
    found = read_program(sharded.compile_update({"w": leaf}, mesh))
    assert sum(found.counts.values()) <= most
    assert found.exchanges_between_products == 0


# Leaf by leaf, launches and compile time grow.
# https://github.com/mitsuba-renderer/drjit/issues/494
# https://github.com/KellerJordan/modded-nanogpt/issues/146
# https://github.com/google-deepmind/dm-haiku/issues/639


def matmuls(shapes: dict[str, tuple[int, ...]], view: Any) -> int:
    """Matmuls in the text of an update on one device."""
    tx = scale_by_muon(weight_dimension_numbers=view)
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params))
    return len(re.findall(r" dot\(", lowered.compile().as_text() or ""))


def test_more_leaves_of_one_shape_are_not_more_products():
    alone = matmuls({"w": (32, 32)}, sharded.MATRIX)
    assert alone > 0
    assert matmuls({f"w{i}": (32, 32) for i in range(8)}, sharded.MATRIX) == alone
    assert matmuls({f"w{i}": (32, 32) for i in range(64)}, sharded.MATRIX) == alone
    assert matmuls({"w": (64, 32, 32)}, STACK) == alone
    six = {f"w{i}": (32, 32 - i % 6) for i in range(64)}
    assert matmuls(six, sharded.MATRIX) == 6 * alone


@pytest.mark.parametrize("spec", [P(), P("f")])
def test_grouped_results_equal_ungrouped_ones(spec):
    mesh = make_mesh({"f": 8})
    leaves = {f"w{i}": Leaf((32, 32 + 8 * (i % 3)), spec) for i in range(12)}
    grads, where = sharded.gradients(leaves), sharded.shardings(leaves, mesh)
    tx = scale_by_muon(FAST, device=sharded.SLOW)
    placed = jax.device_put(grads, where)
    together = first_update(tx, placed, jit=True)
    alone = jax.jit(functools.partial(first_update, tx))
    for name, x in grads.items():
        assert reference.relative_error(together[name], alone(x)) <= 1e-6


# Memory: state doubled, workspace unbounded.
# https://github.com/NVIDIA/Megatron-LM/issues/5034
# https://github.com/hiyouga/LLaMA-Factory/issues/8041
# https://github.com/MoonshotAI/Moonlight/issues/41
# https://github.com/marin-community/marin/issues/3766


@pytest.mark.parametrize(("mu_dtype", "matrix", "embedding"), [(None, 4, 8), ("bfloat16", 2, 6)])
def test_bytes_of_the_state(mu_dtype, matrix, embedding):
    params = {"w": jnp.ones((1024, 1024)), "emb": jnp.ones((4096, 64))}
    state: Any = jax.eval_shape(muon(0.1, mu_dtype=mu_dtype).init, params)
    sizes = {
        label: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inner) if x.ndim)
        for label, inner in state.inner_states.items()
    }
    assert sizes == {"muon": matrix * 1024 * 1024, "adam": embedding * 4096 * 64}


@pytest.mark.parametrize("spec", [P("f"), P(None, "f"), P(None, None, "f")])
def test_the_workspace_of_a_large_stack_is_bounded(spec):
    leaf = Leaf((128, 512, 512), spec, STACK)
    matrix = 512 * 512 * 4
    mesh, limit = make_mesh({"f": 8}), 24 * matrix
    compiled = sharded.compile_update({"w": leaf}, mesh, max_workspace_bytes=limit)
    slices = 128 // 8 * matrix
    # A device's slices of what goes in and what comes out, and the workspace.
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * slices + limit
