"""What tests ask of the processor."""

from __future__ import annotations

import pytest
import torch

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the buffers of oneDNN's convolutions are those of AVX-512: elsewhere it takes others for some",
)
"""For what holds an exact number of bytes of convolutions against this machine."""
