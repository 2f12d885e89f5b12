# Everything is installed into .venv in this folder, at the first use.
#   make demo            start the whole system and measure it   (make demo ARGS=--json prints JSON)
#   make test            lint, types, a quick selection of the tests and one whole system
#   make test-all        all tests but long ones; what CI runs
#   make rollout         replace everything in an installation under load   (make rollout ARGS=--help)
#   make chaos           break a running system at random, compare every answer  (make chaos ARGS=--help)
#   make fuzz            send a running system 10,000 bad inputs, judge every answer  (make fuzz ARGS=--help)
#   make tenants         let one tenant attack, measure what its neighbour notices of it  (make tenants ARGS=--help)
#   make cluster         run the rendered Helm chart without a cluster: upgrade, kills  (make cluster ARGS=--help; root)
#   make test-clients    run other people's clients against a live server  (make test-clients ARGS="openai_node --write")
#   make test-engines    run vLLM and SGLang with hints, in environments of their own that the first use makes
#   make docs            serve the documentation on this machine     (make docs ARGS="-a 127.0.0.1:8100")
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-first test-second test-slow test-long test-clients test-engines rollout chaos fuzz tenants cluster bench lint stubs lock sbom audit install clean distclean

ARGS ?=
LOCK_ARGS ?=
AUDIT_ARGS ?=
PYTEST_ARGS ?=
BENCH ?= speedup
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
BIN := $(VENV)/bin
STAMP := $(VENV)/.outrider-installed

# Python 3.11 and 3.12 come first: only these have a wheel that contains a Redis server.
PYTHON ?= $(shell for candidate in python3 python3.12 python3.11; do \
	"$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo "$$candidate"; exit; }; done; \
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo python3)

# On Linux torch from the default index includes gigabytes of CUDA libraries. Without a GPU the CPU build is enough. It
# comes from the configured index if that offers it, else from TORCH_CPU_INDEX.
TORCH ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
HAS_GPU ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU || true)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install -qq --progress-bar off

# Some images set this. Without bytecode each of a suite's hundreds of processes would compile the source again.
export PYTHONDONTWRITEBYTECODE :=
# No process contacts a model hub or prompts for input.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export RAY_USAGE_STATS_ENABLED := 0

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))
	@echo "also: make test-first, test-second, test-slow (the parts of test-all), test-long, bench, lint, stubs, lock, sbom, audit, install, clean, distclean"

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard outrider/engine/compiled/*.cpp outrider/engine/compiled/*.h)
	@if [ -z "$(PYTHON)" ]; then \
		echo "Outrider needs Python 3.11 or newer and found none. Install one, or: make PYTHON=/path/to/python3"; \
		exit 1; fi
	@echo "[1/3] virtual environment in $(VENV) ($$("$(PYTHON)" --version))"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	@echo "[2/3] $(TORCH), $(if $(filter-out 0,$(HAS_GPU)),GPU build,CPU build)"
	@index=(); \
	if $(BIN)/python -c 'import torch' 2>/dev/null; then :; \
	elif [ "$(or $(HAS_GPU),0)" = 0 ] && [ -n "$(TORCH_CPU_INDEX)" ] && $(PIP) install --dry-run --no-deps --quiet --report - "$(TORCH)" 2>/dev/null \
		| grep -Ec '^ *"(nvidia|cuda)-[a-z]' >/dev/null; then index=(--index-url "$(TORCH_CPU_INDEX)"); fi; \
	$(PIP_INSTALL) "$${index[@]}" "$(TORCH)" || { \
		echo "$(TORCH) is not available. Without a GPU the CPU build is looked for at TORCH_CPU_INDEX=$(TORCH_CPU_INDEX):"; \
		echo "name another index, or use the default index with: make TORCH_CPU_INDEX="; exit 1; }
	@echo "[3/3] Outrider and its dependencies"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m command_line demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint test-first

test-all: test test-second test-slow
	$(BIN)/python -m tests.clients --short --may-be-offline

test-first: $(STAMP)
	$(BIN)/python -m pytest --circle first -m "not long" -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-second: $(STAMP)
	$(BIN)/python -m pytest --circle second -m "not long and not slow" -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest --circle second -m "slow and not long" $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 7200 $(PYTEST_ARGS)

test-clients: $(STAMP)
	@$(BIN)/python -m tests.clients $(ARGS)

test-engines: $(STAMP)
	tests/engines/install_vllm.sh $(VLLM_VENV)
	tests/engines/install_sglang.sh $(SGLANG_VENV)
	OUTRIDER_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python OUTRIDER_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
		$(BIN)/python -m pytest tests/engines -m "not endurance" $(PYTEST_ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m tests.e2e.chaos $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -m tests.e2e.fuzz $(ARGS)

tenants: $(STAMP)
	@$(BIN)/python -m tests.e2e.tenants $(ARGS)

cluster: $(STAMP)
	@$(BIN)/python -m tests.cluster $(ARGS)

rollout: $(STAMP)
	@$(BIN)/python -m tests.e2e.rollout $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH) $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m mkdocs serve $(ARGS)

stubs: $(STAMP)
	$(BIN)/python -m protos.generate

lock: $(STAMP)
	$(BIN)/python -m k8s.images.locks $(LOCK_ARGS)

sbom: $(STAMP)
	$(BIN)/python -m k8s.images.sbom

audit: $(STAMP)
	$(BIN)/python -m k8s.images.audit $(AUDIT_ARGS)

clean:
	rm -rf build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis ./*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
