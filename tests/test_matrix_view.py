"""Leaf <-> matrices: blocks against slicing by hand, and errors that say what is allowed."""

from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers, bind_view


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def split(view: Any, x: np.ndarray) -> Any:
    return jax.jit(bind_view(view, x.shape).split)(x)


def test_dimension_numbers_give_one_matrix_for_each_batch_index():
    x = numbered(6, 3, 2, 4)  # [emb, layers, heads, head_dim], the scan axis in the middle
    (matrices,) = split(MuonDimensionNumbers((0,), (-2, -1)), x)
    for layer in range(3):
        np.testing.assert_array_equal(matrices[layer], x[:, layer].reshape(6, 8))


def test_merged_axes_keep_the_order_given():
    x = numbered(3, 4, 5)
    (matrices,) = split(MuonDimensionNumbers((2, 0), 1), x)
    np.testing.assert_array_equal(matrices[0], x.transpose(2, 0, 1).reshape(15, 4))


def test_split_cuts_the_output_axis():
    x = numbered(32, 80)
    q, k, v = split(MatrixView(split=(64, 8, 8)), x)
    np.testing.assert_array_equal(q[0], x[:, :64])
    np.testing.assert_array_equal(k[0], x[:, 64:72])
    np.testing.assert_array_equal(v[0], x[:, 72:])


def test_groups_gather_the_blocks_of_one_place():
    x = numbered(4, 24)  # two groups of (q q q q, k k, v ... ) as Megatron interleaves them
    q, kv = split(MatrixView(split=(8, 4), groups=2), x)
    np.testing.assert_array_equal(q[0], np.concatenate([x[:, 0:8], x[:, 12:20]], axis=1))
    np.testing.assert_array_equal(kv[0], np.concatenate([x[:, 8:12], x[:, 20:24]], axis=1))


def test_interleaved_gate_and_up():
    x = numbered(3, 10)
    (pair,) = split(MatrixView(split=(1, 1), groups=5), x)
    np.testing.assert_array_equal(pair[0], x[:, 0::2])
    np.testing.assert_array_equal(pair[1], x[:, 1::2])


def test_heads_cut_the_reduction_axis_of_an_output_projection():
    x = numbered(2, 4, 5)  # [heads, head_dim, model]
    view = MatrixView((0, 1), 2, heads=2, axis="reduction")
    (matrices,) = split(view, x)
    np.testing.assert_array_equal(matrices, x)


def test_heads_of_a_stack_are_batch():
    x = numbered(3, 6, 8)
    (matrices,) = split(MatrixView(1, 2, heads=2), x)
    assert matrices.shape == (6, 6, 4)
    np.testing.assert_array_equal(matrices[3], x[1, :, 4:])


VIEWS = [
    (MuonDimensionNumbers((0,), (-2, -1)), (6, 3, 2, 4)),
    (MuonDimensionNumbers((3, 1), (0, 2)), (2, 3, 4, 5)),
    (MatrixView(0, 1, split=(64, 8, 8)), (32, 80)),
    (MatrixView(0, 1, split=(2, 1, 1), groups=5), (6, 20)),
    (MatrixView((0, 2), (3, 1), split=(1, 2, 5)), (3, 2, 4, 4)),
    (MatrixView((1, 2), 3, heads=2, axis="reduction"), (3, 2, 4, 5)),
    (MatrixView(2, 1, heads=3, groups=2), (2, 12, 5)),
    (MuonDimensionNumbers(1, 2), (0, 3, 4)),
    (MuonDimensionNumbers(0, 1), (0, 4)),
]


