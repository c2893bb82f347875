"""Gradients of depthwise convolutions of images hardly larger than the kernel, beside what torch's profiler saw."""

from __future__ import annotations

import pytest
import torch
from truth.convolution_bytes import only_avx512
from truth.cpu_allocator import allocations, peak_of

from memplan.trace.semantics.cpu.convolution import transient_backward

pytestmark = [only_avx512, pytest.mark.usefixtures("one_thread")]
ALIGNED = 256
"""Bytes that oneDNN's buffers may take more, each to be aligned."""


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_gradient_of_a_low_image(layout: torch.memory_format, kernel: tuple[int, int], stride: int) -> None:
    for channels, space in ((64, (8, 8)), (64, (4, 4)), (64, (3, 2)), (48, (2, 3)), (24, (2, 2)), (64, (1, 5))):
        x = torch.randn(2, channels, *space).contiguous(memory_format=layout)
        weight, padding = torch.randn(channels, 1, *kernel), [kernel[0] // 2, kernel[1] // 2]
        how = ([stride, stride], padding, [1, 1], False, [0, 0], channels)
        gradient = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *how))
        for mask in ([False, True, True], [False, True, False], [True, True, True]):
            args = (gradient, x, weight, [channels], *how, mask)
            results: list[tuple[torch.Tensor | None, ...]] = []
            run = torch.ops.aten.convolution_backward.default
            measured = peak_of(allocations(lambda run=run, args=args, to=results: to.append(run(*args))))
            held = sum(one.untyped_storage().nbytes() for one in results[0] if one is not None)
            assert abs(transient_backward(args, {}, results[0]) + held - measured) <= ALIGNED, (space, mask)
