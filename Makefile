# Everything happens in .venv; each step is done once and again only when its inputs change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
INPUTS := pyproject.toml constraints.txt src/vitreous/version.py

.PHONY: demo test test-all lint types check clean bench bench-peers docs

demo: $(VENV)/.core   ## explain the packaged photo with the embedded model
	$(BIN)/vitreous explain src/vitreous/assets/photos/cat.jpg --method attention,rollout,gae,cdam --out vitreous-out

test: $(VENV)/.dev    ## all tests but the slow studies
	$(BIN)/python -m pytest -n auto -m "not slow" --cov=vitreous --cov-report=term --cov-fail-under=90 -q

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types

bench: $(VENV)/.dev   ## every method beside those of its peers that are installed
	$(BIN)/python benchmarks/bench.py

bench-peers: $(VENV)/.dev   ## install the peers
	$(PIP) install -c constraints.txt -e '.[bench]'

docs: $(VENV)/.dev    ## the documentation site, in site/; pictures are kept in .cache/ while nothing changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vitreous needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(INPUTS) | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) vitreous-out site .cache .pytest_cache .mypy_cache .ruff_cache .coverage
