"""Puts all tensors of a step that never names CUDA on the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.boundaries import Boundaries, Program, Runs


def everything_on_card(build: Runs) -> Runs:
    """Return a build that creates all its tensors on the card, as does its step.

    ``torch.autocast("cpu")`` in it acts as ``torch.autocast("cuda")``.
    """

    if isinstance(build, Program):
        return _ProgramOnCard(build)

    def build_on_card() -> Callable[[], Any]:
        """Return the step of ``build``, both with the card as default device."""
        with _card_is_default():
            step = build()
        if not callable(step) or isinstance(step, torch.nn.Module):
            return step  # the caller raises the error

        def step_on_card() -> Any:
            with _card_is_default():
                return step()

        return step_on_card

    return build_on_card


class _ProgramOnCard:
    """A program that creates all its tensors on the card."""

    def __init__(self, program: Program) -> None:
        """``program``: runs with the card as default device."""
        self._program = program
        self.title = program.title

    @property
    def has_time(self) -> bool:
        """Whether there is time for another run."""
        return self._program.has_time

    def run_steps(self, steps: int, boundaries: Boundaries) -> None:
        """Run the program with the card as default device."""
        with _card_is_default():
            self._program.run_steps(steps, boundaries)


@contextmanager
def _card_is_default() -> Iterator[None]:
    """Within this context, tensors are created on the card, and autocast for the CPU is that for CUDA."""
    autocast = torch.autocast

    class CardAutocast(autocast):
        """Autocast of CUDA where the step asks for the CPU's."""

        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    with _torch.patched(torch, autocast=CardAutocast), torch.device("cuda"):
        yield
