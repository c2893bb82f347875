"""`memplan measure --device cuda` where a process sees a card: peaks are torch's own, beside the prediction; a
contribution replays."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path

import goldens.handmade  # noqa: F401  # makes the benchmarks' reader importable
import pytest
from emulated_card.dry_process import command_there, run_there
from environment import needs_cuda_torch

import memplan

golden_file = importlib.import_module("golden_file")  # of benchmarks/: shares no code with what writes

STEP = """
import torch

class ZebraNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.zebra_layer, self.head = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 10)
    def forward(self, x):
        return self.head(torch.nn.functional.gelu(self.zebra_layer(x)))

def build():
    model, data = ZebraNet().cuda(), torch.randn(256, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

def here():
    model, data = torch.nn.Linear(64, 64), torch.randn(8, 64)
    return lambda: model(data).sum().backward()
"""
SCRIPT = STEP + "\nstep = build()\nfor _ in range(4):\n    step()\n"
ITSELF = """
import torch, zebra_steps
torch.cuda.init()
step = zebra_steps.build()
peaks = []
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
print("peaks", peaks)
"""
pytestmark = needs_cuda_torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card")
    (path / "zebra_steps.py").write_text(STEP, encoding="utf-8")
    (path / "zebra_train.py").write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def own_peaks(folder: Path) -> list[list[int]]:
    """What torch's counters say of the same step, in a process that runs nothing of memplan's around it."""
    said = run_there(f"sys.path.insert(0, {str(folder)!r})\n{ITSELF}", folder)
    return json.loads(next(line for line in said.splitlines() if line.startswith("peaks")).removeprefix("peaks"))


def test_peaks_are_torchs_own_and_stand_beside_the_prediction(folder: Path, own_peaks: list[list[int]]) -> None:
    target = f"{folder}/zebra_steps.py:build"
    options = ["--json", "out.json", "--trace", "trace.json", "--contribute", "contributed.json.gz"]
    said = command_there(["measure", "--device", "cuda", *options, target], folder)
    assert said.rstrip().endswith("exit code 0"), said
    trace = memplan.Trace.from_json((folder / "trace.json").read_text(encoding="utf-8"))
    assert (trace.origin, trace.device) == ("measured", "h100")
    assert [[one.allocated, one.reserved] for one in trace.counters[1:]] == own_peaks
    rows = json.loads((folder / "out.json").read_text(encoding="utf-8"))["beside"]["peaks"]
    assert [row["measured"] for row in rows[2:]] == [size for pair in own_peaks for size in pair]
    assert [row["predicted"] for row in rows] == [row["measured"] for row in rows]
    assert "Every peak is as predicted, to the byte." in said
    saved = {trace.ops[one.op or 0].layer for one in trace.storages if one.cause == "saved" and one.op is not None}
    assert {"zebra_layer", "ZebraNet"} <= saved  # each step's tensors have a layer and a cause
    _check_contribution(folder, trace)


def _check_contribution(folder: Path, trace: memplan.Trace) -> None:
    """It replays to the same peak, on the allocator that is simulated, and has no name of the user's."""
    golden = golden_file.read(folder / "contributed.json.gz")
    assert [(one.allocated, one.reserved) for one in golden.steps] == [
        (one.allocated, one.reserved) for one in trace.counters[1:]
    ]
    replayed = memplan.replay(golden.snapshot())
    assert replayed.mismatches == []
    assert replayed.timeline.peak_allocated == max(one.allocated for one in trace.counters)
    assert b"zebra" not in gzip.decompress((folder / "contributed.json.gz").read_bytes()).lower()


def test_a_module_is_put_on_the_card(folder: Path) -> None:
    said = command_there(
        ["measure", "--device", "cuda", "--input", "8x512", f"{folder}/zebra_steps.py:ZebraNet"], folder
    )
    assert "exit code 0" in said
    assert "training step on h100" in " ".join(said.split())


def test_a_step_that_names_no_card_is_made_there(folder: Path) -> None:
    said = command_there(["measure", "--device", "cuda", f"{folder}/zebra_steps.py:here"], folder)
    assert "exit code 0" in said
    assert "everything was made on the card" in " ".join(said.split())


def test_a_script_is_measured_beside_its_prediction(folder: Path, own_peaks: list[list[int]]) -> None:
    options = ["run", "--measure", "--device", "cuda", "--contribute", "contributed.json.gz", "--json", "out.json"]
    said = command_there([*options, "zebra_train.py"], folder)
    assert said.rstrip().endswith("exit code 0"), said
    data = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    rows = {row["part"]: row for row in data["beside"]["peaks"]}
    assert [rows["step 2"]["measured"], rows["step 2, reserved"]["measured"]] == own_peaks[1]
    assert rows["step 2"]["predicted"] == rows["step 2"]["measured"]
    assert golden_file.read(folder / "contributed.json.gz").steps[1].allocated == rows["step 2"]["measured"]


def test_what_was_there_before_does_not_count(folder: Path) -> None:
    code = f"""
import torch
sys.path.insert(0, {str(folder)!r})
import zebra_steps, memplan
kept = torch.zeros(1 << 20, device="cuda")
print("bytes", [one.allocated for one in memplan.measure(zebra_steps.build, device="cuda").counters])
del kept
torch.cuda.empty_cache()
print("bytes", [one.allocated for one in memplan.measure(zebra_steps.build, device="cuda").counters])
"""
    lines = [line for line in run_there(code, folder).splitlines() if line.startswith("bytes")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
