"""What a whole training step receives, the backward pass included, compiled for absent H100s.

    python benchmarks/training_step.py --output benchmarks/results/training_step.json

16 matrices of 2048 x 2048 in bfloat16 on 8 H100s: gradients and the update are one program, of
which the bytes are read and divided by those of all weights. Rows differ in the optimizer, in where
its moments are, and in the type of the parameters: plain, or reduced over the replicas, so that
gradients come unreduced. `ddp` has whole weights on each device; `hsdp` is replica=2, fsdp=4 on
Explicit axes, and the loss reshards each weight to whole: the all-gather of the forward pass (three
quarters of the weights) is left out. Wants the virtual environment of `aot_bytes.py` for CUDA.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.aot_bytes import make_mesh
from benchmarks.compiled import read_program
from muon_optax import muon, state_shardings

COUNT, SIZE, TOKENS = 16, 2048, 128
DDP, HSDP = {"data": 8}, {"replica": 2, "fsdp": 4}
WEIGHTS = COUNT * SIZE * SIZE * 2  # bytes


class Case(NamedTuple):
    """One program.

    Attributes:
      name: of the row.
      mesh: sizes of the axes.
      kind: of the axes.
      spec: of each weight.
      over: axes that moments are sharded over, too; None is what the types say.
      is_adamw: whether AdamW gets all weights, rather than Muon.
    """

    name: str
    mesh: Mapping[str, int]
    kind: AxisType
    spec: P
    over: str | None = None
    is_adamw: bool = False


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
REDUCED, REPLICA = P(reduced=frozenset(DDP)), P("fsdp", reduced=frozenset({"replica"}))
CASES = (
    Case("ddp, AdamW", DDP, AUTO, P(), is_adamw=True),
    Case("ddp, Muon", DDP, AUTO, P()),
    Case("ddp, Muon, moments over data", DDP, AUTO, P(), "data"),
    Case("ddp, AdamW, reduced", DDP, EXPLICIT, REDUCED, is_adamw=True),
    Case("ddp, Muon, reduced", DDP, EXPLICIT, REDUCED),
    Case("hsdp, AdamW", HSDP, EXPLICIT, P("fsdp"), is_adamw=True),
    Case("hsdp, Muon", HSDP, EXPLICIT, P("fsdp")),
    Case("hsdp, Muon, moments over replica", HSDP, EXPLICIT, P("fsdp"), "replica"),
    Case("hsdp, AdamW, reduced", HSDP, EXPLICIT, REPLICA, is_adamw=True),
    Case("hsdp, Muon, reduced", HSDP, EXPLICIT, REPLICA),
    Case("hsdp, Muon, whole gradients", HSDP, EXPLICIT, P("fsdp"), "replica"),
)


def optimizer_of(case: Case, where: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a case, for weights of these shardings."""
    return muon(
        0.02,
        param_shardings=where if case.kind == AUTO else None,
        shard_moments_over=case.over,
        partition=_all_adamw if case.is_adamw else None,
        device="h100",
    )


def _all_adamw(params: Any) -> Any:
    return jax.tree.map(lambda _: "adam", params)


def compile_case(case: Case) -> str:
    """The optimised program of a step (params, state, x) -> (params, state)."""
    found, axes = make_mesh("cuda", dict(case.mesh)), tuple(case.mesh)
    mesh = Mesh(found.devices, found.axis_names, axis_types=(case.kind,) * len(axes))
    where = NamedSharding(mesh, case.spec)
    params = {
        f"layer_{i}": jax.ShapeDtypeStruct((SIZE, SIZE), "bfloat16", sharding=where)
        for i in range(COUNT)
    }
    x = jax.ShapeDtypeStruct((TOKENS, SIZE), "bfloat16", sharding=NamedSharding(mesh, P(axes)))
    tx = optimizer_of(case, jax.tree.map(lambda _: where, params))
    is_whole = "whole gradients" in case.name
    is_typed = is_whole or bool(case.spec.reduced)
    whole = NamedSharding(mesh, P(reduced=frozenset(axes)) if is_typed else P())

    def gathered(w):
        return jax.sharding.reshard(w, whole) if case.mesh is HSDP else w

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ (w if is_whole else gathered(w)))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def step(params, state, x):
        weights = jax.tree.map(gathered, params) if is_whole else params
        updates, state = tx.update(jax.grad(loss)(weights, x), state, params)
        return optax.apply_updates(params, updates), state

    shapes, shardings = jax.eval_shape(tx.init, params), state_shardings(tx, params, where)
    state = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
    with jax.set_mesh(mesh):
        return (
            jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile().as_text() or ""
        )


def measure(case: Case) -> dict[str, Any]:
    """One record of the results."""
    program = read_program(compile_case(case))
    forward = WEIGHTS * (case.mesh["fsdp"] - 1) // case.mesh["fsdp"] if "fsdp" in case.mesh else 0
    return {
        "program": case.name,
        "mesh": dict(case.mesh),
        "devices": math.prod(case.mesh.values()),
        "weights": WEIGHTS,
        "received": program.received,
        "received_by_kind": program.received_by_kind,
        "collectives": program.counts,
        "forward": forward,
        "units": round((program.received - forward) / WEIGHTS, 3),
    }


def main() -> None:
    """Compiles the cases, prints a line of each, and writes the records."""
    parser = argparse.ArgumentParser(description="Bytes of a whole training step.")
    parser.add_argument("--only", help="part of a case's name")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    records = []
    for case in CASES:
        if args.only is None or args.only in case.name:
            records.append(measure(case))
            print(json.dumps(records[-1]), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
