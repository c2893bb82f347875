"""A dry run through the public function and the command: what it says, what it refuses, what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from environment import ENVIRONMENT, needs_cuda_torch

import memplan
from memplan.cli import main
from memplan.devices import find
from memplan.dry import progress
from memplan.dry.cuda_torch import CudaTorch
from memplan.dry.library import Library
from memplan.errors import DeviceError, StepError, UsageError
from memplan.trace.dry_run import process
from memplan.trace.dry_run.builds import Packed
from memplan.trace.dry_run.process import run_dry

STEP = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 512, device="cuda")

    def step():
        loss = model(data).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() > 1:
            torch.zeros(1 << 20, device="cuda")

    return step

def streams():
    side, data = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")

    def step():
        with torch.cuda.stream(side):
            other = data * 2
        other.record_stream(torch.cuda.current_stream())
        del other
        more = [torch.empty(3 << 20, device="cuda") for _ in range(3)]
        del more
        torch.cuda.empty_cache()

    return step

def net():
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()

def compiled(mode=None):
    model, data = net(), torch.randn(256, 512, device="cuda")
    fused = torch.compile(model, mode=mode)

    def step():
        fused(data).sum().backward()
        model.zero_grad()

    return step

def compiled_with_graphs():
    return compiled("reduce-overhead")

def captured():
    model, data = net(), torch.randn(256, 512, device="cuda")
    model(data).sum().backward()
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(data).sum().backward()
    return lambda: graph.replay() or model

def scaled():
    model, data, scaler = net(), torch.randn(256, 512).pin_memory(), torch.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(data.cuda(non_blocking=True)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step

def hungry():
    return lambda: torch.empty(100 << 30, device="cuda")

def recurrent():
    net, data = torch.nn.LSTM(8, 8).cuda(), torch.ones(2, 3, 8, device="cuda")
    return lambda: net(data)

def dies():
    import os
    return lambda: os.kill(os.getpid(), 11)

def selects():
    data = torch.ones(64, device="cuda")
    return lambda: torch.nonzero(data)

def counts():
    steps = torch.arange(8, device="cuda")
    return lambda: (steps.tolist() == list(range(8))) or 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "dry_steps.py"
    found.write_text(STEP)
    return found


def dry(file: Path, name: str, **options: Any) -> memplan.Trace:
    given = {"device": "h100", "steps": 2, "environment": ENVIRONMENT} | options
    return run_dry(Packed("dry_steps", name, str(file)), **given)


def test_options_of_a_dry_run_are_refused_without_it() -> None:
    for options, why in (({"environment": "/tmp"}, "dry=True"), ({"snapshot": "a.pickle"}, "a card")):
        with pytest.raises(UsageError, match=f"{next(iter(options))} without {why}"):
            memplan.measure(lambda: lambda: None, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("device", "said"), [(None, "a dry run of no card"), ("cpu", "names no card"),
                                              ("b200", "the clocks of b200")])  # fmt: skip
def test_a_card_has_to_be_named(device: str | None, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        memplan.measure(lambda: lambda: None, device=device, dry=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--environment", "/tmp", "a.py:b"], "--environment without --dry"),
        (["--snapshot", "a.pickle", "a.py:b"], "--snapshot without a card"),
        (["--dry", "a.py:b"], "--dry without --device"),
        (["--dry", "--device", "b200", "{file}:build"], "the clocks of b200"),
        (["--dry", "--device", "h100", "--environment", "{file}x", "{file}:counts"], "is no environment of Python"),
    ],
)
def test_the_command_answers_in_one_line(options: list[str], said: str, file: Path) -> None:
    result = CliRunner().invoke(main, ["measure", *(one.format(file=file) for one in options)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_torch_that_hangs_is_one_line(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(tmp_path / "driver", tmp_path / "nvml", tmp_path / "triton")
    torch = CudaTorch(Path(sys.executable), tmp_path, "2.99.0", "13.0", "")
    monkeypatch.setattr(process, "find_torch", lambda environment: torch)
    monkeypatch.setattr(process, "library_for", lambda torch: library)
    monkeypatch.setattr(process, "process_variables", lambda inherited, *more: dict(inherited))
    monkeypatch.setattr(process, "process_command", lambda torch, code: ["sleep", "60"])
    monkeypatch.setattr(progress, "STALLED", 0.5)
    with pytest.raises(DeviceError, match=r"torch 2\.99\.0 on the emulated card hangs while it is loaded"):
        run_dry(Packed("train", "build", str(file)), device="h100", steps=1)


def test_a_dry_run_starts_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a main guard is run again in the other process, up to its own call."""
    monkeypatch.setenv("MEMPLAN_DRY_CARD", "any")
    with pytest.raises(UsageError, match='if __name__ == "__main__"'):
        dry(file, "streams")


