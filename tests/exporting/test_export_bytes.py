"""Inputs of eight bits that a device normalizes, beside PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow, thinned
from torch import nn
from torch.nn import functional as F
from truth.c_program import FLAGS, floats_of, printed_by

import memplan
from memplan.errors import InputError, UsageError
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

CHANNELS = ((124.0, 116.0, 104.0), (58.0, 57.0, 56.0))


class Casting(nn.Module):
    """A model that normalizes bytes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(2 * ((x.float() - 127) / 255) + 0.25)


def convolutions(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))


def pools() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 3))


def made(make: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        model(torch.zeros(1, 3, 8, 8))
    return model


def exported(model: nn.Module, folder: Path, input: str = "1x3x8x8:uint8<256", **options: Any) -> Exported:
    step: dict[str, Any] = {"targets": "1:int64<3", "loss": F.cross_entropy, "optimizer": "sgd:lr=0.05", "name": "net"}
    return memplan.export(model, input, folder=folder, **step | options)


CASES: dict[str, tuple[Any, Any, str, bool]] = {
    "channels": (convolutions, CHANNELS, "uint8", False),
    "one number": (convolutions, (127.5, 60.0), "uint8", False),
    "strides": (lambda: convolutions(stride=2), CHANNELS, "int8", False),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(108, 3)), CHANNELS, "uint8",
               False),
    "linear": (perceptron, (3.0, 50.0), "int8", False),
    "casting": (lambda: Casting(convolutions()), None, "uint8", False),
    "linear of channels": (perceptron, CHANNELS, "uint8", True),
    "pool": (pools, CHANNELS, "uint8", True),
}  # fmt: skip
"""By name: model, normalization, dtype, and whether a buffer in floats is needed."""


@needs_compiler
@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_a_step_of_bytes_is_that_of_their_floats(name: str, tmp_path: Path) -> None:
    make, normalize, dtype, buffer = CASES[name]
    options = {} if normalize is None else {"normalize": normalize}
    done = exported(made(make), tmp_path / "a", f"1x3x8x8:{dtype}<100", **options)
    assert done.verdict.proven
    assert done.byte_inputs == (("x", buffer),)
    assert done.inputs == 192 + 4, "a byte for each element, and the class"
    if normalize is None:
        return
    floats = exported(made(make), tmp_path / "b", "1x3x8x8", verify=False)
    assert done.arena <= floats.arena + buffer * 4 * 192, "a buffer in floats, or nothing"
    assert buffer or done.arena == floats.arena


@needs_compiler
def test_bytes_of_the_caller_are_normalized_as_by_torchvision(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8)
    model = made(convolutions)
    exported(model, tmp_path, normalize=CHANNELS, verify=False)
    mean, std = (torch.tensor(numbers).reshape(3, 1, 1) for numbers in CHANNELS)
    expected = model((x.float() - mean) / std)
    loss = F.cross_entropy(expected, torch.tensor([2]))
    loss.backward()
    with torch.no_grad():
        weights = torch.cat([(w - 0.05 * w.grad).reshape(-1) for w in model.parameters() if w.grad is not None])
    text = f"""
#include "net.h"
#include <stdio.h>
static net_state s;
int main(void)
{{
    static const uint8_t x[192] = {{{", ".join(map(str, x.reshape(-1).tolist()))}}};
    const int32_t y = 2;
    float output[3];
    net_init(&s);
    printf("%.9g\\n", (double)net_step_to(&s, x, &y, output));
    for (int k = 0; k < 3; k++)
        printf("%.9g\\n", (double)output[k]);
    for (int k = 0; k < NET_WEIGHTS; k++)
        printf("%.9g\\n", (double)s.weights[k]);
    return 0;
}}
"""
    assert "-Werror" in FLAGS
    found = floats_of(printed_by(tmp_path, text))
    wanted = np.concatenate([[loss.item()], expected.detach().reshape(-1).numpy(), weights.numpy()])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("make", [convolutions, *slow(perceptron)])
def test_frozen_weights_in_eight_bits_read_bytes(make: Any, tmp_path: Path) -> None:
    model = made(make)
    first = next(module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear)))
    first.requires_grad_(False)
    done = exported(model, tmp_path, normalize=(127.0, 60.0), frozen_weights="int8")
    assert done.verdict.proven
    assert done.byte_inputs == (("x", False),)


@pytest.mark.parametrize(
    "normalize",
    [(1.0,), (0.0, 0.0), (float("nan"), 1.0), ((1.0, 2.0), (1.0, 2.0, 3.0)), "12", 3.0, ((), ())],
)
def test_what_normalizes_nothing_is_refused(normalize: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="normalize"):
        exported(made(convolutions), tmp_path, normalize=normalize)


def test_a_normalization_of_other_channels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="normalize for 2 channels, and an input of 1x3x8x8"):
        exported(made(convolutions), tmp_path, normalize=((1.0, 2.0), (1.0, 2.0)))
