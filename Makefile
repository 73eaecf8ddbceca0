# Everything here works on a machine with only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check test-newest versions wheel-test docs notebooks parity bench-aot lint clean

demo: $(INSTALLED)  ## train a small GPT with Muon and with AdamW; writes demo/curves.png
	$(BIN)/python examples/train_gpt.py --output demo

# Two processes on two cores: more threads for a product would wait for each other, and spin.
test check test-newest: export OMP_NUM_THREADS = 1

test: $(INSTALLED)  ## the whole test suite, doctests included
	@find .jax_cache -mtime +14 -delete 2>/dev/null || true  # programs that tests compiled
	$(BIN)/python -m pytest -n 2 --dist worksteal

# For before each commit: what is quick, and touches every module.
CHECK := alias barriers checks cost dispatch loads matrix_view momentum package partition partition_warnings placement plans reports rounds scaling specs stage tables tree_paths usual_specs weight_decay wrappers

check: lint  ## linters, types, and a part of the tests that touches every module
	$(BIN)/python -m pytest -n 2 --dist worksteal -x muon_optax $(wildcard $(CHECK:%=tests/test_%.py))

# The other end of the versions: what Python 3.12 installs. What depends on JAX and Flax is run.
PYTHON312 ?= python3.12
NEWEST := execute pipeline optax_parity conventions_jax

test-newest: .venv-newest/.installed  ## a part of the suite with Python 3.12 and the newest JAX
	.venv-newest/bin/python -m pytest -n 2 $(NEWEST:%=tests/test_%.py)

.venv-newest/.installed: pyproject.toml
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

versions:  ## the oldest and newest JAX, optax and Flax on each Python from 3.11 to 3.13; a table at the end
	$(PYTHON) .ci/versions.py

wheel-test:  ## builds sdist and wheel; installs it into an empty environment of each Python, and trains there
	.ci/wheel-test 3.11 3.12 3.13

docs: .venv-docs/.installed  ## the site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

notebooks: .venv-notebooks/.installed  ## executes the notebooks, and keeps their outputs in them
	.venv-notebooks/bin/python .ci/notebooks.py $(wildcard $(CURDIR)/examples/notebooks/*.ipynb)

.venv-notebooks/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[notebooks]'
	touch $@

parity: $(INSTALLED)  ## every mesh, precision and recipe against PyTorch's FSDP2
	$(BIN)/python -m muon_optax parity --grid --worst --json benchmarks/results/parity_grid.json

# Programs for machines that aren't here: each platform's plugin wants an environment of its own.
AOT_JAX := 0.10.2
AOT := benchmarks/results/aot_bytes

bench-aot: $(INSTALLED) .venv-cuda/.installed .venv-tpu/.installed  ## Llama-3-8B and OLMoE-7B for absent GPUs and TPUs; an hour
	.venv-cuda/bin/python benchmarks/aot_bytes.py cuda --devices 8 64 --contestants muon_optax optax --output $(AOT).json
	.venv-cuda/bin/python benchmarks/aot_bytes.py cuda --devices 8 64 --unstacked --output $(AOT).json
	.venv-cuda/bin/python benchmarks/aot_bytes.py cuda --devices 512 1024 --layouts fsdp_rows fsdp_columns hsdp hsdp_64 fsdp_tp --output $(AOT).json
	.venv-cuda/bin/python benchmarks/aot_bytes.py cuda --model olmoe-7b --devices 8 64 --layouts fsdp_experts hsdp_experts --output $(AOT).json
	.venv-cuda/bin/python benchmarks/aot_bytes.py cuda --model olmoe-7b --devices 64 --layouts experts_fsdp replica_experts_fsdp --output $(AOT).json
	.venv-tpu/bin/python benchmarks/aot_bytes.py tpu --devices 8 64 512 --output $(AOT).json
	$(BIN)/python docs/figures.py

.venv-cuda/.installed: PLUGINS := jax-cuda13-plugin==$(AOT_JAX) jax-cuda13-pjrt==$(AOT_JAX)
.venv-tpu/.installed: PLUGINS := libtpu
.venv-cuda/.installed .venv-tpu/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check jax==$(AOT_JAX) $(PLUGINS) optax
	touch $@

lint: $(INSTALLED)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads 2

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .jax_cache .venv-newest .venv-versions .venv-docs .venv-notebooks .venv-cuda .venv-tpu demo site
