"""What is recorded on fake tensors, held against what the allocator really did."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import thinned
from models.steps import STEPS, mlp, plain
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.errors import DataDependentError, DeviceError, MemplanError, StepError, UsageError


@pytest.mark.parametrize("name", thinned(STEPS, 3))
def test_peak_is_what_the_allocator_reports(name: str) -> None:
    build = STEPS[name]
    torch.manual_seed(0)
    predicted = memplan.simulate(memplan.record(build)).peak_allocated
    # below by the scalars that kernels wrap and by the random state that checkpoint keeps on the host, 5 KiB a layer
    assert predicted == pytest.approx(measured_peak(build), rel=0.002, abs=8192)


_none: Any = lambda: None  # noqa: E731
_three: Any = 3


def test_every_step_has_its_own_peak() -> None:
    # a batch so large that every step peaks in its backward, with the optimizer's state there from the second on
    trace = memplan.record(lambda: plain(mlp(), torch.randn(4096, 192), torch.optim.Adam), steps=3)
    peaks = [step.peak_allocated for step in memplan.simulate(trace).steps]
    parameters = list(mlp().parameters())
    state = sum(2 * p.numel() * 4 + 4 for p in parameters)
    assert peaks[1] - peaks[0] == state
    assert peaks[2] == peaks[1]


def test_nothing_is_allocated() -> None:
    def build() -> Any:
        model = nn.Linear(1 << 20, 1 << 20, bias=False)  # 4 TiB
        return lambda: model(torch.randn(4, 1 << 20)).sum().backward()

    assert memplan.simulate(memplan.record(build)).peak_allocated > 8 << 40


def test_recording_twice_gives_the_same_text() -> None:
    build = STEPS["grad_scaler_and_clipping"]
    assert memplan.record(build).to_json() == memplan.record(build).to_json()


def test_random_state_and_modules_stay_as_they_were() -> None:
    model = mlp(32)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    memplan.explain(model, "8x32", optimizer=torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_global_hooks_and_patches_are_gone_after_a_failure() -> None:
    call, item = torch.Tensor.__bool__, torch.Tensor.item

    def build() -> Any:
        raise ValueError("no data")

    with pytest.raises(StepError, match="build raised ValueError: no data"):
        memplan.record(build)
    assert (torch.Tensor.__bool__, torch.Tensor.item) == (call, item)
    assert float(torch.ones(3).sum()) == 3.0
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_parameter_registration_hooks


def test_ops_say_where_they_come_from() -> None:
    trace = memplan.record(STEPS["accumulation_and_two_losses"], steps=1)
    forward = [op for op in trace.ops if op.name == "aten.addmm.default" and op.phase == "forward"]
    assert {op.layer for op in forward} >= {"Sequential.0", "Sequential.2", "Linear", "Linear#2"}
    assert all(op.where and "steps.py:" in op.where for op in forward)
    backward = [op for op in trace.ops if op.phase == "backward" and op.gradient_of is not None]
    assert backward
    assert all(op.layer == trace.ops[op.gradient_of or 0].layer for op in backward)
    assert {op.phase for op in trace.ops} == {"build", "forward", "backward", "optimizer"}


def test_layers_of_the_only_model_have_its_own_names() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second[0](self.first(x)) + x

    trace = memplan.record(lambda: plain(Block(), torch.randn(4, 8)), steps=1)
    assert {op.layer for op in trace.ops if op.phase == "forward"} == {"first", "second.0", "Block", ""}
    assert {s.name for s in trace.storages if s.cause == "weight"} == {
        "first.weight", "first.bias", "second.0.weight", "second.0.bias",
    }  # fmt: skip


def test_recomputed_ops_are_marked() -> None:
    trace = memplan.record(STEPS["checkpoint_reentrant"], steps=1)
    again = [op for op in trace.ops if op.recomputed]
    once = [op for op in trace.ops if op.phase == "forward" and op.name == "aten.addmm.default"]
    assert len([op for op in again if op.name == "aten.addmm.default"]) == len(once) == 12


def test_a_scalar_gets_a_standin_that_is_listed() -> None:
    def build() -> Any:
        model, x = mlp(16), torch.randn(4, 16)

        def step() -> None:
            loss = model(x).sum()
            loss.backward()
            average = 0.9 * loss.item()
            if average > 100:
                model.zero_grad()

        return step

    trace = memplan.record(build)
    kinds = [(a.kind, a.count) for a in trace.assumptions]
    assert kinds == [("bound", 1), ("scalar", 2)]
    assert "a value decides a branch: one way" in trace.assumptions[0].text
    assert all("test_record.py:" in (a.where or "") for a in trace.assumptions)


def test_known_values_are_no_standins() -> None:
    def build() -> Any:
        assert torch.tensor([3, 4]).tolist() == [3, 4]
        assert torch.arange(3).sum().item() == 3
        return lambda: None

    assert memplan.record(build).assumptions == ()


def test_data_dependent_shapes_are_refused_with_layer_and_line() -> None:
    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(x[:, 0].abs().long(), 0)

    def build() -> Any:
        model = nn.Sequential(nn.Linear(4, 4), Head())
        return lambda: model(torch.randn(8, 4)).sum().backward()

    with pytest.raises(DataDependentError, match=r"repeat_interleave.*memplan\.measure") as caught:
        memplan.record(build)
    assert caught.value.layer == "1"
    assert "test_record.py:" in (caught.value.where or "")
    assert memplan.simulate(memplan.measure(build)).peak_allocated > 0


def test_real_parameters_from_outside_are_refused_and_untouched() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(StepError, match="made outside of build"):
        memplan.record(lambda: lambda: model(torch.randn(2, 4)).sum().backward())
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: memplan.record(_none), StepError, "build returned None"),
        (lambda: memplan.record(lambda: nn.Linear(2, 2)), StepError, "build returned the module Linear"),
        (lambda: memplan.record(lambda: lambda: None, steps=0), UsageError, "steps=0"),
        (lambda: memplan.record(lambda: lambda: None, device="h9000"), DeviceError, "h9000"),
        (lambda: memplan.record(_three), StepError, "3 is not callable"),
        (lambda: memplan.record(lambda: lambda: torch.zeros(2).cuda()), MemplanError, "on (CUDA|cuda)"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_data_loaders_load_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = memplan.record(STEPS["data_loader_with_workers"])
    monkeypatch.setattr("models.steps.WORKERS", 2)
    there = memplan.record(STEPS["data_loader_with_workers"])
    assert (there.ops, there.storages) == (here.ops, here.storages)


@pytest.mark.parametrize(
    "read",
    [
        lambda loss: (loss > 3).item(),
        lambda loss: loss.item() ** 2 > 50,
        lambda loss: int(loss.detach()) >= 1,
        lambda loss: round(loss.item()) >= 1,
        lambda loss: bool(loss > 0),
        lambda loss: torch.equal(loss, loss * 2),
        lambda loss: list(range(int(loss.detach()))),
        lambda loss: 1 if float(loss.detach()) > 0.9 else 2,
        lambda loss: 1 if loss.detach().numpy() > 0.9 else 2,
    ],
)
def test_a_standin_that_can_decide_is_named(read: Any) -> None:
    def build() -> Any:
        model = nn.Linear(4, 4)
        return lambda: read(model(torch.randn(2, 4)).sum())

    assert any("decides a branch" in one.text.lower() for one in memplan.record(build, steps=1).assumptions)


def test_a_size_that_is_a_value_is_refused() -> None:
    def build() -> Any:
        lengths, x = torch.randn(64).abs().long(), torch.randn(64, 9)
        return lambda: x[:, : lengths.max()] * 2

    with pytest.raises(DataDependentError, match="as an index or a size"):
        memplan.record(build)


def test_parameters_and_momentum_without_modules_have_their_causes() -> None:
    def build() -> Any:
        weights, x = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)], torch.randn(8, 64)
        momentum = [torch.zeros_like(weight) for weight in weights]

        def step() -> None:
            h = x
            for weight in weights:
                h = torch.tanh(h @ weight)
            h.sum().backward()
            with torch.no_grad():
                for weight, m in zip(weights, momentum, strict=True):
                    m.mul_(0.9).add_(weight.grad)  # pyright: ignore[reportArgumentType]  # it has one by now
                    weight.sub_(m, alpha=0.1)
                    weight.grad = None

        return step

    most = memplan.explain(build).by_cause_most
    size = 3 * 64 * 64 * 4
    assert most["weight"] == most["optimizer_state"] == most["parameter_gradient"] == size
    assert most["input"] == 8 * 64 * 4


def test_a_module_that_is_made_in_a_step_dies_with_it() -> None:
    """4 MiB of weights at a time, however many steps; held against the allocator."""

    def build() -> Callable[[], Any]:
        x = torch.randn(1, 1024)
        return lambda: nn.Linear(1024, 1024)(x).sum()

    steps = memplan.simulate(memplan.record(build, device="cpu", steps=4)).steps
    assert len({step.peak_allocated for step in steps}) == 1
    assert steps[0].peak_allocated == pytest.approx(measured_peak(build, steps=4), rel=0.001)


def test_guards_against_nan_are_not_taken_as_true() -> None:
    def build() -> Callable[[], Any]:
        model = nn.Linear(4, 4)

        def step() -> None:
            loss = model(torch.ones(2, 4)).sum()
            if torch.isnan(loss) or torch.isinf(loss).any():
                raise FloatingPointError("nan loss")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            torch.allclose(loss, loss)

        return step

    trace = memplan.record(build, device="cpu", steps=1)
    assert "a check for nan or inf was read and taken as False" in {a.text for a in trace.assumptions}


@pytest.mark.parametrize("removed", [False, True])
def test_modules_that_are_imported_by_a_step_keep_torch_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Fake tensors are hidden from the step's code, not from what it imports."""
    (tmp_path / "imported_by_a_step.py").write_text("from torch._subclasses import FakeTensor\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("imported_by_a_step", None)
    monkeypatch.setitem(sys.modules, "removed_by_a_step", types.ModuleType("removed_by_a_step"))
    seen: list[Any] = []

    def build() -> Callable[[], object]:
        def step() -> object:
            if removed:
                sys.modules.pop("removed_by_a_step", None)
            inside: dict[str, Any] = {"__name__": "torch.fresh"}
            exec("from torch._subclasses import FakeTensor", inside)
            seen.append(inside["FakeTensor"])
            seen.append(importlib.import_module("imported_by_a_step"))
            one = torch.ones(2)
            seen.append(isinstance(one, torch._subclasses.FakeTensor))
            return one

        return step

    memplan.record(build)
    from torch._subclasses.fake_tensor import FakeTensor as real

    assert seen[0] is real
    assert seen[1].FakeTensor is real
    assert seen[2] is False
    assert torch._subclasses.FakeTensor is real
    assert "__getattr__" not in vars(torch._subclasses)
