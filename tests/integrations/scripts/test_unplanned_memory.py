"""What is held beside a model's step, against bytes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memplan
from memplan import _torch
from memplan.integrations.scripts.unplanned_memory import Calls, Span, UnplannedMemory, unplanned_memory

BATCH, WIDTH = 64, 100
INPUT = memplan.spec(f"{BATCH}x{WIDTH}")
SCALARS = 16
"""The sum, its gradient of ones, and what else is one number."""


class Timed:
    """A build whose step is timed: calls of the models that it makes, and updates."""

    def __init__(self, build: Callable[[], Callable[[], Any]], updates: bool) -> None:
        self.build, self.updates, self.calls, self.tick = build, updates, Calls(), lambda: 0
        self.title, self.has_time = "build", True

    def run_steps(self, steps: int, boundaries: Any) -> None:
        """Run it as a program, which knows the ticks of its trace."""
        self.calls = Calls()
        plain, begun = nn.Sequential.__call__, [0]

        def called(module: nn.Module, *args: Any) -> Any:
            start = boundaries.tick
            try:
                return plain(module, *args)
            finally:
                self.calls.calls.append(Span(start, boundaries.tick))

        def updated(*_: Any) -> None:
            if self.updates:
                self.calls.updates.append(Span(begun[0], boundaries.tick))

        before = register_optimizer_step_pre_hook(lambda *_: begun.__setitem__(0, boundaries.tick))
        after = register_optimizer_step_post_hook(updated)
        try:
            with _torch.patched(nn.Sequential, __call__=called):
                step = self.build()
                boundaries.built()
                for _ in range(steps):
                    step()
                    boundaries.stepped()
                boundaries.ended()
        finally:
            before.remove()
            after.remove()


def both(build: Callable[[], Callable[[], Any]], *, updates: bool = False, device: str = "cpu") -> UnplannedMemory:
    timed = Timed(build, updates)
    trace = memplan.record(timed, device=device)
    return unplanned_memory(trace, "Sequential", ["0"], [INPUT], timed.calls)


def beside(build: Callable[[], Callable[[], Any]], *, updates: bool = False, device: str = "cpu") -> int:
    return both(build, updates=updates, device=device).in_steps


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def held(build_more: Callable[[], Any] = lambda: None) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        model, data, more = net(), torch.randn(BATCH, WIDTH), build_more()
        return lambda: (model(data).sum().backward(), more)

    return build


def test_a_model_and_its_input_are_nothing_beside() -> None:
    assert beside(held()) <= SCALARS


def test_tensors_of_the_scripts_own_count_all_the_time() -> None:
    assert 0 <= beside(held(lambda: torch.zeros(1000))) - 4000 <= SCALARS


def test_a_second_tensor_like_the_input_counts() -> None:
    more = beside(held(lambda: torch.randn(BATCH, WIDTH)))
    assert 0 <= more - 4 * BATCH * WIDTH <= SCALARS


def test_another_models_weights_count() -> None:
    assert 0 <= beside(held(lambda: nn.Conv1d(10, 20, 3, bias=False))) - 4 * 600 <= SCALARS


def test_what_building_alone_holds_does_not() -> None:
    def build() -> Callable[[], Any]:
        step = held()()
        torch.zeros(100_000)
        return step

    assert beside(build) <= SCALARS


def test_a_loss_outside_counts_what_it_keeps_and_its_gradients() -> None:
    """exp keeps its result; its gradient is a tensor of its own, and so is the one that goes on to the model."""

    def build() -> Callable[[], Any]:
        model, data = net(), torch.randn(BATCH, WIDTH)
        return lambda: (model(data) * 2).exp().sum().backward()

    whole = 4 * BATCH * WIDTH
    assert 2 * whole <= beside(build) <= 2 * whole + 2 * SCALARS


def test_an_optimizers_state_counts_where_the_plan_has_none() -> None:
    def build() -> Callable[[], Any]:
        model, data = net(), torch.randn(BATCH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)

        def step() -> None:
            model(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    state = 4 * (WIDTH * WIDTH + WIDTH)
    assert beside(build, updates=True) <= SCALARS
    assert beside(build) >= state


def test_on_a_card_it_is_blocks() -> None:
    assert beside(held(lambda: torch.zeros(10)), device="h100") % 512 == 0


def test_an_output_that_outlives_its_step_counts_in_the_next() -> None:
    def build() -> Callable[[], Any]:
        model, data, outputs = net(), torch.randn(BATCH, WIDTH), list[torch.Tensor]()

        def step() -> None:
            output = model(data)
            output.sum().backward()
            outputs[:] = [output]

        return step

    whole = 4 * BATCH * WIDTH
    assert whole <= beside(build) <= whole + 2 * SCALARS


def test_what_is_there_while_the_model_is_not_trained_is_apart() -> None:
    """A validation is not within a step: nothing of it is beside the plan, and all of it is of the script."""

    def build() -> Callable[[], Any]:
        model, data = net(), torch.randn(BATCH, WIDTH)

        def step() -> None:
            model(data).sum().backward()
            with torch.no_grad():
                model[0](torch.randn(10 * BATCH, WIDTH))

        return step

    found, validated = both(build), 4 * 10 * BATCH * WIDTH
    assert found.in_steps <= 2 * SCALARS
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert 2 * validated <= found.between_steps - 2 * weights <= 2 * validated + 4 * BATCH * WIDTH + 4 * SCALARS
