"""What people train, as whole steps: losses, activations, pools and norms that kernels or decompositions compute."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import RecordingError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
Part = Callable[[torch.Tensor], torch.Tensor]


class Apply(nn.Module):
    def __init__(self, function: Part) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def planes(*parts: nn.Module) -> nn.Module:
    """Convolution, parts, classes."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *parts, nn.Flatten(), nn.LazyLinear(3))
    net(torch.zeros(2, 2, 6, 6))
    return net


def vectors(out: int, *parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out), *parts)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


class Recurrent(nn.Module):
    def __init__(self, kind: str, **how: Any) -> None:
        super().__init__()
        self.cells, self.head = getattr(nn, kind)(3, 5, batch_first=True, **how), nn.LazyLinear(3)
        self(torch.zeros(2, 6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


PARTS: dict[str, Callable[[], nn.Module]] = {
    "prelu": lambda: planes(nn.PReLU(4)), "mish": lambda: planes(nn.Mish()), "glu": lambda: planes(nn.GLU(1)),
    "celu": lambda: planes(nn.CELU()), "hardshrink": lambda: planes(nn.Hardshrink(0.2)),
    "softshrink": lambda: planes(nn.Softshrink(0.2)), "threshold": lambda: planes(nn.Threshold(0.1, 0.0)),
    "log sigmoid": lambda: planes(nn.LogSigmoid()), "clamp": lambda: planes(Apply(lambda x: x.clamp(-0.5, 0.5))),
    "where": lambda: planes(Apply(lambda x: torch.where(x > 0, x, 0.1 * x))),
    "instance norm": lambda: planes(nn.InstanceNorm2d(4, affine=True)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(72, 3))),
    "normalize": lambda: planes(Apply(lambda x: F.normalize(x, dim=1))),
    "nearest": lambda: planes(nn.Upsample(scale_factor=2)),
    "bilinear": lambda: planes(nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear by corners": lambda: planes(nn.UpsamplingBilinear2d(size=(9, 7))),
    "pixel shuffle": lambda: planes(nn.PixelShuffle(2)), "channel shuffle": lambda: planes(nn.ChannelShuffle(2)),
    "adaptive max pool": lambda: planes(nn.AdaptiveMaxPool2d((3, 2))), "circular": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(108, 3)
    ),
    "amax": lambda: planes(Apply(lambda x: x.amax((2, 3)))),
    "max": lambda: planes(Apply(lambda x: x.flatten(2).max(2).values)),
    "std": lambda: planes(Apply(lambda x: torch.cat([x.std((2, 3)), x.var((2, 3))], 1))),
    "logsumexp": lambda: planes(Apply(lambda x: torch.logsumexp(x, (2, 3)))),
    "stack": lambda: planes(Apply(lambda x: torch.stack([x, 2 * x], 2))),
    "flip": lambda: planes(Apply(lambda x: x.flip(3))),
    "roll": lambda: planes(Apply(lambda x: x.roll(1, 3))), "cumsum": lambda: planes(Apply(lambda x: x.cumsum(2))),
}  # fmt: skip
LOSSES: dict[str, tuple[int, Any, Any]] = {
    "label smoothing": (3, "3:int64<3", lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "no reduction": (3, "3:int64<3", lambda o, y: F.cross_entropy(o, y, reduction="none").mean()),
    "one hot": (3, "3:int64<3", lambda o, y: F.mse_loss(torch.softmax(o, 1), F.one_hot(y, 3).float())),
    "bce": (2, "3x2", lambda o, y: F.binary_cross_entropy(torch.sigmoid(o), torch.sigmoid(y))),
    "bce with logits": (
        2, "3x2", lambda o, y: F.binary_cross_entropy_with_logits(o, torch.sigmoid(y), pos_weight=torch.full((2,), 2.0))
    ),
    "huber": (2, "3x2", F.huber_loss), "smooth l1": (2, "3x2", F.smooth_l1_loss),
    "kl": (3, "3x3", lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean")),
    "cosine": (4, "3x4", lambda o, y: (1 - F.cosine_similarity(o, y)).mean()),
    "triplet": (4, "3x4", lambda o, y: F.triplet_margin_loss(o[:1], o[1:2], o[2:]) + 0 * y.sum()),
    "gaussian": (2, "3x1", lambda o, y: F.gaussian_nll_loss(o[:, :1], y, F.softplus(o[:, 1:]))),
}  # fmt: skip
TEXTS: dict[str, Any] = {
    "each token": lambda o, y: F.cross_entropy(o.transpose(1, 2), y),
    "smoothed": lambda o, y: F.cross_entropy(o.transpose(1, 2), y, label_smoothing=0.1),
    "next token": lambda o, y: F.cross_entropy(o[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1)),
}


def proven(model: nn.Module, input: str, target: str, loss: Any, folder: Path) -> bool:
    step: dict[str, Any] = {"loss": loss, "optimizer": "sgd:lr=0.02", "budget": "1 MiB", "name": "net"}
    return memplan.export(model, input, targets=target, folder=folder, **step).verdict.proven


def part(name: str, folder: Path) -> bool:
    torch.manual_seed(0)
    return proven(PARTS[name](), "2x2x6x6", "2:int64<3", F.cross_entropy, folder)


def of_loss(name: str, folder: Path) -> bool:
    torch.manual_seed(0)
    out, target, loss = LOSSES[name]
    return proven(vectors(out), "3x6", target, loss, folder)


@needs_compiler
def test_steps_of_common_parts_are_proven(tmp_path: Path) -> None:
    assert part("bilinear", tmp_path / "a")
    assert proven(Text(), "2x7:int64<11", "2x7:int64<11", TEXTS["next token"], tmp_path / "d")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_proven(name: str, tmp_path: Path) -> None:
    assert part(name, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_proven(name: str, tmp_path: Path) -> None:
    assert of_loss(name, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_models_of_tokens_are_proven(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert proven(Text(), "2x7:int64<11", "2x7:int64<11", TEXTS[name], tmp_path)


def test_what_an_op_is_made_of_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="im2col, which is made of"):
        proven(
            nn.Sequential(nn.Unfold(3), nn.Flatten(), nn.Linear(288, 3)),
            "2x2x6x6",
            "2:int64<3",
            F.cross_entropy,
            tmp_path,
        )


@needs_compiler
def test_a_recurrent_step_is_proven(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert proven(Recurrent("GRU"), "2x6x3", "2:int64<3", F.cross_entropy, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2}])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_proven(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert proven(Recurrent(kind, **how), "2x6x3", "2:int64<3", F.cross_entropy, tmp_path)
