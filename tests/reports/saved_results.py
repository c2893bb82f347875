"""Results of small steps as JSON text, of every kind, with names that would be tags if they were not escaped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from models.guard_figures import figures, taken
from models.public_examples import FULL
from reports.outcomes import FRONTIER, PROOF, plan
from torch import nn

import memplan
from memplan.checks.finding import Findings
from memplan.devices import catalogue
from memplan.explanation.explain import explain_trace
from memplan.planning.plan.plan import Plan
from memplan.reports import replay
from memplan.reports.devices import Catalogue
from memplan.simulation.replays.side_by_side import cases
from memplan.simulation.snapshots.write import write_snapshot
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import find_largest
from memplan.studies.capacity.limit import Room
from memplan.studies.capacity.on_cards import CardRow, OnCards
from memplan.studies.guarding.outcome import compare_with
from memplan.trace.recording.session import Target
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace
from memplan.verification.fitting.outcome import Outcome

DATA = Path(__file__).parents[1] / "data"
EVIL = "<script>hacked = 1</script><img src=x onerror='hacked = 1'>"


class Net(nn.Module):
    """Convolutions in a module whose name is a tag."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.add_module(EVIL, nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, EVIL)(self.body(self.stem(x)).mean((2, 3)))


def build() -> Callable[[], None]:
    model, x = Net(), torch.randn(8, 3, 32, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


@cache
def trace() -> Trace:
    return memplan.record(build, device="rtx4090")


@cache
def explanation() -> str:
    return explain_trace(trace(), title=EVIL).to_json()


@cache
def planned() -> Plan:
    whole = memplan.plan(Net, "8x3x32x32", budget="1 GiB", costs="roofline").eager_peak
    return memplan.plan(Net, "8x3x32x32", budget=whole * 4 // 5, costs="roofline")


@cache
def fitted() -> str:
    found = Outcome("net.py:make", planned(), PROOF, frontier=replace(FRONTIER, budget=planned().budget))
    return found.to_json()


@cache
def sweep() -> str:
    axes = {"batch": [2, 4, 8], "size": [16, 24]}
    return memplan.sweep(Net, axes, "2x3x16x16", device="rtx4090", jobs=1).to_json()


def findings() -> str:
    return Findings(EVIL, tuple(memplan.check(Unpadded, "1x1x32x32"))).to_json()


class Unpadded(nn.Sequential):
    """Convolutions that lose a border."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))


def replayed() -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.pickle"
        write_snapshot(path, memplan.simulate(trace()), {})
        return replay.dumps(cases(memplan.replay(path), [], None))


def ranks() -> str:
    found = memplan.roles(build, world=2, device="rtx4090")
    return replace(found, title=EVIL).to_json()


def snapshots_of_ranks() -> str:
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{number}.pickle" for number in range(2)]
        for file in files:
            write_snapshot(file, memplan.simulate(trace()), {})
        return memplan.replay_ranks(files).to_json()


def watched_by_ranks() -> str:
    with TemporaryDirectory() as folder:
        model = nn.Linear(8, 8)
        with memplan.watch(model, folder=folder, quiet=True) as seen:
            model(torch.randn(2, 8)).sum().backward()
            seen.end_step()
        return replace(memplan.watched_ranks(folder), notes=(EVIL,)).to_json()


def reasons_of_ranks() -> str:
    return memplan.why_ranks({0: EVIL, 1: FULL}).to_json()


def layouts() -> str:
    return memplan.layouts(lambda: nn.Linear(64, 64), "8x64", world=2, device="h100").to_json()


def compared() -> str:
    return memplan.compare(Net, lambda: Net(16), "8x3x32x32").to_json()


def found_largest() -> str:
    subject = Subject(Net, StepOptions(("2x3x16x16",)).checked())
    return find_largest(subject, "batch", Room(Target("cpu"), 1 << 22)).to_json()


def watched() -> str:
    leak = {
        "where": "train.py:3", "layer": "a", "op": "mul", "shape": [2], "dtype": "float32", "count": 1, "bytes": 8,
        "steps": [1], "held_by": "a list", "kept_at": None, "noticed": 2, "cycle": False, "ended": None,
    }  # fmt: skip
    row = {"step": 1, "seconds": 0.1, "peak": 9000, "held": 4000, "predicted": 9000, "resident": None}
    facts = {"format": "memplan.watch", "schema": 1, "device": "cpu", "steps": 1, "predicted": 9000}
    return json.dumps({**facts, "rows": [row], "leaks": [leak], "notes": [EVIL]})


def guarded() -> str:
    before, now = figures({("a", "saved"): 10}), taken({("a", "saved"): 30, (EVIL, "weight"): 4})
    return compare_with(before, now, "1%").to_json()


def on_cards() -> str:
    rows = CardRow("t4", 16 << 30, False, 20 << 30, 21 << 30, 0), CardRow(EVIL, 80 << 30, True, 9, 10, 64, 80, 11)
    return OnCards(f"net {EVIL}", "batch", rows, 5).to_json()


@cache
def every() -> dict[str, str]:
    """One of each kind."""
    return {
        "explanation": explanation(),
        "trace": trace().to_json(),
        "plan": planned().to_json(),
        "old plan": (DATA / "mlp.plan.json").read_text(),
        "made-up plan": plan().to_json(),
        "proof": PROOF.to_json(),
        "fit": fitted(),
        "sweep": sweep(),
        "findings": findings(),
        "replay": replayed(),
        "ranks": ranks(),
        "snapshots of ranks": snapshots_of_ranks(),
        "watched ranks": watched_by_ranks(),
        "reasons of ranks": reasons_of_ranks(),
        "layouts": layouts(),
        "comparison": compared(),
        "largest": found_largest(),
        "cards": on_cards(),
        "watched run": watched(),
        "guard": guarded(),
        "devices": Catalogue(catalogue()).to_json(),
        "cache": json.dumps({"format": "memplan.cache", "schema": 1, "kept": []}),
    }
