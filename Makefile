# Everything works from a bare clone: the first run makes .venv and installs the pinned
# versions, a second one starts at once.
#
#   PYTHON    the interpreter that makes .venv (3.11 or later)
#   WORKERS   parallel test processes; 0 runs them in one process
#   ARGS      passed on: make test ARGS="-k verifier", make demo ARGS="--help"
#   PIP_ARGS  passed on to pip, e.g. an index that carries CPU-only builds of torch

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
PIP_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
# Stamps carry the time of the last good install, so an interrupted one starts over.
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format clean

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(RUN_READY) ## Decode a dozen prompts plainly and speculatively, and compare
	$(BIN)/paceline demo $(ARGS)

test: $(DEV_READY) ## Run the tests (without the slow ones)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(DEV_READY) ## Run all tests, the slow ones included
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow or not slow" $(ARGS)

lint: $(DEV_READY) ## Check style (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_READY) ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, builds and caches
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(RUN_READY): pyproject.toml constraints.txt
	@echo "Installing into .venv (a few minutes the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

$(DEV_READY): $(RUN_READY)
	$(PIP) -e ".[dev,gguf]"
	@touch $@
