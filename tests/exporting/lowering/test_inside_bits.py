"""A bit for each element of a bounded activation in place of the activation, where only its gradient reads it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

import memplan
from memplan.errors import VerificationError
from memplan.exporting import export as exporting
from memplan.exporting.exported import Exported
from memplan.exporting.source.program_text import program_text

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def exported(folder: Path, activation: nn.Module, budget: str = "1 MiB") -> Exported:
    """A step that trains biases alone: no gradient reads an activation but that of the activation itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), activation, nn.Conv2d(6, 6, 3, padding=1), activation, nn.Flatten(),
        nn.Linear(6 * 8 * 8, 3),
    )  # fmt: skip
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path.endswith("bias"))
    x = 40 * torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1))  # beyond both bounds
    return memplan.export(
        model, x, targets=torch.tensor([1]), loss="cross_entropy", optimizer="sgd:lr=0.05", budget=budget,
        folder=folder, name="net", force=True,
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "activation",
    [nn.ReLU6(), pytest.param(nn.Hardtanh(-1.5, 2.5), marks=pytest.mark.slow)],
)
def test_biases_are_trained_without_activations(activation: nn.Module, tmp_path: Path) -> None:
    least = exported(tmp_path, activation).smallest_budget
    done = exported(tmp_path, activation, f"{least} B")
    assert done.verdict.proven
    assert "pack_inside(" in (tmp_path / "net.c").read_text()
    plane, bits, small = 4 * 6 * 8 * 8, 6 * 8 * 8 // 8, 4 * (6 + 6 + 3) + 64
    assert done.live <= 2 * plane + 2 * bits + small, "of both activations, only bits are kept: one more plane is 1,536"


@needs_compiler
@pytest.mark.parametrize("wrong", ["x[k] < low", *slow("x[k] >= 2 * high")])
def test_wrong_bits_are_found(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = exported(tmp_path, nn.ReLU6()).smallest_budget

    def text(layout: Any) -> str:
        whole = program_text(layout)
        right = "x[k] >= high" if "high" in wrong else "x[k] <= low"
        assert right in whole
        return whole.replace(right, wrong)

    monkeypatch.setattr(exporting, "program_text", text)
    with pytest.raises(VerificationError, match="differs"):
        exported(tmp_path, nn.ReLU6(), f"{least} B")
