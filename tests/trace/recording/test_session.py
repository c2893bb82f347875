"""What is done around a step: Python's garbage collector, modes, switches and random states."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth.cpu_allocator import measured_peak
from truth.fresh_process import run_fresh

import memplan
from memplan.errors import StepError
from memplan.trace.recording.session import collector_held


class _Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def _left() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """On, with nothing frozen, as in a process that does not touch it."""
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_on_again_with_nothing_frozen_whatever_is_raised() -> None:
    with suppress(ValueError), collector_held():
        assert not gc.isenabled()
        assert gc.get_freeze_count()
        raise ValueError
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_off_stays_off() -> None:
    gc.disable()
    with collector_held():
        pass
    assert not gc.isenabled()


def test_garbage_of_before_is_collected_after_and_not_inside() -> None:
    left = _left()
    with collector_held():
        gc.collect()
        assert left() is not None  # what a step frees is its own
    gc.collect()
    assert left() is None


def test_garbage_made_inside_is_collected_when_asked_for() -> None:
    with collector_held():
        left = _left()
        gc.collect()
        assert left() is None


def test_inside_another_the_garbage_between_them_goes_first() -> None:
    with collector_held():
        left = _left()
        with collector_held():
            assert left() is None  # else it would stay to the end of the outer one
        assert gc.get_freeze_count()
        assert not gc.isenabled()
    assert not gc.get_freeze_count()
    assert gc.isenabled()


def test_what_the_user_froze_stays_frozen_and_nothing_joins_it() -> None:
    kept = [_Cycle()]
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_held(), collector_held():
        left = _left()
        assert gc.get_freeze_count() <= frozen  # frozen objects may go by their counts
        gc.collect()
        assert left() is None
    assert gc.get_freeze_count()
    del kept


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_trains_whatever_the_caller_is_within(mode: Any) -> None:
    def trained() -> int:
        return memplan.explain(nn.Linear(8, 4), memplan.spec("2x8"), device="cpu").timeline.peak_allocated

    expected = trained()
    with mode():
        assert trained() == expected
        assert memplan.check(nn.Linear(8, 4), memplan.spec("2x8"), device="cpu") is not None
        assert not torch.is_grad_enabled()


FROZEN_FLAGS = """
import torch, memplan
torch.backends.disable_global_flags()
print(memplan.record(lambda: lambda: torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward(), device="cpu"))
"""


def test_switches_that_may_not_be_set_are_not() -> None:
    ran = run_fresh(FROZEN_FLAGS)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_states_of_checkpoints_count(reentrant: bool) -> None:
    """5,056 bytes each, as torch's profiler sees them without any mode of ours."""

    def build() -> Any:
        layers, x = [nn.Linear(16, 16) for _ in range(6)], torch.randn(4, 16, requires_grad=True)

        def step() -> None:
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=reentrant)
            y.sum().backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


def ends() -> Callable[[], None]:
    def step() -> None:
        next(iter(()))

    return step


def ends_in_build() -> Callable[[], None]:
    return next(iter(()))


def strided_nested() -> Callable[[], None]:
    layer, parts = nn.Linear(8, 4), [torch.randn(3, 8), torch.randn(5, 8)]

    def step() -> None:
        layer(torch.nested.as_nested_tensor(parts)).to_padded_tensor(0.0).sum().backward()

    return step


def jagged_nested() -> Callable[[], None]:
    layer, parts = nn.Linear(8, 4), [torch.randn(3, 8), torch.randn(5, 8)]

    def step() -> None:
        nested: Any = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        layer(nested).values().sum().backward()

    return step


RUNS: list[Any] = [
    lambda build: memplan.record(build, device="cpu"),
    lambda build: memplan.record(build, device="h100"),
    memplan.measure,
]


@pytest.mark.parametrize("run", RUNS, ids=["record", "on a card", "measure"])
@pytest.mark.parametrize(("build", "what"), [(ends, "step 1"), (ends_in_build, "build")])
def test_an_iterator_that_ends_is_the_cause_of_a_step_error(run: Any, build: Any, what: str) -> None:
    with pytest.raises(StepError, match=rf"{what} raised StopIteration.*test_session.py:\d+") as raised:
        run(build)
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("run", RUNS, ids=["record", "on a card", "measure"])
@pytest.mark.parametrize("build", [strided_nested, jagged_nested])
def test_nested_tensors_are_refused_by_name(run: Any, build: Any) -> None:
    with pytest.raises(StepError, match=r"step 1 uses nested tensors \(torch.nested\).*Pad the sequences"):
        run(build)


@pytest.mark.parametrize("together", [True, False])
def test_what_a_build_sets_of_cudnn_is_put_back(together: bool) -> None:
    cudnn: Any = torch.backends.cudnn

    def build() -> Any:
        cudnn.benchmark = cudnn.deterministic = True
        if together:
            cudnn.allow_tf32 = False
        else:
            cudnn.conv.fp32_precision = "ieee"
        model = nn.Conv2d(1, 1, 3)
        return lambda: model(torch.zeros(1, 1, 8, 8)).sum().backward()

    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.conv.fp32_precision
    memplan.record(build, device="h100", cudnn=False)
    assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.conv.fp32_precision) == before


def test_a_recording_leaves_no_device_with_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate keeps the first device that it sees as long as the process lives."""
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setattr(state.PartialState, "_shared_state", {})  # another test has it see one
    seen: list[str] = []

    def build() -> Callable[[], None]:
        seen.append(state.PartialState().device.type)
        return lambda: None

    before = dict(state.PartialState._shared_state)
    memplan.record(build, device="cpu")
    memplan.record(build, device="rtx4090")
    memplan.measure(build)
    assert seen[0] == seen[-1] == "cpu"
    assert "cuda" in seen
    assert dict(state.PartialState._shared_state) == before
