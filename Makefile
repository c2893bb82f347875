# make demo | test | check | changelog
#
# A CPU build of torch: make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
CONSTRAINTS := constraints/cpu.txt
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) -e

.PHONY: demo test check changelog clean

demo: $(VENV)/.examples
	$(BIN)/memplan explain examples/resnet18.py:build $(DEMO_FLAGS)
	$(BIN)/memplan explain examples/unet3d.py:build $(DEMO_FLAGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

# pyright reads the tests too, so it needs what they import
check: $(VENV)/.test $(VENV)/.check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

changelog: $(VENV)/.check
	$(BIN)/towncrier build --draft

clean:
	rm -rf $(VENV)

# One stamp for each extra: installed once, and again when the versions change.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
