"""The installed torch: its release, and the dtypes that it computes by oneDNN. Seen in torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import functools

import torch

from memplan._torch.eager import no_modes

Version = tuple[int, int]


def torch_version() -> Version:
    """Return (major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def onednn_computes_in(dtype: torch.dtype) -> bool:
    """Return whether torch computes convolutions of this dtype, and matrix products in bfloat16, by oneDNN on this
    processor.

    Source: aten/src/ATen/native/mkldnn/Utils.h, `mkldnn_bf16_device_check` and `mkldnn_fp16_device_check`.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in checks:
        return dtype is torch.float32
    is_supported = getattr(torch.ops.mkldnn, checks[dtype], None)
    if is_supported is None:
        return dtype is torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()
    with no_modes():
        return bool(is_supported())
