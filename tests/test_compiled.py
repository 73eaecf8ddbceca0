"""The counter of `benchmarks.compiled`, on small programs whose cost is known."""

import doctest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import compiled, hlo
from benchmarks.compiled import Collective, Program, read_program

N = 8
BYTES = 64 * 32 * 4  # of the whole array in all programs here


ROWS = P("d")


def program(body, out=ROWS, *extra) -> Program:
    """Compiles `body` under a shard_map; its first argument is a float32 array (64, 32), by rows.

    The others are of the shapes in `extra`, and whole.
    """
    mesh = jax.make_mesh((N,), ("d",))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(ROWS, *[P()] * len(extra)), out_specs=out, check_vma=False
    )
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    rest = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))
        for shape in extra
    ]
    return read_program(jax.jit(mapped).lower(x, *rest).compile())


def gather(x):
    return jax.lax.all_gather(x, "d", tiled=True)


def scatter(x):
    return jax.lax.psum_scatter(x, "d", tiled=True)


@pytest.mark.parametrize(
    ("body", "out", "kind", "received"),
    [
        (gather, P(), "all-gather", BYTES * 7 // 8),
        (lambda x: scatter(gather(x) * x[:1]), ROWS, "reduce-scatter", BYTES * 7 // 8),
        (lambda x: jax.lax.psum(x, "d"), P(), "all-reduce", 2 * BYTES // 8 * 7 // 8),
        (
            lambda x: jax.lax.all_to_all(x, "d", 1, 0, tiled=True),
            ROWS,
            "all-to-all",
            BYTES // 8 * 7 // 8,
        ),
        (
            lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % N) for i in range(N)]),
            ROWS,
            "collective-permute",
            BYTES // 8,
        ),
    ],
)
def test_counts_one_collective_of_each_kind(body, out, kind, received):
    found = program(body, out)
    assert found.counts[kind] == 1
    assert found.received_by_kind[kind] == received
    assert found.flops == 0


def test_sums_the_kinds():
    found = program(lambda x: scatter(gather(x) * x[:1]))
    assert found.counts == {"all-gather": 1, "reduce-scatter": 1}
    assert found.received == 2 * BYTES * 7 // 8


def test_reads_the_groups_of_one_axis_of_a_mesh():
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P(("a", "b"))))
    groups = {}
    for axis in "ab":
        mapped = jax.shard_map(
            lambda x, axis=axis: jax.lax.all_gather(x, axis, tiled=True),
            mesh=mesh,
            in_specs=P(("a", "b")),
            out_specs=P("b" if axis == "a" else "a"),
            check_vma=False,
        )
        (found,) = read_program(jax.jit(mapped).lower(x).compile()).collectives
        groups[axis] = (found.group_size, set(map(frozenset, found.groups)))
    assert groups["a"] == (2, {frozenset({i, i + 4}) for i in range(4)})
    assert groups["b"] == (4, {frozenset(range(4)), frozenset(range(4, 8))})


def test_multiplies_nested_loops_out():
    def body(x, w):
        def step(x, _):
            x, _ = jax.lax.scan(lambda x, _: (gather(x)[:8] @ w, None), x, None, length=3)
            return scatter(gather(x)), None

        return jax.lax.scan(step, x, None, length=5)[0]

    found = program(body, ROWS, (32, 32))
    assert found.counts == {"all-gather": 20, "reduce-scatter": 5}
    assert found.received == 25 * BYTES * 7 // 8
    assert found.flops == 15 * 2 * 8 * 32 * 32


LOOP = """HloModule m, num_partitions=8

%body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %b = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%b), index=1
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f32[8,8]{1,0}) tuple(%i, %y)
}

%condition (c: (s32[], f32[8,8])) -> pred[] {
  %seven = s32[]{:T(128)} constant(7)
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%count, %seven), direction=LT
}

ENTRY %main (x: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %x = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8,8]{1,0}) while(%x), condition=%condition, body=%body
}
"""


