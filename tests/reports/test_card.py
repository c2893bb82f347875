"""The sum and the verdict on the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan._bytes import parse_bytes
from memplan.reports.explain import report
from memplan.reports.terminal import text_of


@pytest.fixture(scope="module")
def text() -> str:
    """Without a cuDNN: the workspaces are intervals."""
    return text_of(explained("t4", cudnn=False))


def explained(device: str, **more: Any) -> Any:
    return report(memplan.explain(lambda: nn.Conv2d(8, 16, 3, padding=1), "4x8x64x64", device=device, **more))


def _numbers(line: str) -> list[int]:
    return [parse_bytes(found) for found in re.findall(r"[\d.]+ (?:GiB|MiB|KiB|B)\b", line)]


def test_the_rows_add_up_to_what_nvidia_smi_would_show(text: str) -> None:
    table = text.split("On the card")[1].split("fits")[0].splitlines()
    rows = [_numbers(line) for line in table if len(_numbers(line)) == 2]
    *terms, total = rows
    for column in (0, 1):
        assert sum(term[column] for term in terms) == pytest.approx(total[column], rel=0.01)


def test_the_verdict_and_what_is_left_out_are_told(text: str) -> None:
    assert "fits on NVIDIA T4" in text
    assert "the smallest card with these kernels that it fits on: rtx4060" in " ".join(text.split())
    assert "not in this sum: what other processes hold" in text
    assert "with the largest workspaces of the algorithms known of cuDNN" in text


def test_with_expected_workspaces_there_is_one_number_with_its_band() -> None:
    text = text_of(explained("a100-80gb", cudnn="9.26.0"))
    table = text.split("On the card")[1].split("fits")[0].splitlines()
    assert "low" not in table[0]
    *terms, total = [number for line in table for number in _numbers(line)]
    assert sum(terms) == pytest.approx(total, rel=0.01)
    assert re.search(r"needs about [\d.]+ MiB \(95 %: [\d.]+ MiB to [\d.]+ MiB\)", " ".join(text.split()))
    assert "with the largest workspaces" not in text


def test_what_cuda_would_refuse_stands_at_the_head() -> None:
    def build() -> Callable[[], Any]:
        model, data = nn.Linear(3, 4).cuda(), torch.zeros(2, 3)
        return lambda: model(data)

    text = text_of(report(memplan.explain(memplan.record(build, device="t4"))))
    assert "addmm READS A TENSOR OF THE HOST" in text.split("By cause")[0]
