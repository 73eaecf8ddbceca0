"""Leaves modules that need a package which isn't installed out of the doctests."""

import importlib.util

_NEEDS = {
    "equinox": ("readers/equinox",),
    "flax": ("readers/linen", "readers/nnx"),
    "haiku": ("readers/haiku",),
    "torch": (
        "readers/torch",
        "interop/parity/module",
        "interop/parity/ranks",
        "interop/parity/reference",
    ),
}
collect_ignore = [
    f"muon_optax/{module}.py"
    for package, modules in _NEEDS.items()
    if importlib.util.find_spec(package) is None
    for module in modules
]
