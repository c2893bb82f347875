"""Steps that `torch.compile` compiles: their bytes are those of a run of the compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from models.compiled_steps import STEPS, Broken, Feedforward, step_of, vectors
from torch import nn
from truth.cpu_allocator import collecting, measured_peak

import memplan
from memplan.simulation.simulate import simulate
from memplan.trace.recording.session import COMPILED

# torch's own, as a real run compiles
pytestmark = pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning")
STEP_COUNTER = 8
"""Bytes of a tensor that a compiled optimizer does not make."""


def peak(build: Callable[[], Callable[[], Any]], device: str | None = None, steps: int = 2) -> int:
    return simulate(memplan.record(build, device=device, steps=steps)).peak_allocated


@pytest.mark.parametrize(
    "name", ["graph break", *slow("model", "method", "decoder", "lengths", "checkpointed", "with the loss", "autocast")]
)
def test_the_bytes_are_those_of_the_compiled_step(name: str) -> None:
    steps = 4 if name == "lengths" else 2
    predicted = memplan.record(STEPS[name], steps=steps)
    assert COMPILED in predicted.notes
    assert not predicted.assumptions
    torch._dynamo.reset()  # pyright: ignore[reportAttributeAccessIssue]
    # what compiles in the first step can leave cycles that hold its tensors (torch 2.15)
    measured = measured_peak(collecting(STEPS[name]), steps)
    assert simulate(predicted).peak_allocated == pytest.approx(measured, abs=16 * STEP_COUNTER)


@pytest.fixture(scope="module")
def eager_peak() -> int:
    return peak(step_of(Feedforward, vectors, lambda model: model))


def test_fused_kernels_take_less_than_eager_mode_and_say_what_they_compute(eager_peak: int) -> None:
    trace = memplan.record(STEPS["model"])
    assert simulate(trace).peak_allocated < eager_peak
    fused = [op for op in trace.ops if op.name.startswith("inductor.fused_")]
    assert any("layer_norm" in op.name and "gelu" in op.name and op.phase == "forward" for op in fused)
    saved = [storage for storage in trace.storages if storage.cause == "saved"]
    assert any(trace.ops[storage.op].name.startswith("inductor.") for storage in saved if storage.op is not None)


def test_force_eager_is_the_eager_step(eager_peak: int) -> None:
    with torch.compiler.set_stance("force_eager"):
        trace = memplan.record(STEPS["model"])
    assert COMPILED not in trace.notes
    assert simulate(trace).peak_allocated == eager_peak


def test_explain_says_what_eager_mode_would_take() -> None:
    explanation = memplan.explain(STEPS["model"])
    eager = memplan.explain(step_of(Feedforward, vectors, lambda model: model))
    sentence = f"without torch.compile the step would peak at {eager.sentence.split(' -> ')[1].split(' peak')[0]}"
    assert sentence in explanation.notes


def test_what_cannot_be_followed_runs_as_if_eager_and_says_why() -> None:
    class Reads(Feedforward):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[: int(x.sum().item()) % 2 + 4])

    def fullgraph(model: nn.Module) -> Any:
        return torch.compile(model, fullgraph=True)

    trace = memplan.record(step_of(Reads, vectors, fullgraph))
    (text,) = {row.text for row in trace.assumptions if row.kind == "compiled"}
    assert "as if eager" in text
    assert "not followed: " in text
    assert simulate(trace).peak_allocated == peak(step_of(Reads, vectors, lambda model: model))


def test_compiled_functions_run_as_before() -> None:
    """One that was compiled for real before a recording calls it with tensors without data."""
    norm = torch.compile(lambda x: (x.square().mean() + 1).rsqrt(), backend="aot_eager")
    x = torch.randn(4, 64)
    expected = norm(x)

    def build() -> Callable[[], None]:
        model = Feedforward()
        return lambda: norm(model(torch.randn(4, 64))).backward()

    assert COMPILED in memplan.record(build).notes
    memplan.record(STEPS["graph break"])
    assert torch.equal(norm(x), expected)
    broken = Broken()
    assert torch.equal(torch.compile(broken, backend="eager")(x), broken(x))


def test_a_compiled_step_on_a_card_takes_less_than_the_eager_one() -> None:
    compiled, eager = (
        memplan.record(step_of(Feedforward, vectors, how), device="h100")
        for how in (torch.compile, lambda model: model)
    )
    assert COMPILED in compiled.notes
    assert {storage.device for storage in compiled.storages} == {"cuda:0"}
    assert simulate(compiled).peak_allocated < simulate(eager).peak_allocated
