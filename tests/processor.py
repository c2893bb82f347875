"""What tests ask of the processor."""

from __future__ import annotations

import pytest
import torch

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="oneDNN's convolutions take other buffers without AVX-512, more of them in bfloat16",
)
"""For what holds the bytes of convolutions on this machine against formulas, or needs budgets that bfloat16 keeps."""
