"""The peak of a trial by itself is what the allocator counts for the same loop without memplan."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

from memplan.planning.graph.placement import Home
from memplan.verification.measurement.peak_alone import measure_trial
from memplan.verification.measurement.trial import Trial, Work


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_state_from_before_the_first_update_is_part_of_the_peak(kind: Any, restarted: bool) -> None:
    """Adagrad allocates its state when it is made, AdamW in the first update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    x, optimizer = torch.randn(32, 64), partial(kind, lr=0.1, foreach=False)

    def build() -> Any:
        copied, inputs = copy.deepcopy(model), x.clone()
        made = optimizer(copied.parameters())

        def step() -> None:
            made.zero_grad()
            output = copied(inputs)  # a trial has it until the update, too
            output.sum().backward()
            made.step()

        return step

    trial = Trial("alone", model, model, Work((x,), loss=torch.sum, optimizer=optimizer))
    if restarted:
        trial.restart()
    _, peak = measure_trial(trial, Home())
    assert peak == pytest.approx(measured_peak(build), abs=256)  # scalars live longer in one of them
    assert peak > 3 * 2 * 64 * 256 * 4  # weights, gradients and a state of as many bytes
