"""What a test needs of the machine: the processor, the version of torch, an environment with a CUDA build of torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The release of torch, such as ``(2, 13)``."""
ENVIRONMENT = os.environ.get("MEMPLAN_DRY_TORCH")
"""The environment with a CUDA build of torch in which dry runs are tested."""

needs_cuda_torch = pytest.mark.skipif(
    ENVIRONMENT is None, reason="MEMPLAN_DRY_TORCH names no environment with a CUDA build of torch"
)

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="oneDNN's convolutions take other buffers without AVX-512, more of them in bfloat16",
)
"""For tests of the bytes of convolutions on this machine, or of budgets that only bfloat16 keeps."""

needs_sizes_as_symbols = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="attention on the CPU asks for numbers in torch 2.11: each new size is captured by itself there",
)
"""For attention that is traced with symbols for sizes."""


def skip_without(*tools: str) -> None:
    """Skip a test for which commands or folders of `make toolchain` are missing; where MEMPLAN_REQUIRE_TOOLCHAIN is 1,
    as in CI, the test fails instead."""
    missing = [tool for tool in tools if shutil.which(tool) is None and not Path(tool).is_dir()]
    if missing:
        message = f"{', '.join(missing)} not found: make toolchain"
        if os.environ.get("MEMPLAN_REQUIRE_TOOLCHAIN") == "1":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


def examples(number: int) -> int:
    """Return how many examples a property draws that needs ``number`` of them: a fifth where slow tests do not run."""
    return number * hypothesis.settings().max_examples // 100


def slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrization that repeat the others in more places: `make test-all` runs them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases of a parametrization of which all but each ``every``-th are `slow`."""
    listed = list(cases)
    return [case for at, case in enumerate(listed) for case in ([case] if at % every == 0 else slow(case))]
