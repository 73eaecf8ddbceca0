"""What the package says of itself: one version, the Pythons it takes, and paths that are there."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import muon_optax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", muon_optax.__version__)
    assert metadata.version("muon-optax") == muon_optax.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == muon_optax.__version__
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == muon_optax.__version__


def test_the_pythons_that_are_named_are_those_that_are_tried():
    classifiers = PROJECT["classifiers"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    (tried,) = re.findall(r"\.ci/wheel-test ([\d. ]+)$", (ROOT / "Makefile").read_text(), re.M)
    assert named == tried.split()
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_type_checkers_are_told():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "muon_optax/py.typed").is_file()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "docs/releasing.md"])
def test_paths_and_commands_that_contributors_are_told_are_there(page: str):
    text = (ROOT / page).read_text()
    folders = r"`((?:muon_optax|tests|docs|benchmarks|examples|\.ci)/[\w./-]*)"
    for path in re.findall(folders, text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)
