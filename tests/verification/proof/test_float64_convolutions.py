"""Convolutions in float64 in parts, beside torch's of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.verification.proof import float64_convolutions
from memplan.verification.proof.float64_convolutions import float64_convolutions as in_parts


class Sizes(TorchDispatchMode):
    """Notes the largest operand of a convolution or its derivative, in elements, within the context, and counts the
    derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.derivatives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.largest = max(self.largest, args[0].numel(), args[1].numel())
            self.derivatives += "backward" in str(func)
        return func(*args, **(kwargs or {}))


def gradients(convolution: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result, its gradients, and those of a gradient penalty: a second derivative."""
    x = x.clone().requires_grad_(x.requires_grad)
    y = convolution(x)
    weights = list(convolution.parameters())
    first = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
    return [y, *first, *torch.autograd.grad(first[0].square().sum(), [weights[0], *([x] if x.requires_grad else [])])]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (2, {"kernel_size": 3, "padding": 1}),
        (2, {"kernel_size": 5, "padding": 2, "stride": 2, "bias": False}),
        (2, {"kernel_size": (3, 1), "padding": (4, 0), "dilation": (2, 1)}),  # rows of nothing but padding
        (2, {"kernel_size": 2, "stride": 3, "groups": 2}),
        (3, {"kernel_size": 3, "padding": 1, "stride": (2, 1, 1)}),
    ],
)
@pytest.mark.parametrize("part_bytes", [1, 20_000, 100_000])
def test_parts_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, rank: int, options: dict[str, Any], needs_gradient: bool, part_bytes: int
) -> None:
    """Single rows, several, and two of three samples."""
    monkeypatch.setattr(float64_convolutions, "_PART_BYTES", part_bytes)
    torch.manual_seed(0)
    convolution = (nn.Conv2d if rank == 2 else nn.Conv3d)(4, 6, **options).double()
    x = torch.randn(3, 4, *[13] * rank, dtype=torch.float64, requires_grad=needs_gradient)
    expected, sizes = gradients(convolution, x), Sizes()
    with in_parts():
        computed = gradients(convolution, x)
    with sizes, in_parts():
        convolution(x).sum().backward()
    for ours, whole in zip(computed, expected, strict=True):
        assert (ours - whole).norm() <= 1e-13 * whole.norm()
    assert [tensor.stride() for tensor in computed] == [tensor.stride() for tensor in expected]
    windows = expected[0][:, 0].nbytes * convolution.weight[0].numel()
    if windows > part_bytes:
        most = max(x.numel(), expected[0].numel())  # a sample with its padding has less than two, and two than three
        assert sizes.largest <= most // 3 * 2 or (part_bytes == 100_000 and sizes.largest < most)


def test_parts_are_as_large_as_the_gradient_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part adds up a whole one."""
    monkeypatch.setattr(float64_convolutions, "_PART_BYTES", 1)
    convolution, x, sizes = nn.Conv2d(64, 64, 3, padding=1).double(), torch.randn(16, 64, 4, 4).double(), Sizes()
    windows = x.nbytes * 3 * 3
    with sizes, in_parts():
        convolution(x).sum().backward()
    assert 1 < sizes.derivatives <= windows / convolution.weight.nbytes


def test_others_run_as_they_are() -> None:
    """Float32, transposed convolutions, channels last and a single small sample are not split."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9)
    plain, transposed = nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)
    steps = [
        (plain, x), (transposed.double(), x.double()), (nn.Conv1d(4, 6, 3).double(), x.double()[:, :, 0]),
        (nn.Conv2d(4, 6, 3).double(), x.double().to(memory_format=torch.channels_last)),
        (nn.Conv2d(4, 6, 3).double(), x.double()[:1]),
    ]  # fmt: skip
    for module, operand in steps:
        sizes = Sizes()
        expected = module(operand)
        with sizes, in_parts():
            computed = module(operand)
        assert computed.equal(expected)
        assert computed.stride() == expected.stride()
        assert sizes.largest >= operand.numel()
