# SGLang on a machine without a GPU, in an environment of its own: its pins differ from those of .venv.

SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG := sglang==0.5.23
SGLANG_TESTS := tests/rollout/sglang $(wildcard tests/distributed/test_sglang*.py)

.PHONY: sglang-cpu test-sglang test-sglang-full

sglang-cpu: $(SGLANG_STAMP)  ## make .venv-sglang: hybridrl, megatron-core and SGLang on a CPU

$(SGLANG_STAMP): pyproject.toml tools/sglang_cpu/requirements.txt tools/sglang_cpu/constraints.txt
	rm -rf $(SGLANG_VENV)
	"$(PYTHON)" -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --upgrade 'pip>=24'
	$(SGLANG_BIN)/python -m pip install -c tools/sglang_cpu/constraints.txt torch
	$(SGLANG_BIN)/python -m pip install -c tools/sglang_cpu/constraints.txt -e . -r tools/sglang_cpu/requirements.txt
	$(SGLANG_BIN)/python -m pip install --no-deps '$(SGLANG)'
	$(SGLANG_BIN)/python -c 'from hybridrl.rollout.sglang import internals; internals.check()'
	@touch $@

test-sglang: sglang-cpu  ## the SGLang tests, in .venv-sglang
	$(TEST_ENV) $(SGLANG_BIN)/python -m pytest $(SGLANG_TESTS)

test-sglang-full: sglang-cpu  ## every SGLang test
	$(TEST_ENV) $(SGLANG_BIN)/python -m pytest -m '' $(SGLANG_TESTS)
