"""A measured trace is the allocator's own account, joined to ops and causes."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow, thinned
from models.steps import STEPS, mlp, plain
from torch._subclasses.fake_tensor import FakeTensorMode
from truth.cpu_allocator import allocations, measured_peak, peak_of
from truth.fresh_process import run_fresh

import memplan
from memplan.trace.recording.boundaries import Boundaries

NAMES = ["in_place", "checkpoint_of_a_function", "frozen_and_tied", "convolutions_3d", "optimizer_adamw_foreach",
         "custom_function", "double_backward", "autocast"]  # fmt: skip
FEW = ["optimizer_adamw_foreach", "autocast"]
REPEATED = [*FEW, *slow(*(name for name in NAMES if name not in FEW))]


def events(trace: memplan.Trace) -> list[int]:
    """Bytes of a trace's births and deaths, in order; negative where they are released."""
    storages = trace.storages
    births = [(storage.born, storage.bytes) for storage in storages]
    deaths = [(storage.died, -storage.bytes) for storage in storages if storage.died is not None]
    return [size for _, size in sorted([*births, *deaths])]


def seen(build: Callable[[], Callable[[], Any]], steps: int = 2) -> list[int]:
    """The same of a run without memplan, less the release of what was there before."""

    def run() -> None:
        step = build()
        for _ in range(steps):
            step()

    live: dict[int, int] = {}
    result: list[int] = []
    for size in allocations(run):
        if size < 0 and not live.get(-size):
            continue
        live[abs(size)] = live.get(abs(size), 0) + (1 if size > 0 else -1)
        result.append(size)
    return result


@pytest.mark.parametrize("name", REPEATED)
def test_every_event_is_that_of_a_plain_run_under_the_profiler(name: str) -> None:
    torch.manual_seed(0)
    measured = memplan.measure(STEPS[name])
    assert memplan.simulate(measured).peak_allocated == measured_peak(STEPS[name])
    births = [[size for size in sizes if size > 0] for sizes in (events(measured), seen(STEPS[name]))]
    assert births[0] == births[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STEPS) - set(NAMES)))
def test_the_same_for_every_other_step(name: str) -> None:
    torch.manual_seed(0)
    assert memplan.simulate(memplan.measure(STEPS[name])).peak_allocated == measured_peak(STEPS[name])


@pytest.mark.parametrize("steps", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", thinned(FEW, 2))
def test_many_steps_are_those_of_a_plain_run(name: str, steps: int) -> None:
    torch.manual_seed(0)
    measured = memplan.measure(STEPS[name], steps=steps)
    sizes, plain = events(measured), seen(STEPS[name], steps)
    assert len(measured.steps) == steps
    assert levels_at_births(sizes) == levels_at_births(plain)
    assert memplan.simulate(measured).peak_allocated == peak_of(plain)


def levels_at_births(sizes: list[int]) -> list[tuple[int, int]]:
    """Bytes of each birth, and how much there is then. What dies between two births may do so in any order."""
    return [(size, level) for size, level in zip(sizes, itertools.accumulate(sizes), strict=True) if size > 0]


# derivative formulas that are others where torch sees a dispatch mode, and tensors without memory
OTHERWISE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.prod(),
    lambda x: x.cumprod(0),
    lambda x: x.max() * 2,
    lambda x: x.median(),
    lambda x: x.clamp(torch.zeros(8, 8), torch.ones(8, 8)),
    lambda x: torch.matrix_exp(x),
    lambda x: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(8)),
    torch.sgn,
]


