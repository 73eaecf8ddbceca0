"""Muon for JAX: orthogonalised momentum for weight matrices, AdamW for the rest."""

from muon_optax.alias import muon
from muon_optax.checkpoints import check_state
from muon_optax.flax_views import flax_matrix_views
from muon_optax.matrix_view import MatrixView, MuonDimensionNumbers
from muon_optax.notices import MuonWarning
from muon_optax.plans import Plan, plan
from muon_optax.polar import newton_schulz
from muon_optax.reports import ParameterReport, report
from muon_optax.rules import Rule, default_rules
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.state import state_shardings
from muon_optax.statistics import UpdateStats, update_stats
from muon_optax.transform import (
    MuonState,
    orthogonalize,
    scale_by_momentum,
    scale_by_muon,
    scale_by_shape,
)
from muon_optax.transforms.brakes import radial_brake
from muon_optax.transforms.decays import add_cautious_weight_decay, coupled_decay
from muon_optax.transforms.entries import EntryState, scale_by_entry
from muon_optax.transforms.namo import NamoState, scale_by_namo
from muon_optax.transforms.neurons import NeuronState, scale_by_neuron
from muon_optax.transforms.relative_size import floor_update, relative_update
from muon_optax.transforms.spheres import HyperballState, hyperball

__all__ = [
    "DeviceModel",
    "EntryState",
    "HyperballState",
    "MatrixView",
    "MuonDimensionNumbers",
    "MuonState",
    "MuonWarning",
    "NamoState",
    "NeuronState",
    "ParameterReport",
    "Plan",
    "Rule",
    "UpdateStats",
    "add_cautious_weight_decay",
    "check_state",
    "coupled_decay",
    "default_rules",
    "flax_matrix_views",
    "floor_update",
    "hyperball",
    "muon",
    "newton_schulz",
    "orthogonalize",
    "plan",
    "radial_brake",
    "relative_update",
    "report",
    "scale_by_entry",
    "scale_by_momentum",
    "scale_by_muon",
    "scale_by_namo",
    "scale_by_neuron",
    "scale_by_shape",
    "state_shardings",
    "update_stats",
]
