"""Convolutions of a piece of a volume, in halves, beside torch's own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.tiles.recorded_segments import recorded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.planning.tiles.convolutions import CONVOLUTIONS, convolution_gradients
from memplan.planning.tiles.tiled import Axis, Tiled

CONVOLUTION = "aten.convolution.default"
Options = tuple[list[int], list[int], list[int], bool, list[int], int]


def options(stride: list[int], padding: list[int], dilation: list[int]) -> Options:
    """Stride to groups, as of ``aten::convolution``."""
    return stride, padding, dilation, False, [0], 1


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Options]] = {
    "even": ((1, 16, 10, 16, 16), (12, 16, 3, 3, 3), options([1, 1, 1], [0, 1, 1], [1, 1, 1])),
    "odd": ((1, 8, 7, 9, 11), (6, 8, 3, 3, 3), options([1], [1], [1])),
    "strided": ((1, 8, 7, 9, 8), (6, 8, 3, 3, 3), options([2, 2, 2], [1, 1, 1], [1, 1, 1])),
    "dilated": ((1, 8, 7, 9, 16), (6, 8, 3, 3, 3), options([1, 1, 1], [2, 2, 2], [2, 2, 2])),
    "unequal": ((1, 4, 5, 5, 6), (4, 4, 3, 1, 2), options([1, 2, 3], [1, 0, 2], [1, 1, 1])),
    "wide_padding": ((1, 4, 3, 3, 3), (4, 4, 3, 3, 3), options([1, 1, 1], [2, 2, 2], [1, 1, 1])),
}


def is_rounding(tensor: Tensor, exact: Tensor) -> bool:
    """Return whether a tensor in float32 differs from one in float64 by the rounding of its sums alone."""
    return bool((tensor - exact).abs().max() < 2e-5 * exact.abs().max())


def batch_sizes_of_kernels(function: Any) -> list[int]:
    """Return the batch sizes of the convolutions that torch runs in a function."""
    sizes = list[int]()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "convolution" in str(func):
                sizes.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Watching():
        function()
    return sizes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_the_whole_in_float64(case: str, has_bias: bool) -> None:
    """Two halves run as a batch; the element that both have is counted once."""
    torch.manual_seed(0)
    shape, weight_shape, of_convolution = CASES[case]
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(weight_shape, requires_grad=True)
    bias = torch.randn(weight_shape[0], requires_grad=True) if has_bias else None
    exact = torch.ops.aten.convolution.default(
        x.double(), weight.double(), None if bias is None else bias.double(), *of_convolution
    )
    y = CONVOLUTIONS[CONVOLUTION](x, weight, bias, *of_convolution)
    assert is_rounding(y, exact)
    assert y.is_contiguous()
    dy = torch.randn(y.shape)
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    expected = torch.autograd.grad(exact, leaves, dy.double())
    computed = torch.autograd.grad(y, leaves, dy)
    mask = [True, True, has_bias]
    alone = convolution_gradients(dy, x.detach(), weight.detach(), has_bias, of_convolution, mask)
    assert (alone[2] is not None) == has_bias
    for gradient, again, right in zip(computed, alone, expected, strict=False):
        assert again is not None
        assert is_rounding(gradient, right)
        assert torch.equal(gradient, again)


def test_halves_run_where_torch_would_copy_each_window() -> None:
    """Of one sample with few channels and rows. Not of many, for which torch runs oneDNN by itself, nor of images."""
    of_volume = options([1] * 3, [1] * 3, [1] * 3)
    weight, run = torch.randn(4, 4, 3, 3, 3), CONVOLUTIONS[CONVOLUTION]

    def batch_sizes(x: Tensor, w: Tensor = weight, of_convolution: Options = of_volume) -> list[int]:
        return batch_sizes_of_kernels(lambda: run(x, w, None, *of_convolution))

    assert batch_sizes(torch.randn(1, 4, 6, 8, 8)) == [2]
    assert batch_sizes(torch.randn(1, 4, 64, 96, 8)) == [1]
    assert batch_sizes(torch.randn(3, 4, 6, 8, 8)) == [3]
    assert batch_sizes(torch.randn(1, 4, 6, 8, 8).double(), weight.double()) == [1]
    assert batch_sizes(torch.randn(1, 4, 8, 8), weight[..., 0], options([1] * 2, [1] * 2, [1] * 2)) == [1]


def test_pieces_of_a_volume_run_in_halves() -> None:
    """Forward and backward, where a piece is small and the volume is not; of a last convolution the gradients alone."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 4, 3, padding=1))
    volume = torch.randn(1, 2, 64, 64, 8, requires_grad=True)
    parameters = list(layers.parameters())
    whole = layers(volume)
    program, tensors = recorded(layers, [volume], parameters)
    tiled = Tiled(program, Axis(2), 4)
    dy = torch.randn(whole.shape)
    expected = dict(zip([volume, *parameters], torch.autograd.grad(whole, [volume, *parameters], dy), strict=True))
    detached, results, gradients = [tensor.detach() for tensor in tensors], list[Tensor](), list[Tensor | None]()
    assert set(batch_sizes_of_kernels(lambda: results.extend(tiled.forward(detached, [])))) == {2}
    torch.testing.assert_close(results[0], whole)
    needed = [True] * len(detached)
    sizes = batch_sizes_of_kernels(lambda: gradients.extend(tiled.backward(detached, [], [dy], needed)))
    assert set(sizes) == {2}
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert gradient is not None
        assert is_rounding(gradient, expected[tensor].double())
