"""The environment with a CUDA build of torch that tests of dry runs use, by the variable MEMPLAN_DRY_TORCH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENVIRONMENT = os.environ.get("MEMPLAN_DRY_TORCH")

needs_cuda_torch = pytest.mark.skipif(
    ENVIRONMENT is None, reason="MEMPLAN_DRY_TORCH names no environment with a CUDA build of torch"
)
ROOT = Path(__file__).resolve().parents[1]
