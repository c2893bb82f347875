# make demo | test | test-all | coverage | check | changelog

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
CONSTRAINTS := constraints/cpu.txt
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
# Tests run side by side, each with kernels of one thread: two of many threads each would wait for one another.
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() or 1))")

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) -e

.PHONY: demo test test-all coverage check changelog clean

demo: $(VENV)/.examples
	$(BIN)/memplan explain examples/resnet18.py:build $(DEMO_FLAGS)
	$(BIN)/memplan explain examples/unet3d.py:build $(DEMO_FLAGS)

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=25

test: $(VENV)/.test
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

# and what repeats the same in more places
test-all: $(VENV)/.test
	$(PYTEST) $(PYTEST_FLAGS)

# branches, too
coverage: $(VENV)/.test
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered $(PYTEST_FLAGS)

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
$(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(INSTALL) '.[$*]'
	touch $@

# The CPU build of torch: from where pip looks anyway, else from PyTorch's own index; where neither has one for this
# machine, the registry's build, which on Linux brings CUDA along.
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) torch==$(TORCH)+cpu \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check --retries 1 --extra-index-url $(TORCH_INDEX) torch==$(TORCH)+cpu \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) torch==$(TORCH)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
