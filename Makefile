# Everything here works on a machine with only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test parity lint clean

demo: $(INSTALLED)  ## train a small GPT with Muon and with AdamW; writes demo/curves.png
	$(BIN)/python examples/train_gpt.py --output demo

test: $(INSTALLED)  ## the whole test suite, doctests included
	$(BIN)/python -m pytest -n 2

parity: $(INSTALLED)  ## every mesh, precision and recipe against PyTorch's FSDP2
	$(BIN)/python -m muon_optax parity --grid --worst --json benchmarks/results/parity_grid.json

lint: $(INSTALLED)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo
