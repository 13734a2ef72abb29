# One command per thing a person does here. Each makes its own virtual environment when there is none.
#
#   make train ARGS='learner.steps=20'    overrides are passed on to run.py
#   make test  ARGS='-k staleness -n 0'         and options to pytest
#   make test  PYTHON=python3.12 VENV=../tw   another interpreter, another environment

VENV ?= .venv
# The first interpreter that is new enough; `make PYTHON=…` chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$p" && exit; \
	done; echo python3)
ARGS ?=

# Programs are called as modules, so that a checkout that was moved still works.
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.treeward-installed

.DEFAULT_GOAL := help
.PHONY: help train test test-slow lint check bench mlflow clean

help: ## show this list
	@echo "Treeward: reinforcement learning of LLM agents over rollout trees"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

train: $(STAMP) ## train a small agent on this machine (ARGS='key=value …' changes the config)
	@$(RUN) run.py $(ARGS)

# Two workers: more would only crowd a small machine, and each imports torch.
test: $(STAMP) ## run the fast tests
	@$(RUN) -m pytest -n 2 $(ARGS)

test-slow: $(STAMP) ## run the slow tests: whole runs of real processes
	@$(RUN) -m pytest -m slow -n 2 $(ARGS)

lint: $(STAMP) ## check style, formatting and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

check: lint test ## the gate for every change: lint, then the fast tests

bench: $(STAMP) ## measure the ring and write benchmarks/results/
	@$(RUN) -m benchmarks.ring $(ARGS)

mlflow: $(STAMP) ## browse the runs at http://127.0.0.1:5000
	@mkdir -p runs
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(RUN) -m mlflow ui --host 127.0.0.1 --port 5000 \
		--backend-store-uri sqlite:///runs/mlflow.db $(ARGS)

clean: ## remove the virtual environment and all caches; runs/ stays
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stamp is written last: an installation that was interrupted is taken up again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || { \
		echo "Treeward needs Python 3.11 or 3.12, but '$(PYTHON)' is $$($(PYTHON) -V 2>/dev/null | grep . || echo no Python at all): install one and run make again, or name it with make PYTHON=/path/to/python." >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "Python could not make a virtual environment in $(VENV): on Debian and Ubuntu, install the package python3-venv and run make again." >&2; exit 1; }
	@echo "installing Treeward and what it needs into $(VENV) (once; about 2 GB and some minutes)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-input -e '.[dev]'
	@touch $@
