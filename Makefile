# Everything runs from the virtual environment in .venv. Making it needs the network; after that hosts-oldest alone does.
#
#   PYTHON       the Python that makes .venv (3.11 or newer); found when not given
#   PYTEST_ARGS  more arguments for pytest:       make test PYTEST_ARGS="tests/unit -x"
#   WORKERS      test processes of one thread, 0 for one of all:  make test WORKERS=0
#   GPU_PYTHON   a Python whose torch has CUDA:   make gpu-check GPU_PYTHON=python3
#   SIZE         of the evaluation, cpu or gpu:   make evaluation SIZE=gpu GPU_PYTHON=python3
#   ONLY         slices of it, or their folders:  make evaluation SIZE=gpu ONLY="gpt2-half resnet-minute"
#   MINUTES      that a slice of it may take:     make evaluation SIZE=gpu MINUTES=150 ONLY=gpt2-freed

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test quick soak hosts-oldest check format figures docs gpu-check evaluation clean

BIN := .venv/bin
STAMP := .venv/installed
# What the demo needs: the installation of the tests if it is there, otherwise the command alone.
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),.venv/installed-demo)
IS_RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTEST_ARGS ?=
WORKERS ?= 2
GPU_PYTHON ?= $(BIN)/python
SIZE ?= cpu
# Tests start many Pythons, and each would compile all of src again.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests run in one process: what a file sets up once, as a job of ranks, is set up once.
BY_FILE := --dist loadfile --no-loadscope-reorder
OLDEST := build/oldest-hosts
HOSTS := tests/equivalence/test_accelerate.py tests/equivalence/test_lightning.py tests/equivalence/test_transformers.py \
	tests/equivalence/test_hosts_of_unlike_lengths.py tests/equivalence/test_hosts_that_are_planned.py \
	tests/equivalence/test_hosts_that_compile.py tests/equivalence/test_hosts_that_count_nothing.py \
	tests/equivalence/test_hosts_that_hold_more.py tests/equivalence/test_trainers_own_losses.py \
	tests/equivalence/test_joined_windows.py tests/distributed/test_host_ranks.py tests/unit/test_examples.py

help: ## Show this list
	@echo "make <target>:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Make .venv, or bring it up to date with pyproject.toml and constraints.txt

.venv/bin/python:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		for candidate in python3 python3.13 python3.12 python3.11; do \
			if "$$candidate" -c '$(IS_RECENT)' 2>/dev/null; then python="$$candidate"; break; fi; \
		done; \
	elif ! "$$python" -c '$(IS_RECENT)'; then \
		echo "PYTHON=$$python is not Python 3.11 or newer ($$("$$python" --version 2>&1 || true))." >&2; exit 1; \
	fi; \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11 or newer: tried python3, python3.13, python3.12, python3.11." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "Making .venv with $$("$$python" --version) (about a minute the first time)"; \
	"$$python" -m venv .venv

$(STAMP): pyproject.toml constraints.txt | .venv/bin/python
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/installed-demo: pyproject.toml constraints.txt | .venv/bin/python
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[cli]'
	@touch $@

demo: $(DEMO) ## Compare a small GPT on real text with its plan, in two minutes
	@rm -rf runs/demo
	@$(BIN)/trimtab compare words_gpt --steps 12 --out runs/demo

test: $(STAMP) ## Run the tests
	@$(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1) $(BIN)/python -m pytest \
		$(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) $(BY_FILE)) $(PYTEST_ARGS)

quick: override PYTEST_ARGS += -m "not slow"
quick: test ## Run the tests without those marked slow

soak: $(STAMP) ## Run the long matrices, and the long tests that `make test` leaves out
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/soak -n $(or $(filter-out 0,$(WORKERS)),1) --long also $(PYTEST_ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(or $(filter-out 0,$(WORKERS)),1) $(BY_FILE) --long only $(PYTEST_ARGS)

hosts-oldest: $(STAMP) ## Run the tests of hosts on the oldest of their versions; fetches these
	@rm -rf $(OLDEST)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --target $(OLDEST) \
		-r constraints-oldest.txt
	@PYTHONPATH=$(OLDEST):src OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(filter-out 0,$(WORKERS)),1) $(BY_FILE) \
		--long also $(HOSTS) -k "not test_examples or host or accelerate or lightning or transformers" $(PYTEST_ARGS)

check: $(STAMP) ## Check format, lint and types; changes nothing
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy

figures: $(STAMP) ## Rebuild the figures in README.md and docs/ from benchmarks/results
	@$(BIN)/python -m benchmarks.figures

docs: $(STAMP) ## Build the documentation's site; warnings are errors
	@$(BIN)/python docs/reference.py
	@$(BIN)/python docs/build_site.py build/site
	@echo "Site: build/site/index.html"

format: $(STAMP) ## Put files into the house's format, and repair what lint can repair
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP)) ## Run the tests that need a CUDA device
	@if ! $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "No CUDA device is visible to $(GPU_PYTHON): no GPU test was run." >&2; exit 1; \
	fi
	@PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu -rs $(PYTEST_ARGS)

evaluation: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP)) ## Go on with the paper's evaluation, a slice of minutes after another
	@PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.paper.evaluation --size $(SIZE) \
		$(if $(MINUTES),--slice-minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY))

clean: ## Remove the environment, caches and builds; keeps runs/
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