def test_a_loop_without_a_noted_trip_count_runs_to_its_counters_limit():
    assert read_program(LOOP).flops == 7 * 2 * 8**3
    for change in (("direction=LT", "direction=GT"), ("s32[]{:T(128)} get", "f32[] get")):
        with pytest.raises(ValueError, match="no known trip count"):
            read_program(LOOP.replace(*change))


def test_a_conditional_counts_its_costliest_branch():
    def body(x, w):
        many = lambda x: x @ w @ w @ w  # noqa: E731
        return jax.lax.cond(jax.lax.axis_index("d") > 2, many, lambda x: x @ w, x)

    assert program(body, ROWS, (32, 32)).flops == 3 * 2 * 8 * 32 * 32


@pytest.mark.parametrize(
    ("left", "right", "equation", "flops"),
    [
        ((5, 7), (7, 3), "mk,kn->mn", 2 * 5 * 7 * 3),
        ((7, 5), (3, 7), "km,nk->mn", 2 * 5 * 7 * 3),
        ((4, 5, 7), (4, 7, 3), "bmk,bkn->bmn", 2 * 4 * 5 * 7 * 3),
        ((512, 256), (256, 384), "mk,kn->mn", 2 * 512 * 256 * 384),
        ((2, 128, 256), (2, 128, 256), "bmk,bnk->bmn", 2 * 2 * 128 * 128 * 256),
    ],
)
def test_counts_products_of_any_orientation(left, right, equation, flops):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    lowered = jax.jit(lambda x, y: jnp.einsum(equation, x, y)).lower(*arguments)
    found = read_program(lowered.compile())
    assert found.flops == flops
    assert (found.received, found.exchanges_between_products) == (0, 0)


@pytest.mark.parametrize(
    ("body", "between"),
    [
        (lambda x, w: scatter((gather(x) @ w) @ w), 0),  # in, matmuls, out
        (lambda x, w: gather(x @ w)[:8] @ w, 1),
        (lambda x, w: scatter(gather(x @ w)) @ w, 2),
        (lambda x, w: (x @ w, gather(x)[:8] @ w)[1], 0),  # another matmul, on other data
        (lambda x, w: x @ w + gather(x * 2)[:8] @ w, 0),
    ],
)
def test_finds_exchanges_between_products_of_one_matrix(body, between):
    found = program(body, ROWS, (32, 32))
    assert found.exchanges_between_products == between


def test_finds_an_exchange_between_the_rounds_of_a_loop():
    def body(x, w):
        return jax.lax.scan(lambda x, _: (gather(x @ w)[:8], None), x, None, length=4)[0]

    assert program(body, ROWS, (32, 32)).exchanges_between_products >= 1


def test_values_in_one_tuple_are_told_apart():
    def body(x, w):
        def step(carry, _):
            x, y = carry
            return (x @ w, gather(y)[:8]), None

        (x, y), _ = jax.lax.scan(step, (x, x), None, length=4)
        return x + y

    assert program(body, ROWS, (32, 32)).exchanges_between_products == 0


ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true, num_partitions=8

%async_computation (p: bf16[64,32]) -> bf16[8,32] {
  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %rs = bf16[8,32]{1,0:T(8,128)(2,1)} reduce-scatter(%p), channel_id=3, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[8,32]) -> bf16[8,32] {
  %x = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="x"}
  %ag = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%x), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  %agd = bf16[64,32]{1,0} all-gather-done(%ag)
  %rss = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}, u32[]) async-start(%agd), \
calls=%async_computation
  %rsd = bf16[8,32]{1,0} async-done(%rss)
  %sugar = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}) reduce-scatter-start(%agd), channel_id=7, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  %sugard = bf16[8,32]{1,0} reduce-scatter-done(%sugar)
  %ar = bf16[8,32]{1,0} all-reduce-start(%rsd), channel_id=4, replica_groups={}, to_apply=%add
  %ard = bf16[8,32]{1,0} all-reduce-done(%ar)
  %cp = (bf16[8,32]{1,0}, bf16[8,32]{1,0}, u32[], u32[]) collective-permute-start(%ard), \
