# From a fresh clone: `make test` sets up everything it needs in .venv and runs the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Beside the pinned one, to see that kernels compile by the newest too
NVRTC_NEWEST ?= nvidia-cuda-nvrtc==13.4.92
BIN := .venv/bin
# Tests run side by side, one torch thread each: faster than one test on all cores
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: test test-gpu lint format bench compile-all docs docs-check clean

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# With a GPU, in the environment that has it: every kernel against fp64, memory, determinism, streams, graphs
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/make_wgmma.py --check

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The fast sweep, on the GPU if there is one; BENCH takes more options, as in `make bench BENCH=--full`
bench: .venv/ready
	$(BIN)/flashtile bench $(BENCH)

# Every kernel for every architecture that NVRTC knows, with the options in pairs; no GPU needed
compile-all: .venv/ready
	$(BIN)/flashtile compile --all

# Tables and figures of README.md and docs/ from results/
docs: .venv/ready
	$(BIN)/python tools/make_docs.py

docs-check: .venv/ready
	$(BIN)/python tools/make_docs.py --check

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "flashtile needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/nvrtc-newest $(NVRTC_NEWEST)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@
