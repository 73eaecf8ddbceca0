"""What `.ci/wheel-test` asks of the built archives, and of an environment with the wheel alone.

python smoke.py archives REPOSITORY SDIST WHEEL
python smoke.py train REPOSITORY
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

READ_BESIDE = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml"}
OF_BUILD = {"PKG-INFO", ".gitignore"}


def archives(repository: Path, *built: Path) -> None:
    """Raises unless both archives hold the package's files and nothing that doesn't belong."""
    listed = subprocess.check_output(["git", "ls-files", "muon_optax"], cwd=repository, text=True)
    package = set(listed.split())
    for path in built:
        if path.suffix == ".whl":
            names = {n for n in zipfile.ZipFile(path).namelist() if ".dist-info/" not in n}
            wanted = package
        else:
            with tarfile.open(path) as archive:
                files = [member.name for member in archive.getmembers() if member.isfile()]
            names = {name.partition("/")[2] for name in files} - OF_BUILD
            wanted = package | READ_BESIDE
        assert names == wanted, f"{path.name}: {sorted(names ^ wanted)}"
        assert "muon_optax/py.typed" in names
        print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e3:.0f} kB")


def train(repository: Path) -> None:
    """Runs the README's first training loop with the package that is installed."""
    from importlib.metadata import version

    import jax
    import optax

    import muon_optax

    assert repository not in Path(muon_optax.__file__).parents, muon_optax.__file__
    assert muon_optax.__version__ == version("muon-optax")
    (loop,) = (
        block
        for block in re.findall(
            r"```python\n(.*?)```", (repository / "README.md").read_text(), re.S
        )
        if "def step(" in block
    )
    names: dict = {}
    exec(compile(loop, "README.md", "exec"), names)
    assert names["loss"] < 0.1, names["loss"]
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    print(f"Python {python}, {versions}: muon_optax {muon_optax.__version__} trains")


if __name__ == "__main__":
    {"archives": archives, "train": train}[sys.argv[1]](*map(Path, sys.argv[2:]))
