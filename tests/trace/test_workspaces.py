"""Workspaces of convolutions in recorded steps: of a worker in cuDNN's place, expected ones, or intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn.scripted_worker import NOWHERE, needs_compiler, write_script
from torch import nn

import memplan
from memplan._bytes import format_bytes
from memplan.cudnn import ask as asking
from memplan.cudnn import worker_process
from memplan.cudnn.questions import ExecutionPlan
from memplan.errors import DeviceError, FormatError
from memplan.trace.recording import session
from memplan.trace.trace import Trace

pytestmark = needs_compiler
Recorded = Callable[..., Trace]
PLANS = """
    size = {'forward': 3 << 20, 'input gradient': 5 << 20, 'weight gradient': 7 << 20}[question['kind']]
    say({'plans': [['eng8', size], ['eng9', size + 4096], ['eng3', 100], ['eng4', 200], ['eng1', 0]]})
"""
DESCRIBED = "for a described card; a real one can choose others, mostly for weight gradients and kernels of 1"
ENGINES = (ExecutionPlan("eng8", 3 << 20), ExecutionPlan("eng3", 100), ExecutionPlan("eng1", 0))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Records with a worker that runs some lines for each question."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "find_cudnn", lambda environment: None if environment is False else NOWHERE)

    def record(build: Any, text: str = PLANS, **more: Any) -> Trace:
        monkeypatch.setattr(worker_process, "SCRIPT", write_script(tmp_path, text))
        return memplan.record(build, device="a100-80gb", **more)

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=True):
        yield record


def build() -> Callable[[], None]:
    model, data = nn.Conv2d(8, 16, 3, padding=1), torch.ones(2, 8, 32, 32, requires_grad=True)
    return lambda: model(data).sum().backward()


def workspaces(trace: Trace) -> list[tuple[int, int | None]]:
    return [(one.bytes, one.low) for one in trace.storages if one.cause == "workspace"]


def test_the_first_plan_of_each_is_taken_and_lies_beside_its_result(recorded: Recorded) -> None:
    trace = recorded(build, steps=1)
    assert workspaces(trace) == [(3 << 20, None), (5 << 20, None), (7 << 20, None)]
    assert trace.engines[0].plans == ENGINES
    assert [one.plans[0].workspace for one in trace.engines] == [3 << 20, 5 << 20, 7 << 20]
    backward = next(op for op in trace.ops if op.name == "aten.convolution_backward.default")
    born = {one.id: one for one in trace.storages if one.op == backward.index}
    order = [one.bytes for one in sorted(born.values(), key=lambda one: one.born)]
    # gradient of the data, a copy of the expanded gradient, workspace; a copy, gradient of the weight, workspace; bias
    data, weight, copy = 2 * 8 * 32 * 32 * 4, 16 * 8 * 9 * 4, 2 * 16 * 32 * 32 * 4
    assert order[:6] == [data, copy, 5 << 20, copy, weight, 7 << 20]
    assert order[6] == 16 * 4
    alive = [one.bytes for one in born.values() if one.died is None or one.died > backward.end]
    assert alive == [data, weight, 64], "what else was made is freed by the end of the op"
    low, high = (memplan.simulate(trace, workspace=case) for case in ("low", "high"))
    assert low.peak_allocated == high.peak_allocated == memplan.simulate(trace, workspace="measured").peak_allocated
    assert trace.notes[-1] == f"cuDNN 9.19.0 chose the workspaces of 3 convolutions {DESCRIBED}"


def test_a_saved_trace_keeps_the_engines(recorded: Recorded) -> None:
    trace = recorded(build)
    assert Trace.from_json(trace.to_json()) == trace
    without = replace(trace, engines=())
    assert '"engines"' not in without.to_json()
    assert Trace.from_json(without.to_json()) == without
    for broken in (replace(trace.engines[0], storage=10**6), replace(trace.engines[0], plans=())):
        with pytest.raises(FormatError):
            Trace.from_json(replace(trace, engines=(broken,)).to_json())


def test_without_a_library_nothing_changes(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = recorded(build, cudnn=False)
    monkeypatch.setattr(session, "find_cudnn", lambda environment: None)
    assert recorded(build).to_json() == intervals.to_json()
    assert intervals.engines == ()
    assert all(low == 0 < high for high, low in workspaces(intervals))
    assert len(workspaces(intervals)) == 4, "one for each op"


def test_what_is_not_answered_is_expected_and_this_is_said(recorded: Recorded) -> None:
    crashes = "    if question['kind'] == 'input gradient': os.kill(os.getpid(), signal.SIGSEGV)\n"
    trace = recorded(build, crashes + PLANS, steps=1)
    found = workspaces(trace)
    assert found[0] == (3 << 20, None)
    assert found[1][1] is None
    assert found[2] == (7 << 20, None)
    (size,) = trace.expected
    assert trace.storages[size.storage].bytes == found[1][0]
    assert trace.notes[-3:] == (
        f"cuDNN 9.19.0 chose the workspaces of 2 convolutions {DESCRIBED}",
        "the workspaces of 1 convolutions are those that cuDNN 9.19.0 is expected to choose; for its own answer: pip "
        "install memplan[cudnn], or --cudnn ENVIRONMENT (cudnn= in Python)",
        "cuDNN 9.19.0 did not answer for 1 of 3 convolutions, whose workspaces are expected by a model of its choice: "
        "its process ended by SIGSEGV",
    )


def test_with_benchmark_the_first_call_takes_the_largest_and_the_next_nobody_knows_which(recorded: Recorded) -> None:
    def tried() -> Callable[[], None]:
        torch.backends.cudnn.benchmark = True
        return build()

    trace = recorded(tried)
    assert workspaces(trace)[:3] == [((size << 20) + 4096, None) for size in (3, 5, 7)]
    assert workspaces(trace)[3:] == [((size << 20) + 4096, 0) for size in (3, 5, 7)]
    assert [one.plans[0].engine for one in trace.engines] == ["eng9"] * 3


def test_a_depthwise_convolution_is_not_asked_for(recorded: Recorded) -> None:
    def depthwise() -> Callable[[], None]:
        model, data = nn.Conv2d(8, 8, 3, groups=8), torch.ones(2, 8, 32, 32)
        return lambda: model(data).sum().backward()

    trace = recorded(depthwise, "    os._exit(3)\n")
    assert trace.engines == ()
    assert not any("cuDNN" in note for note in trace.notes)


def test_explain_says_how_much_of_a_peak_rests_on_answers(recorded: Recorded) -> None:
    """After the convolution, which takes 7 MiB at most, a buffer of 64 MiB is the peak, and no workspace lives."""

    def then_more() -> Callable[[], Any]:
        step = build()
        return lambda: (step(), torch.ones(16 << 20))

    (note,) = [note for note in memplan.explain(recorded(then_more)).notes if "largest workspace" in note]
    assert note.endswith("; 0 B of the peak rest on its answers")


def test_explain_and_check_have_one_figure_and_name_the_engine(recorded: Recorded) -> None:
    trace = recorded(build)
    explained = memplan.explain(trace)
    assert explained.card is not None
    assert explained.timeline.peak_allocated == explained.card.peak_allocated_high
    assert explained.by_cause["workspace"] == 7 << 20
    largest = "cuDNN's largest workspace is 7.0 MiB: eng8 for conv2d's gradient of Conv2d"
    assert f"{largest}; 7.0 MiB of the peak rest on its answers" in explained.notes
    assert not any("chooses an algorithm" in note for note in explained.notes)
    (finding,) = [one for one in memplan.check(trace) if one.id == "workspace-surprise"]
    assert finding.bytes == finding.details["high"] - finding.details["low"]
    assert finding.details["high"] == explained.timeline.peak_allocated
    assert finding.details["layers"][0]["engine"] == "eng8"
    assert finding.message.startswith("cuDNN plans 7.0 MiB of workspace for Conv2d (engine eng8), whose tensors are ")
    assert finding.advice[-1] == "where there is no room for it, torch takes a slower engine, down to eng1, with 0 B"


def test_an_environment_without_cudnn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="is no environment of Python"):
        memplan.record(build, device="h100", cudnn=tmp_path)


def test_what_a_real_card_took_comes_before_cudnns_answer(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass took what cuDNN's third engine takes, the weight's gradient what none does."""

    def took(card: str, version: int, *, exactly: bool) -> dict[str, int]:
        key = '["{}",[2,8,32,32],[16,8,3,3],[2,16,32,32],false,"float32",[1,1],[1,1],[1,1],[32,32,32],true,false]'
        return {key.format("forward"): 100, key.format("weight gradient"): 9 << 20} if card == "a100-80gb" else {}

    monkeypatch.setattr(asking, "measured", took)
    trace = recorded(build, steps=1)
    assert workspaces(trace) == [(100, None), (5 << 20, None), (9 << 20, None)]
    forward, _, weight = trace.engines
    assert forward.plans == (ExecutionPlan("eng3", 100), ExecutionPlan("eng1", 0))
    assert weight.plans == (ExecutionPlan("an engine that it did not name", 9 << 20), ExecutionPlan("eng8", 7 << 20),
                            *ENGINES[1:])  # fmt: skip
    assert trace.measured == (forward.storage, weight.storage)
    assert trace.notes[-2:] == (
        f"cuDNN 9.19.0 chose the workspaces of 1 convolutions {DESCRIBED}",
        "a real a100-80gb took the workspaces of 2 convolutions with cuDNN 9.19.0, and these count",
    )
    assert Trace.from_json(trace.to_json()) == trace
    (note,) = [note for note in memplan.explain(trace).notes if "largest workspace" in note]
    assert note.startswith("cuDNN's largest workspace is 9.0 MiB, as a real card took: an engine that it did not name")
    assert note.endswith("; 0 B of the peak rest on its answers, 9.0 MiB on what a real card took")