@pytest.mark.parametrize(("view", "shape"), VIEWS)
def test_merge_undoes_split(view, shape):
    bound = bind_view(view, shape)
    x = numbered(*shape)
    parts = jax.jit(bound.split)(x)
    assert tuple(p.shape for p in parts) == bound.matrices
    np.testing.assert_array_equal(jax.jit(bound.merge)(parts), x)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    cut=st.sampled_from(["output", "reduction"]),
)
def test_blocks_are_disjoint_and_complete(sizes, groups, cut):
    length = sum(sizes) * groups
    shape = (2, 3, length) if cut == "output" else (2, length, 3)
    view = MatrixView(1, 2, split=tuple(sizes), groups=groups, axis=cut)
    parts = split(view, numbered(*shape))
    seen = np.sort(np.concatenate([np.ravel(p) for p in parts]))
    np.testing.assert_array_equal(seen, np.arange(np.prod(shape)))


def test_each_block_has_its_own_factor():
    bound = bind_view(MatrixView(0, 1, split=(2, 1), groups=2), (3, 6))
    factor = np.broadcast_to(bound.per_block([10.0, 20.0]), (3, 6))
    np.testing.assert_array_equal(factor[0], [10, 10, 20, 10, 10, 20])
    merged = bind_view(MatrixView(0, (2, 1), split=(1, 5)), (3, 2, 3))
    spread = np.broadcast_to(merged.per_block([7.0, 9.0]), (3, 2, 3))
    np.testing.assert_array_equal(spread[0].T.ravel(), [7, 9, 9, 9, 9, 9])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MatrixView(split=(4, 4), heads=2), "split or heads, not both"),
        (lambda: MatrixView(heads=0), "positive integers"),
        (lambda: MatrixView(split=(3, -1)), "positive integers"),
        (lambda: MatrixView(split=()), "positive integers"),
        (lambda: MatrixView(split=cast(Any, 12)), "a tuple of sizes, got 12"),
        (lambda: MatrixView(split=cast(Any, np.int64(12))), "a tuple of sizes, got 12"),
        (lambda: MatrixView(split=cast(Any, 1.5)), "split must be integers, got 1.5"),
        (lambda: MatrixView(cast(Any, 0.0), 1), "reduction_axis must be integers, got 0.0"),
        (lambda: MatrixView(0, cast(Any, True)), "output_axis must be integers, got True"),
        (lambda: MatrixView(groups=True), "positive integers"),
        (lambda: MatrixView(axis=cast(Any, "rows")), "'output' or 'reduction'"),
        (lambda: bind_view(MuonDimensionNumbers(5, 7), (2, 3, 4)), r"\[-3, 2\].*got 5"),
        (lambda: bind_view(MuonDimensionNumbers(cast(Any, "0"), 1), (2, 3)), "got '0'"),
        (lambda: bind_view(MuonDimensionNumbers(0, 0), (2, 3)), "disjoint"),
        (lambda: bind_view(MuonDimensionNumbers((), 1), (2, 3)), "one or more integers"),
        (lambda: bind_view(MuonDimensionNumbers((0, -3), 1), (2, 3, 4)), "must differ"),
        (lambda: bind_view(MuonDimensionNumbers(0, 1), (3,)), "two dims or more"),
        (lambda: bind_view(MatrixView(split=(64, 8)), (4, 80)), "size 80 exactly"),
        (lambda: bind_view(MatrixView(heads=3), (4, 80)), "size 80 exactly"),
        (lambda: bind_view(MatrixView(split=(1, 1), groups=3), (4, 8)), "groups=3"),
    ],
)
def test_errors_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_views_are_hashable_and_take_lists():
    lists: Any = {"reduction_axis": [0, 1], "output_axis": [2], "split": [1, 2]}
    assert hash(MatrixView(**lists)) == hash(MatrixView((0, 1), (2,), split=(1, 2)))


def test_axes_may_be_numpy_integers():
    """As `np.argsort` gives them."""
    axes: Any = np.arange(2)
    assert MatrixView(axes[0], axes[1]) == MatrixView(0, 1)
    found = bind_view(MatrixView(axes, np.int64(2)), (3, 4, 5))  # pyright: ignore[reportArgumentType]
    assert found == bind_view(MatrixView((0, 1), 2), (3, 4, 5))
