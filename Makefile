# One way to run each thing. `make help` lists them.

PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Installed before everything else. Point pip at an index of CPU builds (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) and a
# machine without a GPU is spared the CUDA libraries: a local version, as 2.13.0+cpu, is preferred to 2.13.0.
TORCH ?= torch==2.13.0
ENGINE ?= transformers
# The tests' ranks share the cores: one thread each.
TEST_ENV := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1

include sglang.mk

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-full lint types format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
		awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

install: $(STAMP)  ## make .venv and install hybridrl into it, editable, with what the tests need

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11 and no python3 found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade 'pip>=24'
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e '.[test]'
	@touch $@

quickstart: $(if $(filter sglang,$(ENGINE)),sglang-cpu,install)  ## train a small MoE model by GRPO on 2 ranks, show the curve (ENGINE=transformers or sglang)
	$(if $(filter sglang,$(ENGINE)),$(SGLANG_BIN),$(BIN))/python tools/quickstart.py --engine $(ENGINE)

test: lint types  ## lint, types and the quick tests
	$(TEST_ENV) $(BIN)/python -m pytest

test-full: lint types  ## every test: whole matrices and learning runs too
	$(TEST_ENV) $(BIN)/python -m pytest -m ''

lint: install  ## ruff: rules and format; hadolint: the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

types: install  ## mypy
	$(BIN)/mypy

format: install  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and builds; .venv and outputs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
