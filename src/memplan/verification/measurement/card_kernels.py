"""Settle, while steps are compared on a CUDA card, which kernels compute and how precisely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def same_kernels_each_time() -> Iterator[None]:
    """Make cuDNN take kernels that add in the same order in each run, and not choose among them by their speed."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def float32_in_full() -> Iterator[None]:
    """Compute convolutions, recurrent layers and products of float32 in float32.

    By default convolutions round to the 10 bits of TF32 (`torch.backends.cudnn.allow_tf32`), which a deep net of batch
    norms makes so large in its first gradients that rounding cannot be told from errors. Both of torch's settings are
    kept, the older one and `fp32_precision`: it refuses to say the one where a program has set the other.
    """
    backends, cudnn = torch.backends, torch.backends.cudnn
    settings = cudnn.conv, cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul
    before, older = [one.fp32_precision for one in settings], None
    with suppress(RuntimeError):
        older = cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        if older is None:
            _set_each(settings, ["ieee"] * len(settings))
        else:
            _set_older(False, "highest")
        yield
    finally:
        if older is not None:
            _set_older(*older)
        _set_each(settings, before)


def _set_older(convolutions: bool, products: str) -> None:
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


def _set_each(settings: Iterable[Any], precisions: Iterable[str]) -> None:
    for one, precision in zip(settings, precisions, strict=True):
        one.fp32_precision = precision
