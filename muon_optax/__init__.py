"""Muon for JAX: orthogonalised momentum for weight matrices, AdamW for the rest.

`muon_optax.recipes`, `muon_optax.interop` and `muon_optax.models` are imported when they are used.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from muon_optax._internal.warnings import MuonWarning
from muon_optax.alias import muon
from muon_optax.inspect.checkpoints import check_state
from muon_optax.inspect.plans import Plan, plan
from muon_optax.inspect.reports import ParameterReport, report
from muon_optax.inspect.statistics import UpdateStats, update_stats
from muon_optax.orthogonalization import newton_schulz
from muon_optax.partition import Rule, default_rules
from muon_optax.readers import model_rules
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.state import state_shardings
from muon_optax.transforms.block_periodic import BlockPeriodic
from muon_optax.transforms.brakes import radial_brake
from muon_optax.transforms.dion2 import scale_by_dion2
from muon_optax.transforms.dion2_slices import Dion2
from muon_optax.transforms.direction import scale_by_muon
from muon_optax.transforms.entries import EntryState, scale_by_entry
from muon_optax.transforms.momentum import scale_by_momentum
from muon_optax.transforms.momentum_state import MuonState, momentum
from muon_optax.transforms.namo import Namo, NamoState, scale_by_namo
from muon_optax.transforms.neurons import NeuronState, scale_by_neuron
from muon_optax.transforms.orthogonalize import orthogonalize
from muon_optax.transforms.qk_clip import Attention, HeadWeight, clip_qk, qk_clip
from muon_optax.transforms.relative_size import floor_update, relative_update
from muon_optax.transforms.shape_scale import scale_by_shape
from muon_optax.transforms.spheres import HyperballState, hyperball
from muon_optax.transforms.weight_decay import add_cautious_weight_decay, coupled_decay
from muon_optax.views.flax import flax_matrix_views
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers

if TYPE_CHECKING:
    from muon_optax import interop as interop
    from muon_optax import models as models
    from muon_optax import recipes as recipes

__all__ = [
    "Attention",
    "BlockPeriodic",
    "DeviceModel",
    "Dion2",
    "EntryState",
    "HeadWeight",
    "HyperballState",
    "MatrixView",
    "MuonDimensionNumbers",
    "MuonState",
    "MuonWarning",
    "Namo",
    "NamoState",
    "NeuronState",
    "ParameterReport",
    "Plan",
    "Rule",
    "UpdateStats",
    "add_cautious_weight_decay",
    "check_state",
    "clip_qk",
    "coupled_decay",
    "default_rules",
    "flax_matrix_views",
    "floor_update",
    "hyperball",
    "model_rules",
    "momentum",
    "muon",
    "newton_schulz",
    "orthogonalize",
    "plan",
    "qk_clip",
    "radial_brake",
    "relative_update",
    "report",
    "scale_by_dion2",
    "scale_by_entry",
    "scale_by_momentum",
    "scale_by_muon",
    "scale_by_namo",
    "scale_by_neuron",
    "scale_by_shape",
    "state_shardings",
    "update_stats",
]

__version__ = "0.1.0"

_SUBMODULES = ("interop", "models", "recipes")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
