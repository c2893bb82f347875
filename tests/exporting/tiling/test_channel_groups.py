"""Steps whose large values come in groups of channels: the same step, in an arena that can be counted by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models.microcontroller_networks import NETWORKS, Inverted
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError
from memplan.exporting.exported import Exported
from memplan.exporting.tiling import tilings

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Excited(nn.Module):
    """What leaves the channels between two layers of them: a mean over each, that comes back as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Inverted(3, 4, 2, 4), nn.MaxPool2d(2))
        self.less, self.more = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)
        self.last, self.head = nn.ConvTranspose2d(4, 8, 4, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        y = y * torch.sigmoid(self.more(F.relu(self.less(y.mean((2, 3), keepdim=True)))))
        return self.head(F.silu(self.last(y)).mean((2, 3)))


def exported(model: nn.Module, folder: Path, input: str = "1x3x16x16", **options: Any) -> Exported:
    step: dict[str, Any] = {"targets": "1:int64<2", "loss": F.cross_entropy, "budget": "100 MiB"}
    step["optimizer"] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    return memplan.export(model, input, folder=folder, **step | options)


@needs_compiler
@pytest.mark.parametrize("frozen", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_groups_of_channels_compute_what_the_whole_does(
    frozen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilings, "SMALL", 0)
    monkeypatch.setattr(tilings, "MOST", 160)
    torch.manual_seed(0)
    model = Excited()
    for one in model.layers.modules():  # what makes the channels, and what reads them: rows and columns of weights
        if isinstance(one, nn.Conv2d) and one.kernel_size == (1, 1):
            one.requires_grad_(frozen is None)
    weights: dict[str, Any] = {} if frozen is None else {"frozen_weights": frozen}
    weights["optimizer"] = lambda p: torch.optim.SGD([one for one in p if one.requires_grad], lr=0.05, momentum=0.9)
    with pytest.raises(BudgetError) as caught:
        exported(model, tmp_path / "a", budget=0, **weights)
    tight = exported(model, tmp_path / "b", budget=caught.value.smallest_budget, **weights)
    assert tight.verdict.proven, "losses, weights and running statistics as PyTorch has them"
    assert tight.ram == caught.value.smallest_budget == tight.smallest_budget
    text = (tmp_path / "b" / "excited.c").read_text()
    assert "static void insert(" in text, "what others read as a whole is put together"
    (*_, (again, whole), (tiles, parts)) = tight.levers
    assert (again.split()[0], tiles.split()[2]) == ("results", "channels")
    assert parts < whole


def test_nothing_is_split_where_samples_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilings, "SMALL", 0)
    done = exported(Excited(), tmp_path, input="2x3x8x8", targets="2:int64<2", verify=False)
    assert not any("channels" in what for what, _ in done.levers)


@needs_compiler
@pytest.mark.slow
def test_a_mobilenet_learns_in_the_memory_of_few_channels(tmp_path: Path) -> None:
    """By hand, where the last layer alone is trained: what the second block reads, one channel of the six times as many
    that it makes of it, what the depthwise convolution makes of that, and the sum of what the block makes of all."""
    torch.manual_seed(0)
    model = NETWORKS["mobilenet_v2"][0]().requires_grad_(False)
    list(model.modules())[-1].requires_grad_(True)
    plain = lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)  # noqa: E731
    roomy = exported(model, tmp_path / "a", "1x3x96x96", optimizer=plain, verify=False)
    tight = exported(model, tmp_path / "b", "1x3x96x96", optimizer=plain, budget=roomy.smallest_budget)
    assert tight.verdict.proven
    assert tight.arena == 4 * (48 * 48 * (8 + 1) + 24 * 24 * (1 + 8))


@pytest.mark.slow
@needs_compiler
def test_the_frozen_part_in_eight_bits_is_converted_to_floats_by_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The integers are whole, 24 planes of 16 x 16 bytes; the same in floats would be four times as many."""
    monkeypatch.setattr(tilings, "SMALL", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1).requires_grad_(False), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.ReLU6(), nn.Conv2d(24, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip
    options: dict[str, Any] = {"optimizer": "sgd:lr=0.05", "frozen_layers": "int8", "name": "net"}
    options["calibrate"] = [(torch.randn(4, 3, 16, 16), torch.arange(4) % 2)]
    with pytest.raises(BudgetError) as caught:
        exported(model, tmp_path, budget=0, **options)
    done = exported(model, tmp_path, budget=caught.value.smallest_budget, **options)
    assert done.verdict.proven
    assert "int8_dequantize(" in (tmp_path / "net.c").read_text()
    assert done.arena < 4 * 24 * 16 * 16, "no buffer of floats holds all channels"
