"""Regressions from public reports: scaling and weight decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from running import first_update

from muon_optax import MatrixView, MuonDimensionNumbers, MuonWarning, muon

# The layout convention flips the aspect factor.
# https://github.com/google-deepmind/optax/issues/1249
# https://github.com/keras-team/keras/issues/21885
# https://github.com/pytorch/pytorch/issues/160213


EYE = np.eye(2, dtype=np.float32)


def factors(shapes, views=None, **options):
    """What each leaf of ones is multiplied by, with nothing orthogonalised."""
    tx = muon(
        1.0,
        nesterov=False,
        orthogonalizer=lambda x: x,
        muon_weight_dimension_numbers=views,
        **options,
    )
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    update = {name: np.ravel(x) for name, x in first_update(tx, ones, jit=True).items()}
    assert all((x == x[0]).all() for x in update.values())
    return {name: -float(x[0]) for name, x in update.items()}


KERNELS = {"up": (4, 16), "down": (16, 4), "torch_up": (16, 4)}
KERNEL_VIEWS = {
    "up": MuonDimensionNumbers(),
    "down": MuonDimensionNumbers(),
    "torch_up": MuonDimensionNumbers(1, 0),
}


@pytest.mark.parametrize(
    ("scale", "want"),
    [
        ("shape_scaling", (2, 1, 2)),
        ("match_rms_adamw", (0.8, 0.8, 0.8)),
        ("spectral", (4, 4, 4)),
        ("unit_rms_norm", (2, 0.5, 2)),
        ("none", (1, 1, 1)),
    ],
)
def test_the_aspect_factor_follows_the_view(scale, want):
    got = factors(KERNELS, KERNEL_VIEWS, scale=scale)
    np.testing.assert_allclose([got[name] for name in KERNELS], want, rtol=1e-6)
    torch = factors({"torch_up": (16, 4)}, MuonDimensionNumbers(1, 0), scale=scale)
    np.testing.assert_allclose(torch["torch_up"], want[0], rtol=1e-6)


def test_a_kernel_and_its_transpose_get_the_same_step():
    x = reference.matrix(0, 4, 16)
    views = {"jax": MuonDimensionNumbers(0, 1), "torch": MuonDimensionNumbers(1, 0)}
    tx = muon(0.1, muon_weight_dimension_numbers=views)
    got = first_update(tx, {"jax": x, "torch": x.T}, jit=True)
    assert reference.relative_error(got["torch"], np.transpose(got["jax"])) <= 1e-6
    assert reference.relative_error(got["jax"], -0.2 * reference.newton_schulz(x)) <= 1e-5


# A convolution's factor read from its window or from the tensor's order of axes.
# https://github.com/KellerJordan/Muon/issues/63 https://github.com/MoonshotAI/Moonlight/issues/31
# https://github.com/huggingface/pytorch-image-models/issues/2791
# https://github.com/ultralytics/ultralytics/issues/25846

HWIO = MuonDimensionNumbers((0, 1, 2), 3)


def test_the_factor_of_a_convolution_is_that_of_its_matrix():
    shapes = {"three": (3, 3, 4, 8), "one": (1, 1, 4, 16)}
    got = factors(shapes, HWIO)
    np.testing.assert_allclose([got["three"], got["one"]], [1, 2], rtol=1e-6)
    got = factors(shapes, HWIO, scale="match_rms_adamw")
    np.testing.assert_allclose([got["three"], got["one"]], [1.2, 0.8], rtol=1e-6)


def test_depthwise_kernels_get_adamw_by_default():
    shapes = {"conv": (3, 3, 1, 8), "conv1d": (4, 1, 64)}
    params = {"w": EYE, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()}}
    with pytest.warns(
        MuonWarning, match=r"one input channel get AdamW.*conv \(3, 3, 1, 8\), conv1d"
    ):
        state: Any = muon(0.1).init(params)
    momenta = state.inner_states["muon"].inner_state[0].mu
    assert momenta["conv"] == momenta["conv1d"] == optax.MaskedNode()
    update: Any = jax.jit(muon(0.1).update)(params, state, params)[0]
    want = first_update(optax.nadam(0.1), params, jit=True)
    for name in ("conv", "conv1d"):
        np.testing.assert_allclose(update[name], want[name], rtol=1e-6)


# Flattening a stack merges the stack axis.
# https://github.com/microsoft/dion/issues/119 https://github.com/microsoft/dion/issues/121
# https://github.com/KellerJordan/Muon/issues/34


def test_leaves_of_one_shape_equal_a_stack_and_each_alone():
    convs = [reference.matrix(i, 12, 8).reshape(3, 4, 8) for i in range(3)]
    view, stacked = MuonDimensionNumbers((0, 1), 2), MuonDimensionNumbers((1, 2), 3)
    tx = muon(0.1, muon_weight_dimension_numbers=view)
    beside = first_update(tx, {str(i): x for i, x in enumerate(convs)}, jit=True)
    of_stack = muon(0.1, muon_weight_dimension_numbers=stacked)
    stack = first_update(of_stack, {"stack": np.stack(convs)}, jit=True)["stack"]
    for i, x in enumerate(convs):
        want = -0.1 * reference.newton_schulz(np.asarray(x).reshape(12, 8)).reshape(3, 4, 8)
        alone = first_update(tx, {"conv": x}, jit=True)["conv"]
        for got in (beside[str(i)], stack[i], alone):
            assert reference.relative_error(got, want) <= 1e-5


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (MuonDimensionNumbers((0, 1), 2), (3, 4, 8)),
        (MuonDimensionNumbers((2, 0), (3,)), (2, 3, 4, 5)),
        (MatrixView((0,), (3, 1), split=(1, 2, 5)), (3, 2, 4, 4)),
    ],
)
def test_a_reshape_is_undone_exactly(view, shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tx = muon(
        1.0,
        nesterov=False,
        bias_correction=False,
        beta=0.5,
        scale="none",
        orthogonalizer=lambda x: x,
        muon_weight_dimension_numbers=view,
    )
    np.testing.assert_array_equal(first_update(tx, {"w": x}, jit=True)["w"], -0.5 * x)


# Fused projections treated as one matrix, and the scale of each block lost.
# https://github.com/NVIDIA/Megatron-LM/issues/4731
# https://github.com/NVIDIA/Megatron-LM/issues/6688
# https://github.com/NVIDIA/Megatron-LM/issues/7077
# https://github.com/pytorch/torchtitan/issues/4532
# https://github.com/pytorch/torchtitan/issues/4692 https://github.com/microsoft/dion/issues/90
# https://github.com/microsoft/dion/issues/113 https://github.com/InternLM/xtuner/issues/2030
# https://github.com/deepspeedai/DeepSpeed/issues/8367
# https://github.com/deepspeedai/DeepSpeed/issues/8580


def assert_blocks_equal_leaves(blocks, fused, view, take, **options):
    """Compares a fused leaf with separate [fan-in, fan-out] leaves; `take` cuts the fused one."""
    tx = muon(0.1, muon_weight_dimension_numbers=view, **options)
    got = np.asarray(first_update(tx, {"fused": fused}, jit=True)["fused"])
    separate = {f"part_{i}": x for i, x in enumerate(blocks)}
    want = first_update(muon(0.1, **options), separate, jit=True)
    for i, part in enumerate(take(got)):
        assert reference.relative_error(part, want[f"part_{i}"]) <= 1e-5, i


@pytest.mark.parametrize("options", [{}, {"consistent_rms": 0.2}, {"adaptive": True}], ids=str)
def test_fused_query_key_value(options):
    blocks = [reference.matrix(i, 64, n) for i, n in enumerate((64, 8, 8))]
    assert_blocks_equal_leaves(
        blocks,
        np.concatenate(blocks, axis=1),
        MatrixView(0, 1, split=(64, 8, 8)),
        lambda x: np.split(x, [64, 72], axis=1),
        **options,
    )


def test_fused_query_gate_query_key_value_in_torch_layout():
    blocks = [reference.matrix(i, 16, n) for i, n in enumerate((24, 24, 8, 8))]
    assert_blocks_equal_leaves(
        blocks,
        np.concatenate(blocks, axis=1).T,
        MatrixView(1, 0, split=(24, 24, 8, 8)),
        lambda x: [part.T for part in np.split(x, [24, 48, 56], axis=0)],
    )


def test_interleaved_gate_and_up_rows():
    gate, up = reference.matrix(0, 8, 12), reference.matrix(1, 8, 12)
    assert_blocks_equal_leaves(
        [gate, up],
        np.stack([gate.T, up.T], axis=1).reshape(24, 8),  # rows g0, u0, g1, u1, ...
        MatrixView(1, 0, split=(1, 1), groups=12),
        lambda x: [x[0::2].T, x[1::2].T],
    )


def test_heads_by_themselves():
    heads = [reference.matrix(i, 64, 32) for i in range(8)]
    assert_blocks_equal_leaves(
        heads,
        np.concatenate(heads, axis=1),
        MatrixView(0, 1, heads=8),
        lambda x: np.split(x, 8, axis=1),
    )


def test_fused_is_not_joint():
    blocks = [reference.matrix(i, 64, n) for i, n in enumerate((64, 8, 8))]
    leaf = {"qkv": np.concatenate(blocks, axis=1)}
    view = MatrixView(0, 1, split=(64, 8, 8))
    split = first_update(muon(0.1, muon_weight_dimension_numbers=view), leaf, jit=True)["qkv"]
    joint = first_update(muon(0.1), leaf, jit=True)["qkv"]
    assert reference.relative_error(joint, split) > 0.1


@pytest.mark.parametrize(
    "view",
    [
        MatrixView(0, 1, split=(64, 8)),
        MatrixView(0, 1, split=(64, 8, 8, 8)),
        MatrixView(0, 1, heads=3),
        MatrixView(0, 1, split=(1, 1), groups=39),
    ],
)
def test_sizes_that_do_not_fill_the_axis_are_an_error_at_init(view):
    tx = muon(0.1, muon_weight_dimension_numbers={"attn": {"qkv": view}})
    params: Any = {"attn": {"qkv": jax.ShapeDtypeStruct((64, 80), "float32")}}
    with pytest.raises(ValueError, match=r"attn/qkv: .*size 80 exactly, for shape \(64, 80\)"):
        tx.init(params)


# Weight decay: its order, shared or not with AdamW, its mask, and how it vanishes.
# https://github.com/google-deepmind/optax/issues/1275
# https://github.com/google-deepmind/optax/issues/1565
# https://github.com/stanford-crfm/levanter/issues/1147
# https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010
# https://github.com/pytorch/pytorch/issues/64475


def zero_gradient_update(params, *args, **options):
    return first_update(muon(*args, **options), jax.tree.map(np.zeros_like, params), params)


def test_decay_times_the_rate_on_muon_leaves_only():
    params = {"w": EYE, "b": np.ones(2, np.float32)}
    update = zero_gradient_update(params, 0.5, weight_decay=0.1)
    np.testing.assert_allclose(update["w"], -0.05 * np.eye(2), rtol=1e-6)
    np.testing.assert_array_equal(update["b"], np.zeros(2))
    update = zero_gradient_update(params, 0.5, adam_weight_decay=0.1)
    np.testing.assert_array_equal(update["w"], np.zeros((2, 2)))
    np.testing.assert_allclose(update["b"], -0.05 * np.ones(2), rtol=1e-6)


NESTED = {"block": {"a": EYE, "b": EYE}, "rest": {"c": EYE}}


@pytest.mark.parametrize(
    ("mask", "decayed"),
    [
        ({"block": {"a": True, "b": False}, "rest": {"c": True}}, "ac"),
        ({"block": False, "rest": True}, "c"),
        (True, "abc"),
        (False, ""),
        (lambda params: jax.tree.map(lambda x: x.shape == (2, 2), params), "abc"),
        (lambda params: {"block": True, "rest": False}, "ab"),
    ],
)
def test_masks_of_the_decay(mask, decayed):
    update = zero_gradient_update(NESTED, 0.5, weight_decay=0.1, weight_decay_mask=mask)
    for name, leaf in (update["block"] | update["rest"]).items():
        want = -0.05 * np.eye(2) if name in decayed else np.zeros((2, 2))
        np.testing.assert_allclose(leaf, want, rtol=1e-6)


def test_a_small_decay_does_not_vanish_in_half_precision():
    ones = np.ones((2, 2), jnp.bfloat16)
    params = {"w": ones, "b": ones[0]}
    update = zero_gradient_update(params, 1e-4, weight_decay=0.1, adam_weight_decay=0.1)
    for leaf in update.values():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, np.full_like(leaf, -1e-5))


@pytest.mark.parametrize(("kind", "want"), [("decoupled", 0), ("l2", 0), ("independent", -0.1)])
def test_a_rate_of_zero_stops_all_but_independent_decay(kind, want):
    update = zero_gradient_update(
        {"w": EYE}, lambda count: 0.1 * count, weight_decay=0.1, weight_decay_kind=kind
    )
    np.testing.assert_allclose(update["w"], want * np.eye(2), rtol=1e-6)


def test_decay_comes_after_the_direction():
    x = reference.matrix(0, 4, 6, kappa=5)
    got = first_update(muon(0.5, weight_decay=0.1), {"w": x}, jit=True)["w"]
    direction = (6 / 4) ** 0.5 * reference.newton_schulz(x)
    assert reference.relative_error(got, -0.5 * (direction + 0.1 * x)) <= 1e-5
