"""The watch on a card: an emulated one, on which torch's own allocator counts, and runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from environment import ENVIRONMENT, needs_cuda_torch

import memplan
from memplan.devices import find
from memplan.dry.cuda_torch import find_torch
from memplan.dry.library import library_for
from memplan.trace.dry_run.process import process_command, process_variables

pytestmark = needs_cuda_torch

SCRIPT = """
import json, os, sys
import torch
import memplan

ask = json.loads(sys.argv[1])
torch.cuda.init()
if ask["history"]:
    torch.cuda.memory._record_memory_history()
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, peaks = [], []

def train(seen):
    for number in range(ask["steps"]):
        x = torch.randn(ask["batch"] if number < ask["large"] else 6_000_000, 512, device="cuda")
        output = model(x)
        loss = output.logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if seen is None:
            peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()])
            torch.cuda.reset_peak_memory_stats()
        if number >= ask["keep"]:
            kept.append(output)

answer = {"error": None}
try:
    if ask["watch"]:
        with memplan.watch(model, optimizer, quiet=True, post_mortem=ask["folder"]) as seen:
            train(seen)
    else:
        train(None)
except torch.cuda.OutOfMemoryError as error:
    answer["error"] = type(error).__name__
answer |= seen.to_dict() if ask["watch"] else {"peaks": peaks}
print("ANSWER" + json.dumps(answer))
sys.stdout.flush()
os._exit(0)  # its threads may hold objects of Python
"""
NEVER = 1_000


def run(folder: Path, **asked: Any) -> dict[str, Any]:
    ask = {"steps": 24, "batch": 256, "large": NEVER, "keep": NEVER, "watch": True, "history": False} | asked
    file = folder / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    torch, card = find_torch(ENVIRONMENT), find("rtx4090")
    arguments = ["train.py", json.dumps(ask | {"folder": str(folder)})]
    code = f"sys.argv = {arguments!r}\nexec(compile(open({str(file)!r}).read(), {str(file)!r}, 'exec'))"
    variables = process_variables(os.environ, card, library_for(torch), folder / "log")
    done = subprocess.run(process_command(torch, code), env=variables, capture_output=True, text=True, check=False)
    assert "ANSWER" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("ANSWER")[2])


def test_rows_are_the_allocators_and_predictions_are_exact(tmp_path: Path) -> None:
    """The same steps without a watch, read by torch's own counters, have the same peaks."""
    seen, plain = run(tmp_path), run(tmp_path, watch=False)
    assert [[row["peak"], row["held"]] for row in seen["rows"]] == plain["peaks"]
    assert [row["predicted"] for row in seen["rows"]] == [peak for peak, _ in plain["peaks"]]
    assert {row["drift"] for row in seen["rows"]} == {0}
    assert (seen["device"], seen["leaks"], seen["drifts"]) == ("rtx4090", [], [])


def test_a_leak_that_begins_late_is_found_by_the_number_of_allocations(tmp_path: Path) -> None:
    (leak,) = run(tmp_path, keep=8)["leaks"]
    line = 1 + SCRIPT.splitlines().index("        output = model(x)")
    assert leak["where"] == f"train.py:{line}"
    assert leak["bytes"] == 256 * 10 * 4
    assert leak["noticed"] == 16  # outputs are kept from step 9 on; three steps with one more each; four observed
    assert "`kept`" in leak["held_by"]


def test_out_of_memory_on_the_card(tmp_path: Path) -> None:
    seen = run(tmp_path, large=5, history=True)
    assert seen["error"] == "OutOfMemoryError"
    data = json.loads(Path(seen["post_mortem"]).read_text())
    assert data["step"] == 6
    # of the batch 6,000,000: the result of the first layer, or of GELU, is 22.89 GiB
    assert data["asked"] == pytest.approx(6_000_000 * 1024 * 4, rel=0.001)
    assert data["capacity"] >= data["reserved"] + data["free"]
    assert data["budget"] == data["reserved"] + data["free"]
    assert data["alive_of"].startswith("the failed step, as predicted")
    assert data["by_cause"]["input"] == 6_000_000 * 512 * 4
    assert data["by_layer"][0]["bytes"] == 6_000_000 * 1024 * 4
    assert data["levers"]["fits"] is False
    assert data["levers"]["smallest_budget"] > data["budget"]
    assert "--input 6000000x512" in data["command"]
    replayed = memplan.replay(data["snapshot"])
    assert replayed.timeline.peak_allocated >= data["allocated"]