@pytest.mark.parametrize("made", thinned(OTHERWISE, 3))
def test_formulas_that_change_under_a_mode_are_measured_as_they_are(
    made: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def build() -> Callable[[], None]:
        x = torch.randn(8, 8, requires_grad=True)

        def step() -> None:
            x.grad = None
            made(x).sum().backward()

        return step

    births = [[size for size in sizes if size > 0] for sizes in (events(memplan.measure(build)), seen(build))]
    assert births[0] == births[1]


def test_what_is_made_without_a_mode_alone_is_said() -> None:
    def build() -> Callable[[], None]:
        x = torch.randn(64, 64, requires_grad=True)
        return lambda: x.prod().backward()

    assert any(
        "no layer and no cause: they are allocated only where nothing names the ops, in ProdBackward0" in note
        for note in memplan.measure(build).notes
    )


@pytest.mark.parametrize("name", REPEATED)
def test_causes_agree_with_the_recording(name: str) -> None:
    build = STEPS[name]
    totals = []
    for trace in (memplan.record(build), memplan.measure(build)):
        total: dict[str, int] = {}
        for storage in trace.storages:
            total[storage.cause] = total.get(storage.cause, 0) + storage.bytes
        totals.append(total)
    recorded, measured = totals
    for cause in ("weight", "optimizer_state", "parameter_gradient", "saved"):
        assert measured.get(cause, 0) == pytest.approx(recorded.get(cause, 0), rel=0.01), cause


def test_ops_and_layers_are_those_of_the_recording() -> None:
    build = STEPS["accumulation_and_two_losses"]
    recorded, measured = memplan.record(build, steps=1), memplan.measure(build, steps=1)
    # making parameters is an op where it really happens: only the step is compared
    pick = lambda trace: [(op.name, op.layer, op.phase) for op in trace.ops if op.step == 0]  # noqa: E731
    assert pick(measured) == pick(recorded)


def test_what_cannot_be_joined_gets_a_line() -> None:
    held: list[Any] = []

    def build() -> Any:
        model, x = mlp(64), torch.randn(8, 64)

        def step() -> None:
            model.zero_grad()
            held.append(torch.get_rng_state())  # allocated in C++, out of sight of every dispatch mode
            model(x).sum().backward()

        return step

    trace = memplan.measure(build)
    assert any("could not be joined" in note for note in trace.notes)


def test_what_a_program_does_after_its_last_step_is_not_measured() -> None:
    class Training:
        title = "a training with a validation at its end"
        has_time = True

        def run_steps(self, steps: int, boundaries: Boundaries) -> None:
            model = torch.nn.Linear(64, 64)
            boundaries.built()
            for _ in range(steps):
                model(torch.randn(16, 64)).sum().backward()
                boundaries.stepped()
            boundaries.ended()
            for _ in range(40):  # more ops than the steps have
                self.kept = torch.randn(256, 256) @ torch.randn(256, 256)

    trace = memplan.measure(Training(), device="cpu")
    weights, inputs = 4 * (64 * 64 + 64), 4 * 16 * 64
    assert 2 * weights + inputs <= memplan.simulate(trace).peak_allocated < 4 * 256 * 256


def test_memory_from_before_is_not_counted() -> None:
    kept = [torch.ones(1 << 20)]

    def build() -> Any:
        model, x = mlp(64), torch.randn(8, 64)

        def step() -> None:
            kept.clear()  # releases 4 MiB that were there before
            plain(model, x)()

        return step

    events = memplan.simulate(memplan.measure(build)).events
    assert min(allocated for _, allocated, _ in events) >= 0


def test_a_tensor_from_outside_does_not_count_and_is_told() -> None:
    x = torch.randn(1024, 256)

    def build() -> Callable[[], torch.Tensor]:
        copy = x.clone()
        return lambda: copy.sum() + x.sum()

    for trace in (memplan.measure(build), memplan.record(build)):
        assert memplan.simulate(trace).peak_allocated == measured_peak(build)
        assert any("1.0 MiB of tensors that were made outside" in note for note in trace.notes)


@pytest.mark.parametrize(
    "seen",
    thinned(
        [
            lambda x: x[:100],
            lambda x: x.detach(),
            lambda x: x.unsqueeze(0),
            lambda x: x.chunk(3)[1],
            lambda x: x.t().t(),
            lambda x: torch.stack(list(x)),
        ],
        3,
    ),
)
def test_views_of_a_tensor_from_outside_do_not_count_either(seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(1024, 256)

    def build() -> Callable[[], None]:
        layer = torch.nn.Linear(256, 8)
        return lambda: layer(seen(x)).sum().backward()

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)
    assert memplan.simulate(memplan.measure(build)).peak_allocated == measured_peak(build)


@pytest.mark.filterwarnings("error::UserWarning")  # torch warns of who asks a fake tensor for its address
def test_what_the_step_only_traces_takes_nothing() -> None:
    def build() -> Callable[[], torch.Tensor]:
        x = torch.randn(1000)

        def step() -> torch.Tensor:
            with FakeTensorMode():
                traced = torch.empty(1 << 20)
                del traced
            return (x * 2).sum()

        return step

    trace = memplan.measure(build)
    assert memplan.simulate(trace).peak_allocated < 1 << 20


def test_threads_of_others_do_not_count() -> None:
    go = [True]

    def beside() -> None:
        while go:
            thread = threading.Thread(target=lambda: torch.zeros(1 << 20))
            thread.start()
            thread.join()

    build = lambda: plain(mlp(64), torch.randn(8, 64))  # noqa: E731
    other = threading.Thread(target=beside)
    other.start()
    try:
        measured = memplan.simulate(memplan.measure(build)).peak_allocated
    finally:
        go.clear()
        other.join()
    assert measured == measured_peak(build)


def test_a_thread_that_cannot_start_is_left_as_it_was() -> None:
    def build() -> Callable[[], None]:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
        assert thread.run.__qualname__ == "Thread.run"
        return lambda: None

    assert not any("still running" in note for note in memplan.measure(build).notes)


def test_what_other_threads_allocate_counts() -> None:
    """The peak is that of the same work in this thread."""

    def build(threaded: bool = True) -> Callable[[], None]:
        model = mlp(256)

        def work() -> None:
            model(torch.randn(512, 256)).sum().backward()

        def step() -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        return step if threaded else work

    in_thread, here = (memplan.measure(lambda where=where: build(where)) for where in (True, False))
    assert memplan.simulate(in_thread).peak_allocated == memplan.simulate(here).peak_allocated
    assert memplan.simulate(here).peak_allocated == measured_peak(lambda: build(False))
    assert any("in other threads" in note for note in in_thread.notes)


def test_a_thread_that_goes_on_is_told() -> None:
    done = threading.Event()

    def build() -> Callable[[], None]:
        threading.Thread(target=done.wait).start()
        return lambda: None

    try:
        assert any("still running" in note for note in memplan.measure(build).notes)
    finally:
        done.set()


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.max(1).values,
        lambda x: x[torch.arange(0, 64, 2)],
        lambda x: x.gather(1, torch.zeros(64, 5, dtype=torch.long)),
        lambda x: x.topk(3).values,
        lambda x: x.index_select(0, torch.arange(3)),
        lambda x: x.sort(1).values,
        lambda x: x.cummax(0).values,
    ],
)
def test_gradients_that_are_written_into_zeros_are_one_tensor(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A dispatch mode makes torch write them into a copy of the zeros; the plain profiler shows that it does not."""

    def build() -> Callable[[], None]:
        x = torch.randn(64, 4096, requires_grad=True)

        def step() -> None:
            made(x).sum().backward()
            x.grad = None

        return step

    plain = measured_peak(build)
    assert memplan.simulate(memplan.measure(build)).peak_allocated == plain
    assert memplan.simulate(memplan.record(build)).peak_allocated == pytest.approx(plain, rel=0.01)


QUIET = """
import os, torch, memplan
model = torch.nn.Linear(4, 4)
memplan.measure(lambda: lambda: model(torch.ones(2, 4)).sum().backward())
assert os.environ.get("KINETO_LOG_LEVEL") is None, "what the user's own processes are told is as it was"
"""


def test_the_profiler_says_nothing() -> None:
    """In a process of its own: how much it says is settled once."""
    ran = run_fresh(QUIET)
    assert ran.returncode == 0, ran.stderr
    assert "profiler" not in ran.stderr


def test_a_compiled_step_is_measured_as_it_runs_compiled() -> None:
    def with_scratch(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            torch.empty(1 << 20)
            return graph(*args)

        return run

    def build() -> Callable[[], Any]:
        torch._dynamo.reset()  # pyright: ignore[reportAttributeAccessIssue]  # torch.compile has imported it
        model: Any = torch.compile(mlp(64), backend=with_scratch)
        return plain(model, torch.randn(8, 64))

    trace = memplan.measure(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build) > 4 << 20
    assert any("torch.compile" in note for note in trace.notes)


def test_weights_are_seen_after_an_import_that_makes_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two runs of a measurement only the first imports a module. The bytes are those of the Linear."""
    (tmp_path / "makes_a_tensor.py").write_text("import torch\n\nEPS = torch.tensor(1e-16)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> Callable[[], None]:
        importlib.import_module("makes_a_tensor")
        model = torch.nn.Linear(64, 512)
        batch = torch.ones(4, 64)
        return lambda: model(batch).sum().backward()

    weights = [storage.bytes for storage in memplan.measure(build).storages if storage.cause == "weight"]
    assert weights == [64 * 512 * 4, 512 * 4]
