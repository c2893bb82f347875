"""Copies to host memory and back: as calls, and in programs, on the CPU with copies that come as late as they may, and
on a GPU where there is one."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from environment import thinned
from planning.graphs import HELD, all_kept, kept
from torch import Tensor, nn

from memplan.devices import find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.offload import Offload
from memplan.planning.levers.registry import with_encodings_of
from memplan.planning.ops import host_copies
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.validation.validate import validate

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA GPU, and none is here")
places = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])


@places
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_stored_comes_back_laid_out_as_it_was(place: str, dtype: torch.dtype) -> None:
    value = (torch.randn(4, 5, 6, 7, device=place) * 9).to(dtype).to(memory_format=torch.channels_last)
    expected = value.clone()
    host, copy = host_copies.store(value)
    assert host.device.type == "cpu"
    assert host.is_pinned() == (place == "cuda")
    copy.wait()
    value.zero_()
    back, copy = host_copies.fetch(host)
    copy.wait()
    assert (back.device.type, back.dtype, back.stride()) == (place, dtype, expected.stride())
    assert torch.equal(back, expected)


class Late(host_copies.Copy):
    """A copy that happens when it is waited for, and not before; its memory is full of nonsense until then."""

    __slots__ = ("source", "target")

    def wait(self) -> None:
        source, target = self.source(), self.target()
        assert source is not None, "freed before it was copied"
        assert target is not None, "freed before it was copied"
        target.copy_(source)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies come as late as they may; returns their directions."""
    seen = list[str]()

    def copied(source: Tensor, target: Tensor, device: torch.device, direction: str) -> Late:
        seen.append(direction)
        target.fill_(float("nan") if target.is_floating_point() else 1)
        copy = Late(device)
        object.__setattr__(copy, "source", weakref.ref(source))
        object.__setattr__(copy, "target", weakref.ref(target))
        return copy

    monkeypatch.setattr(host_copies, "_begin_copy", copied)
    return seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def captured() -> JointGraph:
    torch.manual_seed(0)
    graph = capture(Net(), call_of((torch.randn(64, 32),), {})).graph
    graph = with_encodings_of(graph, Situation(card=find("rtx4090")), [Offload(smallest_offloaded_bytes=64)])
    assert len(graph.forms_by("offload")) > 5
    return replace(graph, ops=tuple(replace(op, seconds=1e-6) for op in graph.ops))


CHOICES: dict[str, Any] = {
    "all away": lambda graph: Choices(saved_forms=all_kept(graph, "offload")),
    "half away, the rest made again": lambda graph: Choices(
        recomputable_values(graph), kept(offload=[one.value for one in graph.forms_by("offload")[::2]])
    ),
    "away, and signs beside": lambda graph: Choices(saved_forms=all_kept(graph, "encode", "offload")),
    "held": lambda graph: Choices(
        saved_forms=kept(offload=[one.value for one in graph.forms_by("offload")[1::2]]), gradients=HELD
    ),
}


def run(text: str, graph: JointGraph, model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a program."""
    found: dict[str, Any] = {}
    exec(compile(text, "plan", "exec"), found)
    own = dict(model.named_parameters()) | {"0": x}
    handed = [own[value.path] for value in graph.values if value.kind in ("parameter", "input")]
    gradients: dict[str, Tensor] = {}
    with torch.no_grad():
        (loss,), saved = found["forward"](list(handed))
        for given in found["backward"](list(handed), saved, [torch.ones((), device=x.device)]):
            gradients |= {graph.values[of].path: gradient.clone() for of, gradient in given}
            given.clear()
    return loss, gradients


def compared(choice: str, place: str) -> None:
    graph = captured()
    made = schedule(graph, CHOICES[choice](graph))
    validate(graph, made)
    assert any(action.kind == "store" for action in made.forward)
    text = program(made)
    torch.manual_seed(1)
    model, x = Net().to(place), torch.randn(64, 32, device=place)
    reference = run(program(schedule(graph, Choices(gradients=made.choices.gradients))), graph, model, x)
    loss, gradients = run(text, graph, model, x)
    assert torch.equal(loss, reference[0])
    assert len(gradients) == len(list(model.parameters()))
    for name, gradient in gradients.items():
        assert torch.equal(gradient, reference[1][name]), name
    if place == "cpu":
        expected = model(x)
        expected.backward()
        assert torch.equal(loss, expected)
        for name, one in model.named_parameters():
            assert one.grad is not None
            assert torch.equal(gradients[name], one.grad), name


@places
@pytest.mark.parametrize("choice", thinned(CHOICES, 2))
def test_a_program_that_offloads_gives_the_same_bits(choice: str, place: str) -> None:
    compared(choice, place)


@pytest.mark.parametrize("choice", CHOICES)
def test_and_so_it_does_where_every_copy_comes_as_late_as_it_may(choice: str, late: list[str]) -> None:
    compared(choice, "cpu")
    assert late.count("out") == late.count("back") > 0


@pytest.mark.parametrize("kind", ["stored", "fetched"])
def test_without_a_wait_a_late_copy_is_noticed(kind: str, late: list[str]) -> None:
    """Else the test above would say nothing."""
    graph = captured()
    made = schedule(graph, CHOICES["all away"](graph))
    lines = program(made).splitlines()
    first, *rest = (at for at, line in enumerate(lines) if "_copy.wait()" in line)
    which = first if kind == "stored" else rest[-1]
    text = "\n".join(lines[:which] + lines[which + 1 :])
    model, x = Net(), torch.randn(64, 32)
    _, gradients = run(text, graph, model, x)
    reference = run(program(schedule(graph, Choices())), graph, model, x)
    assert not all(torch.equal(gradients[name], one) for name, one in reference[1].items())


def test_the_program_can_be_read() -> None:
    graph = captured()
    text = program(schedule(graph, CHOICES["all away"](graph)))
    assert max(map(len, text.splitlines())) <= 120
    assert "from memplan.planning.ops import host_copies as transfers" in text
    assert "gelu_host, gelu_host_copy = transfers.store(gelu)  # offloads 16.0 KiB" in text
    assert "gelu, gelu_host_copy = transfers.fetch(gelu_host)  # fetches 16.0 KiB" in text
    assert text.count("_copy.wait()") == 2 * text.count("transfers.store(")
    assert "transfers" not in program(schedule(graph, Choices()))


@needs_gpu
def test_memory_is_free_while_a_value_is_away_and_copies_run_beside_ops() -> None:
    torch.cuda.empty_cache()
    size = 64 << 20
    value = torch.arange(size // 4, device="cuda", dtype=torch.float32)
    expected, before = float(value.double().sum()), torch.cuda.memory_allocated()
    for _ in range(3):
        host, copy = host_copies.store(value)
        copy.wait()
        del value, copy
        assert torch.cuda.memory_allocated() <= before - size
        other = torch.full((size // 4,), float("nan"), device="cuda")  # most likely in the memory that was freed
        value, copy = host_copies.fetch(host)
        del other
        noise = torch.full((size // 4,), float("nan"), device="cuda")
        copy.wait()
        del copy, host
        assert float(value.double().sum()) == expected
        del noise
    assert torch.cuda.memory_allocated() <= before
