"""From a model to rules: finds the framework's reader and turns its records into rules."""

import importlib
from collections.abc import Callable
from typing import Any

from muon_optax._internal.tree_paths import Segments
from muon_optax._internal.warnings import warn_about
from muon_optax.partition import Rule
from muon_optax.readers.decide import UNKNOWN_MODULE, UNKNOWN_STACK, Choice, decide
from muon_optax.readers.inputs import Inputs
from muon_optax.readers.records import Reading

__all__ = ["model_rules"]

# The package and name of a class of which a model is an instance, and the module that reads it.
_READERS = {
    ("flax.nnx", "Module"): "nnx",
    ("flax.linen", "Module"): "linen",
    ("equinox", "Module"): "equinox",
    ("haiku", "Transformed"): "haiku",
    ("haiku", "TransformedWithState"): "haiku",
    ("torch.nn", "Module"): "torch",
}


def model_rules(model: Any, /, *inputs: Any, **options: Any) -> tuple[Rule, ...]:
    """Reads from a model's modules which optimizer each parameter gets, and its matrices.

    Args:
      model: a Flax NNX, Flax Linen, Equinox or torch module, or the result of `haiku.transform`.
        Its arrays may be shape structs, as `nnx.eval_shape` and `eqx.filter_eval_shape` make them,
        or be on torch's meta device.
      *inputs: example inputs of its call, as arrays or shape structs; nothing is computed. Linen
        and Haiku need them, since their parameters are made by a call. Elsewhere they are optional:
        with them, parameters of modules of your own and the layers that make the logits are known
        by their use in the call, without them by names and shapes.
      **options: keyword arguments of the call.

    Returns:
      A rule for each floating-point parameter, by its exact path in the tree that is trained:
      `nnx.state(model, nnx.Param)`, `eqx.filter(model, eqx.is_inexact_array)`, the "params" of
      Linen's or Haiku's `init`, `dict(module.named_parameters())`. For `partition`, behind rules of
      your own. A MuonWarning names the parameters of which something couldn't be told.

    Raises:
      TypeError: for a model of another framework, or one that needs inputs and has none.

    Example:
      >>> import equinox as eqx, jax, muon_optax
      >>> mlp = eqx.nn.MLP(4, 8, 64, 2, key=jax.random.key(0))  # weights are [out, in]
      >>> rules = model_rules(mlp)
      >>> print(rules[0].reason, rules[0].view)
      weight of Linear MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0,))
      >>> tx = muon_optax.muon(0.02, partition=rules)
    """
    reading = _reader(model)(model, Inputs(inputs, options))
    choices = decide(reading)
    _warn(reading, choices)
    return tuple(Rule(path, c.label, c.reason, c.view) for path, c in choices.items())


def _reader(model: Any) -> Callable[[Any, Inputs], Reading]:
    for kind in type(model).__mro__:
        for (package, name), reader in _READERS.items():
            if kind.__name__ == name and f"{kind.__module__}.".startswith(f"{package}."):
                return importlib.import_module(f"muon_optax.readers.{reader}").read
    names = ", ".join(f"{package}.{name}" for package, name in _READERS)
    raise TypeError(
        f"model_rules reads instances of {names}; got {type(model).__module__}."
        f"{type(model).__name__}. For a tree of parameters alone, muon's default rules decide."
    )


def _warn(reading: Reading, choices: dict[Segments, Choice]) -> None:
    doubted = {
        (doubt, label): [
            leaf
            for leaf in reading.leaves
            if (choices[leaf.segments].doubt, choices[leaf.segments].label) == (doubt, label)
        ]
        for doubt, label in (
            (UNKNOWN_STACK, "adam"),
            (UNKNOWN_MODULE, "muon"),
            (UNKNOWN_MODULE, "adam"),
        )
    }
    can_trace = reading.takes_inputs and reading.usage is None
    cure = "give model_rules example inputs, or " if can_trace else ""
    cure += "put a Rule in front of its rules"
    warn_about(
        "nothing tells which axes of these stacked parameters are layers, so that they get AdamW; "
        f"{cure}",
        doubted[UNKNOWN_STACK, "adam"],
    )
    warn_about(
        "modules that model_rules doesn't know have these parameters of two dims, which get Muon "
        f"as [in, out]; {cure}",
        doubted[UNKNOWN_MODULE, "muon"],
    )
    warn_about(
        f"modules that model_rules doesn't know have these parameters, which get AdamW; {cure}",
        doubted[UNKNOWN_MODULE, "adam"],
    )
