"""The notebooks: their cells run in order, at a small size, and what they show is kept in them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import run_code

NOTEBOOKS = Path(__file__).parents[1] / "examples/notebooks"
# For each, what makes it small, and what holds at the end.
SMALL = {
    "muon_in_ten_minutes.ipynb": {
        "batch = 2, 128, 64, 16": "batch = 1, 32, 16, 8",
        "steps = 200": "steps = 30",
    },
    "muon_on_a_mesh.ipynb": {"layers, width = 8, 128": "layers, width = 8, 32"},
}
HOLDS = {
    "muon_in_ten_minutes.ipynb": """
after = singular_values(newton_schulz(before))
assert singular_values(before)[-1] < 0.1 * singular_values(before)[0]
assert after[-1] > 0.3 * after[0] and after[0] < 1.3
for losses in (losses_muon, losses_adamw):
    assert losses[-5:].mean() < losses[:5].mean() - 0.3
""",
    "muon_on_a_mesh.ipynb": """
assert abs(received["all_to_all"] / 545e6 - 1) < 0.001
assert bound < received["all_to_all"] < received["gather"] / 20
""",
}


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((NOTEBOOKS / name).read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_is_tried():
    assert sorted(SMALL) == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", SMALL)
def test_its_cells_run_in_order(name: str):
    pytest.importorskip("flax")
    matplotlib = pytest.importorskip("matplotlib.pyplot")
    program = "\n".join("".join(cell["source"]) for cell in cells(name)) + HOLDS[name]
    for full, small in SMALL[name].items():
        assert program.count(full) == 1
        program = program.replace(full, small)
    run_code(program, NOTEBOOKS)
    matplotlib.close("all")


@pytest.mark.parametrize("name", SMALL)
def test_its_outputs_are_kept_and_small(name: str):
    found = cells(name)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
    pictures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(pictures) >= 2
    assert max(map(len, pictures)) < 60_000
    assert (NOTEBOOKS / name).stat().st_size < 150_000


def test_muon_is_ahead_in_what_is_kept():
    text = "".join(
        "".join(output.get("text", ""))
        for cell in cells("muon_in_ten_minutes.ipynb")
        for output in cell["outputs"]
    )
    ours, theirs = map(float, re.findall(r"last tenth: Muon ([\d.]+), AdamW ([\d.]+)", text)[0])
    assert ours < theirs - 0.1
