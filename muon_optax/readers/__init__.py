"""Rules read from a model's own modules, one file for each framework.

A new framework is a file with a function `read(model, inputs)` that returns a `Reading`, and a line
in `entry`.
"""

from muon_optax.readers.entry import model_rules

__all__ = ["model_rules"]
