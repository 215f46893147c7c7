# Everything starts here: each target does its own set-up on a fresh machine. What a user runs needs READY; tests,
# linters, measurements and the site need DEV too, three times the packages.
DEV = $(VENV)/.ready-dev
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Python keeps what it compiled, whatever this shell says: pip compiles nothing (below), so where nothing is kept every
# process compiles torch and transformers anew, 4 to 13 seconds each, and the tests start more than a hundred
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo serve test test-all lint check check-all fuzz mutants docs bench-cpu bench-gpu bench-spec bench-serve referee clean

demo: $(READY) model  ## a real model writes two texts, plain and drafted: one gains, one does not
	$(BIN)/forerun demo
	@echo; echo "next: . $(BIN)/activate, then forerun chat, or forerun serve"

serve: $(READY) model  ## an OpenAI-compatible server and its page on http://127.0.0.1:8000 (ARGS="--port 9000")
	$(BIN)/forerun serve $(ARGS)

test: $(DEV)  ## what CI runs: lint beside the fast tier of the tests
	@$(MAKE) --no-print-directory -j 2 lint check

test-all: $(DEV)  ## before an issue is closed: both tiers of the tests, then `make fuzz` and `make mutants`
	@$(MAKE) --no-print-directory -j 2 lint check-all
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory mutants

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: $(DEV) model  # tests/conftest.py puts the longest files first
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check-all: $(DEV) model
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --all -m "not fuzz"

fuzz: $(DEV) model  ## 300 damaged files of every format, 400 random loads, 10,000 damaged requests and 400 more to every route
	$(BIN)/pytest -q -n 2 -m fuzz tests/damaged tests/fuzz tests/server/test_fuzz.py
	FORERUN_FUZZ=400 $(BIN)/pytest -q tests/server/test_schemathesis.py

mutants: $(DEV) model  ## faults put in on purpose: do the tests notice? (ARGS="--area verify")
	$(BIN)/python tools/mutants.py $(ARGS)

docs: $(DEV)  ## the generated pages, and the site into site/
	$(BIN)/python -m tools.docs_pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench-cpu: $(DEV) model llama  ## ratios over transformers, llama.cpp and our plain loop; about five minutes (ARGS=--full: more)
	$(BIN)/python -m lab cpu --json bench-out/cpu.json --plot bench-out/cpu.png \
	--batch-plot bench-out/cpu-batches.png $(ARGS)

bench-gpu: $(DEV) model  ## t(n), plain and speculative texts in batches of 1 to 128 on a GPU, texts compared
	@mkdir -p bench-out
	$(BIN)/python -m lab gpu --json bench-out/gpu.json --plot bench-out/gpu-passes.png \
	--batch-plot bench-out/gpu-batches.png $(ARGS)

referee: $(DEV)  ## how often `forerun verify` is wrong: 1,000 simulated and 20 real clean runs, planted bugs with 20 seeds; half an hour
	@mkdir -p bench-out
	$(BIN)/python -m lab referee-clean --json bench-out/referee.json $(ARGS)

bench-spec: $(DEV) model  ## every drafter on Spec-Bench's six tasks, T=0 and T=1, one table; at 8B cost on a GPU
	$(BIN)/python -m lab spec --json bench-out/spec.json --plot bench-out/spec.png $(ARGS)

bench-serve: $(DEV) model  ## a server under load: speculation off, fixed and adaptive, texts compared
	$(BIN)/python -m lab serve --json bench-out/serve.json --plot bench-out/serve.png $(ARGS)

.PHONY: model
model: $(READY)
	@$(BIN)/forerun models pull smollm2 --quiet

.PHONY: llama
llama: $(READY)  ## llama.cpp to compare with: pip builds it, which takes minutes; where it cannot, we go on without
	@$(BIN)/python -c "import llama_cpp" 2>/dev/null \
	|| { echo "building llama-cpp-python, once, to compare with"; \
	nice $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt llama-cpp-python; } \
	|| echo "llama-cpp-python could not be installed: the benchmark goes on without llama.cpp"

# --no-compile: Python compiles what is imported, which is a small part of what is installed
INSTALL = $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
LISTS = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = project["optional-dependencies"]

# the package is built while the others are fetched and unpacked, which is work for one core; pip alone would build it
# after it has resolved them all
$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/forerun/models/native/c/*.[ch] src/forerun/models/native/c/*/*.[ch])
	@echo "setting up $(VENV): torch, the other packages and the C kernels; this takes minutes, once"
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(LISTS); print(*project["dependencies"], *extras["serve"], sep="\n")' > $(VENV)/needed.txt
	$(INSTALL) --no-deps -e . & package=$$!; $(INSTALL) torch && $(INSTALL) -r $(VENV)/needed.txt; others=$$?; \
	wait $$package && exit $$others
	@touch $@

$(DEV): $(READY)  # the packages alone: the C kernels are built already
	@$(BIN)/python -c '$(LISTS); print(*extras["dev"], *extras["bench"], sep="\n")' > $(VENV)/dev.txt
	$(INSTALL) -r $(VENV)/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
