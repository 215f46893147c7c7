# Everything starts here: each target does its own set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint check bench-cpu bench-gpu clean

demo: $(READY) model  ## a real model answers, drafted tokens in colour
	$(BIN)/forerun generate --file examples/demo.txt --max-tokens 110

test: lint check  ## what CI runs

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: $(READY) model
	$(BIN)/pytest -q -n 2 --dist loadfile

bench-cpu: $(READY) model  ## ratios over transformers and over our own plain loop, in one run
	$(BIN)/python -m forerun.bench.cpu

bench-gpu: $(READY) model  ## t(n), plain and speculative text on a GPU, bits included
	$(BIN)/python -m forerun.bench.gpu

.PHONY: model
model: $(READY)
	@$(BIN)/forerun models pull smollm2 --quiet

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/forerun/models/kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
