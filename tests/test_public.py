"""The public names: what they are, and that each can be called once every module is imported.

A module of the name of a function would take its place in the package as soon as it is imported.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.public_examples import TRAINING
from source_files import FILES, module_name
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.simulation.snapshots.write import write_snapshot

# What `from memplan import *` gives. Adding a name here is a promise to keep it.
PUBLIC = [
    "BudgetError",
    "Comparison",
    "Explanation",
    "Exported",
    "Finding",
    "Fitted",
    "Heuristics",
    "Layouts",
    "LineProfile",
    "MemplanError",
    "PackedMasters",
    "Plan",
    "Proof",
    "Quantized",
    "RankReasons",
    "RankSnapshots",
    "Replay",
    "Roles",
    "Sweep",
    "Timeline",
    "Trace",
    "WatchedRanks",
    "WholeRun",
    "Why",
    "__version__",
    "assert_peak",
    "check",
    "compare",
    "explain",
    "export",
    "fit",
    "largest",
    "layouts",
    "load_weights",
    "measure",
    "plan",
    "profile",
    "quantize",
    "record",
    "replay",
    "replay_ranks",
    "roles",
    "simulate",
    "spec",
    "sweep",
    "verify",
    "watch",
    "watched_ranks",
    "whole_run",
    "why",
    "why_ranks",
    "with_loss",
]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def build() -> Callable[[], None]:
    model, data = make(), torch.randn(256, 64)
    return lambda: model(data).sum().backward()


LOSS: dict[str, Any] = {"targets": "256:int64<8", "loss": F.cross_entropy}
STEP = {**LOSS, "device": "cpu"}
BUDGET = "3 MiB"


def snapshot(folder: Path) -> str:
    timeline = memplan.simulate(memplan.record(build, device="h100"))
    write_snapshot(folder / "step.pickle", timeline, {})
    return str(folder / "step.pickle")


def snapshot_of_next(folder: Path) -> str:
    """The same of rank 1."""
    return str(shutil.copy(folder / "step.pickle", folder / "rank1.pickle"))


def script(folder: Path) -> Path:
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    return folder / "train.py"


def watched() -> Any:
    model, data = make(), torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with memplan.watch(model, optimizer, quiet=True) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
    return seen


def watched_folder(folder: Path) -> Path:
    """Where a rank of one has written what its watch saw."""
    with memplan.watch(make(), quiet=True, folder=folder / "ranks") as seen:
        seen.end_step()
    return folder / "ranks"


def exported(folder: Path) -> nn.Module:
    """A model with the weights that it was exported with."""
    model = make()
    memplan.export(model, "1x64", targets="1:int64<8", loss=F.cross_entropy, optimizer=torch.optim.SGD,
                   folder=folder / "device", name="net", verify=False)  # fmt: skip
    weights = [parameter.detach().numpy().reshape(-1) for parameter in model.parameters()]
    np.concatenate(weights).tofile(folder / "device" / "weights.bin")
    return memplan.load_weights(make(), folder / "device" / "weights.bin")


# Each public function, called for a tiny model; true where it gave what it should.
CALLS: dict[str, Callable[[Path], bool]] = {
    "assert_peak": lambda _: memplan.assert_peak(make, "256x64", at_most="2 MiB", **STEP).device == "cpu",
    "check": lambda _: memplan.check(make, "256x64", **STEP) == [],
    "compare": lambda _: memplan.compare(make, make, "256x64", b_options={"train": False}, **STEP).difference < 0,
    "explain": lambda _: memplan.explain(make, "256x64", **STEP).timeline.peak_allocated > 256 * 64 * 4,
    "export": lambda folder: (
        memplan.export(
            make(),
            "1x64",
            targets="1:int64<8",
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            folder=folder,
            verify=False,
        ).ram
        < 256 << 10
    ),
    "fit": lambda _: memplan.fit(make(), "256x64", budget=BUDGET, **STEP).loss is not None,
    "layouts": lambda _: memplan.layouts(make, "256x64", world=2, device="h100").best is not None,
    "largest": lambda _: memplan.largest(make, "batch", "256x64", budget=BUDGET, **STEP) > 256,
    "load_weights": lambda folder: len(list(exported(folder).parameters())) == 6,
    "measure": lambda _: memplan.simulate(memplan.measure(build)).peak_allocated > 256 * 64 * 4,
    "plan": lambda _: memplan.plan(make, "256x64", budget=BUDGET, **STEP).peak <= 3 << 20,
    "profile": lambda _: memplan.profile(make).lines is None,
    "quantize": lambda _: memplan.quantize(make(), "256x64", weights="int8").weights_saved > 0,
    "record": lambda _: len(memplan.record(build).ops) > 0,
    "replay": lambda folder: memplan.replay(snapshot(folder)).mismatches == [],
    "replay_ranks": lambda folder: memplan.replay_ranks([snapshot(folder), snapshot_of_next(folder)]).odd == (),
    "roles": lambda _: [role.ranks for role in memplan.roles(make, "256x64", world=2, device="cpu").roles] == [(0, 1)],
    "simulate": lambda _: memplan.simulate(memplan.record(build)).peak_allocated > 256 * 64 * 4,
    "spec": lambda _: memplan.spec("2x3", seed=1).shape == (2, 3),
    "sweep": lambda _: len(memplan.sweep(make, {"batch": [1, 2]}, "256x64", **STEP).rows) == 2,
    "verify": lambda _: memplan.verify(model := make(), model, "256x64", pairs=0, **LOSS).ok,
    "watch": lambda _: len(watched().rows) == 4,
    "watched_ranks": lambda folder: memplan.watched_ranks(watched_folder(folder)).odd == (),
    "whole_run": lambda folder: memplan.whole_run(script(folder), device="cpu").allocated > 512 * 10 * 16,
    "why": lambda _: memplan.why("CUDA error: out of memory").verdict == "no figures",
    "why_ranks": lambda _: memplan.why_ranks({0: "", 1: "CUDA error: out of memory"}).first.rank == 1,
    "with_loss": lambda _: isinstance(memplan.with_loss(make(), F.cross_entropy), nn.Module),
}


def test_the_public_names_are_these() -> None:
    assert sorted(memplan.__all__) == sorted(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(memplan, name)] == []


def test_every_public_function_is_called_below() -> None:
    functions = {
        name for name in PUBLIC if callable(getattr(memplan, name)) and not isinstance(getattr(memplan, name), type)
    }
    assert functions == set(CALLS)


@pytest.fixture(scope="module", autouse=True)
def _every_module_is_imported() -> None:
    for path in FILES:
        if path.name != "__main__.py":
            importlib.import_module(module_name(path))


@pytest.mark.parametrize("name", CALLS)
def test_a_public_function_is_callable(name: str, tmp_path: Path) -> None:
    if name == "quantize":
        pytest.importorskip("torchao")
    assert CALLS[name](tmp_path)


def test_traces_and_plans_are_saved_and_loaded(tmp_path: Path) -> None:
    trace = memplan.record(build)
    trace.save(tmp_path / "trace.json")
    assert memplan.Trace.load(tmp_path / "trace.json") == trace
    plan = memplan.plan(make, "256x64", budget=BUDGET, **STEP)
    plan.save(tmp_path / "plan.json")
    assert memplan.Plan.load(tmp_path / "plan.json") == plan
