"""Leaves the modules that run under PyTorch out of the doctests where it isn't installed."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("torch") is None:
    collect_ignore += [
        f"muon_optax/interop/parity/{name}.py" for name in ("module", "ranks", "reference")
    ]
