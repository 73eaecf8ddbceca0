"""The module that is trained: a causal language model, small, with the shapes that go wrong.

Tokens are mixed by a running mean. One layer is 13 wide, so that its rows are sharded unevenly over
any mesh; there are a [1, N] and an [N, 1] weight; and the MLP is tensor-parallel where the mesh has
an axis for that.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from muon_optax.interop.parity.case import SEQUENCES, Case

__all__ = ["Model", "batch", "loss_of", "sharded_model"]

VOCABULARY = 24
WIDTH = 16
UNEVEN = 13
HIDDEN = 24
LENGTH = 12


class Model(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, UNEVEN, bias=False)
        self.unmix = nn.Linear(UNEVEN, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.expand = nn.Linear(1, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Three layers, each added to the stream of token and running mean."""
        x = self.embed_tokens(tokens)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + x.cumsum(1) / count
        x = x + self.unmix(nn.functional.silu(self.mix(self.norm(x))))
        x = x + self.expand(torch.sigmoid(self.gate(x)))
        x = x + self.down(nn.functional.silu(self.up(x)))
        return self.lm_head(x)


def batch(seed: int, step: int) -> torch.Tensor:
    """The whole batch of a step: noisy walks around the vocabulary, (sequences, length + 1)."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    jumps = torch.tensor([1, 1, 1, 1, 1, 5])
    choices = torch.randint(len(jumps), (SEQUENCES, LENGTH), generator=generator)
    walk = torch.cat([start, jumps[choices]], dim=1).cumsum(1)
    return walk % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded_model(case: Case, mesh: DeviceMesh) -> Any:
    """The model as FSDP2 shards it, with a tensor-parallel MLP where the mesh has 'tp'."""
    torch.manual_seed(case.seed)
    model = Model().to(getattr(torch, case.dtype))
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh)
