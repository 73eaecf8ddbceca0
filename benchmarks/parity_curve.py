"""One training run under torch FSDP2 and under JAX: is the loss curve the same?

torch trains the parity model on four ranks, with our float32 reference optimizer and with
`torch.optim.Muon`; JAX trains it from the same parameters on the same batches, with its own
gradients, on eight devices. Writes benchmarks/results/parity_curve.json:

    python benchmarks/parity_curve.py
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_optax import recipes
from muon_optax.interop.parity.case import Case, Optimizer, parse_mesh
from muon_optax.interop.parity.launch import run_cases
from muon_optax.interop.torch import from_state_dict

DEVICES = 8
RESULTS = Path(__file__).parent / "results"
OPTIMIZERS: tuple[Optimizer, ...] = ("reference", "torch")
LABELS = {"reference": "float32 reference", "torch": "torch.optim.Muon (bfloat16 inside)"}


def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
    """The parity model: (batch, length) to (batch, length, vocabulary)."""
    x = params["embed_tokens"]["embedding"][tokens]
    x = x + jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    normed = normed * params["norm"]["scale"] + params["norm"]["bias"]
    x = x + jax.nn.silu(normed @ params["mix"]["kernel"]) @ params["unmix"]["kernel"]
    x = x + jax.nn.sigmoid(x @ params["gate"]["kernel"]) @ params["expand"]["kernel"]
    hidden = jax.nn.silu(x @ params["up"]["kernel"] + params["up"]["bias"])
    x = x + hidden @ params["down"]["kernel"] + params["down"]["bias"]
    return x @ params["lm_head"]["kernel"]


def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    logits = logits_of(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def jax_losses(case: Case, muon: set[str], first: dict[str, Any]) -> list[float]:
    """Trains in JAX from torch's first parameters, on eight devices."""
    from muon_optax.interop.parity.module import batch

    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = from_state_dict(first, like_of(first, mesh))
    rows = jax.tree.map(lambda p: p.sharding, params)
    options: dict[str, Any] = {"ns_dtype": None} if case.optimizer == "reference" else {}
    tx = recipes.torch_muon(
        case.learning_rate,
        weight_decay=case.weight_decay,
        adam_weight_decay=case.weight_decay,
        partition=lambda tree: labels_of(tree, muon),
        param_shardings=rows,
        **options,
    )
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses, sharded = [], NamedSharding(mesh, PartitionSpec("fsdp"))
    for number in range(1, case.steps + 1):
        tokens = jax.device_put(batch(case.seed, number).numpy().astype(np.int32), sharded)
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    return losses


def like_of(tensors: dict[str, Any], mesh: jax.sharding.Mesh) -> Any:
    """Shapes and rows of the Flax tree: torch's rows over the devices where they divide."""
    names = {"embed_tokens.weight": "embedding", "norm.weight": "scale"}
    like: dict[str, Any] = {}
    for key, tensor in tensors.items():
        layer, leaf = key.split(".")
        name = names.get(key, "kernel" if leaf == "weight" else leaf)
        shape = tuple(tensor.shape)[:: -1 if name == "kernel" else 1]
        rows = 1 if name == "kernel" else 0
        dims = [None if i != rows or n % DEVICES else "fsdp" for i, n in enumerate(shape)]
        rows = NamedSharding(mesh, PartitionSpec(*dims))
        like.setdefault(layer, {})[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    return like


def labels_of(tree: Any, muon: set[str]) -> Any:
    """Muon for the kernels whose layers torch gave it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: (
            "muon" if path[1].key == "kernel" and f"{path[0].key}.weight" in muon else "adam"
        ),
        tree,
    )


def run(steps: int) -> list[dict[str, Any]]:
    """Both sides of both optimizers."""
    import torch

    jax.config.update("jax_num_cpu_devices", DEVICES)
    cases = [
        Case("torch_muon", parse_mesh("fsdp=4"), optimizer, steps=steps) for optimizer in OPTIMIZERS
    ]
    results = []
    with tempfile.TemporaryDirectory() as name:
        run_cases(Path(name), cases)
        for i, case in enumerate(cases):
            record = np.load(Path(name) / f"{i}.npz")
            prefix = "param/0/"
            first = {
                key.removeprefix(prefix): torch.from_numpy(record[key])
                for key in record
                if key.startswith(prefix)
            }
            theirs = [float(record[f"loss/{n}"]) for n in range(1, steps + 1)]
            ours = jax_losses(case, set(map(str, record["muon"])), first)
            gaps = [abs(a - b) / a for a, b in zip(theirs, ours, strict=True)]
            results.append(
                {
                    "optimizer": case.optimizer,
                    "torch": theirs,
                    "jax": ours,
                    "largest_gap": max(gaps),
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "parity_curve")
    args = parser.parse_args()
    results = run(args.steps)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda x: float(f"{float(x):.6g}"))
    args.output.with_suffix(".json").write_text(json.dumps(rounded, indent=1) + "\n")
    for result in results:
        print(f"{LABELS[result['optimizer']]}: largest gap {100 * result['largest_gap']:.3f}%")
    if any(result["largest_gap"] >= 0.01 for result in results):
        raise SystemExit("the curves are more than 1% apart")


if __name__ == "__main__":
    main()
