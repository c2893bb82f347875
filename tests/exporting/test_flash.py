"""What lies in flash: weights in eight bits, in a file of their own, and under a bound."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, UsageError
from memplan.exporting.exported import Exported
from memplan.exporting.kernels.frozen_weights import quantized

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Frozen(nn.Module):
    """A weight of each kind that kernels read in eight bits, a norm and a vector that they do not, and a head.

    The dropout is below all that is trained, and the convolution up makes fewer elements than it reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(9, 12), nn.Parameter(torch.ones(12))
        self.first = nn.Conv1d(12, 8, 3, padding=1, groups=2)
        self.norm, self.up = nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 3, 2, 2)
        self.inner, self.table = nn.Linear(3, 10), nn.Parameter(torch.randn(2, 10))
        self.drop = nn.Dropout(0.2)
        self.requires_grad_(False)
        self.early, self.head = nn.Parameter(torch.zeros(8, 1)), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.words(x) * self.scale)
        y = F.relu(self.norm(self.first(y.mT) + self.early))
        return self.head(torch.tanh(self.inner(self.up(y).mean(2)) + self.table))


READ_SO = ("words.weight", "first.weight", "up.weight", "inner.weight")
NARROW, ROWS = 9 * 12 + 8 * 6 * 3 + 8 * 3 * 2 + 10 * 3, 9 + 8 + 8 + 10
"""Their elements, and their scales."""
STEP: dict[str, Any] = {
    "targets": "2:int64<3", "loss": F.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.05),
}  # fmt: skip


def made() -> Frozen:
    torch.manual_seed(0)
    return Frozen()


def exported(folder: Path, model: nn.Module | None = None, **options: Any) -> Exported:
    given = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(1))
    return memplan.export(made() if model is None else model, given, folder=folder, name="net", **STEP | options)


def in_eight_bits(model: Frozen) -> Frozen:
    """The model as torch's own quantization to eight bits by channel rounds it."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name in READ_SO:
            one = rounded.get_parameter(name)
            scales = one.flatten(1).abs().amax(1) / 127
            zeros = torch.zeros(len(scales), dtype=torch.int32)
            one.copy_(torch.fake_quantize_per_channel_affine(one, scales, zeros, 0, -127, 127))
    return rounded


def test_eight_bits_are_those_of_torch() -> None:
    model, rounded = made(), in_eight_bits(made())
    for name in READ_SO:
        found = quantized(model.get_parameter(name).numpy())
        assert np.abs(found.numbers).max() == 127
        assert np.array_equal(found.floats, rounded.get_parameter(name).numpy())
    assert not quantized(np.zeros((2, 3), np.float32)).floats.any()


@needs_compiler
def test_frozen_weights_in_eight_bits_are_proven_and_their_error_is_said(tmp_path: Path) -> None:
    model = made()
    before = copy.deepcopy(model.state_dict())
    done, plain = exported(tmp_path, model, frozen_weights="int8"), exported(tmp_path / "plain", verify=False)
    assert done.verdict.proven
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items()), "the model is as it was"
    assert done.rounding is not None
    assert (done.rounding.weights, done.rounding.saved) == (NARROW, 3 * NARROW - 4 * ROWS)
    assert done.flash == plain.flash - done.rounding.saved
    assert (done.ram, done.frozen, done.trained) == (plain.ram, plain.frozen, plain.trained)
    assert set(done.rounding.kept) == {
        "scale",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "up.bias",
        "inner.bias",
        "table",
    }
    x = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = made().double().eval()(x)
        moved = in_eight_bits(made()).double().eval()(x) - wanted
    assert done.rounding.forward_error == pytest.approx(float(moved.norm() / wanted.norm()))
    assert 0 < done.rounding.forward_error < 0.05
    assert f"{done.rounding.forward_error:.2%}" in str(done.rounding)


def filed(model: Frozen) -> bytes:
    """What a file of the weights holds: what is trained, statistics, frozen floats, scales; then eight bits."""
    state = model.state_dict()
    layers = ("words", "first", "norm", "up", "inner")
    order = ["early", "head.weight", "head.bias", "norm.running_mean", "norm.running_var", "scale", "table"]
    order += [name for layer in layers for name in (f"{layer}.weight", f"{layer}.bias") if name not in READ_SO]
    floats = [state[name].reshape(-1) for name in order if name in state]
    scales = [state[name].flatten(1).abs().amax(1) / 127 for name in READ_SO]
    rounded = in_eight_bits(model).state_dict()
    narrow = [
        (rounded[n].flatten(1) / by[:, None]).round().to(torch.int8) for n, by in zip(READ_SO, scales, strict=True)
    ]
    return torch.cat([*floats, *scales]).numpy().astype("<f4").tobytes() + b"".join(
        one.numpy().tobytes() for one in narrow
    )


@needs_compiler
def test_weights_in_a_file_are_the_callers(tmp_path: Path) -> None:
    done = exported(tmp_path, weights_file=True, frozen_weights="int8")
    assert done.verdict.proven
    assert not (tmp_path / "sequential_weights.h").exists()
    assert (tmp_path / "net.bin").read_bytes() == filed(made())
    size = (tmp_path / "net.bin").stat().st_size
    assert done.flash == size + 4, "the loss's own gradient, 1, is in the code"
    floats = 8 + 3 * 10 + 3 + 2 * 8
    assert done.state == 4 * (floats + 3) + 4, "weights, statistics, rate, step and random state, and a pointer"
    assert subprocess.run(["make", "test"], cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "net.bin").write_bytes(b"too short")
    found = subprocess.run(["./test_net"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "net.bin cannot be read\n")


def test_a_model_over_the_flash_is_refused_with_what_would_help(tmp_path: Path) -> None:
    fits = exported(tmp_path / "a", verify=False)
    exported(tmp_path / "b", verify=False, flash=fits.flash)
    with pytest.raises(BudgetError) as caught:
        exported(tmp_path / "c", verify=False, flash=fits.flash - 1)
    assert not any((tmp_path / "c").iterdir())
    assert caught.value.smallest_budget == fits.flash
    said = str(caught.value)
    assert re.search(r"first.weight 576 B, words.weight 432 B, up.weight 192 B, and \d+ more", said)
    assert "weights_file=True" in said
    left = fits.flash - (3 * NARROW - 4 * ROWS)
    assert f"frozen_weights='int8' ({format_bytes(left)})" in said
    assert exported(tmp_path / "e", verify=False, flash=4, weights_file=True).name == "net", "its flash is elsewhere"
    with pytest.raises(UsageError, match="frozen_weights='int4'"):
        exported(tmp_path / "f", frozen_weights="int4")
    with pytest.raises(UsageError, match="bytes"):
        exported(tmp_path / "f", flash="much")
