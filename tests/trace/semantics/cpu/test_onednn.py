"""Scratch of oneDNN's convolutions: predicted to the byte beside what torch's profiler saw, op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from truth.convolution_bytes import beyond_results, only_avx512

from memplan.trace.semantics.layout import has_amx

aten = torch.ops.aten
pytestmark = only_avx512
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "matrix product, by a column of each group": ((4, 24, 16, 16), (20, 12, 4, 4), {"groups": 2}),
    "of groups with a bias": ((1, 64, 6, 6), (8, 16, 3, 3), {"stride": 3, "groups": 4, "bias": True}),
    "of volumes": ((1, 8, 6, 6, 6), (8, 4, 3, 3, 3), {"groups": 2, "bias": True}),
    "strides that divide the width": ((8, 3, 12, 12), (16, 3, 2, 2), {"stride": 2}),
    "strides that do not": ((2, 8, 5, 5), (80, 8, 3, 3), {"stride": 2, "padding": 2}),
    "to one channel, laid out alike both ways": ((4, 2, 28, 28), (1, 2, 3, 3), {"stride": 3, "padding": 1}),
    "strided lines": ((4, 32, 20), (20, 32, 2), {"stride": 3}),
    "strided volumes": ((4, 4, 6, 6, 6), (20, 4, 2, 2, 2), {"stride": 3, "padding": 1}),
    "strided volumes of many channels": ((1, 48, 8, 8, 8), (160, 12, 3, 3, 3), {"stride": 3, "groups": 4}),
    "40 channels in two blocks of 32": ((2, 40, 12, 12), (16, 40, 3, 3), {"stride": 2, "padding": 1}),
    "groups of ten channels": ((1, 8, 28, 28), (40, 2, 3, 3), {"stride": 3, "groups": 4}),
    "groups of four": ((8, 8, 32, 32), (16, 2, 4, 4), {"stride": 2, "groups": 4}),
    "strided and dilated": ((2, 4, 8, 8), (2, 2, 3, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
    "strided and dilated lines": ((2, 24, 16), (8, 24, 4), {"stride": 2, "dilation": 2, "bias": True}),
    "few channels, strided and dilated": ((2, 1, 12, 12), (10, 1, 3, 3), {"stride": 2, "dilation": 2}),
    "padded by more than half of the kernel": ((4, 24, 20, 20), (20, 24, 3, 3), {"padding": 2, "bias": True}),
    "padded by all of the kernel": ((2, 16, 12, 12), (16, 16, 2, 2), {"padding": 2}),
    "by channel": ((8, 8, 8, 8), (8, 1, 3, 3), {"padding": 1, "groups": 8, "bias": True}),
    "by channel, padded": ((2, 48, 9, 9), (48, 1, 2, 2), {"padding": 2, "groups": 48}),
    "by channel, in volumes": ((2, 8, 6, 6, 6), (8, 1, 2, 2, 2), {"stride": 2, "groups": 8, "bias": True}),
    "groups of 16": ((4, 32, 10, 10), (32, 16, 3, 3), {"padding": 1, "groups": 2, "bias": True}),
    "groups of 16, dilated": ((4, 64, 8), (32, 16, 2), {"dilation": 2, "groups": 4}),
    "few channels": ((4, 3, 20, 20), (32, 3, 3, 3), {"padding": 1, "bias": True}),
    "some channels": ((4, 8, 20, 20), (24, 8, 3, 3), {"padding": 1, "bias": True}),
    "images": ((2, 32, 20, 20), (48, 32, 3, 3), {"padding": 1, "bias": True}),
    "one image": ((1, 32, 28, 28), (16, 32, 3, 3), {"padding": 1}),
    "volumes": ((2, 16, 8, 8, 8), (32, 16, 3, 3, 3), {"padding": 1, "bias": True}),
    "pixels": ((2, 64, 12, 12), (16, 64, 1, 1), {"bias": True}),
    "pixels, to few": ((4, 96, 8, 8), (2, 96, 1, 1), {"bias": True}),
    "pixels, to 40": ((4, 16, 12, 12), (40, 16, 1, 1), {"bias": True}),
    "pixels of one image": ((1, 32, 32, 32), (20, 32, 1, 1), {"bias": True}),
    "pixels of volumes": ((2, 64, 8, 8, 8), (40, 64, 1, 1, 1), {"bias": True}),
    "every second pixel": ((8, 96, 16, 16), (40, 96, 1, 1), {"stride": 2, "bias": True}),
    "images in channels last": ((4, 32, 14, 14), (64, 32, 3, 3), {"padding": 1, "last": True}),
    "strided in channels last": ((4, 32, 14, 14), (64, 32, 3, 3), {"stride": 2, "padding": 1, "last": True}),
    "pixels in channels last": ((4, 32, 14, 14), (64, 32, 1, 1), {"last": True}),
    "transposed": ((4, 8, 9, 9), (8, 20, 3, 3), {"stride": 2, "padding": 1, "transposed": True, "bias": True}),
    "transposed, to an even width": ((2, 16, 8, 8), (16, 16, 2, 2), {"stride": 2, "transposed": True, "bias": True}),
    "transposed groups": ((4, 24, 6), (24, 20, 2), {"groups": 2, "transposed": True}),
}


def check(name: str, dtype: torch.dtype, gradients: tuple[str, ...]) -> None:
    size, shape, how = SHAPES[name]
    dims, groups, transposed = len(size) - 2, how.get("groups", 1), how.get("transposed", False)
    steps = ([how.get(step, default)] * dims for step, default in (("stride", 1), ("padding", 0), ("dilation", 1)))
    settings = (*steps, transposed, [0] * dims, groups)
    channels = shape[1] * groups if transposed else shape[0]
    x, weight = torch.randn(size).to(dtype), torch.randn(shape).to(dtype)
    if how.get("last"):
        x, weight = (one.to(memory_format=torch.channels_last) for one in (x, weight))
    bias = torch.randn(channels).to(dtype) if how.get("bias") else None
    forward = (x, weight, bias, *settings)
    found = {"forward": beyond_results(aten.convolution.default, *forward)}
    gradient = torch.randn_like(aten.convolution(*forward))
    for of, mask in (("input", [True, False, False]), ("weight", [False, True, bias is not None])):
        backward = (gradient, x, weight, [channels] if bias is not None else None, *settings, mask)
        if of in gradients:
            found[of] = beyond_results(aten.convolution_backward.default, *backward)
    assert {of: predicted for of, (predicted, _) in found.items()} == {of: seen for of, (_, seen) in found.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_scratch_is_what_the_profiler_saw(name: str, threads: int) -> None:
    check(name, torch.float32, ("input", "weight"))


HALF = [name for name in SHAPES if not any(kind in name for kind in ("pixel", "channel,", "transposed", "last"))]
"""Those whose forward and input's gradient are counted to the byte in bfloat16, too."""


@pytest.mark.skipif(
    has_amx() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="with tiles, other kernels run"
)
@pytest.mark.parametrize("name", HALF)
@pytest.mark.usefixtures("one_thread")
def test_scratch_in_bfloat16_without_tiles(name: str) -> None:
    check(name, torch.bfloat16, ("input",))
