"""Norms in evaluation mode of which the bias alone is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import memplan
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
def test_a_bias_asks_for_no_activation_of_its_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.SiLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    model(torch.randn(8, 2, 12, 12))
    model.eval().requires_grad_(False)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.bias.requires_grad_(True)

    def exported(name: str, verify: bool) -> Exported:
        return memplan.export(
            model, "1x2x12x12", targets="1:int64<3", loss="cross_entropy", optimizer="sgd:lr=0.1",
            folder=tmp_path / name, name="net", verify=verify,
        )  # fmt: skip

    alone = exported("bias", True)
    assert alone.verdict.proven
    assert alone.arena < 2 * 4 * 6 * 12 * 12 + 256, "what SiLU reads, and a gradient"
    assert "batch_norm_sums" not in (tmp_path / "bias" / "net.c").read_text()
    norm.weight.requires_grad_(True)
    both = exported("both", False)
    assert "batch_norm_sums" in (tmp_path / "both" / "net.c").read_text()
    assert both.arena >= alone.arena + 4 * 6 * 12 * 12, "and what the norm reads"
