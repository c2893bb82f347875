"""Peaks of single ops on a card, each in a step of its own: predicted, and as torch counts them on a dry card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import memplan

Case = tuple[Any, Callable[[torch.Tensor], torch.Tensor], int]
"""Shape, op, and the peak in bytes of its step."""


def steps_of(cases: Mapping[str, Case]) -> Callable[[], None]:
    """One step for each case, in order."""
    left = iter(cases.values())

    def step() -> None:
        shape, op, _ = next(left)
        x = torch.randn(shape, device="cuda", requires_grad=True)
        op(x).sum().backward()

    return step


def peaks(trace: memplan.Trace, names: Iterable[str]) -> dict[str, int]:
    """Peak of each case's step, by its name."""
    return {name: step.peak_allocated for name, step in zip(names, memplan.simulate(trace).steps, strict=True)}
