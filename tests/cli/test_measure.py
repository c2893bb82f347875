"""`memplan measure` and `memplan run --measure` where there is no GPU, and options that do not go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from environment import slow
from models.steps import STEPS

import memplan
from memplan.cli import main, measure
from memplan.errors import DeviceError, UsageError
from memplan.explanation.explain import explain_trace
from memplan.reports.html.saved_results import read_results
from memplan.reports.terminal import text_of
from memplan.studies.comparisons.measured import compare_with_prediction
from memplan.trace.records import Counters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
STEP = "import torch\ndef build():\n    model = torch.nn.Linear(4, 4)\n"
STEP += "    return lambda: model(torch.ones(2, 4)).sum().backward()\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["measure", "--device", "cuda", "{file}:build"], "no GPU here"),
        *slow((["measure", "--device", "cuda", "--contribute", "x.json.gz", "{file}:nothing"], "no GPU here")),
        (["run", "--measure", "--device", "cuda", "{file}"], "no GPU here"),
        (["measure", "--contribute", "x.json.gz", "{file}:build"], "--contribute without --device cuda"),
        (["measure", "--contribute", "-", "--device", "cuda", "{file}:build"], "--contribute -"),
        (["run", "--device", "cuda", "--contribute", "x.json.gz", "{file}"], "--contribute without --device cuda"),
        (["measure", "--snapshot", "x.pickle", "{file}:build"], "--snapshot without a card"),
        (["measure", "--device", "h100", "{file}:build"], "device 'h100' to measure on"),
    ],
)
def test_the_command_answers_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(STEP, encoding="utf-8")
    result = CliRunner().invoke(main, [one.format(file=file) for one in arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "x.json.gz").exists()


def test_without_a_gpu_the_way_out_is_the_emulated_card() -> None:
    with pytest.raises(DeviceError, match="--dry --device h100"):
        memplan.measure(lambda: lambda: None, device="cuda")


@pytest.mark.parametrize("option", ["snapshot", "contribute"])
def test_files_of_a_card_need_one(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} without a card"):
        memplan.measure(lambda: lambda: None, **{option: "x"})  # pyright: ignore[reportArgumentType]


def test_a_dry_run_contributes_nothing() -> None:
    with pytest.raises(UsageError, match="contribute with dry=True"):
        memplan.measure(lambda: lambda: None, device="h100", dry=True, contribute="x")


def test_the_cpu_is_measured_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(STEP, encoding="utf-8")
    result = CliRunner().invoke(main, ["measure", "--device", "cpu", f"{file}:build"])
    assert result.exit_code == 0, result.output
    assert "training step on cpu" in " ".join(result.stdout.split())
    assert "Beside the prediction" not in result.stdout


def test_the_page_of_a_measured_step_has_its_peaks_beside_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``measure --json`` writes of a step on a card, ``memplan report`` reads."""
    trace = memplan.record(STEPS["frozen_and_tied"], device="h100")
    peaks = memplan.simulate(trace)
    counters = tuple(Counters(peak.peak_allocated, peak.peak_reserved) for peak in (peaks.build, *peaks.steps))
    measured = replace(trace, origin="measured", counters=counters)
    monkeypatch.setattr(measure, "_measure", lambda *_: (measured, explain_trace(measured)))
    monkeypatch.setattr(
        measure, "_compare_with_prediction", lambda *_: compare_with_prediction(trace, measured, "steps.py:build")
    )
    file = tmp_path / "step.json"
    result = CliRunner().invoke(main, ["measure", "--device", "cuda", "--json", str(file), "steps.py:build"])
    assert result.exit_code == 0, result.output
    [page] = read_results(str(file))
    assert "Every peak is as predicted, to the byte." in text_of(page.document)
