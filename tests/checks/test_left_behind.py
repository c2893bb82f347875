"""Tensors that each step leaves behind: what a real run of the step leaves, with Python's collector held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth.cpu_allocator import allocations

import memplan

ID = "left-behind"
Build = Callable[[], Callable[[], Any]]
ROWS, WIDTH = 8192, 64
EACH = ROWS * WIDTH * 4
"""Bytes of one tensor of rows."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def outputs(keep: Callable[[torch.Tensor], Any], *, grad: bool = False) -> Build:
    def build() -> Callable[[], Any]:
        model, x, kept = net(), torch.randn(ROWS, WIDTH), list[Any]()

        def step() -> None:
            with torch.set_grad_enabled(grad):
                kept.append(keep(model(x)))

        return step

    return build


def features(keep: bool) -> Build:
    """A hook keeps a layer's output, detached; the model trains."""

    def build() -> Callable[[], Any]:
        model, x, kept = net(), torch.randn(ROWS, WIDTH), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if keep:
            model[0].register_forward_hook(lambda module, given, out: kept.append(out.detach()))

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    return build


class Remembering(nn.Module):
    """Blocks under a checkpoint that get a list along, in which they leave their output."""

    def __init__(self, reentrant: bool, remembers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([net() for _ in range(2)])
        self.reentrant, self.remembers = reentrant, remembers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            seen: list[torch.Tensor] = []

            def run(h: torch.Tensor, seen: list[torch.Tensor], block: nn.Module = block) -> torch.Tensor:
                out = block(h)
                if self.remembers:
                    seen.append(out)
                return out

            result: Any = checkpoint(run, x, seen, use_reentrant=self.reentrant)
            x = result
        return x


def remembering(reentrant: bool, remembers: bool = True) -> Build:
    def build() -> Callable[[], Any]:
        model, x = Remembering(reentrant, remembers), torch.randn(ROWS, WIDTH, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    return build


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def really_left(build: Build) -> int:
    """Return bytes that a step on real tensors leaves, from torch's own record of the CPU's allocations."""
    return _live_after(build, 3) - _live_after(build, 2)


def _live_after(build: Build, steps: int) -> int:
    alive: list[Any] = []

    def run() -> None:
        alive.append(build())
        for _ in range(steps):
            alive[0]()

    return sum(allocations(run))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_outputs_in_a_list(device: str) -> None:
    (finding,) = found(outputs(lambda y: y), device)
    assert (finding.severity, finding.details["kind"], finding.layer) == ("warning", "kept", "2")
    assert finding.bytes == really_left(outputs(lambda y: y)) == EACH
    assert "detach() would free nothing" in finding.message
    assert (".cpu()" in finding.advice[0]) == (device != "cpu")


def concatenated(*, by_hand: bool) -> Build:
    """Outputs behind those of earlier steps: by `torch.cat`, or in a new tensor, as transformers does it."""

    def build() -> Callable[[], Any]:
        model, x, kept = net(), torch.randn(ROWS, WIDTH), list[torch.Tensor]()

        def step() -> None:
            with torch.no_grad():
                y = model(x)
                if kept and by_hand:
                    both = y.new_full((len(kept[0]) + len(y), WIDTH), -100)
                    both[: len(kept[0])] = kept[0]
                    both[len(kept[0]) :] = y
                    kept[0] = both
                else:
                    kept[:] = [torch.cat((kept[0], y)) if kept else y]

        return step

    return build


@pytest.mark.parametrize("by_hand", [False, True])
def test_outputs_behind_those_of_earlier_steps(by_hand: bool) -> None:
    (finding,) = found(concatenated(by_hand=by_hand), "h100")
    assert (finding.details["kind"], finding.layer) == ("kept", "2")
    assert finding.bytes == really_left(concatenated(by_hand=by_hand)) == EACH
    assert finding.details["bytes_per_step"] == [EACH] * 2


def test_features_of_a_hook() -> None:
    (finding,) = found(features(True))
    assert (finding.details["kind"], finding.layer, finding.bytes) == ("kept", "0", really_left(features(True)))


def test_on_the_host_they_do_not_count() -> None:
    assert found(outputs(lambda y: y.cpu()), "h100") == []


@pytest.mark.parametrize(
    "build",
    [features(False), outputs(lambda y: y.mean()), outputs(lambda y: y, grad=True)],
    ids=["no hook", "numbers", "a graph, which is another trap"],
)
def test_what_is_not_left_behind(build: Build) -> None:
    assert found(build) == []


def test_a_tensor_that_the_next_step_replaces() -> None:
    def build() -> Callable[[], Any]:
        model, x, last = net(), torch.randn(ROWS, WIDTH), dict[str, Any]()

        def step() -> None:
            with torch.no_grad():
                last["out"] = model(x)

        return step

    assert found(build) == []


def test_a_state_that_each_step_computes_from_the_last() -> None:
    def build() -> Callable[[], Any]:
        model, state = net(), [torch.randn(ROWS, WIDTH)]

        def step() -> None:
            with torch.no_grad():
                state[0] = model(torch.cat((state[0], state[0])))[:ROWS].clone()

        return step

    assert found(build) == []


def test_a_reentrant_checkpoint_closes_a_cycle() -> None:
    (finding,) = found(remembering(True))
    assert (finding.severity, finding.details["kind"]) == ("warning", "cycles")
    assert finding.bytes == pytest.approx(really_left(remembering(True)), rel=0.01)
    assert "use_reentrant=False" in finding.advice[0]


@pytest.mark.parametrize(
    "build", [remembering(False), remembering(True, remembers=False)], ids=["not reentrant", "nothing in the list"]
)
def test_no_cycle(build: Build) -> None:
    assert found(build) == []
    assert really_left(build) < EACH / 10


def test_a_cycle_of_the_users_own() -> None:
    def build() -> Callable[[], Any]:
        model, x = net(), torch.randn(ROWS, WIDTH)

        def step() -> None:
            with torch.no_grad():
                seen: dict[str, Any] = {"out": model(x)}
            seen["itself"] = seen

        return step

    (finding,) = found(build)
    assert finding.bytes == really_left(build) == EACH
    assert "use_reentrant" not in finding.advice[0]
