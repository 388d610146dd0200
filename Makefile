# Everything runs in .venv, which `make setup` makes, or in the conda environment eagle3nb where that is active.
# Extra arguments: make run ARGS="...".
PYTHON ?= python3
ifeq ($(CONDA_DEFAULT_ENV),eagle3nb)
BIN := $(CONDA_PREFIX)/bin
SETUP := $(BIN)/python setup/install.py --here
else
BIN := .venv/bin
SETUP := $(PYTHON) setup/install.py
endif

.DEFAULT_GOAL := help
.PHONY: help setup run smoke test test-long lab docs lock clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup:  ## Install everything (again: returns at once). FLAVOUR=cpu or gpu overrides what it sees
	@$(SETUP)

run: setup  ## Train and check the small real model: params/smollm2.yaml
	$(BIN)/eagle3nb run params/smollm2.yaml $(ARGS)

smoke: setup  ## The same path with a tiny model: params/smoke.yaml
	$(BIN)/eagle3nb run params/smoke.yaml $(ARGS)

test: setup  ## Lint and tests
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest $(ARGS)

test-long: setup  ## Ten healthy small runs, each checked (about 15 minutes)
	$(BIN)/python -m pytest -m long $(ARGS)

lab: setup  ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks $(ARGS)

docs: setup  ## Write docs/checks.md anew from the checks
	$(BIN)/python -m eagle3nb.bridges.docs > docs/checks.md

lock:  ## Write setup/lock-*.txt anew from environment.yml (ARGS=--upgrade takes the newest versions)
	$(PYTHON) setup/relock.py $(ARGS)

clean:  ## Remove .venv and caches; results in runs/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +
