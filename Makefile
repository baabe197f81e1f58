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

# what asks for little but a core, beside the tests of threads, processes and whole trainings:
# about half of the work
ALONE := $(addprefix tests/,testing ir passes frontend loops codegen tune base cli kernels bench)

# OpenMP's threads sleep at barriers: with other processes on the cores, spinning there took more
# time than the tests. Types are checked meanwhile; what that says comes last. What runs behind `&`
# does not hear Ctrl-C: the shell ends it.
test: export OMP_WAIT_POLICY := passive
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@failed=0; types=; alone=; logs=$$(mktemp -d); \
	trap '[ -z "$$types$$alone" ] || kill $$types $$alone 2>/dev/null; rm -rf "$$logs"' EXIT; \
	trap 'cat "$$logs"/alone 2>/dev/null; exit 130' INT TERM; \
	$(BIN)/mypy > $$logs/types 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q $(ALONE) > $$logs/alone 2>&1 & alone=$$!; \
	$(BIN)/python -m pytest -q $(ALONE:%=--ignore=%) || failed=$$?; \
	wait $$alone || failed=$$?; alone=; cat $$logs/alone; \
	wait $$types || failed=$$?; types=; echo "$(BIN)/mypy"; cat $$logs/types; \
	exit $$failed

demo: $(STAMP)
	$(BIN)/python examples/ppo_mujoco.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
