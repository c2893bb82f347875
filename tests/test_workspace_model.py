"""What the models of cuDNN's choice learn from (tools/workspace_model): convolutions as torch has them."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan.cudnn.questions import Question

TOOL = Path(__file__).resolve().parent.parent / "tools" / "workspace_model"


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    monkeypatch.syspath_prepend(str(TOOL))
    sampling: Any = importlib.import_module("sampling")
    first, second = (list(itertools.islice(sampling.sample(7), 600)) for _ in range(2))
    assert first == second, "the same seed gives the same questions"
    return first


def test_each_is_a_convolution_of_torch(sampled: list[Question]) -> None:
    for question in sampled:
        x, weight = (torch.empty(sizes, device="meta") for sizes in (question.x, question.w))
        convolve = torch.nn.functional.conv2d if x.dim() == 4 else torch.nn.functional.conv3d
        groups = question.x[1] // question.w[1]
        y = convolve(x, weight, None, question.stride, question.padding, question.dilation, groups)
        assert tuple(y.shape) == question.y


def test_all_kinds_dimensions_and_formats_are_there(sampled: list[Question]) -> None:
    assert {question.kind for question in sampled} == {"forward", "input gradient", "weight gradient"}
    assert {len(question.x) - 2 for question in sampled} == {2, 3}
    assert any(question.x[2] == question.w[2] == 1 < question.x[3] for question in sampled), "in one dimension"
    assert {question.channels_last for question in sampled} == {True, False}
    assert {question.dtype for question in sampled} >= {"float32", "float16", "bfloat16"}
    assert any(question.x[1] > question.w[1] > 0 for question in sampled), "in groups"