channel_id=5, source_target_pairs={{0,1},{1,0},{2,2}}
  %cpd = bf16[8,32]{1,0} collective-permute-done(%cp)
  %a2a = (bf16[4,32]{1,0}, /*index=1*/bf16[4,32]{1,0}) all-to-all(%cpd, %cpd), channel_id=6, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %gemm = (f32[8,16]{1,0}, s8[1024]{0}) custom-call(%cpd, %agd), \
custom_call_target="__cublas$lt$matmul", backend_config={"n":"64"}
  ROOT %alone = bf16[8,32]{1,0} all-reduce(%cpd), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
}
"""


def test_reads_the_asynchronous_forms_of_accelerators():
    whole, slice_ = 64 * 32 * 2, 8 * 32 * 2
    found = read_program(ASYNCHRONOUS)
    assert found.counts == {
        "all-gather": 1,
        "reduce-scatter": 2,
        "all-reduce": 1,
        "collective-permute": 1,
        "all-to-all": 1,
    }
    assert found.received_by_kind == {
        "all-gather": whole * 3 // 4,
        "reduce-scatter": 2 * slice_ * 7,
        "all-reduce": 2 * slice_ * 7 // 8,
        "collective-permute": slice_,
        "all-to-all": slice_ // 2,
    }
    groups = {c.kind: c.groups for c in found.collectives}
    assert groups["all-gather"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups["all-reduce"] == (tuple(range(8)),)
    assert groups["collective-permute"] == ((0, 1), (1, 0))
    assert groups["all-to-all"] == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("mesh['a'=1,'b'=8] {'b'}", {frozenset(range(8))}),
        ("mesh['a'=2,'b'=4] {'b'}", {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}),
        ("mesh['a'=2,'b'=4] {'a'}", {frozenset({i, i + 4}) for i in range(4)}),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", {frozenset({i, i + 1}) for i in range(0, 8, 2)}),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})},
        ),
    ],
)
def test_reads_groups_along_the_axes_of_a_mesh(written, groups):
    text = ASYNCHRONOUS.replace("replica_groups={}", f"replica_groups={written}")
    (found,) = [c for c in read_program(text).collectives if c.kind == "all-reduce"]
    assert set(map(frozenset, found.groups)) == groups


def test_reads_the_products_of_accelerators():
    text = """HloModule m
ENTRY %main (x: bf16[3,8,32]) -> bf16[8,16] {
  %x = bf16[3,8,32]{2,1,0} parameter(0)
  %w = bf16[3,16,32]{2,1,0} parameter(1)
  %gemm = (bf16[3,8,16]{2,1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"
  %y = bf16[8,32]{1,0} parameter(2)
  %v = bf16[32,16]{1,0} parameter(3)
  ROOT %conv = bf16[8,16]{1,0} convolution(%y, %v), dim_labels=bf_io->bf
}
"""
    assert read_program(text).flops == 2 * 3 * 8 * 16 * 32 + 2 * 8 * 16 * 32


def test_a_loop_of_unknown_length_is_an_error():
    def body(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    with pytest.raises(ValueError, match="no known trip count"):
        program(body, ROWS, (32, 32))


def test_groups_that_cannot_be_read_are_an_error():
    text = ASYNCHRONOUS.replace("replica_groups={}", "replica_groups=@mesh")
    with pytest.raises(ValueError, match="no replica groups"):
        read_program(text)
    with pytest.raises(ValueError, match="no ENTRY"):
        read_program("HloModule empty")


def test_one_device_alone_receives_nothing():
    assert Collective("all-gather", 100, ((0,), (1,))).received == 0


@pytest.mark.parametrize("module", [compiled, hlo])
def test_the_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)
