"""The site's pages and navigation, without mkdocs: `make docs` builds them and checks links."""

import importlib
import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import muon_optax
from muon_optax import interop, recipes

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hooks; they import mkdocs only where it calls them."""
    (path,) = CONFIG["hooks"]
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_navigation(entry: Any) -> list[str]:
    """All pages below an entry of the navigation, in its order."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for each in below for page in in_navigation(each)]


def test_every_page_is_in_the_navigation_once(site):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    brought = {there for there in site.OUTSIDE.values() if there.endswith(".md")}
    found = in_navigation(CONFIG["nav"])
    assert sorted(found) == sorted(pages | brought)
    for source in site.OUTSIDE:
        assert (ROOT / source).is_file(), source


def test_every_public_name_has_a_page_in_the_navigation(site):
    class Config:
        nav: Any = []  # noqa: RUF012

    wanted = {
        f"api/{module.__name__}.{name}.md"
        for module in (muon_optax, recipes, interop)
        for name in module.__all__
    }
    pages = site.api_pages()
    assert wanted | {f"api/{name}.md" for name in site.WHOLE_MODULES} == set(pages)
    assert sorted(in_navigation(site.on_config(Config()).nav)) == sorted(pages)
    for text in pages.values():
        path = text.split()[1]
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, path


@pytest.mark.parametrize(
    ("target", "source", "page", "want"),
    [
        ("../README.md", "docs/README.md", "README.md", "start.md"),
        ("docs/sharding.md", "README.md", "start.md", "sharding.md"),
        ("../docs/multiprocess.md", "examples/README.md", "examples.md", "multiprocess.md"),
        ("../benchmarks/results/a.png", "docs/results.md", "results.md", "results/a.png"),
        ("bytes.png", "docs/sharding.md", "sharding.md", "bytes.png"),
    ],
)
def test_links_lead_to_where_pages_have_gone(site, target, source, page, want):
    site.OUTSIDE["benchmarks/results/a.png"] = "results/a.png"
    assert site._moved(target, source, page) == want


def test_names_in_the_index_lead_to_their_pages(site):
    class Page:
        class file:  # noqa: N801
            src_uri = "README.md"

    index = site.on_page_markdown((ROOT / "docs/README.md").read_text(), Page)
    linked = set(re.findall(r"\]\(api/([\w.]+)\.md\)", index))
    names = {path.removeprefix("api/").removesuffix(".md") for path in site.api_pages()}
    assert names - linked <= {"muon_optax.models"}
    for target in re.findall(r"\]\(([^)#:]+)", index):
        assert posixpath.normpath(target) == target
