"""The layers before the first trained one in eight bits."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import InputError, UsageError
from memplan.exporting.exported import Exported
from tests.truth.c_program import array, floats_of, printed_by
from tests.truth.integer_layers import Gate, Integer, Network, Plus

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
MEAN, STD = (124.0, 116.3, 104.5), (58.0, 57.0, 57.5)


class Features(nn.Module):
    """A frozen body, a trained head, and what the body hands on as an output."""

    def __init__(self, body: nn.Sequential, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}


def normed(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after)]


def inverted() -> nn.Sequential:
    """What lies between the first five convolutions is large: they run row by row."""
    return nn.Sequential(
        *normed(3, 8, 3, 2), nn.ReLU6(), *normed(8, 8, 3, groups=8), nn.Hardswish(), *normed(8, 12, 1),
        *normed(12, 24, 1), nn.ReLU6(), *normed(24, 24, 5, 2, groups=24), nn.ReLU6(), *normed(24, 8, 1),
        Plus(*normed(8, 8, 3), nn.ReLU()), Gate(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid()),
        nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 10), nn.ReLU(),
    )  # fmt: skip


def branched() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=2, dilation=2), nn.Tanh(), nn.Conv2d(6, 8, (3, 1), (2, 1), groups=2), nn.ReLU(),
        Plus(nn.Conv2d(8, 8, 3, padding=1)), nn.ReLU(), nn.AvgPool2d(2, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 6),
    )  # fmt: skip


def series() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, 2, groups=4), nn.ReLU6(),
        nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.Hardswish(), nn.Linear(12, 4), nn.ReLU())


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int, torch.dtype]] = {
    "inverted": (inverted, (1, 3, 48, 48), 10, torch.uint8),
    "branched": (branched, (2, 2, 12, 11), 6, torch.float32),
    "series": (series, (2, 3, 40), 5, torch.int8),
    "perceptron": (perceptron, (2, 20), 4, torch.float32),
}
"""By name: the body, the shape of its input, its width, and the input's dtype."""


def settled(body: nn.Sequential, shape: tuple[int, ...]) -> nn.Sequential:
    """With statistics of some data, and frozen."""
    with torch.no_grad():
        for _ in range(20):
            body(torch.randn(4, *shape[1:]))
        for module in body.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
    return body.eval().requires_grad_(False)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def data(shape: tuple[int, ...], dtype: torch.dtype, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two calls' samples each."""
    large = (2 * shape[0], *shape[1:])
    return [(drawn(large, dtype, k), torch.arange(large[0]) % 3) for k in range(count)]


def loss_of(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], target)


def exported(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> Exported:
    byte = {} if x.is_floating_point() else {"normalize": (MEAN, STD) if x.dtype == torch.uint8 else (3.0, 40.0)}
    given: dict[str, Any] = {
        "targets": torch.arange(len(x)) % 3, "loss": loss_of, "optimizer": "sgd:lr=0.05", "name": "net",
        "frozen_layers": "int8", "calibrate": data(tuple(x.shape), x.dtype), "folder": folder, "budget": "1 MiB",
    } | byte | options  # fmt: skip
    return memplan.export(model, x, **given)


def as_integers(x: torch.Tensor, done: Exported, low: float, high: float) -> Integer:
    """The input as the device reads it: bytes as they are, floats by the range on the data."""
    if x.is_floating_point():
        scale = float(np.float32((high - low) / 255))
        zero = round(-128 - low / scale)
        numbers = np.clip(np.rint(x.numpy() * np.float32(1 / scale)) + zero, -128, 127).astype(int).astype(object)
        return Integer(numbers, scale, np.array(zero))
    return Integer(x.numpy().astype(int).astype(object), 1.0, np.array(0))


def by_hand(model: Features, x: torch.Tensor, done: Exported, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The features that the device has to compute, by a reference that shares no code with the export."""
    assert done.int8 is not None
    modules = list(copy.deepcopy(model.body))
    if not x.is_floating_point():
        # (x - mean) / std = (x - z) / std + (z - mean) / std, where z is an integer: into weight and bias
        first = modules[0]
        assert isinstance(first, (nn.Conv1d, nn.Conv2d))
        channels = first.in_channels
        mean, std = (MEAN, STD) if x.dtype == torch.uint8 else ([3.0] * channels, [40.0] * channels)
        zeros = np.rint(mean)
        shape = (1, -1, *[1] * (first.weight.dim() - 2))
        first.double()
        largest = max(1 / s for s in std)
        left = torch.tensor([(z - m) / s for z, m, s in zip(zeros, mean, std, strict=True)], dtype=torch.float64)
        bias = (first.weight.flatten(2).sum(2) * left).sum(1)
        bias = bias if first.bias is None else bias + first.bias
        first.bias = nn.Parameter(bias.detach())
        first.weight = nn.Parameter((first.weight * (1 / torch.tensor(std, dtype=torch.float64) / largest).reshape(shape)).detach())  # fmt: skip
        given = Integer(x.numpy().astype(int).astype(object), largest, zeros.astype(int).astype(object))
    else:
        every = torch.cat([inputs.reshape(-1) for inputs, _ in batches])
        given = as_integers(x, done, float(every.min()), float(every.max()))
    found = Network(done.int8.layers).run(modules, given)
    return np.float32(found.scale) * (found.numbers - found.zeros).astype(np.float32)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_frozen_part_computes_the_integers_of_a_reference(name: str, tmp_path: Path) -> None:
    make, shape, width, dtype = CASES[name]
    torch.manual_seed(0)
    model = Features(settled(make(), shape), width)
    x = drawn(shape, dtype, 99)
    done = exported(model, x, tmp_path)
    assert done.verdict.proven, "the head beside PyTorch, which reads the same features"
    assert done.int8 is not None
    assert not done.int8.stays
    kind = {torch.uint8: "uint8_t", torch.int8: "int8_t", torch.float32: "float"}[dtype]
    text = f"""
#include "net.h"
#include <stdio.h>
static net_state s;
{array("x", x if x.is_floating_point() else x.int()).replace("int32_t", kind)}
int main(void)
{{
    static float output[{len(x)} * {width + 3}];
    net_init(&s);
    net_infer(&s, x, output);
    for (int k = 0; k < {len(x)} * {width}; k++)
        printf("%.9g\\n", (double)output[k]);
    return 0;
}}
"""
    found = floats_of(printed_by(tmp_path, text)).astype(np.float32).reshape(len(x), -1)
    wanted = by_hand(model, x, done, data(shape, dtype))
    assert np.array_equal(found, wanted.reshape(len(x), -1))
    with torch.no_grad():
        seen = x if x.is_floating_point() else (
            (x.float() - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1)
            if dtype == torch.uint8 else (x.float() - 3) / 40
        )  # fmt: skip
        exact = model.body(seen).numpy()
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.06
    assert error < 3 * done.int8.worst, "what the report says of other data"
