"""Dropped rows against what gradients reach; sizes that do not come back; crops of skip connections."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from torch import Tensor, nn

import memplan

ID = "uneven-arithmetic"


def uneven(model: Any, shape: str, kind: str = "") -> list[memplan.Finding]:
    found = [finding for finding in memplan.check(model, shape, device="cpu") if finding.id == ID]
    return [finding for finding in found if finding.details["kind"] == kind] if kind else found


class UNet(nn.Module):
    """One level, padded; ``repair`` says how the two paths are made to meet."""

    def __init__(self, repair: str = "none") -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.up, self.repair = nn.ConvTranspose2d(4, 4, 2, 2), repair

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        size = skip.shape[2:]
        x = F.max_pool2d(skip, 2)
        x = self.up(x, output_size=size) if self.repair == "output_size" else self.up(x)
        if self.repair == "pad":
            x = F.pad(x, (0, size[1] - x.shape[3], 0, size[0] - x.shape[2]))
        if self.repair == "crop":
            skip = skip[:, :, : x.shape[2], : x.shape[3]]
        return self.last(torch.cat([skip, x], 1))


@pytest.mark.parametrize("layer", [
    nn.MaxPool2d(2), nn.AvgPool2d(3), nn.Conv2d(1, 1, 3, 2), nn.Conv2d(1, 1, 3, 2, 1), nn.Conv2d(1, 1, 5, 3, 1),
    nn.Conv2d(1, 1, 3, 2, 2, dilation=2), nn.Conv2d(1, 1, 1, 2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(3, 2, 1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", [17, 18, *slow(15, 16)])
def test_rows_are_dropped_that_no_gradient_reaches(layer: nn.Module, size: int) -> None:
    x = torch.rand(1, 1, size, size, requires_grad=True)
    probe = layer
    if isinstance(layer, nn.MaxPool2d):
        probe = nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding, ceil_mode=layer.ceil_mode)
    (gradient,) = torch.autograd.grad(probe(x).sum(), x)
    unread = (gradient[0, 0].abs().sum(1) == 0).nonzero().flatten().tolist()
    read = sorted(set(range(size)) - set(unread))
    behind = size - 1 - read[-1]
    gap = max(b - a - 1 for a, b in itertools.pairwise(read))  # a kernel of 1 skips every other row anyway
    dropped = [
        f.details["dropped"]
        for f in uneven(nn.Sequential(nn.Conv2d(1, 1, 1), layer), f"1x1x{size}x{size}", "dropped rows")
    ]
    assert dropped == ([[behind - gap] * 2] if behind > gap else [])


def test_what_the_stride_before_makes_of_them() -> None:
    net = lambda: nn.Sequential(nn.Conv2d(1, 1, 3, 2, 1), nn.Conv2d(1, 1, 3, 2, 1), nn.MaxPool2d(2))  # noqa: E731
    (finding,) = uneven(net, "1x1x36x36", "dropped rows")  # 36 -> 18 -> 9, of which the pool takes 8
    assert finding.details["pixels"] == [4, 4]
    assert finding.layer == "2"


@pytest.mark.parametrize(("repair", "kinds"), [
    ("none", set()), ("output_size", {"dropped rows"}), ("pad", {"dropped rows", "size not back"}),
    ("crop", {"dropped rows", "size not back", "crop"}),
])  # fmt: skip
def test_a_unet_of_an_odd_size(repair: str, kinds: set[str]) -> None:
    size = 24 if repair == "none" else 25
    assert {f.details["kind"] for f in uneven(lambda: UNet(repair), f"1x1x{size}x{size}")} == kinds
    if repair == "pad":
        (finding,) = uneven(lambda: UNet(repair), "1x1x25x25", "size not back")
        assert (finding.details["size"], finding.details["expected"]) == ([24, 24], [25, 25])
        assert finding.layer == "up"


@pytest.mark.parametrize("repair", ["pad", "crop", "output_size"])
def test_even_sizes_need_no_repair(repair: str) -> None:
    assert uneven(lambda: UNet(repair), "1x1x24x24") == []


def test_in_a_classifier_it_is_a_note() -> None:
    net = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))  # noqa: E731
    (finding,) = uneven(net, "1x1x15x15")
    assert finding.severity == "info"


def test_of_the_crops_of_a_line_the_largest_is_told_with_the_others() -> None:
    """A valid U-Net of two levels: 36 to 24 at the input's resolution, 14 to 12 at half of it."""

    class Valid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 5), nn.Conv2d(2, 2, 2)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(2, 2, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            first = self.down[0](x)
            second = self.down[1](F.max_pool2d(first, 2))
            x = self.down[2](F.max_pool2d(second, 2))
            for up, skip in zip(self.up, (second, first), strict=True):
                x = up(x)
                edge = (skip.shape[2] - x.shape[2]) // 2
                x = torch.cat([skip[:, :, edge:-edge, edge:-edge], x], 1)
            return x

    (finding,) = uneven(Valid, "1x1x38x38", "crop")
    assert (finding.details["size"], finding.details["kept"]) == (36, 24)
    assert finding.message.endswith("(here also from 14 to 12)")
