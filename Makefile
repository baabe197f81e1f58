# make test: set up .venv, lint, check types, run the tests.   make demo: train eager and compiled.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test demo setup lint format
.DEFAULT_GOAL := test

setup: $(STAMP)

# triton is named apart: a CPU build of torch does not bring it, and its interpreter runs kernels
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): downloads torch and simulators once, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[sim,dev]' triton
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# what needs one core only, beside the tests of threads, processes and whole trainings
ALONE := tests/testing tests/ir tests/passes tests/frontend tests/loops tests/codegen tests/tune

test: lint
	@$(BIN)/python -m pytest -q $(ALONE) > .pytest-alone.log 2>&1 & alone=$$!; \
	$(BIN)/python -m pytest -q $(ALONE:%=--ignore=%); others=$$?; \
	wait $$alone; alone=$$?; cat .pytest-alone.log; rm -f .pytest-alone.log; \
	exit $$(( others > alone ? others : alone ))

demo: $(STAMP)
	$(BIN)/python examples/ppo_mujoco.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
