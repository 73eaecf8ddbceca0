"""How the sharding of a leaf is read on Explicit, Auto and Manual mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import make_mesh

from muon_optax.sharding.declared import declared_specs
from muon_optax.sharding.specs import LeafSharding, read_sharding, read_shardings, whole_shapes


def read_all(tree, declared):
    return read_shardings(tree, declared_specs(declared, tree))


SIZES = {"x": 2, "y": 4, "one": 1}
SHAPE = (8, 16, 32)


def array(spec: P, kind: str | dict[str, str] = "explicit") -> jax.Array:
    return jax.device_put(jnp.zeros(SHAPE), NamedSharding(make_mesh(SIZES, kind), spec))


def traced(x: jax.Array, declared=None) -> LeafSharding:
    """The sharding as it is read while tracing."""
    found = []
    jax.eval_shape(lambda x: found.append(read_sharding(x, declared)), x)
    return found[0]


@pytest.mark.parametrize(
    ("written", "spec", "free", "block"),
    [
        (P(), ((), (), ()), ("x", "y"), SHAPE),
        (P("x"), (("x",), (), ()), ("y",), (4, 16, 32)),
        (P(None, "x", "y"), ((), ("x",), ("y",)), (), (8, 8, 8)),
        (P(None, None, ("y", "x")), ((), (), ("y", "x")), (), (8, 16, 4)),
        (P(("one", "y")), (("y",), (), ()), ("x",), (2, 16, 32)),
        (P("one"), ((), (), ()), ("x", "y"), SHAPE),
    ],
)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_sharding_is_read(kind, written, spec, free, block):
    x, named = array(written, kind), NamedSharding(make_mesh(SIZES, kind), written)
    for sharding in (
        read_sharding(x),
        read_sharding(x, named),
        traced(x, named),
        traced(x, written),
        *([traced(x)] if kind == "explicit" else []),
    ):
        assert (sharding.shape, sharding.spec, sharding.free) == (SHAPE, spec, free)
        assert sharding.block == block == x.addressable_shards[0].data.shape
        assert sharding.is_known
        assert sharding.manual == ()
        assert isinstance(hash(sharding), int)


def test_a_traced_array_on_auto_axes_hides_its_sharding():
    sharding = traced(array(P("x", "y"), "auto"))
    assert not sharding.is_known
    assert (sharding.known, sharding.free) == ((), ())


def test_of_mixed_axes_the_explicit_ones_are_known():
    x = array(P("x", "y"), {"x": "explicit", "y": "auto", "one": "auto"})
    sharding = traced(x)
    assert (sharding.known, sharding.spec, sharding.free) == (("x",), (("x",), (), ()), ())
    declared = traced(x, P("x", "y"))
    assert (declared.known, declared.spec) == (("x", "y", "one"), (("x",), ("y",), ()))


def test_axes_come_in_the_order_of_the_mesh():
    sharding = read_sharding(array(P(None, "y", "x")))
    assert sharding.axes_of((2, 1)) == sharding.axes_of((1, 2)) == ("x", "y")
    assert sharding.axes_of((0,)) == ()
    assert sharding.count(("x", "y")) == 8


def test_on_one_device_there_is_no_mesh():
    for x in (jnp.zeros(SHAPE), np.zeros(SHAPE), jax.ShapeDtypeStruct(SHAPE, "float32")):
        sharding = read_sharding(x)
        assert sharding == LeafSharding(SHAPE)
        assert sharding.is_known
        assert sharding.block == SHAPE
        assert sharding.axes_of((0, 1)) == ()
    mesh = make_mesh({"f": 1})
    assert read_sharding(jnp.zeros(SHAPE), NamedSharding(mesh, P("f"))) == LeafSharding(SHAPE)


def test_shape_structs_say_where_they_lie():
    mesh = make_mesh(SIZES)
    struct = jax.ShapeDtypeStruct(SHAPE, "float32", sharding=NamedSharding(mesh, P("x")))
    assert read_sharding(struct) == read_sharding(struct, NamedSharding(mesh, P("x")))


def test_what_can_be_declared():
    mesh = make_mesh(SIZES)
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))
    params = {"a": {"w": jnp.zeros((8, 8)), "v": jnp.zeros((8, 8))}, "b": jnp.zeros((8, 8))}
    placed = jax.device_put(params["b"], columns)
    struct = jax.ShapeDtypeStruct((8, 8), "float32", sharding=rows)
    assert declared_specs(None, params) == [None] * 3
    assert declared_specs(rows, params) == [rows] * 3
    assert declared_specs(P("x"), params) == [P("x")] * 3
    assert declared_specs({"a": rows, "b": P()}, params) == [rows, rows, P()]
    assert declared_specs({"a": {"v": struct, "w": None}, "b": placed}, params) == [
        rows,
        None,
        columns,
    ]
    assert declared_specs(params, params) == [P()] * 3  # arrays on one device are whole
    abstract = jax.eval_shape(lambda x: x, {"b": placed})
    (found,) = declared_specs(abstract, abstract)
    assert isinstance(found, NamedSharding)
    assert found.spec == columns.spec


def test_a_tree_of_shardings_that_does_not_match_is_an_error():
    params = {"a": {"w": jnp.zeros((8, 8))}, "b": jnp.zeros((8, 8))}
    with pytest.raises(ValueError, match=r"(?s)shardings.*b: a leaf.*c: an entry"):
        declared_specs({"a": P(), "c": P()}, params)
    with pytest.raises(TypeError, match=r"NamedSharding.*'x'"):
        declared_specs({"a": "x", "b": P()}, params)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("x", "y", None, None), "4 entries for a leaf of 3 dims"),
        (P("z"), r"names the axes \['z'\]; the mesh has \('x', 'y', 'one'\)"),
        (P("x", ("y", "x")), "names an axis twice"),
        (P(None, None, "y"), r"dim 2 of shape \(8, 16, 30\) must be a multiple of 4"),
    ],
)
def test_a_spec_that_does_not_fit_is_an_error_that_names_the_leaf(spec, message):
    mesh = make_mesh(SIZES)
    good = jax.ShapeDtypeStruct((8, 16, 30), "float32", sharding=NamedSharding(mesh, P()))
    tree = {"decoder": {"kernel": good}, "other": good}
    with pytest.raises(ValueError, match=rf"decoder/kernel: .*{message}") as caught:
        read_all(tree, {"decoder": {"kernel": spec}, "other": P()})
    assert "other" not in str(caught.value)


def in_shard_map(function, specs, shapes, check_vma=True, names=("x", "y", "one")):
    """What `function` finds out about blocks, traced inside a shard_map."""
    mesh, found = make_mesh(SIZES), []

    def body(tree):
        found.append(function(tree))
        return 0

    outer = jax.tree.map(
        lambda s: P(*(tuple(a for a in sharded_axes(e) if a in names) or None for e in s)),
        specs,
        is_leaf=lambda s: isinstance(s, P),
    )
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(outer,),
        out_specs=P(),
        axis_names=set(names),
        check_vma=check_vma,
    )
    structs = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    jax.eval_shape(mapped, structs)
    return found[0]


def sharded_axes(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


@pytest.mark.parametrize("check_vma", [True, False])
def test_blocks_inside_a_shard_map(check_vma):
    specs = {"w": P("x", None, "y"), "b": P()}
    shapes = {"w": SHAPE, "b": (32,)}

    def read(tree):
        return read_all(tree, specs), whole_shapes(tree, specs)

    (bias, matrix), wholes = in_shard_map(read, specs, shapes, check_vma)
    assert (matrix.shape, matrix.block) == (SHAPE, (4, 16, 8))
    assert matrix.manual == ("x", "y", "one")
    assert (bias.shape, bias.free) == ((32,), ("x", "y"))
    assert {name: x.shape for name, x in wholes.items()} == shapes


def test_blocks_of_some_axes_alone():
    specs = {"w": P("x", None, "y")}
    (matrix,), wholes = in_shard_map(
        lambda tree: (read_all(tree, specs), whole_shapes(tree, specs)),
        specs,
        {"w": SHAPE},
        names=("x",),
    )
    assert (matrix.shape, matrix.block, matrix.manual) == (SHAPE, (4, 16, 8), ("x",))
    assert matrix.partition_spec == P(None, None, "y")
    assert wholes["w"].shape == SHAPE


def test_undeclared_blocks_inside_a_shard_map_are_an_error_for_each_of_them():
    specs = {"a": P("x"), "b": P(None, "y"), "c": P()}
    shapes = dict.fromkeys(specs, (8, 16))
    with pytest.raises(ValueError, match=r"(?s)a: .*'x'.*b: .*'y'") as caught:
        in_shard_map(lambda tree: read_all(tree, None), specs, shapes)
    assert "c:" not in str(caught.value)
    with pytest.raises(ValueError, match=r"sharded:\n  a, b, c: inside a pmap.*check_vma=False"):
        in_shard_map(lambda tree: read_all(tree, None), specs, shapes, check_vma=False)


def test_inside_a_pmap_one_line_is_told_of_all_leaves():
    params = {f"layer_{i:02}": jnp.ones((8, 16, 32)) for i in range(12)}
    message = r"they are sharded:\n  layer_00, (layer_0\d, )+layer_07 and 4 more: inside a pmap, "
    with pytest.raises(ValueError, match=message) as caught:
        jax.pmap(lambda tree: len(read_all(tree, None)))(params)
    assert str(caught.value).split("\n--")[0].count("\n") == 1


def test_shapes_outside_a_shard_map_are_left_as_they_are():
    tree = {"w": array(P("x"))}
    assert whole_shapes(tree, {"w": P("x")}) is tree
    assert whole_shapes(tree, None) is tree


def test_vmap_hides_the_axis_of_its_members_alone():
    found = []
    x = array(P("x", None, "y"))
    jax.eval_shape(jax.vmap(lambda x: found.append(read_sharding(x))), x)
    assert found[0].spec == ((), ("y",))
    assert found[0].known == ("y", "one")
    assert found[0].free == ()
