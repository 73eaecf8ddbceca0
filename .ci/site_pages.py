"""Hooks of mkdocs: a page for each public name, and what lies outside of docs/.

Links are written so that they work in the repository; here they are led to where pages have gone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import muon_optax
from muon_optax import interop, recipes

ROOT = Path(__file__).parents[1]
MODULES = (muon_optax, recipes, interop)
# What isn't in docs/: path in the repository -> path in the site.
OUTSIDE = {
    "README.md": "start.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    **{
        f"examples/notebooks/{path.name}": f"notebooks/{path.name}"
        for path in sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
    },
    **{
        f"benchmarks/results/{path.name}": f"results/{path.name}"
        for path in sorted((ROOT / "benchmarks/results").glob("*.*"))
    },
}
# Shown on one page each: what they have is used together.
WHOLE_MODULES = ("muon_optax.interop.torch", "muon_optax.models")


def api_pages() -> dict[str, str]:
    """The path of each page of the API in the site -> its Markdown."""
    names = [f"{module.__name__}.{name}" for module in MODULES for name in module.__all__]
    pages = {f"api/{name}.md": f"::: {name}\n" for name in names}
    for name in WHOLE_MODULES:
        pages[f"api/{name}.md"] = f"::: {name}\n    options: {{members_order: source}}\n"
    return pages


def on_config(config: Any) -> Any:
    """Appends the API to the navigation, a section for each module."""
    sections: dict[str, list[dict[str, str]]] = {}
    for path in api_pages():
        module, _, name = path.removeprefix("api/").removesuffix(".md").rpartition(".")
        sections.setdefault(module, []).append({name: path})
    config.nav.append({"API": [{module: names} for module, names in sections.items()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that aren't files of docs/."""
    from mkdocs.structure.files import File

    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for source, path in OUTSIDE.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to where pages have gone, and names in the index to their pages."""
    path = page.file.src_uri
    outside = {there: source for source, there in OUTSIDE.items()}
    source = outside.get(path, f"docs/{path}")
    markdown = re.sub(
        r"(?<=\]\()([^)#:]+)(?=[)#])", lambda match: _moved(match[1], source, path), markdown
    )
    if path == "README.md":
        pages = {name.rpartition(".")[2]: f"api/{name}.md" for name in _names()}
        markdown = re.sub(
            r"^\| `.*? \|", lambda row: _with_links(row[0], pages), markdown, flags=re.M
        )
    return markdown


def _names() -> list[str]:
    return [path.removeprefix("api/").removesuffix(".md") for path in api_pages()]


def _moved(target: str, source: str, page: str) -> str:
    """A link of the file `source` of the repository, as a link of the site's `page`."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    there = OUTSIDE.get(found, found.removeprefix("docs/"))
    return posixpath.relpath(there, posixpath.dirname(page) or ".")


def _with_links(row: str, pages: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        page = pages.get(match[1].rpartition(".")[2])
        return f"[{match[0]}]({page})" if page else match[0]

    return re.sub(r"`([\w.]+)`", link, row)
