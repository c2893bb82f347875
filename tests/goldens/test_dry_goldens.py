"""Predictions beside torch on emulated cards; and that a file of such a card is never taken for a real one's."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch, thinned
from goldens.handmade import MIB, ROOT, TENSOR, changed, gelu, write

import memplan
from memplan.devices import find as find_card
from memplan.dry.cuda_torch import find_torch
from memplan.simulation.replays.replay import replay

# transformers' own, of a step of the zoo
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is:FutureWarning")

golden_file = importlib.import_module("golden_file")  # of benchmarks/, as the next two; handmade.py says where
accuracy = importlib.import_module("cuda_accuracy")
dry = importlib.import_module("dry_accuracy")
golden_dry = importlib.import_module("golden_dry")  # of tools/gpu/, as the next two
steps = importlib.import_module("golden_steps")
measuring = importlib.import_module("golden_measure")

FILES: list[Path] = golden_file.find(dry.DRY)
CARDS = sorted({path.parts[-3] for path in FILES})
STEPS = sorted({path.name for path in FILES})
MISSES: dict[str, str] = json.loads(dry.MISSES.read_text(encoding="utf-8"))


def quick(path: Path) -> bool:
    """Whether a file is of every run: every sixteenth step on one of the cards that have it, the next on the next."""
    cards = sorted(other.parts[-3] for other in FILES if other.name == path.name)
    return STEPS.index(path.name) % 16 == 0 and path.parts[-3] == cards[STEPS.index(path.name) // 16 % len(cards)]


def to_compare(path: Path, *, misses: bool) -> Any:
    """The file, slow unless it is of every run; marked to fail where it is a known miss."""
    # the replay is the same code for every card: of one card in every run
    marks = [] if quick(path) and (misses or path.parts[-3] == CARDS[0]) else [pytest.mark.slow]
    if misses and dry.key_of(path) in MISSES:
        marks.append(pytest.mark.xfail(strict=True, reason=MISSES[dry.key_of(path)]))
    return pytest.param(path, marks=marks)


@functools.cache
def recorded() -> list[tuple[Path, str, str, bool]]:
    """Of each file its card, its step, and whether it says that the card was emulated."""
    return [
        (path, golden.gpu, golden.name, golden.dry)
        for path, golden in zip(FILES, map(golden_file.read, FILES), strict=True)
    ]


@functools.cache
def results() -> dict[str, Any]:
    return json.loads((dry.RESULTS / "dry.json").read_text(encoding="utf-8"))


# What torch did on emulated cards


@pytest.mark.parametrize("path", [to_compare(path, misses=True) for path in FILES], ids=dry.key_of)
def test_prediction_is_as_near_as_it_has_to_be(path: Path) -> None:
    row = accuracy.compare(golden_file.read(path))
    if row.error.startswith("LookupError"):
        pytest.skip(row.error)
    assert row.holds, row


@pytest.mark.parametrize("path", [to_compare(path, misses=False) for path in FILES], ids=dry.key_of)
def test_events_replay_to_every_address_and_segment(path: Path) -> None:
    golden = golden_file.read(path)
    replayed = replay(golden.snapshot())
    assert replayed.mismatches == []
    assert (replayed.peak_allocated, replayed.peak_reserved) == (golden.peak.allocated, golden.peak.reserved)


def test_every_run_compares_each_card() -> None:
    assert {path.parts[-3] for path in FILES if quick(path)} == set(CARDS)
    assert {path.name for path in FILES if quick(path)} == set(STEPS[::16])


LT_WORKSPACE, COUNTER = 1 << 20, 4
EVERY_SIZE = ["gpt2", "autocast_transformer", "multihead_attention", "attention", "attention_efficient_bf16", "linear"]


@pytest.mark.parametrize("card", ["h100", pytest.param("a100-80gb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", thinned(EVERY_SIZE, 3))
def test_every_allocation_has_the_size_that_torch_asked_for(name: str, card: str) -> None:
    """In the same order. Releases of torch differ in two: a workspace of cuBLASLt, and where counters of Adam lie."""
    golden = next(g for g in map(golden_file.read, FILES) if g.name == name and find_card(g.gpu).name == card)
    step = steps.subjects()[0][name]
    with accuracy.environment(golden.environment):
        trace = memplan.record(steps.on_card(step.build), device=card, steps=step.steps)
    born = sorted((storage for storage in trace.counted if storage.bytes), key=lambda storage: storage.born)
    same = golden.torch.split(".")[:2] == torch.__version__.split(".")[:2]
    left_out = () if same else (LT_WORKSPACE, COUNTER)
    predicted, real = ([size for size in found if size not in left_out] for found in
                       ([storage.bytes for storage in born], dry.sizes(golden)))  # fmt: skip
    assert predicted == real


# Real and emulated are told apart


def test_files_of_emulated_cards_lie_in_their_folder_and_say_what_they_are() -> None:
    assert FILES != []
    assert [path for path, _, _, emulated in recorded() if not emulated] == []
    real = golden_file.find(ROOT / "goldens")
    assert not {*real} & {*FILES}
    assert [path for path in real if golden_file.read(path).dry] == []


def test_a_file_of_an_emulated_card_names_it_so_wherever_it_is_compared(tmp_path: Path) -> None:
    content = gelu() | {"format": "memplan-dry-golden", "assumed": ["branch: a value was read"]}
    golden = golden_file.read(write(tmp_path, content))
    assert (golden.dry, golden.assumed) == (True, ("branch: a value was read",))
    assert accuracy.compare(golden, lambda _: prediction(1)).gpu == "emulated NVIDIA H200"
    with pytest.raises(golden_file.GoldenError, match="assumed is missing"):
        golden_file.read(write(tmp_path, gelu() | {"format": "memplan-dry-golden"}))


def test_what_is_measured_on_an_emulated_card_says_so_and_what_was_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    module = importlib.import_module("memplan.trace.dry_run.observe")
    monkeypatch.setattr(module, "check_card", lambda card: checked.append(card.name))
    monkeypatch.setattr(measuring, "golden", lambda _, alone: gelu() | {"alone": alone})
    monkeypatch.delenv("MEMPLAN_DRY_LOG", raising=False)
    content = golden_dry.golden(steps.Subject("gelu", "layers", "golden_layers", lambda: lambda: None), "t4")
    assert checked == ["t4"]
    assert (content["format"], content["assumed"], content["alone"]) == ("memplan-dry-golden", [], False)
    assert content["context"] is None  # the emulated driver's own number is no measurement


@needs_cuda_torch
@pytest.mark.parametrize("name", ["linear", pytest.param("groupnorm_net", marks=pytest.mark.slow)])
def test_the_stored_files_are_what_the_command_writes(name: str, tmp_path: Path) -> None:
    """But for the version of Python."""
    assert ENVIRONMENT is not None
    stored = [golden_file.read(path) for path in FILES if path.name == f"{name}.json.gz"]
    if find_torch(ENVIRONMENT).version != stored[0].torch:
        pytest.skip(f"the stored files are of torch {stored[0].torch}")
    stored = next(golden for golden in stored if golden.capability == (7, 5))
    command = [sys.executable, str(ROOT / "tools" / "gpu" / "golden.py"), "--dry", "t4", "--torch", ENVIRONMENT]
    command += ["--only", name, "--output", str(tmp_path)]
    kept = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}  # MONAI sets it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    (path,) = golden_file.find(tmp_path)
    found = golden_file.read(path)
    assert replace(found, path=stored.path, versions=stored.versions) == stored


# The command that lists misses and makes the tables


def prediction(factor: float) -> Any:
    """Of `handmade.gelu`, off by a factor."""
    peaks = [4 * TENSOR, 5 * TENSOR, 5 * TENSOR]
    span = tuple(golden_file.Peak(int(peak * factor), peak) for peak in (5 * TENSOR, *peaks))
    return accuracy.Prediction(span, span, span, "2.13.0")


@pytest.mark.parametrize("assumed", [[], ["bound: nonzero"]])
def test_a_miss_is_named_by_how_far_it_is_off(
    assumed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, gelu() | {"format": "memplan-dry-golden", "assumed": assumed})
    monkeypatch.setattr(accuracy, "predict", lambda golden, cudnn: prediction(1.25))
    row = dry.row_of(path)
    assert (row.step, row.card, row.number, row.allocated, row.holds) == ("gelu", "NVIDIA H200", True, 0.25, False)
    assert row.miss.startswith("allocated +25.00% off, reserved +0.00%")
    assert row.miss.endswith("decide what is allocated") is bool(assumed)
    monkeypatch.setattr(accuracy, "predict", lambda golden, cudnn: prediction(1))
    assert (dry.row_of(path).holds, dry.row_of(path).miss) == (True, "")


def test_an_interval_that_does_not_hold_is_a_miss_by_what_lies_outside(tmp_path: Path) -> None:
    low, high = (tuple(golden_file.Peak(size, size) for _ in range(4)) for size in (100, 120))
    row = accuracy.Comparison("a", "zoo", "c", "2", (*low[:3], golden_file.Peak(150, 150)), None)
    row = replace(row, prediction=accuracy.Prediction(low, high, None, "2"))
    assert dry.outside(row) == "reserved is 20.00% outside of the interval"
    assert dry.outside(replace(row, measured=(golden_file.Peak(80, 110), *low[1:]))) == (
        "allocated is 25.00% outside of the interval"
    )


def test_a_pair_is_the_same_only_if_every_size_and_peak_is(tmp_path: Path) -> None:
    real = golden_file.read(write(tmp_path, gelu()))
    same = dry.pair_of(real, real)
    assert (same.sizes, same.allocated, same.reserved) == (True, 0, 0)
    peak = dry.pair_of(
        golden_file.read(write(tmp_path, changed(gelu(), "peaks", 0, to=[3 * TENSOR, 4 * TENSOR]))), real
    )
    assert (peak.sizes, peak.allocated, peak.reserved) == (True, -0.25, 0)
    size = dry.pair_of(golden_file.read(write(tmp_path, changed(gelu(), "events", "sizes", 1, to=MIB))), real)
    assert (size.sizes, size.allocated, size.reserved) == (False, 0, 0)


def test_the_stored_results_are_of_the_files_that_are_here() -> None:
    rows = results()["steps"]
    assert len(rows) == len(FILES)
    assert {(row["card"], row["step"]) for row in rows} == {(card, name) for _, card, name, _ in recorded()}
    assert sorted(row["miss"] for row in rows if not row["holds"]) == sorted(MISSES.values())
    stored = [dry.Row(**row) for row in rows]
    beside = [dry.Pair(**row) for row in results()["beside"]]
    assert (dry.RESULTS / "dry.md").read_text(encoding="utf-8") == dry.table(stored)
    asked = dry.stored()[1].rows
    assert {(row.card, row.step) for row in asked} == {(row.card, row.step) for row in stored}
    text = (dry.RESULTS / "dry_short.md").read_text(encoding="utf-8")
    assert text == dry.short(stored, beside, dry.stored()[1])
    assert beside == dry.pairs()


def test_every_step_is_measured_or_says_why_it_is_not() -> None:
    names = set(steps.subjects()[0])
    for card, missing in results()["missing"].items():
        measured = {name for _, of, name, _ in recorded() if of == card}
        assert measured | set(missing) == names
        assert not measured & set(missing)
        assert all(missing.values())
