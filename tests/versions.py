"""What tests ask of the version of torch."""

from __future__ import annotations

import pytest
import torch

needs_sizes_as_symbols = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="attention on the CPU asks for numbers in torch 2.11: each new size is captured by itself there",
)
"""For attention that is traced with symbols for sizes."""
