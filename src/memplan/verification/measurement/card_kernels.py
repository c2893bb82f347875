"""Make cuDNN deterministic, or float32 precise, while steps are compared on a CUDA card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def deterministic_cudnn() -> Iterator[None]:
    """Make cuDNN choose deterministic kernels, and the same in each run instead of the fastest by measurement."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute convolutions, recurrent layers and matrix products of float32 without TF32.

    By default convolutions round to the 10 bits of TF32 (`torch.backends.cudnn.allow_tf32`). Many batch norms amplify
    that until rounding in the first layers' gradients is as large as a bug's error. Both of torch's interfaces are
    restored, the older one and `fp32_precision`: torch refuses to read the older one where a program has set the other.
    """
    backends, cudnn = torch.backends, torch.backends.cudnn
    settings = cudnn.conv, cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul
    before, older = [setting.fp32_precision for setting in settings], None
    with suppress(RuntimeError):
        older = cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        if older is None:
            _set_precisions(settings, ["ieee"] * len(settings))
        else:
            _set_tf32(convolutions=False, products="highest")
        yield
    finally:
        if older is not None:
            _set_tf32(*older)
        _set_precisions(settings, before)


def _set_tf32(convolutions: bool, products: str) -> None:
    """Set torch's older interface: whether convolutions use TF32, and the precision of matrix products."""
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


def _set_precisions(settings: Iterable[Any], precisions: Iterable[str]) -> None:
    """Set torch's newer interface, ``fp32_precision`` of each of its settings."""
    for setting, precision in zip(settings, precisions, strict=True):
        setting.fp32_precision = precision
