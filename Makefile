# `make serve` and `make test` do all the set-up they need. `make help` lists the rest.

ifeq ($(OS),Windows_NT)
$(error Outrider runs on Linux, and on macOS without a GPU. On Windows, run it in WSL2 or in Docker)
endif

CONFIG ?=
ARGS ?=
# Empty: resolve anew, for a torch that fits another CUDA driver or processor than constraints.txt.
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	command -v $$name && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet $(PIP_ARGS) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
PACKAGES := server distill engine kernels
# A worker for each core; tests that share a server, or models, stay together (tests/conftest.py).
TEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest --numprocesses logical --maxprocesses 8 --dist loadgroup

# The project's root must not be on sys.path: its `kernels` would shadow Hugging Face's package.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process of the tests would compile our code, and rewrite the tests' asserts, anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
# `make gpu` sets nothing up: it takes the torch, triton, transformers, pytest and pytest-xdist of
# this Python. The other tests need the packages that `make test` installs.
GPU_PYTHON ?= python3
GPU_JOBS ?= 12
TARGET ?=
DRAFT ?=
# Of ten minutes each at most, on 16 cores; most of it goes into compiling kernels.
GPU_PARTS := gpu-kernels gpu-engine gpu-families gpu-joints gpu-tables
GPU_MARKS := not sweep
gpu-kernels: GPU_MARKS :=
gpu-kernels: GPU_TESTS := tests/kernels
gpu-engine: GPU_TESTS := $(patsubst %,tests/engine/test_%.py,network loop loop_failures replays logit_edits captured_edits \
	decoder quantised_checkpoints memory prompt_logprobs logprobs_overlap pipeline phases batch_invariant_answers compiling \
	heads block_heads mtp fp8_pages batch_invariance_at_load head_loading predictions ranked_drafts unread_rows)
gpu-families: GPU_TESTS := $(patsubst %,tests/engine/test_%.py,hybrids hybrid_mtp hybrid_loading quantised_hybrids \
	kept_states host_tier host_tier_answers expert_models quantised_experts shared_experts)
gpu-joints: GPU_TESTS := tests/engine/test_losslessness.py tests/engine/test_edit_losslessness.py

# For Linux with Python 3.11, as constraints.txt; pip itself can check hashes but not write them down.
LOCK := build/uv/bin/uv pip compile --quiet --no-config --generate-hashes --no-annotate --constraint \
	constraints.txt --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--custom-compile-command "make lock"

.PHONY: gpu gpu-ranks gpu-set-up lock $(GPU_PARTS) \
	help serve test deep every-test oldest newest sweep clients scale release check format-check lint types mutate docs docs-test format \
	clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make serve CONFIG=configs/ngram.toml ARGS="--port 8123 --set scheduler.max_num_seqs=8"'
	@echo '  make test ARGS="tests/server -k chat"'

serve: .make/runtime ## start the server (CONFIG=, ARGS=)
	@exec $(BIN)/outrider serve $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: .make/dev ## run the tests (ARGS= for pytest)
	$(TEST) $(ARGS)

deep: .make/dev ## run the further cases that make test leaves out
	$(TEST) -m deep $(ARGS)

# Two runs would import, collect and start the same servers twice.
every-test: .make/dev ## test and deep in one run, as CI has them
	$(TEST) -m 'not sweep and not scale and not docs' $(ARGS)

oldest newest: %: .make/%
	$(subst $(BIN)/pytest,build/$@/bin/python -m pytest -p no:cacheprovider,$(TEST)) $(ARGS)

oldest: ## run the tests with the oldest versions that pyproject.toml allows (6 GB; ARGS= for pytest)
newest: ## likewise with the newest

sweep: .make/dev ## run what takes too long for every change: all parameters against all others
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -m sweep --timeout 3600 $(ARGS)

clients: .make/clients ## fetch other people's clients (5 GB), and run them against the server
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -m clients $(ARGS)

scale: .make/scale ## fetch routers, Ray and Helm (1.5 GB), and try replicas behind them (15 minutes)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -m scale --timeout 900 $(ARGS)

check: format-check lint types test ## formatting, lint, types and tests

format-check: .make/dev
	$(BIN)/ruff format --check .

lint: .make/dev ## ruff
	$(BIN)/ruff check .

types: .make/dev ## mypy --strict
	$(BIN)/mypy $(PACKAGES:%=-p outrider.%)

mutate: .make/dev ## break the code in known ways, and see that the tests notice
	$(BIN)/python scripts/mutate.py $(ARGS)

gpu: ## gpu-kernels, gpu-engine, gpu-families, gpu-joints, gpu-tables; each takes ten minutes at most (GPU_PYTHON=)
	@$(MAKE) --no-print-directory --keep-going --jobs 1 $(GPU_PARTS)

# Neighbours share compiled kernels: a worker takes a run of tests, and later what others have left.
gpu-kernels gpu-engine gpu-families gpu-joints: gpu-set-up
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -n $(GPU_JOBS) --dist worksteal \
		-m '$(GPU_MARKS)' -o timeout=600 --durations 10 $(GPU_TESTS) $(ARGS)

