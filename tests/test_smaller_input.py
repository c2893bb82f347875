"""The stored outputs of docs/smaller-input.md: beside public reports, an emulated card, and what the commands print."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from cudnn.scripted_worker import needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT
from models.smaller_inputs import STEPS

import memplan
from memplan._bytes import format_bytes
from memplan.cudnn.cudnn_library import find_cudnn
from memplan.studies.sweeps.engine_changes import FACTOR

smaller = importlib.import_module("smaller_input")  # of benchmarks/; handmade.py says where
PAGE = (ROOT / "docs" / "smaller-input.md").read_text(encoding="utf-8")
MADE_WITH = 91900
GIB = 1 << 30


def stored(name: str) -> str:
    return (smaller.FOLDER / f"{name}.md").read_text(encoding="utf-8")


def peak(step: str) -> str:
    """The peak that the page shows for a step."""
    _, _, value = step.partition("_")
    rows = [line for name in smaller.COMMANDS for line in stored(name).splitlines() if value in line.split()[:2]]
    (row,) = [row for row in rows if re.search(r"\d [GMK]iB ", row)]
    return re.findall(r"[\d.]+ [GMK]iB", row)[0]


def test_each_output_is_shown() -> None:
    assert [name for name in smaller.COMMANDS if stored(name).strip() not in PAGE] == []
    assert {path.stem for path in smaller.FOLDER.glob("*.md")} == set(smaller.COMMANDS)


def test_a_larger_one_takes_less_in_each_example() -> None:
    assert (peak("size_127"), peak("size_128")) == ("2.0 GiB", "1.5 GiB")
    assert (peak("batch_6"), peak("batch_7")) == ("36.1 MiB", "21.0 MiB")
    assert (peak("kernel_3"), peak("kernel_4")) == ("247.0 MiB", "122.0 MiB")


@pytest.mark.parametrize("name", ["size", "batch", "kernel"])
def test_the_engines_on_both_sides_are_named(name: str) -> None:
    assert re.search(r"at \d+ cuDNN plans eng\d+ with .* at \d+ eng\d+ with ", " ".join(stored(name).split()))


def test_the_page_of_sweeps_quotes_an_output() -> None:
    sweep = " ".join((ROOT / "docs" / "sweep.md").read_text(encoding="utf-8").split())
    (quoted,) = re.findall(r'"(at \d+ cuDNN plans .*?)"', sweep)
    assert quoted in " ".join(stored("size").split())
    assert f"a factor of {FACTOR} beside" in sweep


def test_what_was_reported_is_what_the_page_says() -> None:
    """The reports' own figures: a peak, and two requests of the kernel that unfolds its input."""
    assert peak("size_361x370x251") == format_bytes(12_874_233_344)
    assert peak("size_4x1090x1922") == "17.0 GiB"
    assert f"{64 * 27 * 362 * 370 * 251 * 2 / GIB:.2f} GiB" == "108.21 GiB"
    assert f"{256 * 27 * 3 * 1088 * 1920 * 4 / GIB:.2f} GiB" == "161.37 GiB"
    assert 64 * 361 * 370 * 251 < 2**31 < 64 * 362 * 370 * 251
    assert 256 * 4 * 1090 * 1922 < 2**31 < 256 * 5 * 1090 * 1922
    for text in ("12,874,233,344", "108.21 GiB", "64 x 27 x 362 x 370 x 251 values", "161.37 GiB", "17 GB"):
        assert text in PAGE
    assert "256 x 27 x 3 x 1088 x 1920 values" in PAGE


def stored_version() -> bool:
    found = find_cudnn(ENVIRONMENT)
    return found is not None and found.version == MADE_WITH


@needs_cuda_torch
@needs_compiler
@pytest.mark.parametrize(
    "step", [pytest.param(name, marks=[] if name.startswith("batch") else [pytest.mark.slow]) for name in STEPS]
)
def test_an_emulated_card_takes_what_the_page_shows(step: str) -> None:
    """The unmodified torch, by its own allocator."""
    if not stored_version():
        pytest.skip("the page was made with another cuDNN")
    card = "a100-80gb" if "x" in step else "h100"
    measured = memplan.measure(STEPS[step], device=card, dry=True, environment=ENVIRONMENT, steps=1)
    assert format_bytes(memplan.simulate(measured).steps[0].peak_allocated) == peak(step)


@needs_cuda_torch
@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "batch" else [pytest.mark.slow]) for name in smaller.COMMANDS]
)
def test_the_stored_outputs_are_those_of_the_commands(name: str) -> None:
    if not stored_version():
        pytest.skip("the page was made with another cuDNN")
    assert ENVIRONMENT is not None
    assert smaller.shown(smaller.COMMANDS[name], str(Path(ENVIRONMENT))) == stored(name)
