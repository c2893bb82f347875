"""What a call finds around it is copied for the prediction, and left as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import InputError
from memplan.integrations.line_profiles.namespace import FakeNamespace

CELL = """
for batch in batches:
    loss = trainer.step(batch)
    seen.append(loss.item())
    scheduler.step()
new = loss
"""

SETUP = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        loss = F.cross_entropy(self.model(x), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

trainer = Trainer()
scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
targets = torch.zeros(32, dtype=torch.int64)
batches = [torch.randn(32, 64) for _ in range(2)]
large = torch.ones(1_000_000)
seen = []
"""


def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(SETUP, names)
    return names


def predicted(source: str, names: dict[str, Any]) -> memplan.Trace:
    code = compile(source, "cell", "exec")
    return FakeNamespace(names, [code]).record(lambda given: exec(code, names), "cpu")


def test_the_bytes_are_those_of_the_same_step_built_anew() -> None:
    def build() -> Any:
        names = namespace()
        del names["large"]  # the cell does not name it
        return lambda: exec(CELL, names)

    trace = predicted(CELL, namespace())
    expected = memplan.simulate(memplan.record(build, device="cpu", steps=1))
    # the order in which its bytes are made is another; the step is the same
    assert memplan.simulate(trace).steps[0].peak_allocated == expected.steps[0].peak_allocated
    assert trace.notes[-1].endswith("what it reads from outside, as stand-ins that are not changed")


def test_nothing_of_it_is_changed() -> None:
    names = namespace()
    before = dict(names)
    weight = names["trainer"].model[0].weight.detach().clone()
    predicted(CELL, names)
    assert names == before
    assert all(names[name] is value for name, value in before.items())
    assert torch.equal(names["trainer"].model[0].weight, weight)
    assert names["trainer"].model[0].weight.grad is None
    assert not names["trainer"].optimizer.state
    assert names["scheduler"].last_epoch == 0
    assert names["seen"] == []


def test_it_is_put_back_where_the_call_fails() -> None:
    names = namespace()
    before = dict(names)
    with pytest.raises(memplan.MemplanError, match="ZeroDivisionError"):
        predicted("batches.clear(); new = 1; 1 / 0", names)
    assert names == before
    assert len(names["batches"]) == 2


def test_gradients_and_states_from_before_are_there() -> None:
    names = namespace()
    exec(CELL, names)
    exec("trainer.step(batches[0]); F.cross_entropy(trainer.model(batches[0]), targets).backward()", names)
    trace = predicted("trainer.step(batches[0])", names)
    born = [one for one in trace.storages if one.cause == "optimizer_state" and one.born > trace.steps[0]]
    assert born == []
    weights = sum(one.nbytes for one in names["trainer"].model.parameters())
    held = sum(one.bytes for one in trace.storages if one.born <= trace.steps[0])
    steps = 4 * len(list(names["trainer"].model.parameters()))
    assert held == 4 * weights + steps + 2 * 32 * 64 * 4 + 32 * 8


def test_a_backward_pass_through_what_was_computed_before_is_refused() -> None:
    names = namespace()
    exec("loss = trainer.model(batches[0]).sum()", names)
    with pytest.raises(InputError, match="a backward pass through a tensor of shape \\(\\) that was computed before"):
        predicted("loss.backward()", names)
    trace = predicted("loss = trainer.model(batches[0]).sum(); loss.backward()", names)
    assert any(op.phase == "backward" for op in trace.ops)


def test_what_cannot_be_copied_is_used_as_it_is() -> None:
    names = namespace()

    class Lock:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle")

        def size(self) -> int:
            return 10

    names["lock"] = Lock()
    trace = predicted("x = torch.ones(lock.size())", names)
    assert [one.bytes for one in trace.storages if one.born > trace.steps[0]] == [40]


def test_variables_around_a_function_are_stand_ins() -> None:
    model = nn.Linear(8, 8)

    @memplan.profile(device="cpu")
    def run(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    y = run(torch.ones(2, 8))
    assert y.grad_fn is not None
    assert type(model.weight) is nn.Parameter
    assert type(model.weight.data) is torch.Tensor
    assert run.lines.rows[2].added == 64
