"""More single layers, of the kinds whose memory on a card is known least: see docs/cuda.md. `GROUPS` says which.

Kernels of 1 and weight gradients, where real cards choose engines that cuDNN does not name for a described card;
recurrent networks beyond the seven that were recorded; and cuDNN's benchmark mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from golden_layers import HALF, Build, Step, backward_of, on_input, recurrent
from golden_layers import LAYERS as FIRST
from torch import nn

LAYERS: dict[str, Build] = {}
GROUPS: dict[str, list[str]] = {}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def layer(group: str, name: str, build: Build) -> None:
    """Enter a build under a name in a group; its random numbers start from the same seed every time."""

    def seeded() -> Step:
        torch.manual_seed(0)
        return build()

    seeded.__name__ = name
    LAYERS[name] = seeded
    GROUPS.setdefault(group, []).append(name)


def weight_gradient(
    make: Callable[[], nn.Module], shape: tuple[int, ...], out: tuple[int, ...], **options: Any
) -> Build:
    """Forward and backward of a module whose input needs no gradient."""

    def build() -> Step:
        dtype = options.get("dtype", torch.float32)
        module, x = make().to(dtype), torch.randn(*shape, dtype=dtype)
        if options.get("channels_last"):
            layout: Any = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            module, x = module.to(memory_format=layout), x.contiguous(memory_format=layout)
        return backward_of(lambda: module(x), *out, dtype=dtype)

    return build


def benchmarked(build: Build) -> Build:
    """The same step with ``torch.backends.cudnn.benchmark``."""

    def build_benchmarked() -> Step:
        step = build()

        def run() -> None:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
                step()

        return run

    return build_benchmarked


def _pointwise() -> None:
    kinds: dict[str, dict[str, Any]] = {"": {}, "_bf16": {"dtype": HALF}, "_channels_last": {"channels_last": True}}
    for inputs, outputs, size in ((64, 256, 56), (256, 64, 56), (512, 128, 28), (2048, 512, 7), (24, 144, 56)):
        for kind, options in kinds.items():
            layer("pointwise", f"conv2d_1x1_{inputs}_{outputs}{kind}", on_input(
                lambda inputs=inputs, outputs=outputs: nn.Conv2d(inputs, outputs, 1, bias=False),
                (16, inputs, size, size), (16, outputs, size, size), **options,
            ))  # fmt: skip
    layer("pointwise", "conv2d_1x1_stride2", on_input(
        lambda: nn.Conv2d(256, 512, 1, 2, bias=False), (16, 256, 56, 56), (16, 512, 28, 28)))  # fmt: skip
    layer("pointwise", "conv3d_1x1x1", on_input(
        lambda: nn.Conv3d(32, 3, 1), (2, 32, 48, 48, 48), (2, 3, 48, 48, 48)))  # fmt: skip
    layer("pointwise", "conv1d_1", on_input(lambda: nn.Conv1d(256, 512, 1), (16, 256, 2048), (16, 512, 2048)))


def _weight_gradients() -> None:
    for inputs, outputs, size in ((3, 64, 112), (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7)):
        for kind, options in {"": {}, "_bf16": {"dtype": HALF}}.items():
            layer("weight_gradients", f"conv2d_3x3_weight_{inputs}_{outputs}{kind}", weight_gradient(
                lambda inputs=inputs, outputs=outputs: nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                (16, inputs, size, size), (16, outputs, size, size), **options,
            ))  # fmt: skip
    for inputs, outputs, size in ((1, 32, 64), (32, 32, 64), (64, 64, 32), (128, 128, 16)):
        layer("weight_gradients", f"conv3d_3x3x3_weight_{inputs}_{outputs}", weight_gradient(
            lambda inputs=inputs, outputs=outputs: nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
            (2, inputs, size, size, size), (2, outputs, size, size, size),
        ))  # fmt: skip


def _recurrent() -> None:
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    layer("recurrent", "rnn", recurrent(nn.RNN))
    layer("recurrent", "rnn_relu_2", recurrent(nn.RNN, num_layers=2, nonlinearity="relu"))
    layer("recurrent", "gru_1", recurrent(nn.GRU))
    for name, kind in kinds.items():
        layer("recurrent", f"{name}_3", recurrent(kind, num_layers=3))
        layer("recurrent", f"{name}_bidirectional_2", recurrent(kind, num_layers=2, bidirectional=True))
        layer("recurrent", f"{name}_fp16", recurrent(kind, torch.float16))
    layer("recurrent", "lstm_projected", _projected)
    layer("recurrent", "lstm_inference", _inferred)


def _projected() -> Step:
    module = nn.LSTM(256, 512, batch_first=True, proj_size=128)
    x = torch.randn(64, 128, 256, requires_grad=True)
    return backward_of(lambda: module(x)[0], 64, 128, 128)


def _inferred() -> Step:
    module, x = nn.LSTM(256, 512, num_layers=2, batch_first=True).eval(), torch.randn(64, 128, 256)

    def step() -> None:
        with torch.no_grad():
            module(x)

    return step


def _benchmark() -> None:
    for name in ("conv2d_3x3", "conv2d_3x3_bf16", "conv2d_1x1", "conv2d_7x7", "conv2d_grouped", "conv3d_3x3x3",
                 "conv3d_3x3x3_bf16", "conv_transpose2d"):  # fmt: skip
        layer("benchmark", f"{name}_benchmark_mode", benchmarked(FIRST[name]))


_pointwise()
_weight_gradients()
_recurrent()
_benchmark()
