"""Each rank's program: `python -m muon_optax.interop.parity.ranks FOLDER`; `launch` starts it.

For case number i of FOLDER/cases.json rank 0 writes FOLDER/i.npz: 'param/STEP/NAME' from step 0,
before the first update, and 'grad/STEP/NAME', 'momentum/STEP/NAME' and 'loss/STEP' from step 1,
of whole tensors in torch's layout; 'muon' lists the names that got Muon.
"""

import collections
import importlib
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from muon_optax.interop.parity.case import Case, read_cases
from muon_optax.interop.parity.launch import leave_with_parent
from muon_optax.interop.parity.module import batch, loss_of, sharded_model
from muon_optax.interop.parity.reference import CONVENTIONS, Reference, is_hidden_matrix

__all__ = ["main"]


class Steppers:
    """The optimizers of one case, their momentum by parameter name, and who got Muon."""

    def __init__(self, model: torch.nn.Module, case: Case) -> None:
        named = [(name, p) for name, p in model.named_parameters()]
        self.named = dict(named)
        if case.optimizer == "reference":
            ways = CONVENTIONS[case.recipe]
            reference = Reference(named, ways, case.learning_rate, case.weight_decay)
            self.optimizers: list[Any] = [reference]
            self.muon = [name for name in self.named if reference.gets_muon(name)]
            return
        make, takes = _PEERS[case.optimizer]
        self.muon = [n for n, p in named if is_hidden_matrix(n, tuple(p.shape)) and takes(p, case)]
        rest = [p for n, p in named if n not in self.muon]
        common: dict[str, Any] = {"lr": case.learning_rate, "weight_decay": case.weight_decay}
        self.optimizers = [
            make([self.named[n] for n in self.muon], common),
            torch.optim.AdamW(rest, **common),
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def momentum(self, name: str) -> Any:
        for optimizer in self.optimizers:
            if isinstance(optimizer, Reference):
                return optimizer.momentum[name]
            state = optimizer.state.get(self.named[name], {})
            for field in ("momentum_buffer", "exp_avg"):
                if field in state:
                    return state[field]
        raise KeyError(name)


def _torch_muon(params: list[Any], common: dict[str, Any]) -> Any:
    return torch.optim.Muon(params, **common)


def _muon_fsdp2(params: list[Any], common: dict[str, Any]) -> Any:
    module = importlib.import_module("muon_fsdp2")  # only where this peer is asked for
    return module.Muon([{"params": params, "use_muon": True, "rms_scale": False, **common}])


def _is_not_row(p: Any, case: Case) -> bool:
    del case
    return p.shape[0] > 1  # torch 2.13 raises for a [1, N] DTensor


def _is_even(p: Any, case: Case) -> bool:
    return p.shape[0] % case.world == 0  # muon_fsdp2 gathers shards of one size


Peer = tuple[Callable[[list[Any], dict[str, Any]], Any], Callable[[Any, Case], bool]]
_PEERS: dict[str, Peer] = {
    "torch": (_torch_muon, _is_not_row),
    "muon_fsdp2": (_muon_fsdp2, _is_even),
}


def run(case: Case) -> dict[str, np.ndarray]:
    """Trains for the case's steps and records them; the same on every rank."""
    sizes = tuple(size for _, size in case.mesh)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(name for name, _ in case.mesh))
    model = sharded_model(case, mesh)
    steppers = Steppers(model, case)
    record = {f"param/0/{name}": _whole(p) for name, p in steppers.named.items()}
    seen: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
    rows = _own_rows(case, mesh)
    for step in range(1, case.steps + 1):
        tokens = batch(case.seed, step)
        model.zero_grad()  # after the forward pass it would miss the sharded gradients
        loss = loss_of(model, tokens[rows])
        loss.backward()
        record[f"loss/{step}"] = _mean(loss)
        for name, p in steppers.named.items():
            seen["grad", name].append(torch.clone(p.grad))  # pyright: ignore[reportArgumentType]
        steppers.step()
        for name, p in steppers.named.items():
            seen["param", name].append(p.detach().clone())
            seen["momentum", name].append(steppers.momentum(name).clone())
    for (kind, name), shards in seen.items():
        whole = _whole(torch.stack(shards))  # gathered once for all steps
        record |= {f"{kind}/{step}/{name}": x for step, x in enumerate(whole, start=1)}
    return record | {"muon": np.array(steppers.muon)}


def _own_rows(case: Case, mesh: Any) -> slice:
    """This rank's sequences: tensor-parallel ranks share theirs."""
    own, count = 0, 1
    for name, size in case.mesh:
        if name != "tp":
            own, count = own * size + mesh.get_local_rank(name), count * size
    each = batch(0, 0).shape[0] // count
    return slice(own * each, (own + 1) * each)


def _whole(x: Any) -> np.ndarray:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).numpy().copy()


def _mean(loss: torch.Tensor) -> np.ndarray:
    loss = loss.detach().clone()
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    return (loss / dist.get_world_size()).numpy()


def main(folder: Path) -> None:
    """Runs all cases of a folder."""
    leave_with_parent()
    torch.set_num_threads(1)
    # Says of each mesh of two axes that its exchanges could be merged.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=os.environ["MUON_PARITY_RENDEZVOUS"],
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for i, case in enumerate(read_cases(folder / "cases.json")):
        record: dict[str, Any] = run(case)
        if rank == 0:
            np.savez(folder / f"{i}.npz", **record)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads, still joinable, now and then abort an orderly exit
