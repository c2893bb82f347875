"""Networks on parts of their input, beside the whole in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memplan.planning.tiles.crops import Crops
from memplan.planning.tiles.program import NotTileable


class UNet(nn.Module):
    """Three levels, with a batch norm."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.LeakyReLU())
        self.third = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, 2) if transposed else nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 6, 1)
        )  # fmt: skip
        self.last = nn.Sequential(
            nn.Conv2d(12, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the result."""
        second = self.second(self.first(x))
        return self.last(torch.cat([second, self.up(self.third(second))], 1))


def unpadded() -> nn.Module:
    """Kernels that lose the border."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 5), nn.ConvTranspose2d(4, 2, 2, 2)
    )


def volumes() -> nn.Module:
    """Two kernels of three dimensions."""
    return nn.Sequential(nn.Conv3d(1, 3, 3, 2, 1), nn.PReLU(), nn.Conv3d(3, 2, 3, 1, 1))


def signals() -> nn.Module:
    """Two kernels of one dimension and a pool, which also makes a view of its indices."""
    return nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.MaxPool1d(2), nn.Conv1d(4, 2, 5, dilation=2))


NETWORKS = {
    "signal": (signals, (2, 1, 96), (2,)),
    "transposed": (lambda: UNet(transposed=True), (2, 3, 48, 64), (4, 4)),
    "bilinear": (lambda: UNet(transposed=False), (2, 3, 48, 64), (4, 4)),
    "unpadded": (unpadded, (1, 3, 60, 63), (2, 2)),
    "volume": (volumes, (1, 1, 16, 24, 20), (2, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_those_of_the_whole(name: str, count: int) -> None:
    """Every element of the result, whatever part it is computed with."""
    torch.manual_seed(0)
    build, shape, strides = NETWORKS[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        whole = model.eval()(x)
        crops = Crops(model, shape, x.dtype)
        parts = crops.grid((count,) * (len(shape) - 2))
        result = crops.run(x, parts, model)
    torch.testing.assert_close(result, whole, rtol=1e-12, atol=1e-12)
    assert crops.strides == strides
    assert len(parts) > 1 or count == 1


class Transposed(nn.Module):
    """A result whose dimensions are in another order in memory."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        """Return the elements of the input in another layout."""
        inverse = sorted(range(x.dim()), key=lambda dim: self.order[dim])
        return x.permute(self.order).contiguous().permute(inverse)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (2, 0, 1, 3)])
def test_the_result_has_the_layout_of_the_whole(order: tuple[int, ...]) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Transposed(*order)).eval(), torch.randn(2, 3, 16, 18)
    with torch.no_grad():
        crops = Crops(model, x.shape, x.dtype)
        result, whole = crops.run(x, crops.grid((2, 2)), model), model(x)
    assert result.stride() == whole.stride()
    torch.testing.assert_close(result, whole)


def test_a_part_reads_the_receptive_field_alone() -> None:
    """Two 3x3 kernels around a pool: by hand, a border of 1 + 2 * 1 elements, up to the next multiple of the stride."""
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(1, 1, 3, padding=1)).eval()
    crops = Crops(model, (1, 1, 64, 64), torch.float32)
    crop = crops.crop(((8, 16), (0, 32)))
    # rows 8 to 16 of the result read 7 to 17 of the pool, rows 14 to 34, and 13 to 35 before the first kernel
    assert crop.input_windows == ((12, 36), (0, 64))
    assert crop.part_in_crop_result == ((2, 10), (0, 32))


class Gated(nn.Module):
    """An input that is scaled by its own mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled input."""
        return x * x.mean((2, 3), keepdim=True).sigmoid()


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), 16, "sum over"),
        (Gated(), 16, "sum over dimensions of space"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), 16, "statistics of the whole"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 2)), 16, "axis"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=1.5, mode="bilinear")), 16, "fraction"),
    ],
)
def test_what_needs_the_whole_is_refused(model: nn.Module, size: int, why: str) -> None:
    """Global pools, norms over space, layers of fixed sizes, fractional factors."""
    with pytest.raises(NotTileable, match=why):
        Crops(model.eval(), (1, 3, size, size), torch.float32)


def test_a_crop_that_begins_between_strides_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stride of 1 in place of 2 a crop could begin at an odd row: the pool would pair other rows."""
    model = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)).eval()
    crops = Crops(model, (1, 1, 32, 32), torch.float32)
    monkeypatch.setattr(crops, "strides", (1, 1))
    monkeypatch.setattr(
        crops, "windows_along", lambda at, window: ((window[0] - 1, window[1] + 1), (1, window[1] - window[0] + 1))
    )
    with pytest.raises(NotTileable, match="positions"):
        crops.crop(((8, 16), (8, 16)))
