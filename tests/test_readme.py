"""The README's code runs, from top to bottom, as one program."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_snippets_run(capsys):
    text = (ROOT / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) >= 5
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["loss"] < 0.1
    assert "all_to_all" in capsys.readouterr().out
    assert names["updates"]["layer_0"].sharding.spec[0] == "fsdp"


def test_commands_are_the_makefiles():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert {"demo", "test", "lint"} <= set(commands) <= set(targets)
