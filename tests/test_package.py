"""What `import muon_optax` gives, and what it leaves for later."""

import subprocess
import sys

import pytest

import muon_optax

SUBMODULES = ("interop", "models", "recipes")

PROGRAM = """
import sys
import muon_optax

loaded = [name for name in {names} if f"muon_optax.{{name}}" in sys.modules]
assert loaded == [], loaded
assert set({names}) <= set(dir(muon_optax))
assert "muon_optax.recipes" not in sys.modules  # nor does dir import them
assert muon_optax.recipes.keller_jordan is not None
assert muon_optax.models.model_shapes is not None
assert muon_optax.interop.from_optax is not None
assert muon_optax.interop.torch.from_state_dict is not None
assert "torch" not in sys.modules
"""


def test_submodules_are_there_without_an_import_of_their_own():
    program = PROGRAM.format(names=SUBMODULES)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_another_name_is_an_error_as_of_any_module():
    assert not hasattr(muon_optax, "recipe")
    with pytest.raises(AttributeError, match="module 'muon_optax' has no attribute 'recipe'"):
        _ = muon_optax.recipe  # pyright: ignore[reportAttributeAccessIssue]


def test_every_public_name_is_listed():
    assert {*muon_optax.__all__, *SUBMODULES} <= set(dir(muon_optax))