@needs_cuda_torch
def test_a_script_without_a_guard_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    end = f'memplan.measure(build, device="h100", dry=True, environment={ENVIRONMENT!r})\n'
    script.write_text(f"import memplan\n{STEP}\n{end}")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert 'Put the call under if __name__ == "__main__":' in found.stderr.splitlines()[-1]


@needs_cuda_torch
@pytest.mark.parametrize("card", ["h100", "a100", "rtx4090", "t4"])
def test_a_step_is_a_trace_with_layers_and_causes(file: Path, card: str) -> None:
    trace = dry(file, "build", device=card)
    assert (trace.origin, trace.device) == ("dry", find(card).name)
    weights = {storage.name: storage.bytes for storage in trace.storages if storage.cause == "weight"}
    assert weights == {"0.weight": 4 * 512 * 1024, "0.bias": 4096, "2.weight": 40960, "2.bias": 40}
    assert sum(storage.cause == "optimizer_state" for storage in trace.storages) == 8  # the counters lie on the host
    assert {op.layer for op in trace.ops if op.phase == "forward"} >= {"0", "1", "2"}
    steps = memplan.simulate(trace).steps
    assert [(step.peak_allocated, step.peak_reserved) for step in steps] == [
        (one.allocated, one.reserved) for one in trace.counters[1:]
    ]
    assert any("dry run" in note for note in trace.notes)
    assert [one.where for one in trace.assumptions if one.kind == "branch"] == ["dry_steps.py:14"]
    assert memplan.Trace.from_json(trace.to_json()) == trace


@needs_cuda_torch
def test_the_snapshot_is_torchs_own(file: Path, tmp_path: Path) -> None:
    trace = dry(file, "build", snapshot=tmp_path / "step.pickle")
    replay = memplan.replay(tmp_path / "step.pickle")
    assert replay.mismatches == []
    assert replay.timeline.peak_reserved == max(one.reserved for one in trace.counters)


@needs_cuda_torch
def test_streams_and_emptied_caches_are_simulated_as_they_were(file: Path) -> None:
    trace = dry(file, "streams", steps=3)
    assert {storage.stream for storage in trace.storages} == {0, 1}
    assert any(call.kind == "empty_cache" for call in trace.calls)
    steps = memplan.simulate(trace).steps
    assert [(step.peak_allocated, step.peak_reserved) for step in steps] == [
        (one.allocated, one.reserved) for one in trace.counters[1:]
    ]


@needs_cuda_torch
@pytest.mark.parametrize("name", ["compiled", "compiled_with_graphs", "captured", "scaled"])
@pytest.mark.parametrize("expandable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_torch_counts_is_simulated(
    file: Path, name: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "expandable_segments:True" if expandable else None
    if settings:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    trace = dry(file, name)
    found = memplan.simulate(trace, settings=settings)
    assert [step.peak_allocated for step in found.steps] == [one.allocated for one in trace.counters[1:]]
    if name != "captured":  # the pool of a graph: held back otherwise than simulated
        assert found.peak_reserved == max(one.reserved for one in trace.counters)
    assert not any(one.kind == "dry" for one in trace.assumptions)
    assert any("torch.compile" in note for note in trace.notes) == name.startswith("compiled")


@needs_cuda_torch
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hungry", "step 1 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 400.00 GiB"),
        ("recurrent", "CUDNN_STATUS_NOT_SUPPORTED"),
        ("dies", "the process of the dry run ended by SIGSEGV"),
    ],
)
def test_what_does_not_run_is_one_line(file: Path, name: str, said: str) -> None:
    with pytest.raises(StepError) as caught:
        dry(file, name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_cuda_torch
def test_sizes_that_values_decide_are_told(file: Path) -> None:
    found = dry(file, "selects").assumptions
    assert [one.text.split()[0] for one in found if one.kind == "bound"] == ["nonzero"]


@needs_cuda_torch
def test_what_the_host_knows_it_reads_back(file: Path) -> None:
    assert dry(file, "counts").origin == "dry"


@needs_cuda_torch
def test_the_command_explains_a_dry_run(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "step.json"
    options = ["measure", "--dry", "h100", "--torch", str(ENVIRONMENT), "--trace", str(written), f"{file}:build"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert "training step on h100" in result.stdout
    assert memplan.Trace.load(written).origin == "dry"
