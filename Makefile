# Everything happens in .venv; each step is done once and again only when its inputs change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
ASSETS := src/vitreous/assets
INPUTS := pyproject.toml constraints.txt src/vitreous/version.py

.PHONY: demo test test-all lint types check clean bench bench-peers docs stub

demo: $(VENV)/.core   ## explain two packaged photos with the embedded model
	$(BIN)/vitreous explain $(ASSETS)/photos/cat.jpg --method attention,rollout,gae,cdam --out vitreous-out
	$(BIN)/vitreous explain $(ASSETS)/photos/cat_and_coffee.jpg --method gae,gradcam --target espresso,tabby --out vitreous-out
	@echo
	@echo "One image, two classes, two different maps: vitreous-out/cat_and_coffee.png"
	@echo
	@echo "Try next: a target of your own from five examples, where the model sees it, and which map is to be trusted."
	@echo "  $(BIN)/vitreous concept build coffee $(ASSETS)/concepts/coffee"
	@echo "  $(BIN)/vitreous explain $(ASSETS)/photos/cat_and_coffee.jpg --method cdam,gradcam --target concept:coffee --out vitreous-out/concept"
	@echo "  $(BIN)/vitreous evaluate $(ASSETS)/photos --method gae,gradcam,rollout --metric token_deletion"

PYTEST = $(BIN)/python -m pytest -q -n auto --dist worksteal

test: $(VENV)/.dev    ## the quick suite: at most five minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.dev   ## the quick suite with shapes and types checked at every call, then everything with coverage
	VITREOUS_TYPES=all $(PYTEST) -m "not slow and not process and not ray and not browser"
	$(PYTEST) --cov=vitreous --cov-report=term --cov-fail-under=90

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

stub: $(VENV)/.dev    ## the types of every method's options, for editors
	$(BIN)/python docs/_make/stub.py

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
