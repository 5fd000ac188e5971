# From a fresh clone: `make test` sets up everything it needs in .venv and runs the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Beside the pinned one, to see that kernels compile by the newest too
NVRTC_NEWEST ?= nvidia-cuda-nvrtc==13.4.92
BIN := .venv/bin
# Tests run side by side, one torch thread each: faster than one test on all cores
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

EXTENSION_SOURCES := setup.py $(wildcard src/flashtile/csrc/* src/flashtile/csrc/cpu/* src/flashtile/csrc/exec/*) src/flashtile/device/attn/params.cuh

.PHONY: test test-gpu test-install test-integrations test-versions test-thunder test-vllm check sanitize sanitize-cpu lint format bench compile-all docs docs-check wheels site lint-workflows clean

# One worker more than cores: some tests wait for processes of their own
test: .venv/extension
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(( $(JOBS) + 1 )) --dist worksteal

# With a GPU, in the environment that has it: every kernel against fp64, memory, determinism, streams, graphs. Several processes share the GPU
# where pytest-xdist is installed. GPU_TESTS takes more options, as in `make test-gpu GPU_TESTS="-m smoke"`
GPU_JOBS ?= $(shell n=$(JOBS); echo $$(( n > 15 ? 15 : n )))
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu \
		$$($(PYTHON) -c 'import importlib.util as u; print("-n $(GPU_JOBS) --dist worksteal" if u.find_spec("xdist") else "")') $(GPU_TESTS)

# pip, pip without torch, uv, a source distribution, wheels, no compiler: about two minutes
test-install: .venv/ready
	$(BIN)/python tools/try_install.py

# What importing its attention takes; the rest of what it requires trains and logs. Triton comes with torch's CUDA builds
TORCHTITAN := "torchtitan==0.3.0; python_version >= '3.11'" spmd_types==0.2.3 tyro==1.0.16 docstring-parser==0.18.0 einops==0.8.2

# transformers, diffusers and the others, each with its real package, in an environment of their own
test-integrations: .venv-integrations/ready
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest -n $(JOBS) tests/integrations

# One wheel under the oldest torch that flashtile serves, the pinned one and the newest, with the newest transformers and diffusers: the CPU and
# integration tests in environments of their own. Not part of CI: it downloads gigabytes, and what is newest differs from day to day. CI runs these
# tests with the pinned versions, and tests/cpu/test_setup.py sees that the extension asks nothing of torch that the oldest one lacks.
# VERSIONS takes others, as in `make test-versions VERSIONS="2.11.0 newest"`; the first one builds the wheel
VERSIONS ?= 2.10.0 $(patsubst torch==%,%,$(TORCH)) newest
test-versions:
	$(PYTHON) tools/test_versions.py --jobs $(JOBS) $(VERSIONS)

# Lightning Thunder needs an older torch, and so an environment of its own; not part of CI
test-thunder: .venv-thunder/ready
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-thunder/bin/python -m pytest -n $(JOBS) tests/integrations/test_thunder.py

# vLLM without the packages around it: its interface, registry and metadata are tried, its engine is not; not part of CI
test-vllm: .venv-vllm/ready
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n $(JOBS) tests/integrations/test_vllm.py

# A minute of random problems on the CPU; CHECK takes more options, as in `make check CHECK="--seed 7"`
check: .venv/extension
	OMP_NUM_THREADS=1 $(BIN)/flashtile check --device cpu --seconds 60 --jobs $(JOBS) $(CHECK)

# With a GPU: every kernel under compute-sanitizer, and each of its tools against a fault on purpose
sanitize:
	PYTHONPATH=src $(PYTHON) tools/sanitize.py $(SANITIZE)

# The CPU engine's tests under AddressSanitizer and under UndefinedBehaviorSanitizer
sanitize-cpu: sanitize-address sanitize-undefined

# Python itself is not built for AddressSanitizer: its library comes first, and the C++ library whose exceptions it watches
PRELOAD = $(if $(filter sanitize-address,$@),$(foreach lib,libasan.so libstdc++.so,$(shell g++ -print-file-name=$(lib))))
sanitize-%: .venv/ready
	rm -rf build/$@ && mkdir -p build/$@ && cp -r src/flashtile build/$@/ && rm -f build/$@/flashtile/*.so
	FLASHTILE_EXTENSION=1 FLASHTILE_SANITIZE=$* $(BIN)/python setup.py --quiet build_ext --build-lib build/$@ --build-temp build/$@/objects
	LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0:log_path=build/$@/report UBSAN_OPTIONS=print_stacktrace=1:log_path=build/$@/report \
		OMP_NUM_THREADS=1 PYTHONPATH=build/$@ $(BIN)/python -m pytest -p no:cacheprovider -n $(JOBS) -k "cpu or together or limits" \
		tests/cpu/test_cpu_engine.py tests/cpu/test_host.py tests/cpu/test_masked_rows.py tests/cpu/test_error_rule.py tests/cpu/test_limits.py tests/cpu/test_kvcache.py || { cat build/$@/report*; exit 1; }

# Tracked C++ and CUDA files; .clang-format-ignore names the generated one
LIST_NATIVE_SOURCES := git ls-files -z '*.h' '*.cpp' '*.cuh' '*.cu'

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(LIST_NATIVE_SOURCES) | xargs -0 $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/format_docs.py --check
	$(BIN)/python tools/make_wgmma.py --check
	$(BIN)/python tools/make_arguments.py --check

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(LIST_NATIVE_SOURCES) | xargs -0 $(BIN)/clang-format -i
	$(BIN)/python tools/format_docs.py

# The fast sweep, on the GPU if there is one; BENCH takes more options, as in `make bench BENCH=--full`
bench: .venv/extension
	$(BIN)/flashtile bench $(BENCH)

# Every kernel for every architecture that NVRTC knows, with the options in pairs; no GPU needed
compile-all: .venv/ready
	$(BIN)/flashtile compile --all

# Tables and figures of README.md and docs/ from results/
docs: .venv/ready
	$(BIN)/python tools/make_docs.py

docs-check: .venv/ready
	$(BIN)/python tools/make_docs.py --check

# The site in build/site/, from README.md and docs/ as they are, results/ and the code; a link that leads nowhere fails (tools/website/). With
# --quiet MkDocs would hide such warnings and succeed.
site: .venv/ready .venv-site/ready
	rm -rf build/site-parts && mkdir -p build/site-parts
	$(BIN)/flashtile report --results results --out build/site-parts/dashboard.html
	$(BIN)/python tools/website/commands.py build/site-parts/commands.md
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@echo "Open build/site/index.html, or for the search: $(PYTHON) -m http.server --directory build/site"

# Everything that a release consists of, checked, in dist/. Wheels for a machine of another kind are cross-built. WHEELS takes more options, as in
# `make wheels WHEELS="--machine x86_64"`
wheels: .venv-wheels/ready
	.venv-wheels/bin/python tools/make_wheels.py $(WHEELS)

# .github/ and CITATION.cff against their schemas
CHECK_SCHEMA = .venv-wheels/bin/check-jsonschema --builtin-schema
lint-workflows: .venv-wheels/ready
	$(CHECK_SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(CHECK_SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK_SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(CHECK_SCHEMA) vendor.citation-file-format CITATION.cff

clean:
	rm -rf .venv .venv-site .venv-integrations .venv-thunder .venv-vllm .venv-versions .venv-wheels build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "flashtile needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/nvrtc-newest $(NVRTC_NEWEST)
	FLASHTILE_EXTENSION=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

.venv/extension: .venv/ready $(EXTENSION_SOURCES)
	FLASHTILE_EXTENSION=1 $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

.venv-integrations/ready: requirements-integrations.txt requirements-apart.txt $(EXTENSION_SOURCES)
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet $(TORCH)
	.venv-integrations/bin/python -m pip install --quiet -r requirements-integrations.txt
	.venv-integrations/bin/python -m pip install --quiet --no-deps $(TORCHTITAN)
	rm -rf .venv-integrations/apart
	.venv-integrations/bin/python -m pip install --quiet --no-deps --target .venv-integrations/apart -r requirements-apart.txt
	FLASHTILE_EXTENSION=1 .venv-integrations/bin/python setup.py --quiet build_ext --inplace
	touch $@

.venv-thunder/ready:
	$(PYTHON) -m venv .venv-thunder
	.venv-thunder/bin/python -m pip install --quiet torch==2.11.0 lightning-thunder==0.2.6 \
		hypothesis==6.170.15 pytest==9.2.0 pytest-xdist==3.8.0 rich==15.0.0 setuptools==80.9.0 typer==0.29.0
	FLASHTILE_EXTENSION=1 .venv-thunder/bin/python setup.py --quiet build_ext --inplace
	touch $@

.venv-vllm/ready: requirements-integrations.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet -r requirements-integrations.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps vllm==0.32.0
	.venv-vllm/bin/python -m pip install --quiet aiohttp cbor2 openai openai_harmony psutil pyzmq
	FLASHTILE_EXTENSION=1 .venv-vllm/bin/python setup.py --quiet build_ext --inplace
	touch $@

# Of torch the headers alone are needed
.venv-wheels/ready: requirements-release.txt
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --quiet -r requirements-release.txt
	.venv-wheels/bin/python -m pip install --quiet --no-deps $(TORCH)
	touch $@

.venv-site/ready: requirements-site.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet -r requirements-site.txt
	touch $@
