"""The conventions of other systems, and of Muon's variants as their authors run them, by name.

Each recipe is `muon` with one system's momentum, Newton-Schulz schedule and dtype, scale, weight
decay, AdamW and choice of leaves, so that a run, its learning rates and its checkpoints carry over.
Every default can be overridden by any argument of `muon`: `torch_muon(1e-3, ns_dtype=None)`
orthogonalises in the momentum's dtype, not in torch's bfloat16.

All of them normalise scale-invariantly, where the sources add or clamp an epsilon: they differ for
gradients below about 1e-7, where the sources' updates shrink. torch stores weights [out, in] and
Flax [in, out]; scales go by role, so that they agree.
"""

from muon_optax.recipes.systems import (
    areal,
    dion,
    keller_jordan,
    llama_factory,
    megatron,
    moonlight,
    optax_muon,
    torch_muon,
    transformer_engine,
    xtuner,
)
from muon_optax.recipes.variants import (
    adamuon,
    dion2,
    dion_normuon,
    emerging_optimizers,
    modded_nanogpt,
    muonclip,
    muonh,
    nordion2,
    normuon,
)

__all__ = [
    "adamuon",
    "areal",
    "dion",
    "dion2",
    "dion_normuon",
    "emerging_optimizers",
    "keller_jordan",
    "llama_factory",
    "megatron",
    "modded_nanogpt",
    "moonlight",
    "muonclip",
    "muonh",
    "nordion2",
    "normuon",
    "optax_muon",
    "torch_muon",
    "transformer_engine",
    "xtuner",
]
