"""What measures budgets on a card, as far as it goes without one: it says so; its counts, budgets, files and table."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens.handmade import ROOT
from torch import nn

import memplan
from memplan.errors import DeviceError

fit = importlib.import_module("fit")  # of tools/gpu/; handmade.py says where
fit_steps = importlib.import_module("fit_steps")
fit_gpu = importlib.import_module("fit_gpu")  # of benchmarks/

ROW: dict[str, Any] = {
    "step": "unet3d", "method": "fit-graph-floor", "budget": None, "given": 3_000_000_000, "reserved": 2_900_000_000,
    "allocated": 2_000_000_000, "seconds": 0.5, "eager_seconds": 0.4, "ratio": 1.25, "quartiles": [1.2, 1.3],
    "moved": 500_000_000_000, "copy_bytes_per_second": 2_000_000_000_000,
}  # fmt: skip
CARD = {"gpu": "NVIDIA H200", "memory": 1, "torch": "2.13.0+cu130", "cuda": "13.0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_or_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fit.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fit.py: torch")
    assert "Expected a machine with an NVIDIA GPU" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_fit_refuses_a_module_on_a_card_and_leaves_it() -> None:
    model = nn.Linear(4, 4).cuda()
    with pytest.raises(DeviceError, match="weight is on cuda:0"):
        memplan.fit(model, torch.ones(2, 4, device="cuda"), budget="1 GiB")
    assert "forward" not in vars(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_peer_is_measured_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fit_steps.STEPS, "unet3d", lambda: fit_steps.unet3d(1, 16, (8, 16)))
    row = fit.measured("unet3d", "per_block", None, 1)
    assert 0 < row["allocated"] <= row["reserved"]
    assert row["moved"] > 0


def test_what_a_step_moves_is_what_its_ops_read_and_write() -> None:
    x = torch.ones(1024, requires_grad=True)  # 4 KiB
    with fit_steps.Moved() as counter:
        y = x.view(32, 32).relu()
    assert counter.bytes == 2 * 4096  # the view moves nothing
    with fit_steps.Moved() as counter, torch.no_grad():
        y.mul_(y)
    assert counter.bytes == 2 * 4096  # read once, though it is both operands, and written
    with fit_steps.Moved() as counter:
        x.sum().backward()
    assert counter.bytes >= 4096 + 4  # expanding the gradient is a view, too


def test_budgets_are_the_floor_shares_of_eager_and_peaks_of_peers() -> None:
    rows = [
        {"method": "eager", "reserved": 1000},
        {"method": "per_block", "reserved": 500},
        {"method": "compile", "error": "out of memory"},
    ]
    assert fit.cases_of_ours(rows) == [
        (f"fit-{engine}-{name}", budget)
        for engine in ("graph", "inductor")
        for name, budget in (("floor", None), ("0.8", 800), ("0.6", 600), ("per_block", 500))
    ]


def test_a_file_keeps_what_was_measured_before(tmp_path: Path) -> None:
    assert fit.write(tmp_path, [{"step": "unet3d", "method": "eager", "error": "no card"}]) is None
    path = fit.write(tmp_path, [ROW | CARD, {**ROW, **CARD, "method": "eager"}])
    again = fit.write(tmp_path, [{**ROW, **CARD, "ratio": 2.0}])
    assert path == again == tmp_path / "nvidia-h200.2.13.0-cu130.json"
    content = json.loads(path.read_text())
    assert {row["method"]: row["ratio"] for row in content["cases"]} == {"eager": 1.25, "fit-graph-floor": 2.0}
    assert (content["gpu"], "gpu" in content["cases"][0]) == ("NVIDIA H200", False)


def test_the_table_invents_nothing() -> None:
    lines = fit_gpu.table([])
    assert len(lines) == 2 + 3
    assert all(line.count("not yet measured") == 5 for line in lines[2:])
    refused = {"step": "resnet50", "method": "fit-graph-floor", "budget": None, "error": "a | b"}
    over = {**ROW, "method": "fit-graph-0.6", "given": 2_000_000_000, "moved": None}
    text = "\n".join(fit_gpu.table([CARD | {"cases": [ROW, refused, over]}]))
    card = "NVIDIA H200, torch 2.13.0+cu130"
    assert (
        f"| 3D U-Net, batch 2, 128³ | {card} | fit-graph-floor | 3.00 | 2.90 | yes | 1.250 [1.200, 1.300] | 50% |"
        in text
    )
    assert "| fit-graph-0.6 | 2.00 | 2.90 | **no** | 1.250 [1.200, 1.300] | not yet measured |" in text
    assert "| fit-graph-floor |  | not yet measured |  |  | a / b |" in text


def test_the_docs_show_the_table_that_the_files_give() -> None:
    results = ROOT / "benchmarks" / "results"
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / "fit_gpu").glob("*.json"))]
    table = "\n".join(fit_gpu.table(found))
    assert (results / "fit_gpu.md").read_text(encoding="utf-8").strip() == table
    assert table in (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "make",
    [
        lambda: fit_steps.unet3d(1, 16, (4, 8, 16)),
        lambda: fit_steps.gpt2_medium(1, layers=1, width=64),
    ],
    ids=["unet3d", "gpt2_medium"],
)
def test_the_steps_run(make: Any) -> None:
    subject = fit_steps.on("cpu", make)
    subject.loss(subject.model(*subject.inputs), *subject.targets).backward()
    assert all(parameter.grad is not None for parameter in subject.model.parameters())
    assert subject.blocks["per_block"]
