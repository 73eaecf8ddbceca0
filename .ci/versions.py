"""Tests the oldest and the newest versions that are allowed, on each Python that is here.

    python .ci/versions.py [3.11 3.12 3.13]

An environment for each pair is made in .venv-versions and kept. Each row of the table is printed
when its tests have ended: the versions that were installed, and how the tests went. The oldest are
the lower bounds in pyproject.toml. Calls of what is going to be removed from JAX are errors there.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "optax", "flax")
# What the chosen tests import; PyTorch and the examples' packages aren't.
TOOLS = ("chex", "hypothesis", "jaxtyping", "pytest", "pytest-xdist")
TESTS = ("pipeline", "optax_parity", "conventions_jax", "alias")
PYTHONS = ("3.11", "3.12", "3.13")
# A row of the table, in Markdown.
ROW = "| {:6} | {:8} | {:8} | {:7} | {:7} | {} |"
_SHOW = "import importlib.metadata as m, json; print(json.dumps({p: m.version(p) for p in %r}))"


def find_python(version: str) -> str | None:
    """The Python of a version, from the path or from pyenv, whose shim may be for another one."""
    candidates = [f"python{version}"]
    if shutil.which("pyenv"):
        prefix = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True)
        candidates.append(f"{prefix.stdout.strip()}/bin/python")
    for python in candidates:
        show = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if shutil.which(python):
            run = subprocess.run(show, capture_output=True, text=True)
            if run.stdout.strip() == version:
                return python
    return None


def lower_bounds() -> list[str]:
    """The oldest versions that pyproject.toml allows, as requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = [*project["dependencies"], *project["optional-dependencies"]["flax"]]
    return [requirement.replace(">=", "==") for requirement in allowed]


def make_environment(python: str, name: str, pins: list[str]) -> Path:
    """An environment with the package; its Python."""
    folder = ROOT / ".venv-versions" / name
    if not folder.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    install = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*install, "-e", f"{ROOT}[flax,report]", *TOOLS, *pins], check=True)
    return found


def outcome(python: Path) -> str:
    """The last line of the tests."""
    files = [f"tests/test_{name}.py" for name in TESTS]
    command = [python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = re.findall(r"^\d+ .*(?:passed|failed|error).*$", run.stdout, re.MULTILINE)
    if run.returncode:
        print(run.stdout[-4000:], run.stderr[-2000:], file=sys.stderr)
    return summary[-1] if summary else f"exit status {run.returncode}"


def main() -> None:
    """Prints the table; the exit status is 1 if a test failed, or nothing could be tried."""
    pins = {"oldest": lower_bounds(), "newest": []}
    tried, failed = 0, False
    print(ROW.format("Python", "versions", *PACKAGES, "tests"))
    print("|" + "---|" * (3 + len(PACKAGES)), flush=True)
    for version in sys.argv[1:] or PYTHONS:
        python = find_python(version)
        if python is None:
            print(f"Python {version} isn't here: left out", file=sys.stderr)
            continue
        for end, wanted in pins.items():
            found = make_environment(python, f"{version}-{end}", wanted)
            shown = subprocess.check_output([found, "-c", _SHOW % (PACKAGES,)], text=True)
            result = outcome(found)
            failed |= "failed" in result or "error" in result or "exit" in result
            row = ROW.format(version, end, *json.loads(shown).values(), result)
            print(row, flush=True)
            tried += 1
    sys.exit(failed or not tried)


if __name__ == "__main__":
    main()
