"""One of several processes that train together on CPU devices.

Usage: python worker.py PROCESS PROCESSES DEVICES_OF_EACH PORT RESULTS
"""

import pathlib
import sys

if __name__ == "__main__":  # before anything makes a device
    import jax

    process, processes, devices, port = map(int, sys.argv[1:5])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, process)
    sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]

import jax
import numpy as np
import sharded
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, STACK, Leaf, make_mesh

from muon_optax import muon

LEAVES = {
    "rows_all_to_all": Leaf((16, 32), P("f")),
    "columns_gram": Leaf((3, 16, 32), P(None, None, "f"), STACK),
    "columns_gather": Leaf((16, 32), P(None, "f")),
    "both_all_to_all": Leaf((16, 32), P("r", "f")),
    "hsdp": Leaf((11, 16, 32), P(None, "f"), STACK),
    "layers": Leaf((4, 16, 32), P("f"), STACK),
}
SPECS = {**{name: leaf.spec for name, leaf in LEAVES.items()}, "bias": P("f")}
STRATEGIES = [(name, name.partition("_")[2]) for name in LEAVES if "_" in name]


def initial() -> dict[str, np.ndarray]:
    return {**sharded.gradients(LEAVES), "bias": np.linspace(-1, 1, 32, dtype=np.float32)}


def train(kind: str) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Two steps on all devices of all processes: the updates of each."""
    mesh = make_mesh({"r": 2, "f": 4}, kind)
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = {
        name: jax.make_array_from_callback(x.shape, where[name], lambda i, x=x: x[i])
        for name, x in initial().items()
    }
    tx = muon(
        0.1,
        FAST,
        muon_weight_dimension_numbers={**sharded.views(LEAVES), "bias": None},
        param_shardings=where,
        strategy=STRATEGIES,
        device=sharded.SLOW,
    )
    update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
    first, state = update(params, state, params)
    second, state = update(first, state, params)
    for name, sharding in where.items():
        sharded.assert_sharded(first[name], sharding)
    return first, second


def main(results: str) -> None:
    assert jax.device_count() == processes * devices
    assert len(jax.local_devices()) == devices
    found = {}
    for kind in ("explicit", "auto"):
        for step, updates in enumerate(train(kind)):
            for name, x in updates.items():
                found[f"{kind}/{step}/{name}"] = multihost_utils.process_allgather(x, tiled=True)
    if process == 0:
        np.savez(results, **found)
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main(sys.argv[5])
