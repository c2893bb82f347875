# make demo | test | test-all | coverage | check | docs | browser | changelog | goldens

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

.PHONY: demo test test-all coverage check docs browser changelog goldens clean

# The first model needs no library but torch, and is explained before MONAI is installed for the second.
demo: $(VENV)/.cli
	$(BIN)/memplan explain examples/resnet18.py:build $(DEMO_FLAGS)
	@$(MAKE) --no-print-directory $(VENV)/.demo
	$(BIN)/memplan explain examples/unet3d.py:build $(DEMO_FLAGS)

# Dozens of tests run memplan in another interpreter: bytecode spares each half a second, also where Python writes none.
PYTEST = $(BIN)/python -m compileall -qq src && OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=25

test: $(VENV)/.test browser
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

# and what repeats the same in more places
test-all: $(VENV)/.test browser
	$(PYTEST) $(PYTEST_FLAGS)

# branches, too
coverage: $(VENV)/.test browser
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered $(PYTEST_FLAGS)

# pyright reads the tests too, so it needs what they import
check: $(VENV)/.test $(VENV)/.check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Debian's Chromium, in which pages are tested; where it cannot be had, these tests are skipped.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
CHROMIUM = apt-get install -y -qq --no-install-recommends chromium
browser:
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	  { $(CHROMIUM) || { apt-get update -qq && $(CHROMIUM); }; } >/dev/null 2>&1 \
	  || echo "no Chromium, and apt-get cannot install it: tests of pages in a browser are skipped"

# The site, in build/site; a warning is an error. Nothing is downloaded. The reports of its gallery are made by the
# commands that it shows, which takes a minute.
docs: $(VENV)/.docs $(VENV)/.report $(VENV)/.charts $(VENV)/.examples
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/site

changelog: $(VENV)/.check
	$(BIN)/towncrier build --draft

# What torch does on emulated cards (goldens/dry), and the tables made of it. MEMPLAN_DRY_TORCH names an environment with
# a CUDA build of torch and the steps' libraries; else one is made, of 6 GB. The H100's steps run with the variable that
# the real one's were recorded with. Exit code 3 of golden.py: some steps cannot be run, which the index says.
DRY_TORCH := $(or $(MEMPLAN_DRY_TORCH),$(VENV)-cuda)
GOLDEN = $(BIN)/python tools/gpu/golden.py --torch $(DRY_TORCH) --jobs 1 --dry
goldens: $(VENV)/.test $(if $(MEMPLAN_DRY_TORCH),,$(DRY_TORCH)/.torch)
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GOLDEN) h100 || test $$? -eq 3
	for card in a100 rtx4090 t4; do $(GOLDEN) $$card || test $$? -eq 3 || exit 2; done
	$(BIN)/python benchmarks/dry_accuracy.py
	$(BIN)/python benchmarks/cudnn_accuracy.py --cudnn $(DRY_TORCH)
	$(BIN)/python benchmarks/smaller_input.py --cudnn $(DRY_TORCH)

$(VENV)-cuda/.torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-cuda
	$(VENV)-cuda/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) torch==2.11.0 \
	  $$(grep -E '^(transformers|peft|monai|einops)==' $(CONSTRAINTS))
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-cuda build/site

# One stamp for each extra: installed once, and again when the versions change.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(INSTALL) '.[$*]'
	touch $@

# The package without extras.
$(VENV)/.cli: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(INSTALL) .
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

# The compilers and the emulators on which exports for small devices are tried (Debian's), and what example projects for
# boards are built with. Without them, tests that need them are skipped, or fail where MEMPLAN_REQUIRE_TOOLCHAIN is 1, as
# in CI; `pip install ziglang` brings a clang where there is none.
TOOLCHAIN = gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm clang gcc-riscv64-unknown-elf \
    picolibc-riscv64-unknown-elf gcc-avr avr-libc arduino-core-avr qemu-system-misc cmake
.PHONY: toolchain
toolchain:
	{ command -v qemu-system-arm && command -v arm-none-eabi-gcc && command -v clang && \
	  command -v riscv64-unknown-elf-gcc && command -v avr-gcc && command -v qemu-system-avr && \
	  command -v cmake && test -d /usr/share/arduino/hardware/arduino/avr; } > /dev/null || \
	    (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(TOOLCHAIN))
