"""The stored answers: what the real card took, by its golden files, and what cuDNN says, by the library itself."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from cudnn.scripted_worker import needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT

from memplan.cudnn import stored_answers
from memplan.cudnn.cudnn_library import find_cudnn
from memplan.cudnn.described_card import properties
from memplan.cudnn.questions import ExecutionPlan, Question
from memplan.cudnn.stored_answers import digest_of, measured, shipped, versions
from memplan.cudnn.worker_process import ask_worker
from memplan.devices import find

accuracy: Any = importlib.import_module("cudnn_accuracy")  # of benchmarks/; handmade.py says where
CARDS = ("a100-80gb", "h100", "rtx4090", "t4")


def question_of(key: str) -> Question:
    fields: list[Any] = json.loads(key)
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in fields]
    return Question(*values)


def test_each_card_is_described_as_it_is_now() -> None:
    assert versions() == (91900, 92600)
    for card in CARDS:
        for version in versions():
            assert len(shipped(card, version, properties(find(card)))) > 750
    other = properties(find("h100")) | {"deviceVer": 1000}
    assert digest_of(other) != digest_of(properties(find("h100")))
    assert shipped("h100", 91900, other) == {}
    assert measured("h100", 92600) == measured("a100-80gb", 91900) == {}


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_the_recurrent_networks_of_the_golden_files_are_stored(card: str) -> None:
    """What the forward passes took, read off their files by hand: beyond the results, less the copy of the input."""
    took = {key: size for key, size in measured(card, 91900).items() if key.startswith(('["lstm', '["gru'))}
    assert sorted(took.values()) == sorted(
        [112_984_832 - 8_388_608, 96_797_184 - 2_097_152, 116_654_848 - 8_388_608, 62_522_112 - 4_194_304,
         329_253_632 - 8_388_608, 151_520_000 - 8_388_608, 38_076_800 - 2_097_152]
    )  # fmt: skip


def test_what_the_real_card_took_and_what_cudnn_says_are_those_of_the_comparison() -> None:
    """The comparison calls an operation of a transposed convolution by what it computes there; the sizes are equal."""
    rows = json.loads((accuracy.RESULTS / "cudnn.json").read_text(encoding="utf-8"))["convolutions"]
    known = shipped("h100", 91900, properties(find("h100")))
    convolutions = {key: took for key, took in measured("h100", 91900).items() if key in known}
    here = {(known[key][0].engine, known[key][0].workspace, took) for key, took in convolutions.items()}
    assert {(row["engine"], row["said"], row["took"]) for row in rows} <= here
    assert len(measured("h100", 91900)) >= 700


def test_a_convolution_takes_what_its_golden_file_says_by_itself() -> None:
    """``conv2d_3x3``: measured of the op, apart from the step."""
    folder = ROOT / "goldens" / "nvidia-h100-80gb-hbm3" / "2.11.0-cu130"
    golden = importlib.import_module("golden_file").read(folder / "conv2d_3x3.json.gz")
    (call,) = [one for one in golden.workspaces if one.op == "aten.convolution.default"]
    sizes = [json.loads(part[part.index("[") :]) for part in call.key.split(" ")[:2]]
    found = {
        took for key, took in measured("h100", 91900).items()
        if (question := question_of(key)).kind == "forward" and [list(question.x), list(question.w)] == sizes
        and question.dtype == "float32" and not question.channels_last and question.dilation == (1, 1)
    }  # fmt: skip
    assert found == {call.most}


@needs_cuda_torch
@needs_compiler
def test_stored_answers_are_what_cudnn_says() -> None:
    library = find_cudnn(ENVIRONMENT)
    assert library is not None
    if library.version not in versions():
        pytest.skip("nothing is stored of this version")
    described = properties(find("h100"))
    known = shipped("h100", library.version, described)
    some = [question_of(key) for key in sorted(known)[::40]]
    for question, answer in ask_worker(library, described, some):
        assert not isinstance(answer, str)
        first: dict[int, ExecutionPlan] = {}
        for plan in answer:
            first.setdefault(plan.workspace, plan)
        assert tuple(first.values()) == known[question.key]


def test_files_are_in_the_package() -> None:
    assert stored_answers.MEASURED.stat().st_size < 20_000
    assert stored_answers.SHIPPED.stat().st_size < 250_000
