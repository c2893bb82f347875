"""Recurrent layers as loops over time: first and last states, code that does not grow, beside PyTorch."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from torch.nn import functional as F

import memplan
from memplan._torch.recurrent import recurrent_replaced
from memplan.exporting.exported import Exported
from memplan.exporting.lowering.recurrent_layers import recurrent_functions

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

KINDS: dict[str, dict[str, Any]] = {"LSTM": {}, "GRU": {}, "RNN": {}, "RNN of ReLUs": {"nonlinearity": "relu"}}


def layer(kind: str, **how: Any) -> nn.Module:
    return getattr(nn, kind.split()[0])(3, 5, **KINDS[kind], **how)


class FirstAndLast(nn.Module):
    """It trains the first state, and reads the last one only."""

    def __init__(self, kind: str, **how: Any) -> None:
        super().__init__()
        self.cells, self.is_lstm = layer(kind, **how), kind == "LSTM"
        directions = how.get("num_layers", 1) * (1 + how.get("bidirectional", False))
        self.first = nn.Parameter(torch.randn(1 + self.is_lstm, directions, 1, 5))
        self.head = nn.Linear((1 + self.is_lstm) * directions * 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first.expand(-1, -1, x.shape[1], -1).contiguous()
        state = self.cells(x, tuple(first) if self.is_lstm else first[0])[1]
        parts = state if self.is_lstm else (state,)
        return self.head(torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1))


class Each(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells, self.head = layer(kind), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0]).mean(0)


def exported(model: nn.Module, input: str, folder: Path, **options: Any) -> Exported:
    step: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": "sgd:lr=0.05", "name": "net", "budget": "1 MiB"}
    batch = input.split("x")[1]
    return memplan.export(model, input, targets=f"{batch}:int64<3", folder=folder, **step | options)


@needs_compiler
@pytest.mark.parametrize("kind", thinned(KINDS, 4))
def test_first_and_last_states_are_trained(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    done = exported(FirstAndLast(kind), "4x2x3", tmp_path)
    assert done.verdict.proven
    assert "cells.weight_hh_l0" in (tmp_path / "net.json").read_text()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_layers_and_directions_are_trained(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FirstAndLast(kind, num_layers=2, bidirectional=True, bias=kind != "GRU", dropout=0.2)
    tight = exported(model, "4x2x3", tmp_path / "a", verify=False).smallest_budget
    assert exported(model, "4x2x3", tmp_path / "b", budget=tight).verdict.proven


@pytest.mark.parametrize("kind", thinned(KINDS, 4))
def test_code_does_not_grow_with_the_sequence(kind: str, tmp_path: Path) -> None:
    begin = time.process_time()
    long = exported(Each(kind), "80x1x3", tmp_path / "a", verify=False)
    assert time.process_time() - begin < 30
    short = exported(Each(kind), "8x1x3", tmp_path / "b", verify=False)
    texts = [(tmp_path / folder / "net.c").read_text() for folder in ("a", "b")]
    assert abs(texts[0].count("\n") - texts[1].count("\n")) < 6, "one update is fused in one of them"
    assert len(texts[0]) < 1.02 * len(texts[1])
    assert long.arena < 10.5 * short.arena


@pytest.mark.parametrize("how", [{}, {"bias": False, "batch_first": True}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_ops_compute_what_torch_does(kind: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    cells, x = layer(kind, **how), torch.randn(4, 2, 3)
    with torch.no_grad():
        expected = cells(x)
        with recurrent_replaced(recurrent_functions()):
            found = cells(x)
    torch.testing.assert_close(found, expected)
