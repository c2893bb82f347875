"""157 small networks, losses and optimizers, each with what people train: exports are tried on all of them.

Each is one thing more than a convolution or two linear layers: an activation, a norm, a pool, a loss, an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Make = Callable[[], nn.Module]
Draw = Callable[[torch.Generator], torch.Tensor]
Loss = Callable[..., torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


@dataclass(frozen=True)
class Net:
    """A model with the data of a step. What is lazy in the model gets its size from the first sample."""

    make: Make
    input: Draw
    target: Draw
    loss: Loss = F.cross_entropy
    optimizer: Optimizer = sgd


class Calls(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def normal(*shape: int) -> Draw:
    return lambda generator: torch.randn(*shape, generator=generator)


def flags(*shape: int) -> Draw:
    return lambda generator: (torch.rand(*shape, generator=generator) > 0.5).float()


def signs(*shape: int) -> Draw:
    return lambda generator: torch.sign(torch.randn(*shape, generator=generator))


def shares(*shape: int) -> Draw:
    return lambda generator: torch.softmax(torch.randn(*shape, generator=generator), 1)


def classes(count: int, *shape: int, first: int = 0) -> Draw:
    return lambda generator: torch.randint(first, count, shape, generator=generator)


IMAGE, SERIES, VECTOR = normal(2, 2, 8, 8), normal(2, 3, 12), normal(3, 6)
WORDS = classes(11, 2, 7)


def of_images(*middle: Make, first: Make | None = None) -> Make:
    """Return what makes a network of a convolution, these layers, and a linear one."""
    head = first or partial(nn.Conv2d, 2, 4, 3, padding=1)
    return lambda: nn.Sequential(head(), *(make() for make in middle), nn.Flatten(), nn.LazyLinear(3))


def of_series(*middle: Make, first: Make | None = None) -> Make:
    return of_images(*middle, first=first or partial(nn.Conv1d, 3, 4, 3))


def in_series(*layers: Make) -> Make:
    return lambda: nn.Sequential(*(make() for make in layers))


def image(*middle: Make, first: Make | None = None, size: int = 8) -> Net:
    return Net(of_images(*middle, first=first), normal(2, 2, size, size), classes(3, 2))


def image_through(function: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    return image(partial(Calls, function))


def series(*middle: Make, first: Make | None = None) -> Net:
    return Net(of_series(*middle, first=first), SERIES, classes(3, 2))


def rectified(first: Make) -> Net:
    return image(nn.ReLU, first=first)


def vector(*layers: Make, count: int = 3) -> Net:
    return Net(in_series(*layers), normal(count, 6), classes(3, count))


def perceptron(outputs: int = 3) -> Make:
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def lost(loss: Loss, target: Draw, outputs: int = 3, count: int = 3) -> Net:
    return Net(perceptron(outputs), normal(count, 6), target, loss)


def stepped(optimizer: Optimizer) -> Net:
    return Net(perceptron(), VECTOR, classes(3, 3), F.cross_entropy, optimizer)


def linear(before: int, after: int) -> Make:
    return partial(nn.Linear, before, after)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.transpose(1, 2))[0][:, -1])


class Cells(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(x.shape[0], 8)
        state: Any = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros
        for t in range(x.shape[2]):
            state = self.cell(x[:, :, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class WrittenGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(3, 24), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[2]):
            (a, b, c), (d, e, f) = self.of_input(x[:, :, t]).chunk(3, 1), self.of_state(h).chunk(3, 1)
            reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
            h = (1 - update) * torch.tanh(c + reset * f) + update * h
        return self.head(h)


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head, self.need_weights = nn.Linear(8, 3), need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.transpose(1, 2))
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.words(x)).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ij->bj", x, self.weight)


def expanded(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(n, c, 2 * h, 2 * w)


def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.binary_cross_entropy_with_logits(output, target, reduction="none")
    return ((1 - torch.sigmoid(output)) ** 2 * each).mean()


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, second = (every := list(parameters))[:2], every[2:]
    return torch.optim.SGD(
        [{"params": first, "lr": 0.1, "momentum": 0.9}, {"params": second, "lr": 0.001, "weight_decay": 0.1}], lr=0.01
    )


ACTIVATIONS: dict[str, Make] = {
    **{kind.__name__: kind for kind in (
        nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid,
        nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Mish, nn.PReLU, nn.LogSigmoid, nn.Hardshrink,
        nn.Softshrink, nn.Tanhshrink, nn.RReLU,
    )},
    "Threshold": partial(nn.Threshold, 0.1, 0.0),
    "GLU": partial(nn.GLU, 1),
    "GELU, tanh": partial(nn.GELU, "tanh"),
    "softplus of large numbers": partial(Calls, lambda x: F.softplus(x * 20, 1.0, 200.0) / 20),
}  # fmt: skip
LAYERS: dict[str, Net] = {
    "BatchNorm2d": image(partial(nn.BatchNorm2d, 4)),
    "BatchNorm2d, affine=False": image(partial(nn.BatchNorm2d, 4, affine=False)),
    "BatchNorm2d, no statistics": image(partial(nn.BatchNorm2d, 4, track_running_stats=False)),
    "BatchNorm2d, momentum=None": image(partial(nn.BatchNorm2d, 4, momentum=None)),
    "BatchNorm1d": vector(linear(6, 8), partial(nn.BatchNorm1d, 8), nn.ReLU, linear(8, 3), count=4),
    "InstanceNorm2d": image(partial(nn.InstanceNorm2d, 4, affine=True)),
    "InstanceNorm2d, statistics": image(partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True)),
    "GroupNorm": image(partial(nn.GroupNorm, 2, 4)),
    "GroupNorm, affine=False": image(partial(nn.GroupNorm, 2, 4, affine=False)),
    "LayerNorm": vector(linear(6, 8), partial(nn.LayerNorm, 8), linear(8, 3)),
    "LayerNorm of images": image(partial(nn.LayerNorm, [4, 8, 8])),
    "RMSNorm": vector(linear(6, 8), partial(nn.RMSNorm, 8), linear(8, 3)),
    "LocalResponseNorm": image(partial(nn.LocalResponseNorm, 2)),
    "weight_norm": vector(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU, linear(8, 3)),
    "spectral_norm": vector(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU, linear(8, 3)),
    "normalize": vector(linear(6, 8), partial(Calls, F.normalize), linear(8, 3)),
    "MaxPool2d": image(partial(nn.MaxPool2d, 2)),
    "MaxPool2d, overlapping": image(partial(nn.MaxPool2d, 3, 2, 1)),
    "MaxPool2d, ceil_mode": image(partial(nn.MaxPool2d, 3, 2, ceil_mode=True), size=9),
    "MaxPool2d, dilated": image(partial(nn.MaxPool2d, 2, 1, dilation=2)),
    "AvgPool2d": image(partial(nn.AvgPool2d, 2)),
    "AvgPool2d, overlapping": image(partial(nn.AvgPool2d, 3, 2, 1)),
    "AvgPool2d, without padding": image(partial(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
    "AvgPool2d, ceil_mode": image(partial(nn.AvgPool2d, 3, 2, ceil_mode=True)),
    "AvgPool2d, divisor": image(partial(nn.AvgPool2d, 3, 2, divisor_override=4), size=9),
    "AdaptiveAvgPool2d": image(partial(nn.AdaptiveAvgPool2d, 3)),
    "AdaptiveMaxPool2d of 1": image(partial(nn.AdaptiveMaxPool2d, 1)),
    "AdaptiveMaxPool2d of 4": image(partial(nn.AdaptiveMaxPool2d, 4)),
    "LPPool2d": image(partial(nn.LPPool2d, 2, 2)),
    "MaxPool1d": series(partial(nn.MaxPool1d, 2)),
    "AvgPool1d": series(lambda: nn.AvgPool1d(2)),
    "AdaptiveMaxPool1d": series(partial(nn.AdaptiveMaxPool1d, 1)),
    "amax": image_through(lambda x: x.amax((2, 3))),
    "max of a dimension": image_through(lambda x: x.flatten(2).max(2).values),
    "Upsample, nearest": image(partial(nn.Upsample, scale_factor=2)),
    "Upsample, bilinear": image(partial(nn.Upsample, scale_factor=2, mode="bilinear")),
    "UpsamplingBilinear2d": image(partial(nn.UpsamplingBilinear2d, scale_factor=2)),
    "Upsample, linear": series(partial(nn.Upsample, scale_factor=2, mode="linear")),
    "repeat_interleave": image_through(lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3)),
    "expand": image_through(expanded),
    "PixelShuffle": image(partial(nn.PixelShuffle, 2)),
    "PixelUnshuffle": image(partial(nn.PixelUnshuffle, 2)),
    "ChannelShuffle": image(partial(nn.ChannelShuffle, 2)),
    **{f"padding_mode={mode!r}": rectified(partial(nn.Conv2d, 2, 4, 3, padding=1, padding_mode=mode))
       for mode in ("zeros", "reflect", "replicate", "circular")},
    "padding='same'": rectified(partial(nn.Conv2d, 2, 4, 4, padding="same")),
    "causal Conv1d": series(partial(nn.Conv1d, 3, 4, 3, dilation=2), first=partial(nn.ConstantPad1d, (4, 0), 0.0)),
    "Conv2d, dilated": rectified(partial(nn.Conv2d, 2, 4, 3, dilation=2, padding=2)),
    "Conv2d, groups": rectified(partial(nn.Conv2d, 2, 4, 3, groups=2)),
    "Conv2d, stride of 3": rectified(partial(nn.Conv2d, 2, 6, 3, groups=2, stride=3)),
    "Conv2d, 5x2": rectified(partial(nn.Conv2d, 2, 4, (5, 2), stride=(2, 1), padding=(2, 1))),
    "ConvTranspose1d": series(nn.ReLU, first=partial(nn.ConvTranspose1d, 3, 4, 4, 2, 1)),
    "ConvTranspose2d, dilated": rectified(
        partial(nn.ConvTranspose2d, 2, 4, 3, 2, 1, groups=2, dilation=2, output_padding=1)
    ),
    "Conv3d": Net(of_images(nn.ReLU, first=partial(nn.Conv3d, 2, 4, 3)), normal(1, 2, 5, 5, 5), classes(3, 1)),
    "Bilinear": vector(Bilinear),
    **{kind.__name__: Net(partial(Recurrent, kind), normal(2, 3, 5), classes(3, 2))
       for kind in (nn.RNN, nn.GRU, nn.LSTM)},
    **{kind.__name__: Net(partial(Cells, kind), normal(2, 3, 5), classes(3, 2))
       for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)},
    "a GRU written out": Net(WrittenGru, normal(2, 3, 5), classes(3, 2)),
    "MultiheadAttention": Net(partial(Attention, False), SERIES, classes(3, 2)),
    "MultiheadAttention, with weights": Net(partial(Attention, True), SERIES, classes(3, 2)),
    "tied language model": Net(
        TiedLanguageModel, WORDS, WORDS, lambda output, target: F.cross_entropy(output.transpose(1, 2), target)
    ),
    "Embedding, padding_idx": Net(
        in_series(partial(nn.Embedding, 11, 8, padding_idx=0), partial(Calls, lambda x: x.mean(1)), linear(8, 3)),
        WORDS, classes(3, 2),
    ),
    "EmbeddingBag": Net(in_series(partial(nn.EmbeddingBag, 11, 8), linear(8, 3)), WORDS, classes(3, 2)),
}  # fmt: skip
LOSSES: dict[str, Net] = {
    "label smoothing": lost(partial(F.cross_entropy, label_smoothing=0.1), classes(3, 3)),
    "class weights": lost(
        lambda output, target: F.cross_entropy(output, target, torch.tensor([1.0, 2.0, 0.5]).to(output.dtype)),
        classes(3, 3),
    ),
    "cross_entropy, sum": lost(partial(F.cross_entropy, reduction="sum"), classes(3, 3)),
    "cross_entropy, none": lost(
        lambda output, target: F.cross_entropy(output, target, reduction="none").mean(), classes(3, 3)
    ),
    "cross_entropy of shares": lost(F.cross_entropy, shares(3, 3)),
    "nll_loss": Net(in_series(linear(6, 3), partial(nn.LogSoftmax, 1)), VECTOR, classes(3, 3), F.nll_loss),
    "mse_loss": lost(F.mse_loss, normal(3, 3)),
    "l1_loss": lost(F.l1_loss, normal(3, 3)),
    "smooth_l1_loss": lost(F.smooth_l1_loss, normal(3, 3)),
    "huber_loss": lost(F.huber_loss, normal(3, 3)),
    "BCE with logits": lost(F.binary_cross_entropy_with_logits, flags(3, 1), 1),
    "BCE with logits, pos_weight": lost(
        lambda output, target: F.binary_cross_entropy_with_logits(output, target, pos_weight=torch.tensor([2.0])),
        flags(3, 1), 1,
    ),
    "BCE": Net(in_series(linear(6, 1), nn.Sigmoid), VECTOR, flags(3, 1), F.binary_cross_entropy),
    "kl_div": Net(
        in_series(linear(6, 3), partial(nn.LogSoftmax, 1)), VECTOR, shares(3, 3),
        partial(F.kl_div, reduction="batchmean"),
    ),
    "soft_margin_loss": lost(F.soft_margin_loss, signs(3, 1), 1),
    "multi_margin_loss": lost(F.multi_margin_loss, classes(3, 3)),
    "poisson_nll_loss": lost(F.poisson_nll_loss, flags(3, 1), 1),
    "gaussian_nll_loss": lost(
        lambda output, target: F.gaussian_nll_loss(output[:, :1], target, F.softplus(output[:, 1:])), normal(3, 1), 2
    ),
    "cosine_similarity": lost(
        lambda output, target: (1 - F.cosine_similarity(output, target)).mean(), normal(3, 4), 4
    ),
    "triplet_margin_loss": lost(
        lambda output, target: F.triplet_margin_loss(output[:2], output[2:4], output[4:]) + 0 * target.sum(),
        normal(2, 1), 4, 6,
    ),
    "cosine_embedding_loss": lost(
        lambda output, target: F.cosine_embedding_loss(output[:2], output[2:], target), signs(2), 4, 4
    ),
    "focal loss": lost(focal, flags(3, 1), 1),
    "log cosh": lost(lambda output, target: torch.log(torch.cosh(output - target)).mean(), normal(3, 3)),
    "logsumexp of similarities": lost(
        lambda output, target: torch.logsumexp(output @ output.T, 1).mean() + F.mse_loss(output, target),
        normal(4, 4), 4, 4,
    ),
    "one_hot": lost(
        lambda output, target: F.mse_loss(torch.softmax(output, 1), F.one_hot(target, 3).to(output.dtype)),
        classes(3, 3),
    ),
    "penalty of the output": lost(
        lambda output, target: F.cross_entropy(output, target) + 1e-3 * output.pow(2).mean(), classes(3, 3)
    ),
    "entropy": lost(
        lambda output, target: -(F.softmax(output, 1) * F.log_softmax(output, 1)).sum(1).mean() + 0 * target.sum(),
        normal(3, 3),
    ),
    "ctc_loss": Net(
        in_series(partial(nn.Conv1d, 3, 5, 3, padding=1), partial(Calls, lambda x: x.permute(2, 0, 1).log_softmax(2))),
        SERIES, classes(5, 2, 3, first=1),
        lambda output, target: F.ctc_loss(output, target, torch.full((2,), 12), torch.full((2,), 3)),
    ),
    "part without a gradient": lost(
        lambda output, target: F.mse_loss(output, target + 0.1 * output.detach()), normal(3, 3)
    ),
}  # fmt: skip
OPERATIONS: dict[str, Net] = {
    "chunk, cat": image_through(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    "std": image_through(lambda x: torch.cat([x.mean((2, 3)), x.std((2, 3))], 1)),
    "var": image_through(lambda x: x.var((2, 3))),
    "abs, sqrt": image_through(lambda x: torch.sqrt(x.abs() + 1e-3)),
    "einsum": vector(Einsum),
    "where": image_through(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "clamp": image_through(lambda x: x.clamp(-0.5, 0.5)),
    "topk": image_through(lambda x: x.flatten(1).topk(5, 1).values),
    "cumsum": image_through(lambda x: x.cumsum(2)),
    "flip": image_through(lambda x: x.flip(3)),
    "roll": image_through(lambda x: x.roll(1, 3)),
    "atan2": Net(
        in_series(linear(6, 2), partial(Calls, lambda x: torch.atan2(x[:, :1], x[:, 1:]))), VECTOR, normal(3, 1),
        F.mse_loss,
    ),
    "rfft": vector(linear(6, 8), partial(Calls, lambda x: torch.fft.rfft(x).abs()), linear(5, 3)),
    "Unfold": Net(
        in_series(partial(nn.Unfold, 3), partial(Calls, lambda x: x.mean(2)), linear(18, 3)), IMAGE, classes(3, 2)
    ),
    "Dropout of none": image(partial(nn.Dropout, 0.0)),
    "softmax with a temperature": Net(
        in_series(linear(6, 3), partial(Calls, lambda x: F.softmax(x / 2.5, 1))), VECTOR, normal(3, 3), F.mse_loss
    ),
    "gumbel_softmax": Net(
        in_series(linear(6, 3), partial(Calls, lambda x: F.gumbel_softmax(x, dim=1))), VECTOR, normal(3, 3), F.mse_loss
    ),
}  # fmt: skip
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD, dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "SGD, maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "SGD, two groups": two_groups,
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    **{kind.__name__: kind for kind in (
        torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adadelta,
    )},
}  # fmt: skip
NETS: dict[str, Net] = {
    **{name: image(make) for name, make in ACTIVATIONS.items()},
    **LAYERS,
    **LOSSES,
    **OPERATIONS,
    **{name: stepped(optimizer) for name, optimizer in OPTIMIZERS.items()},
}
