"""Roles of leaves of small trees, alone or beside a transformer's block."""

from muon_optax.partition.roles import roles_of

Shapes = dict[str, tuple[int, ...]]

DOUBTS = ("bare_parameter", "possible_table", "possible_head")
MATRICES = {"matrix", "transposed_matrix"}


def exact_roles(shapes: Shapes) -> dict[str, str]:
    found = roles_of([(tuple(path.split("/")), shape) for path, shape in shapes.items()])
    return dict(zip(shapes, found, strict=True))


def roles(shapes: Shapes) -> dict[str, str]:
    """Roles, where a doubtful hidden matrix is a hidden matrix.

    These trees are cut to a few layers, so that their outputs mostly go nowhere. The doubts have
    tests of their own, `test_partition_doubtful`.
    """
    return {path: _undoubted(role) for path, role in exact_roles(shapes).items()}


def _undoubted(role: str) -> str:
    if role.removeprefix("transposed_") not in DOUBTS:
        return role
    return "transposed_matrix" if role.startswith("transposed_") else "matrix"


BLOCK: Shapes = {
    "layers/0/attn/q/kernel": (64, 64),
    "layers/0/mlp/up/kernel": (64, 256),
    "layers/0/mlp/down/kernel": (256, 64),
    "layers/0/norm/scale": (64,),
}
TORCH_BLOCK: Shapes = {
    "layers/0/attn/q/weight": (64, 64),
    "layers/0/mlp/up/weight": (256, 64),
    "layers/0/mlp/down/weight": (64, 256),
    "layers/0/norm/weight": (64,),
}


def in_model(shapes: Shapes, block: Shapes = BLOCK) -> dict[str, str]:
    """Roles of leaves beside a transformer's block, whose own are hidden matrices."""
    found = roles(block | shapes)
    matrices = {found[path] for path, shape in block.items() if len(shape) == 2}
    assert matrices <= MATRICES
    return {path: found[path] for path in shapes}


def role_in_model(path: str, shape: tuple[int, ...], block: Shapes = BLOCK) -> str:
    return in_model({path: shape}, block)[path]