def test_with_benchmark_what_a_real_card_took_without_it_plays_no_part(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Any1(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            return True

        def __getitem__(self, key: str) -> int:
            return 1

    def tried() -> Callable[[], None]:
        torch.backends.cudnn.benchmark = True
        return build()

    monkeypatch.setattr(asking, "measured", lambda card, version, exactly: Any1())
    assert recorded(tried).measured == ()


def test_explain_tells_the_first_step_under_benchmark_from_later_ones(recorded: Recorded) -> None:
    """The largest plan takes 7 MiB and 4096 bytes, the smallest nothing; each step tries, or runs, one of three."""

    def tried() -> Callable[[], None]:
        torch.backends.cudnn.benchmark = True
        return build()

    trace = recorded(tried)
    high, low = memplan.simulate(trace), memplan.simulate(trace, workspace="low")
    (note,) = [note for note in memplan.explain(trace).notes if "the first step" in note and "later" in note]
    said = [format_bytes(step.peak_allocated) for step in (high.steps[0], low.steps[1], high.steps[1])]
    assert note.endswith(f"takes up to {said[0]}, and later ones between {said[1]} and {said[2]}")
    assert high.steps[0].peak_allocated - low.steps[1].peak_allocated > 6 << 20
    assert not any("the first step, which" in note for note in memplan.explain(recorded(build)).notes)