# It needs two GPUs, so it is no part of gpu. A process a test: only the first engine of a process
# reads parts of sums in the memory of the other GPU.
gpu-ranks: gpu-set-up ## tests of a target that two GPUs share
	tests=$$($(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m 'gpu and not sweep' --collect-only tests/engine/ranks/test_ranks.py $(ARGS) | \
		grep ::) && printf '%s\n' "$$tests" | \
		OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} xargs -d '\n' -n 1 $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m gpu -o timeout=600

gpu-tables: gpu-set-up ## tables of kernels and engine (TARGET= DRAFT= model directories)
	env -u PYTHONSAFEPATH $(GPU_PYTHON) benchmarks/kernels.py
	@if [ -n "$(TARGET)" ] && [ -n "$(DRAFT)" ]; then \
		env -u PYTHONSAFEPATH $(GPU_PYTHON) benchmarks/engine.py "$(TARGET)" "$(DRAFT)" && \
		env -u PYTHONSAFEPATH $(GPU_PYTHON) benchmarks/same_answers.py "$(TARGET)" "$(DRAFT)"; \
	else echo "Skipped the engine's table and answers: they need TARGET= and DRAFT=."; fi

gpu-set-up:
	@$(GPU_PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .

lock: .make/uv ## pin what the images install, each file by its hash (constraints.txt decides on versions)
	echo setuptools | $(LOCK) - --output-file docker/build.lock
	$(LOCK) --extra tracing pyproject.toml --output-file docker/requirements.lock

release: .make/runtime ## build wheel and source archive into dist/, try the wheel, and print what is left to do
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python scripts/release.py

docs: .make/docs ## build the pages of docs/ into build/docs
	$(BIN)/python scripts/settings_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs-test: .make/dev ## run every command that README and docs/ show (port 8000; what cannot run is listed)
	$(BIN)/pytest -m docs -rs tests/docs $(ARGS)

format: .make/dev ## format and sort the code in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what was installed and built here (converted models stay)
	rm -rf .venv .make build dist *.egg-info kernels/cpu/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

# ---- set-up, each step once

.make/venv:
	@if [ "$$(uname -s)" = Darwin ]; then \
		echo "On macOS, models run on the CPU: no GPU is used. For those, see docs/installing.md."; fi
	@if [ -z "$(PYTHON)" ]; then \
		echo "Outrider needs Python 3.11 or newer, and none was found on PATH." >&2; \
		echo "Install one, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not a Python 3.11 or newer that has its venv module." >&2; \
		echo "Name another (make PYTHON=...); on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
	@echo "Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@mkdir -p .make && touch $@

# torch first and by itself: later steps then keep the build it chose.
.make/runtime: .make/venv pyproject.toml setup.py $(CONSTRAINTS) $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@echo "Installing torch and the server (minutes, the first time)"
	@$(PIP) torch setuptools
	@$(PIP) --no-build-isolation --editable .
	@touch $@

.make/dev: .make/runtime
	@echo "Installing the tools for tests and checks"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

.make/docs: .make/runtime
	@echo "Installing what builds the docs"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

.make/uv: .make/venv
	@$(BIN)/python -m venv build/uv && build/uv/bin/python -m pip install --quiet $(PIP_ARGS) uv
	@touch $@

# What the server needs, at one end of the ranges; our own code and the tests' tools come from .venv, behind it.
.make/oldest: RESOLUTION := lowest-direct
.make/newest: RESOLUTION := highest
.make/oldest .make/newest: .make/%: .make/dev .make/uv pyproject.toml
	@echo "Installing the $* versions of what the server needs"
	@build/uv/bin/uv venv --quiet --no-config --clear --python $(BIN)/python build/$*
	@build/uv/bin/uv pip install --quiet --no-config --upgrade --resolution $(RESOLUTION) \
		--python build/$*/bin/python --requirements pyproject.toml
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3*/site-packages)')" \
		> $$(echo build/$*/lib/python3*/site-packages)/outrider.pth
	@touch $@

# Each in an environment of its own: no two of them agree on their dependencies.
.make/clients: .make/dev tests/clients/requirements.txt tests/clients/package.json
	@while read -r requirement; do \
		folder=build/clients/$${requirement%%[=[]*}; \
		echo "Installing $$requirement"; \
		$(BIN)/python -m venv $$folder && \
		$$folder/bin/python -m pip install --quiet $(PIP_ARGS) "$$requirement" || exit 1; \
	done < tests/clients/requirements.txt
	@mkdir -p build/clients/node && cp tests/clients/package.json build/clients/node/
	@if command -v npm >/dev/null; then npm install --silent --prefix build/clients/node; fi
	@touch $@

# Each in an environment of its own, too; Ray's replicas need this project beside it.
.make/scale: .make/dev tests/scale/requirements.txt
	@while read -r requirement; do \
		folder=build/scale/$${requirement%%[=[]*}; \
		echo "Installing $$requirement"; \
		$(BIN)/python -m venv $$folder && \
		$$folder/bin/python -m pip install --quiet $(PIP_ARGS) "$$requirement" || exit 1; \
	done < tests/scale/requirements.txt
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3*/site-packages)')" \
		> $$(echo build/scale/ray/lib/python3*/site-packages)/outrider.pth
	@touch $@
