"""What cannot be exported: the op and its layer are named, and what is said to write instead is proven."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import InputError, RecordingError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def planes(part: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), part, nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 2, 6, 6))
    return model


def exported(model: nn.Module, folder: Path, input: str = "2x2x6x6", loss: Any = F.cross_entropy) -> bool:
    step: dict[str, Any] = {"targets": "2:int64<3", "optimizer": "sgd:lr=0.05", "name": "net", "loss": loss}
    return memplan.export(model, input, folder=folder, **step).verdict.proven


def resampled(x: torch.Tensor) -> torch.Tensor:
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 5), torch.linspace(-1, 1, 5), indexing="ij"), 2)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=True)


def folded(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 2, 2, 2, 3, 3, 2)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None, str]] = {
    "rrelu_with_noise_functional": (lambda: planes(nn.RReLU()), lambda: planes(nn.LeakyReLU(0.2)), "nn.LeakyReLU"),
    "avg_pool3d": (lambda: planes(nn.LocalResponseNorm(2)), lambda: planes(nn.GroupNorm(2, 4)), "nn.GroupNorm"),
    "im2col": (lambda: planes(nn.Unfold(3)), lambda: planes(nn.Conv2d(4, 36, 3)), "nn.Conv2d"),
    "topk": (
        lambda: planes(Apply(lambda x: x.flatten(1).topk(3).values)),
        lambda: planes(Apply(lambda x: x.flatten(2).amax(2))), "amax",
    ),
    "_fft_r2c": (lambda: planes(Apply(lambda x: torch.fft.rfft(x).abs())), None, "buffer of cosines"),
    "grid_sampler_2d": (
        lambda: planes(Apply(resampled)), lambda: planes(Apply(lambda x: F.interpolate(x, size=(5, 5)))),
        "F.interpolate",
    ),
    "upsample_bicubic2d": (
        lambda: planes(nn.Upsample(scale_factor=2, mode="bicubic")),
        lambda: planes(nn.Upsample(scale_factor=2, mode="bilinear")), "bilinear",
    ),
    "convolution": (
        lambda: planes(nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, (1, 3, 3)))),
        lambda: planes(nn.Sequential(nn.Unflatten(1, (2, 2)), Apply(lambda x: x.flatten(1, 2)), nn.Conv2d(4, 3, 3))),
        r"nn.Conv2d with the depth in the channels, x.flatten\(1, 2\)",
    ),
    "_native_batch_norm_legit_functional": (
        lambda: planes(nn.InstanceNorm2d(4, track_running_stats=True)), lambda: planes(nn.InstanceNorm2d(4)),
        "Use track_running_stats=False",
    ),
    "max_pool2d_with_indices": (
        lambda: planes(nn.Sequential(nn.Upsample(scale_factor=3), nn.MaxPool2d(16, 1))),
        lambda: planes(nn.Sequential(nn.Upsample(scale_factor=3), nn.MaxPool2d(9, 1), nn.MaxPool2d(8, 1))),
        "smaller max pools, one behind another",
    ),
    "adaptive_max_pool2d": (
        lambda: planes(nn.AdaptiveMaxPool2d(4)), lambda: planes(nn.AdaptiveMaxPool2d(3)), "Choose such a size"
    ),
    "sum": (
        lambda: planes(Apply(lambda x: folded(x).sum((0, 2, 4, 6)).reshape(2, -1))),
        lambda: planes(Apply(lambda x: folded(x).sum(6).sum(4).sum(2).sum(0).reshape(2, -1))),
        "one dimension after another",
    ),
    "addmm": (
        lambda: planes(Apply(lambda x: torch.addmm(x[0, 0], x[0, 1], x[1, 1], beta=0.5, alpha=2).reshape(2, -1))),
        lambda: planes(Apply(lambda x: (0.5 * x[0, 0] + 2 * (x[0, 1] @ x[1, 1])).reshape(2, -1))),
        "beta \\* bias",
    ),
    "gather": (
        lambda: planes(Apply(lambda x: x.flatten(1).gather(1, torch.zeros(1, 4).long()).reshape(2, -1))),
        lambda: planes(Apply(lambda x: x.flatten(1)[:1].gather(1, torch.zeros(1, 4).long()).reshape(2, -1))),
        "Narrow the tensor first",
    ),
    "_upsample_bilinear2d_aa": (
        lambda: planes(Apply(lambda x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True))),
        lambda: planes(Apply(lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"))),
        "Leave out antialias",
    ),
    "upsample_nearest3d": (
        lambda: planes(Apply(lambda x: F.interpolate(x.unsqueeze(1), scale_factor=(1, 2, 2)))),
        lambda: planes(Apply(lambda x: F.interpolate(x.unsqueeze(1).flatten(0, 1), scale_factor=2))), "Use planes",
    ),
    "_adaptive_avg_pool3d": (
        lambda: planes(Apply(lambda x: F.adaptive_avg_pool3d(x, 2))),
        lambda: planes(Apply(lambda x: F.adaptive_avg_pool2d(x, 2).unflatten(1, (2, 2)).mean(2))), "Use planes",
    ),
    "scatter_reduce": (
        lambda: planes(Apply(lambda x: x.scatter_reduce(2, torch.zeros(2, 4, 6, 6).long(), x, "amax"))),
        lambda: planes(Apply(lambda x: x.scatter_add(2, torch.zeros(2, 4, 6, 6).long(), x))), "Use scatter_add",
    ),
    "argmax": (
        lambda: planes(Apply(lambda x: x * x.argmax(2, keepdim=True))),
        lambda: planes(Apply(lambda x: x * (x == x.amax(2, keepdim=True)))), "amax",
    ),
    "bucketize": (
        lambda: planes(Apply(lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)))),
        lambda: planes(Apply(lambda x: x * (x.detach()[..., None] > torch.linspace(-1, 1, 5)).float().sum(-1))),
        "Count the edges below",
    ),
    "prod": (
        lambda: planes(Apply(lambda x: x.sigmoid().prod(3))),
        lambda: planes(Apply(lambda x: x.sigmoid().log().sum(3).exp())), r"log\(\).sum\(dim\).exp",
    ),
    "logcumsumexp": (
        lambda: planes(Apply(lambda x: x.logcumsumexp(2))),
        lambda: planes(Apply(lambda x: x.exp().cumsum(2).log())), "cumsum",
    ),
    "hypot": (
        lambda: planes(Apply(lambda x: x.hypot(x + 1))),
        lambda: planes(Apply(lambda x: (x * x + (x + 1) * (x + 1)).sqrt())), "sqrt",
    ),
    "fmod": (
        lambda: planes(Apply(lambda x: x.fmod(0.3))), lambda: planes(Apply(lambda x: x - 0.3 * (x / 0.3).trunc())),
        "trunc",
    ),
    "randn_like": (lambda: planes(Apply(lambda x: x + torch.randn_like(x))), None, "as an input"),
    "bernoulli": (
        lambda: planes(Apply(lambda x: x * torch.bernoulli(x.sigmoid()))), lambda: planes(nn.Dropout(0.5)), "nn.Dropout"
    ),
    "exponential": (lambda: planes(Apply(lambda x: F.gumbel_softmax(x.flatten(1)))), None, "as an input"),
}  # fmt: skip


@pytest.mark.parametrize("op", thinned(REFUSED, 2))
def test_the_op_its_layer_and_another_way_are_said(op: str, tmp_path: Path) -> None:
    refused, _, way = REFUSED[op]
    with pytest.raises(RecordingError, match=rf"{op}\b.*\(in layer 1.*{way}"):
        exported(refused(), tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op, (_, way, _) in REFUSED.items() if way is not None])
def test_the_other_way_is_proven(op: str, tmp_path: Path) -> None:
    way = REFUSED[op][1]
    assert way is not None
    assert exported(way(), tmp_path)


def test_a_loss_is_named_with_another_one(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"multi_margin_loss_backward.*F.cross_entropy"):
        exported(nn.Linear(4, 3), tmp_path, "2x4", F.multi_margin_loss)


def test_a_step_that_diverges_in_pytorch_is_named_with_its_rate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y, lr = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(3, 2), 1e6
    step = {"targets": y, "loss": F.mse_loss, "optimizer": f"sgd:lr={lr}", "folder": tmp_path, "name": "net"}
    with pytest.raises(InputError, match="diverges in PyTorch itself") as caught:
        memplan.export(model, x, **step)
    said = re.search(r"the loss is (inf|nan) after update (\d+), at learning rate 1e\+06", str(caught.value))
    assert said is not None
    trained, rolled, losses = nn.Linear(4, 2), (x, y), list[float]()
    trained.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
    for k in range(20):
        rolled = tuple(tensor.reshape(-1).roll(-7 * k).reshape(tensor.shape) for tensor in (x, y))
        optimizer.zero_grad()
        loss = F.mse_loss(trained(rolled[0]), rolled[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert next(k for k, loss in enumerate(losses) if not math.isfinite(loss)) == int(said[2])
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_loss_that_is_not_finite_at_the_start_is_told_from_divergence(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(InputError, match="the loss is nan in PyTorch itself, before any update"):
        memplan.export(
            model, torch.randn(3, 4), targets=torch.zeros(3, 2), optimizer="sgd:lr=0.1", folder=tmp_path, name="net",
            loss=lambda output, target: ((output - output - 1).log() - target).mean(),
        )  # fmt: skip


def test_a_batch_norm_without_momentum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1: momentum=None"):
        exported(planes(nn.BatchNorm2d(4, momentum=None)), tmp_path)


@needs_compiler
def test_buffers_that_a_step_changes_are_read_before(tmp_path: Path) -> None:
    """The power iteration of a spectral norm reads vectors that it changes: nothing of it may be computed again."""
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    assert exported(nn.Sequential(linear, nn.ReLU(), nn.Linear(8, 3)), tmp_path, "2x6")
