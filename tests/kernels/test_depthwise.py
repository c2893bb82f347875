"""Depthwise convolution, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak
from truth.float64_errors import INTERPRETED, assert_as_exact, values_and_gradients

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels import depthwise as source
from memplan.kernels.depthwise import depthwise, depthwise_backward

Function = Callable[..., Any]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    conv: Function = [F.conv1d, F.conv2d, F.conv3d][x.dim() - 3]
    return conv(x, weight, bias, groups=x.shape[1], **options)


def operands(shape: tuple[int, ...], taps: tuple[int, ...], bias: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = shape, (shape[1], 1, *taps), shape[1:2]
    return [torch.randn(size, dtype=torch.float64) for size in sizes[: 2 + bias]]


def pair(last: bool = False, **options: Any) -> tuple[Function, Function]:
    """The kernel and plain torch, with the options, of x in channels last if `last`."""

    def laid_out(function: Function) -> Function:
        def run(x: Tensor, *others: Tensor) -> Tensor:
            layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            y = function(x.contiguous(memory_format=layout), *others, **options)
            assert function is plain or y.is_contiguous(memory_format=layout)
            return y

        return run

    if last:
        return laid_out(kernels.depthwise_conv), laid_out(plain)
    return partial(kernels.depthwise_conv, **options), partial(plain, **options)


@dtypes
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_values_and_gradients(last: bool, dtype: torch.dtype) -> None:
    assert_as_exact(*pair(last, padding=1), operands((2, 5, 3, 4, 5), (2, 1, 2)), dtype, few=True)


@pytest.mark.parametrize(
    ("shape", "taps", "options"),
    [((2, 3, 9), (4,), {"padding": 3}),
     ((1, 3, 7, 9), (3, 2), {"stride": (2, 3), "padding": (0, 2), "dilation": (2, 1)}),
     ((1, 70, 4, 3), (1, 1), {}),
     ((1, 2, 3, 3), (3, 3), {}),
     ((2, 3, 6, 5, 7), (2, 3, 1), {"stride": 2, "padding": (1, 2, 0), "dilation": (3, 1, 2)}),
     ((1, 2, 36, 37), (2, 1), {"padding": (1, 3)}),
     ((0, 3, 5, 5), (3, 3), {})],
    ids=str,
)  # fmt: skip
def test_odd_sizes(shape: tuple[int, ...], taps: tuple[int, ...], options: dict[str, Any]) -> None:
    """More channels than a tile, more positions than a part, taps that never meet an element, nothing at all."""
    assert_as_exact(*pair(**options), operands(shape, taps), torch.float32, few=True)
    if len(shape) > 3 and 0 < math.prod(shape) < 1000:
        assert_as_exact(*pair(last=True, **options), operands(shape, taps), torch.float32, few=True)


def test_other_strides() -> None:
    """Every second column, a filter that is transposed, and a gradient that one number is expanded to."""

    def strided(function: Function) -> Function:
        return lambda x, w: function(x[..., ::2], w.transpose(-1, -2), None, padding=1).sum(-1)

    ours, theirs = strided(kernels.depthwise_conv), strided(plain)
    assert_as_exact(ours, theirs, operands((2, 3, 5, 8), (2, 3), bias=False), torch.float32, few=True)


def test_numeric_derivatives() -> None:
    ours = partial(kernels.depthwise_conv, stride=2, padding=1)
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in operands((2, 2, 3, 4), (3, 2))])


def test_gradients_that_nobody_wants() -> None:
    x, weight, bias = operands((2, 3, 5, 5), (3, 3))
    kernels.depthwise_conv(x, weight, bias.requires_grad_()).sum().backward()
    assert x.grad is None
    assert weight.grad is None
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, 2 * 9))  # so many elements has y for each


def test_autocast() -> None:
    x, weight, bias = (one.float() for one in operands((2, 3, 5, 5), (2, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        found = values_and_gradients(kernels.depthwise_conv, (x, weight, bias))
        assert kernels.depthwise_conv(x, weight, bias).dtype == torch.bfloat16
        expected = values_and_gradients(plain, (x, weight, bias))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
def test_compiled_as_one_graph() -> None:
    ours = partial(kernels.depthwise_conv, padding=1)
    compiled, of = torch.compile(ours, fullgraph=True, backend="aot_eager"), operands((2, 3, 5, 5), (3, 3))
    torch.testing.assert_close(values_and_gradients(compiled, of), values_and_gradients(ours, of), atol=0, rtol=0)


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
@pytest.mark.filterwarnings("ignore")  # opcheck's own
def test_the_op_is_as_torch_wants_it() -> None:
    x, weight, bias = (x.requires_grad_() for x in operands((2, 3, 5, 5), (3, 3)))
    torch.library.opcheck(depthwise, (x, weight, bias, [2, 1], [1, 0], [1, 1]))
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(depthwise, (last, weight, None, [1, 1], [1, 0], [1, 1]))
    of = x.detach()[..., :3, :3].contiguous(), x.detach(), weight.detach(), [1, 1], [0, 0], [1, 1]
    torch.library.opcheck(depthwise_backward, (*of, [True, False, True]))


@pytest.mark.skipif(not INTERPRETED, reason="of the kernels alone")
def test_sums_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of several tiles add up to what one part is."""
    of = [x.float() for x in operands((1, 2, 9, 40), (1, 2))]
    ours = partial(kernels.depthwise_conv, padding=1)
    once = values_and_gradients(ours, of)
    monkeypatch.setattr(source, "_TILE", 128)
    monkeypatch.setattr(source, "_LEAST_PART", 100)
    torch.testing.assert_close(values_and_gradients(ours, of), once, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("last", [False, *slow(True)], ids=["contiguous", "channels last"])
def test_sums_of_parts_of_several_samples(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of three samples, the last of two."""
    monkeypatch.setattr(source, "_LEAST_PART", 100)
    monkeypatch.setattr(source, "_PART_OF_TAPS", 1)
    assert source.parts_of(5, 35, 9, 64) == (2, 3, 35)
    assert_as_exact(*pair(last, padding=1), operands((5, 3, 5, 7), (3, 3)), torch.float32, few=True)


def test_refused() -> None:
    x, weight, bias = operands((2, 4, 5, 5), (3, 3))
    conv: Function = kernels.depthwise_conv
    with pytest.raises(InputError, match=r"depthwise_conv does not run under torch.vmap"):
        torch.vmap(lambda x: conv(x, weight))(x[None])
    with pytest.raises(
        InputError, match=r"weight has the shape \(4, 2, 3, 3\). Expected \(4, 1, ...\) of 4 dimensions"
    ):
        conv(x, weight.expand(4, 2, 3, 3))
    with pytest.raises(InputError, match=r"weight has the shape \(8, 1, 3, 3\)"):
        conv(x, weight.repeat(2, 1, 1, 1))
    with pytest.raises(InputError, match=r"x has the shape \(4, 5\).*with one to three further dimensions"):
        conv(x[0, 0, :4], weight)
    with pytest.raises(InputError, match=r"bias has the shape \(3,\). Expected \(4,\)"):
        conv(x, weight, bias[1:])
    with pytest.raises(InputError, match=r"stride is 0. Expected a number from 1 on, or 2 of them"):
        conv(x, weight, stride=0)
    with pytest.raises(InputError, match=r"padding is 'same'. Expected a number from 0 on"):
        conv(x, weight, padding="same")
    with pytest.raises(InputError, match=r"dilation is \(1, 1, 1\)"):
        conv(x, weight, dilation=(1, 1, 1))
    with pytest.raises(InputError, match=r"with padding \(0, 0\). Expected at least the filter's reach, \(7, 7\)"):
        conv(x, weight, dilation=3)
    with pytest.raises(InputError, match=r"x is of torch.float64, weight of torch.float32. .*Use autocast"):
        conv(x, weight.float())
    (gradient,) = torch.autograd.grad(conv(x.requires_grad_(), weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="depthwise_backward"):
        gradient.sum().backward()


# Memory


def blocks() -> Callable[[], None]:
    """A training step of two depthwise convolutions in a row."""
    weights = [nn.Parameter(torch.randn(8, 1, 3, 3, 3)) for _ in range(2)]
    inputs = torch.randn(2, 8, 24, 24, 24)

    def step() -> None:
        x = inputs
        for weight in weights:
            x = F.relu(kernels.depthwise_conv(x, weight, padding=1))
        x.sum().backward()
        for weight in weights:
            weight.grad = None

    return step


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_a_recorded_step_takes_what_is_measured() -> None:
    predicted = memplan.simulate(memplan.record(blocks, device="cpu")).peak_allocated
    assert predicted == measured_peak(blocks)


@pytest.mark.parametrize("samples", [1, 8, 128, 1000])
@pytest.mark.parametrize("positions", [1, 49, 196, 1959, 1961, 3919, 3921, 50176])
def test_sums_take_a_tenth_of_the_gradient_beside_one_of_each_filter(samples: int, positions: int) -> None:
    """Of 7 x 7 filters. Each position is in one part."""
    taps = 49
    for tile in (1, 64, 1024):
        programs, span, length = source.parts_of(samples, positions, taps, tile)
        assert (programs - 1) * taps <= samples * positions / 10
        of_sample = -(-positions // length)
        assert programs == -(-samples // span) * of_sample
        assert of_sample == 1 or (span == 1 and length % tile == 0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_results_are_all_but_a_few_sums() -> None:
    """By hand: x, y, the gradient of x, and 27 sums of each channel of a part of 1080 positions, rounded up to 2048."""
    samples, channels, side = 2, 16, 64

    def build() -> Callable[[], None]:
        x = torch.randn(samples, channels, side, side, side, requires_grad=True)
        weight = torch.randn(channels, 1, 3, 3, 3, requires_grad=True)

        def step() -> None:
            y = kernels.depthwise_conv(x, weight, padding=1)
            y.backward(y.detach())

        return step

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    tensor, sums = samples * channels * side**3 * 4, samples * channels * side**3 // 2048 * 27 * 4
    few = 4 * 27 * channels * 4 + 4096
    assert 3 * tensor + sums < step.peak_allocated <= 3 * tensor + sums + few
