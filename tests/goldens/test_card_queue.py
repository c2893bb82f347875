"""The queue of what waits for a real GPU: resumed, whatever an entry does; kept; and run on an emulated card."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch, thinned
from goldens.handmade import ROOT, changed, gelu, write
from torch import nn

import memplan

card_queue: Any = importlib.import_module("card_queue")  # of tools/gpu/, as the next; handmade.py says where
entries: Any = importlib.import_module("queue_entries")
functions: Any = importlib.import_module("queue_functions")
keeping: Any = importlib.import_module("queue_keep")
fit: Any = importlib.import_module("fit")
fit_steps: Any = importlib.import_module("fit_steps")
golden: Any = importlib.import_module("golden")
more: Any = importlib.import_module("golden_more")
steps: Any = importlib.import_module("golden_steps")

CARD = {
    "card": "NVIDIA H200", "memory": 150_000_000_000, "torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.1",
    "folder": "nvidia-h200/2.13.0-cu130",
}  # fmt: skip


@dataclass(frozen=True)
class Fake(entries.Entry):
    """An entry that runs a text of Python."""

    code: str = ""

    def command(self, place: Any) -> list[str]:
        return [sys.executable, "-c", f"folder = {str(place.own)!r}\n{self.code}"]


def fake(name: str, code: str, minutes: float = 0.01, **options: Any) -> Fake:
    return Fake(name, "why", minutes, "none", lambda place: [], entries.figures_of, code=code, **options)


def entry_of(name: str) -> Any:
    return next(entry for entry in entries.ENTRIES if entry.name == name)


def writes(figures: dict[str, Any]) -> str:
    return f"open(folder + '/figures.json', 'w').write({json.dumps(figures)!r})"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}


# Running


def test_a_second_call_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = "open(folder + '/runs', 'a').write('x')\n"
    given = [fake("first", count + writes({"bytes": 7})), fake("long", count, 20), fake("last", count)]
    queue = card_queue.Queue(tmp_path, given)
    queue.run(2, CARD)
    assert queue.states == {"first": "done", "last": "done"}  # there was no time for the long one, but for the next
    first = results(tmp_path)["first"]
    assert first["figures"] == {"bytes": 7}
    assert {name: first[name] for name in ("card", "torch", "driver", "emulated", "error")} == {
        "card": "NVIDIA H200", "torch": "2.13.0+cu130", "driver": "580.1", "emulated": False, "error": "",
    }  # fmt: skip
    card_queue.Queue(tmp_path, given).run(2, CARD)  # whatever it takes: it is the first now
    assert card_queue.Queue(tmp_path, given).states == {"first": "done", "last": "done", "long": "done"}
    runs = {name: (tmp_path / "entries" / name / "runs").read_text() for name in ("first", "long", "last")}
    assert runs == dict.fromkeys(runs, "x")
    card_queue.Queue(tmp_path, given).run(2, CARD, only=["first"])
    assert (tmp_path / "entries" / "first" / "runs").read_text() == "xx"
    assert "first" in capsys.readouterr().out


def test_what_ran_when_the_machine_went_away_comes_last(tmp_path: Path) -> None:
    queue = card_queue.Queue(tmp_path, [fake("a", "pass"), fake("b", "pass"), fake("c", "pass")])
    queue.enter("a", "running")
    assert [entry.name for entry in queue.pending()] == ["b", "c", "a"]


def test_no_entry_is_the_end_of_the_queue(tmp_path: Path) -> None:
    given = [
        fake("crash", writes({"before": 1}) + "\nimport os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        fake("memory", "raise MemoryError('CUDA out of memory. Tried to allocate 2 GiB')"),
        fake("unreadable", "open(folder + '/figures.json', 'w').write('{\"a\": ')"),
        fake("good", writes({"bytes": 7})),
    ]
    queue = card_queue.Queue(tmp_path, given)
    queue.run(2, CARD)
    assert queue.states == {"crash": "crashed", "memory": "failed", "unreadable": "done", "good": "done"}
    found = results(tmp_path)
    assert found["crash"]["figures"] == {"before": 1}  # what it had until then
    assert found["crash"]["error"].startswith("ended by SIGSEGV")
    assert "MemoryError: CUDA out of memory. Tried to allocate 2 GiB" in found["memory"]["error"]
    assert list(found["unreadable"]["figures"]) == ["unreadable"]
    assert queue.pending() == []


def test_an_entry_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_queue, "MOST_MINUTES", 2 / 60)
    sleeper = (
        f"import subprocess, time; subprocess.Popen([{sys.executable!r}, '-c', {_TICKS!r}, folder]); time.sleep(99)"
    )
    queue = card_queue.Queue(tmp_path, [fake("slow", sleeper), fake("next", "pass")])
    queue.run(2, CARD)
    assert queue.states == {"slow": "timed out", "next": "done"}
    ticks = tmp_path / "entries" / "slow" / "ticks"
    assert ticks.exists()
    before = ticks.stat().st_size
    time.sleep(0.3)
    assert ticks.stat().st_size == before  # the child does not go on


_TICKS = """
import sys, time
while True:
    open(sys.argv[1] + '/ticks', 'a').write('x')
    time.sleep(0.05)
"""


def test_what_the_minutes_do_not_suffice_for_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_queue, "LEAST_SECONDS", 0.5)
    slow, parts = fake("slow", "import time; time.sleep(99)"), fake("parts", writes({"left": ["half"]}))
    queue = card_queue.Queue(tmp_path, [parts, slow])
    queue.run(2 / 60, CARD)
    assert queue.states == {"parts": "stopped", "slow": "stopped"}
    assert [entry.name for entry in queue.pending()] == ["parts", "slow"]


def test_what_has_no_new_figure_comes_last_and_ends(tmp_path: Path) -> None:
    count = "import glob\nn = len(glob.glob(folder + '/call*'))\nopen(f'{folder}/call{n}', 'w')\n"
    another = count + "open(folder + '/figures.json', 'w').write('{\"left\": [1], \"a%d\": {}}' % n)"
    late = {"method": "eager", "error": "not done within 450 s"}  # another case would be next
    vain, steady = fake("vain", writes({"left": ["all"]})), fake("steady", another)
    cases = fake("cases", writes({"left": ["compile"], "cases": [late]}))
    queue = card_queue.Queue(tmp_path, [vain, cases, steady, fake("long", "pass", 20)])
    queue.run(2, CARD)
    assert queue.states == {"vain": "stopped", "cases": "stopped", "steady": "stopped"}
    assert [entry.name for entry in queue.pending()] == ["steady", "long", "vain", "cases"]
    queue.run(2, CARD)
    assert queue.states == {"vain": "timed out", "cases": "timed out", "steady": "stopped"}
    assert results(tmp_path)["vain"]["error"] == "no new figure in 2 calls"
    queue.run(2, CARD)
    assert queue.states["steady"] == "stopped"  # another figure each time


def test_nearly_all_the_minutes_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing the card takes some of a call's minutes."""
    monkeypatch.setattr(card_queue, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(card_queue, "MOST_MINUTES", 1 / 60)
    queue = card_queue.Queue(tmp_path, [fake("slow", "import time; time.sleep(99)")])
    queue.run(0.9 / 60, CARD)
    assert queue.states == {"slow": "timed out"}


def test_an_import_that_fails_is_no_measurement(tmp_path: Path) -> None:
    """Python ends with exit code 1."""
    bad = "raise ImportError('no module of that name')"
    given = [fake(name, bad, codes=entry_of(name).codes) for name in ("fit-gpt", "goldens-rest")]
    queue = card_queue.Queue(tmp_path, given)
    queue.run(2, CARD)
    assert set(queue.states.values()) == {"failed"}
    assert "ImportError: no module of that name" in results(tmp_path)["fit-gpt"]["error"]


def test_again_takes_what_failed(tmp_path: Path) -> None:
    given = [fake(name, "pass") for name in ("failed", "crashed", "late", "parts", "whole", "new")]
    queue = card_queue.Queue(tmp_path, given)
    for name, state in (("failed", "failed"), ("crashed", "crashed"), ("late", "timed out")):
        queue.enter(name, state)
    put(tmp_path, result("parts", figures={"a": {"error": "no"}, "b": {"bytes": 1}}), result("whole"))
    queue.enter("parts", "done")
    queue.enter("whole", "done")
    assert [entry.name for entry in queue.pending()] == ["new"]
    queue.run(2, CARD, again=True)
    assert set(queue.states.values()) == {"done"}
    assert sorted(path.name for path in (tmp_path / "entries").iterdir()) == [
        "crashed",
        "failed",
        "late",
        "new",
        "parts",
    ]


def test_a_card_that_cannot_be_described_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def hangs(command: Any, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(card_queue.subprocess, "run", hangs)
    with pytest.raises(SystemExit, match="2"):
        card_queue.describe(None)
    assert "the card cannot be described within 300 s" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        card_queue.main(["run", "--out", str(tmp_path)])
    assert "Expected a machine with an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        card_queue.main(["run", "--only", "prof", "--out", str(tmp_path)])
    assert "there is no entry prof" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_waits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    card_queue.Queue(tmp_path).enter("kernels", "crashed")
    assert card_queue.main(["list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(entries.ENTRIES)
    assert lines[0].startswith("proof                      waits")
    assert lines[1].startswith("kernels                    crashed")


# The entries


def test_every_entry_is_there_and_short_enough() -> None:
    names = [entry.name for entry in entries.ENTRIES]
    assert len(names) == len(set(names))
    assert all(0 < entry.minutes <= 8 and entry.why for entry in entries.ENTRIES)
    place = entries.Place(Path("out"), Path("out/own"), 400.0, "nvidia-none/2.13.0")
    for entry in entries.ENTRIES:
        assert (ROOT / "tools" / "gpu" / f"{entry.module}.py").exists()
        assert callable(importlib.import_module(entry.module).main)
        if entry.module == "queue_functions":
            assert entry.arguments(place)[0] in functions.FUNCTIONS
    budgets = [name.removeprefix("fit-") for name in names if name.startswith("fit-")]
    assert sorted(budgets) == sorted(fit_steps.STEPS)
    assert len(budgets) == 12
    groups = {name.removeprefix("goldens-") for name in names if name.startswith("goldens-")}
    assert groups == {*more.GROUPS, "rest"}
    assert set(functions.FUNCTIONS) <= set(names)


def test_methods_of_budgets_are_those_that_the_script_knows() -> None:
    ours = {method for method, _ in fit.cases_of_ours([{"method": "eager", "reserved": 10}])}
    assert set(entries.METHODS) <= ours | set(fit.PEERS)
    assert set(entries.DRY_METHODS + entries.DRY_COMPILED) <= ours | set(fit.PEERS)


def test_no_script_of_the_folder_hides_a_module_of_python() -> None:
    """Python looks for modules beside the script that runs first."""
    names = {path.stem for path in (ROOT / "tools" / "gpu").glob("*.py")}
    assert not names & set(sys.stdlib_module_names)


def test_only_steps_without_a_golden_file_are_recorded(tmp_path: Path) -> None:
    entry = entry_of("goldens-benchmark")
    first, *rest = more.GROUPS["benchmark"]
    place = entries.Place(tmp_path, tmp_path, 100.0, "nvidia-none/2.13.0")
    known = tmp_path / "goldens" / "nvidia-none" / "2.13.0"
    known.mkdir(parents=True)
    (known / f"{first}.json.gz").touch()
    arguments = entry.arguments(place)
    assert [arguments[n + 1] for n, one in enumerate(arguments) if one == "--only"] == rest
    index = {
        "steps": {first: {"allocated": 7}, rest[0]: {"error": f"not started: {golden.OVER}"}, rest[1]: {"error": "no"}}
    }
    (known / "index.json").write_text(json.dumps(index))
    figures = entry.read(place)
    assert (figures["files"], figures["left"]) == ([first], [rest[0]])
    assert figures["failed"].pop(rest[1]) == "no"
    assert list(figures["failed"]) == rest[2:]  # neither measured nor in the index
    for one in rest:
        (known / f"{one}.json.gz").touch()
    assert entry.command(place) is None


def test_a_case_that_had_nearly_all_the_time_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: Any, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(fit.subprocess, "run", hangs)

    def ended(left: float, total: float) -> dict[str, Any]:
        return fit.case("gpt", "eager", None, 1, None, time.monotonic() + left, total)

    assert ended(450.4, 465)["error"] == "not done within 450 s"
    assert fit.was_stopped(ended(200, 465))
    assert fit.was_stopped(ended(100, 100))  # a call of few minutes says nothing
    assert ended(float("inf"), float("inf"))["error"] == "not done within 1800 s"


HERE = {"gpu": "NVIDIA H200", "memory": 1, "torch": "2.13.0+cu130", "cuda": "13.0"}


def measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str, row: dict[str, Any]
) -> tuple[int, list[str]]:
    """The exit code, and the methods that are measured, each with this result."""
    ran: list[str] = []

    def case(step: str, method: str, budget: int | None, *_: Any) -> dict[str, Any]:
        ran.append(method)
        return {"step": step, "method": method, "budget": budget} | row

    monkeypatch.setattr(fit, "case", case)
    monkeypatch.setattr(fit, "described", lambda dry: HERE)
    monkeypatch.setattr(fit.golden, "no_gpu", lambda: None)
    arguments = ["--only", "gpt", "--methods", "eager,per_block,compile", "--missing", "--output", str(folder)]
    return fit.main([*arguments, *options]), ran


GOOD = {"reserved": 5, "ratio": 1.0, "eager_seconds": 0.5}


def test_what_is_missing_is_missing_of_this_card_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": "gpt", "method": method, "budget": None, **GOOD} for method in ("eager", "per_block", "compile")]
    fit.write(tmp_path, [row | HERE | {"gpu": "NVIDIA H100"} for row in rows])
    fit.write(tmp_path, [row | HERE | {"torch": "2.14.0"} for row in rows])
    fit.write(tmp_path, [rows[0] | HERE])
    assert measured_again(tmp_path, monkeypatch, row=GOOD) == (0, ["per_block", "compile"])


def test_cases_that_failed_are_measured_again_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = {"step": "gpt", "budget": None}
    over = head | {"method": "compile", "error": f"not started: {fit.STOPPED}"}
    fit.write(tmp_path, [head | HERE | GOOD | {"method": "eager"}, head | {"method": "per_block", "error": "no"}, over])
    place = entries.Place(tmp_path, tmp_path, 400.0, "nvidia-h200/2.13.0-cu130")
    figures = entry_of("fit-gpt").read(place)
    assert figures["failed"] == {"per_block": "no"}
    assert "compile" in figures["left"]
    assert "per_block" not in figures["left"]
    assert "--again" in entry_of("fit-gpt").arguments(replace(place, again=True))
    assert "--again" not in entry_of("fit-gpt").arguments(place)
    boom = {"error": "boom"}
    assert measured_again(tmp_path, monkeypatch, row=boom) == (fit.SOME_MISSING, ["compile"])
    assert measured_again(tmp_path, monkeypatch, "--again", row=boom) == (fit.SOME_MISSING, ["per_block", "compile"])
    assert measured_again(tmp_path / "new", monkeypatch, row=boom) == (1, ["eager", "per_block", "compile"])
    other = replace(place, card="nvidia-h100/2.13.0-cu130")
    assert entry_of("fit-gpt").read(other)["cases"] == []


@pytest.mark.parametrize("group", thinned(more.GROUPS, 2))
def test_more_layers_are_steps(group: str) -> None:
    every = steps.subjects(more=True)[0]
    for name in more.GROUPS[group][:: 1 if group == "recurrent" else 4]:
        subject = every[name]
        assert (subject.set, subject.steps) == ("layers", 3)
        memplan.record(steps.on_card(subject.build), device="h100", steps=1, cudnn=False)
    assert not set(more.LAYERS) & set(steps.subjects("golden_layers")[0])


# What functions measure, on the CPU


def noted(run: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run(lambda name, row: found.update({name: row}), functions.Setting(device="cpu"), **options)
    return found


def test_errors_and_seconds_of_a_kernel() -> None:
    weight = 3.0
    kernel = functions.Kernel(
        lambda x, w: (x * w).half().to(x), lambda x, w: x * w, lambda rows: [(rows, 8), (8,)], passes=5
    )
    row = noted(
        functions.kernels, of={"product": kernel}, rows=4, checked_rows=4, dtypes=("float32",), rivals=("torch",)
    )["product, float32"]
    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8)
    exact = x.double() * w.double()
    expected = ((x * w).half().double() - exact).norm() / exact.norm()
    assert row["errors"][0]["error"] == pytest.approx(float(expected))
    assert row["errors"][0]["of_plain"] > 100 * weight  # float16 beside float32
    assert row["least_bytes"] == 5 * 4 * 8 * 4
    assert row["bytes_per_second"] == pytest.approx(row["least_bytes"] / row["seconds"])
    assert row["torch"]["ours_over_it"] > 0


def test_every_kernel_of_memplan_is_in_the_queue() -> None:
    chosen = [*functions._named(functions.TOKEN_KERNELS), *functions._named(functions.IMAGE_KERNELS)]
    assert sorted(chosen) == sorted(functions._kernels())
    updates = {"adamw_step", "sgd_step"}  # timed by what calls them, PackedMasters
    assert {name.split(",")[0] for name in chosen} | updates == set(memplan.kernels.__all__)


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        # by hand, in float32: logits of 4 classes three times, and int64 labels twice, at 2 * 64 * 4 positions
        ("dice_cross_entropy", 1, (3 * 16 + 2 * 8) * 512),
        # scores five times; a mask that samples share, forward; with dropout twice, and a bit of each score, twice
        ("softmax_dropout, mask", 1024, (5 * 4 * 2 + 1) * 512 * 4096),
        ("softmax_dropout, mask, dropout", 1024, (5 * 4 * 2 + 2 + 2 * 2 / 8) * 512 * 4096),
    ],
)
def test_all_that_kernels_move_is_counted(name: str, rows: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "paired", lambda *_: {"eager_seconds": 1, "seconds": 1, "ratio": 1, "quartiles": [1, 1]})
    kernel = functions._kernels()[name]
    row = functions._times(kernel, torch.float32, rows, functions.Setting(device="cpu"), None, ("torch",))
    assert row["least_bytes"] == expected


def test_dropout_of_a_kernel_is_that_of_its_truth() -> None:
    kernel = functions._kernels()["softmax_dropout, mask, dropout"]
    kernel = replace(kernel, shapes=lambda rows: [(2, 8, 16)])
    errors = functions._errors(kernel, torch.float32, 1, functions.Setting(device="cpu"))["errors"]
    assert len(errors) == 2
    assert all(0 < row["error"] < 1e-6 for row in errors)


def test_a_kernel_that_fails_is_an_entry_and_the_others_stand() -> None:
    def refused(x: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bad = functions.Kernel(refused, torch.relu, lambda rows: [(rows, 8)], 5)
    good = functions.Kernel(torch.relu, torch.relu, lambda rows: [(rows, 8)], 5)
    found = noted(
        functions.kernels, of={"bad": bad, "good": good}, rows=4, checked_rows=4, dtypes=("float32",), rivals=("torch",)
    )
    assert found["bad, float32"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert "seconds" in found["good, float32"]


def test_a_copy_that_fails_is_not_the_end_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fit, "copy_rate", refused)
    kernel = functions.Kernel(torch.relu, torch.relu, lambda rows: [(rows, 8)], 5)
    found: dict[str, Any] = {}
    functions.kernels(lambda name, row: found.update({name: row}), functions.Setting(), of={"relu": kernel})
    assert found["copy"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert len(found) == 1 + 3


def test_forms_equal_themselves() -> None:
    found = noted(functions.encodings, elements=1 << 12, checked=1 << 12)
    assert len(found) == 8
    assert all(set(row["differing"]) == {0} and row["bytes_per_second"] > 0 for row in found.values())
    smaller = {name: row["value_bytes"] / row["bytes"] for name, row in found.items()}
    # flags of a byte, float32 and int64 in bits, and in one or two bytes
    assert (smaller["bits"], smaller["sign"], smaller["positive"]) == (8, 32, 32)
    assert (smaller["uint8 indices"], smaller["bfloat16"], smaller["host memory"]) == (8, 2, 1)
    assert 3 < smaller["int8"] < 4  # with the scales


def test_packed_masters_are_masters() -> None:
    found = noted(functions.packed, elements=1 << 12, updates=3)
    assert all(row["differing"] == 0 for row in found.values())
    assert all(row["fused"] == ("one pass" in name) for name, row in found.items())
    # bytes a parameter beside its own two: states, and half of a master weight instead of a whole one
    each = {name: (row["state_bytes"] >> 12, row["plain_bytes"] >> 12) for name, row in found.items()}
    assert each == {kind + how: of for kind, of in (("AdamW", (10, 12)), ("SGD", (6, 8))) for how in ("", ", one pass")}


@pytest.mark.slow
def test_a_proof_is_told() -> None:
    def small() -> Any:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        return fit_steps.Subject(model, (torch.randn(512, 64),), (torch.randn(512, 64),), nn.functional.mse_loss, {})

    row = noted(functions.proof, steps={"small": small}, engines=("graph",))["small, graph"]
    assert (row["ok"], row["exact"], row["failures"]) == (True, True, [])
    assert row["peak"] <= row["budget"] < row["reference_peak"]


def test_a_watch_is_timed() -> None:
    row = noted(functions.watch, steps={"small": 8})["small"]
    assert row["added_seconds"] > 0


# Keeping


SECONDS = {"seconds": 0.5, "took": 3.0, "ratio": 0.9, "quartiles": [0.8, 1.0]}


def result(entry: str = "kernels", **options: Any) -> dict[str, Any]:
    head = {name: value for name, value in CARD.items() if name != "folder"}
    row = {"format": "memplan-gpu-result", "version": 1, "entry": entry, "state": "done", "emulated": False}
    return row | head | {"seconds": 3.0, "figures": {"rms_norm": {"bytes": 5, **SECONDS}}, "error": ""} | options


def put(folder: Path, *rows: dict[str, Any]) -> Path:
    for row in rows:
        card_queue._write(folder / "results" / f"{row['entry']}.json", row)
    return folder


def kept(folder: Path, root: Path, *options: str) -> tuple[int, list[str]]:
    report = keeping.keep(folder, goldens=root / "goldens", results=root / "results", replace="--replace" in options)
    return int(report.differs), report.lines


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_figures_are_kept_once_and_known_ones_stay(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    put(out, result("watch"), result("kernels"))
    assert kept(out, root) == (0, ["kernels: kept", "watch: kept"])
    once = contents(root)
    stored = json.loads(once["results/gpu.json"])["results"]
    assert [row["entry"] for row in stored] == ["kernels", "watch"]
    assert stored[0]["figures"] == {"rms_norm": {"bytes": 5, **SECONDS}}
    assert kept(out, root) == (0, [])
    assert contents(root) == once
    later = {"seconds": 0.75, "took": 4.0, "ratio": 1.0, "quartiles": [0.9, 1.1]}  # no run is as long as another
    put(out, result("kernels", seconds=9.0, figures={"rms_norm": {"bytes": 5, **later}}))
    assert kept(out, root) == (0, [])
    put(out, result("kernels", figures={"rms_norm": {"bytes": 6, **later}}))
    told = "kernels: differs, and the known one stays: figures.rms_norm.bytes 5 -> 6"
    assert kept(out, root) == (1, [told])
    assert contents(root) == once
    assert kept(out, root, "--replace") == (0, ["kernels: replaced"])
    assert json.loads(contents(root)["results/gpu.json"])["results"][0]["figures"] == {
        "rms_norm": {"bytes": 6, **later}
    }
    assert keeping.known(CARD, root / "results") == ["kernels", "watch"]
    assert keeping.known(CARD | {"torch": "2.14.0"}, root / "results") == []


def test_errors_give_way_and_are_measured_again(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    put(out, result(figures={"rms_norm": {"error": "OutOfMemoryError: no"}}))
    assert kept(out, root) == (0, ["kernels: kept"])
    assert keeping.known(CARD, root / "results") == []
    put(out, result())
    assert kept(out, root) == (0, ["kernels: replaced"])


@pytest.mark.parametrize("options", [(), ("--replace",)])
def test_no_error_takes_the_place_of_a_figure(tmp_path: Path, options: tuple[str, ...]) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    no = {"error": "OutOfMemoryError: no"}
    put(out, result(figures={"rms_norm": {"bytes": 5}, "swiglu": no, "geglu": {"bytes": 7, "liger": {"bytes": 1}}}))
    kept(out, root)
    put(out, result(figures={"rms_norm": no, "swiglu": {"bytes": 6}, "geglu": {"bytes": 7, "liger": no}, "new": no}))
    assert kept(out, root, *options) == (
        0, ["kernels: figures.geglu.liger failed, and the known figures stay: OutOfMemoryError: no",
            "kernels: figures.rms_norm failed, and the known figures stay: OutOfMemoryError: no",
            "kernels: replaced"],
    )  # fmt: skip
    assert json.loads(contents(root)["results/gpu.json"])["results"][0]["figures"] == {
        "rms_norm": {"bytes": 5}, "swiglu": {"bytes": 6}, "geglu": {"bytes": 7, "liger": {"bytes": 1}}, "new": no,
    }  # fmt: skip


def test_entries_of_which_parts_failed_are_not_done(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    compiled = {"step": "gpt", "method": "compile", "budget": None, "error": "boom"}
    figures = {"cases": [case("eager", 1.0), compiled], "left": [], "failed": {"compile": "boom"}}
    goldens = {"files": ["gelu"], "left": [], "failed": {"rnn": "no golden file was written"}}
    put(out, result("fit-gpt", figures=figures), result("goldens-recurrent", figures=goldens), result("watch"))
    kept(out, root)
    assert keeping.known(CARD, root / "results") == ["watch"]
    now = figures | {"cases": [case("eager", 1.0), case("compile", 0.7)], "failed": {}}
    put(out, result("fit-gpt", figures=now), result("goldens-recurrent", figures=goldens | {"failed": {}}))
    kept(out, root)
    assert keeping.known(CARD, root / "results") == ["fit-gpt", "goldens-recurrent", "watch"]
    put(out, result("fit-gpt", figures=figures))  # another machine, without a compiler: it is known after all
    kept(out, root)
    assert keeping.known(CARD, root / "results") == ["fit-gpt", "goldens-recurrent", "watch"]


def test_what_is_emulated_or_failed_is_not_kept(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    put(out, result("watch", emulated=True), result("kernels", state="crashed", error="ended by SIGSEGV\nlast words"))
    assert kept(out, root) == (
        0, ["1 results of an emulated card: not kept", "kernels: crashed, not kept as a whole: last words"],
    )  # fmt: skip
    assert contents(root) == {}


def case(method: str, ratio: float, **options: Any) -> dict[str, Any]:
    return {"step": "gpt", "method": method, "budget": None, "reserved": 5, "ratio": ratio} | options


def test_budgets_go_into_the_file_of_the_card(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    stopped = {"step": "gpt", "method": "liger", "budget": None, "error": f"ended: {fit.STOPPED}"}
    put(out, result("fit-gpt", figures={"cases": [case("eager", 1.0), stopped, case("compile", 0.7)]}, state="stopped"))
    lines = ["fit-gpt: stopped, not kept as a whole: no message", "gpt compile: kept", "gpt eager: kept"]
    assert kept(out, root) == (0, lines)
    once = contents(root)
    (name,) = once
    assert name == "results/fit_gpu/nvidia-h200.2.13.0-cu130.json"
    stored = json.loads(once[name])
    assert (stored["gpu"], [row["method"] for row in stored["cases"]]) == ("NVIDIA H200", ["compile", "eager"])
    failed = {"step": "gpt", "method": "compile", "budget": None, "error": "boom"}
    put(out, result("fit-gpt", figures={"cases": [case("eager", 2.0, reserved=6), failed]}, state="stopped"))
    assert kept(out, root) == (
        1, [lines[0], "gpt compile: failed, and the known figures stay: boom",
            "gpt eager: differs, and the known one stays: reserved 5 -> 6"],
    )  # fmt: skip
    assert contents(root) == once
    code, _ = kept(out, root, "--replace")
    ratios = {row["method"]: row["ratio"] for row in json.loads(contents(root)[name])["cases"]}
    assert (code, ratios) == (0, {"compile": 0.7, "eager": 2.0})


def recorded(folder: Path, content: dict[str, Any]) -> None:
    name = content["name"]
    at = folder / "goldens" / CARD["folder"]
    at.mkdir(parents=True, exist_ok=True)
    write(at, content)
    peak = max(content["peaks"])
    row = {
        "set": "layers",
        "bytes": 9,
        "allocated": peak[0],
        "reserved": peak[1],
        "events": 18,
        "notes": [],
        "seconds": 1,
    }
    head = {key: content[key] for key in ("format", "version", "gpu", "versions", "environment")}
    (at / "index.json").write_text(json.dumps(head | {"contexts": None, "steps": {name: row}}))


def test_golden_files_are_kept_and_known_ones_stay(tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "root"
    put(out, result("goldens-rest", figures={"files": ["gelu"], "left": [], "failed": {}}))
    recorded(out, gelu())
    code, lines = kept(out, root)
    where = CARD["folder"]
    assert (code, lines) == (0, ["goldens-rest: kept", f"{where}/gelu: kept"])
    once = contents(root)
    assert {f"goldens/{where}/gelu.json.gz", f"goldens/{where}/index.json"} < set(once)
    assert json.loads(once[f"goldens/{where}/index.json"])["steps"]["gelu"]["events"] == 18
    assert kept(out, root) == (0, [])
    other = changed(gelu(), "peaks", 2, to=[7, 8])
    recorded(out, changed(other, "versions", "driver", to="999"))  # the driver's release alone would not matter
    code, lines = kept(out, root)
    before = gelu()["peaks"][2]
    told = f"peaks[2][0] {before[0]} -> 7; peaks[2][1] {before[1]} -> 8"
    assert (code, lines) == (1, [f"{where}/gelu: differs, and the known one stays: {told}"])
    assert contents(root) == once
    code, _ = kept(out, root, "--replace")
    assert code == 0
    assert contents(root) != once
    recorded(out, changed(gelu(), "format", to="memplan-dry-golden"))
    assert kept(out, root) == (0, [f"{where}: golden files of an emulated card, not kept"])


# On an emulated card


@needs_cuda_torch
@pytest.mark.slow
def test_the_whole_queue_runs_on_an_emulated_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENVIRONMENT is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    call = ["run", "--dry", "h100", "--torch", os.path.expanduser(ENVIRONMENT), "--out", str(tmp_path)]
    assert card_queue.main([*call, "--minutes", "90"]) == 0
    found = results(tmp_path)
    assert {name for name, row in found.items() if row["state"] == "skipped"} == {"proof", "goldens-recurrent"}
    assert found["proof"]["error"].startswith("skipped: needs values")
    assert all(row["emulated"] for row in found.values())
    for name, row in found.items():
        assert not keeping.failed(row["figures"]), (name, row["figures"])
    for name in (
        "gpt",
        "gpt_dropout",
        "vit_s",
        "llama_lora",
    ):  # without cuDNN's convolutions, whose plans are described
        cases = {one["method"]: one for one in found[f"fit-{name}"]["figures"]["cases"]}
        assert cases["fit-graph-0.8"]["reserved"] <= cases["fit-graph-0.8"]["given"] < cases["eager"]["reserved"]


def test_the_readme_names_each_file() -> None:
    text = (ROOT / "tools" / "gpu" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "tools" / "gpu").glob("*.py"):
        assert f"`{path.name}`" in text
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
