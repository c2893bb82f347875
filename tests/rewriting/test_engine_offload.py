"""Planned steps whose values wait in host memory, behind autograd. On the CPU, where a copy is made at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from environment import thinned
from rewriting.cells import CELLS, Planned, same_state, total
from torch import nn

from memplan.devices import find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.joint_graph import recomputable_values
from memplan.planning.levers.lever import GradientUse, Situation
from memplan.planning.levers.offload import Offload
from memplan.planning.levers.registry import with_encodings_of
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.validation.validate import validate
from memplan.rewriting.install import install


def offloaded(model: nn.Module) -> list[int]:
    """Plan the model with every second value away and the rest made again; counts the copies of each plan."""
    counts = list[int]()

    def planned(call: Call, held: bool) -> Any:
        captured = capture(model, call)
        graph = with_encodings_of(
            captured.graph, Situation(card=find("rtx4090")), [Offload(smallest_offloaded_bytes=64)]
        )
        away = frozenset((one.lever, one.value) for one in graph.forms_by("offload")[::2])
        made = schedule(graph, Choices(recomputable_values(graph), away, GradientUse(accumulates=held)))
        validate(graph, made)
        counts.append(sum(action.kind == "fetch" for action in made.backward))
        return Planned(captured, made)

    install(model, planned)
    return counts


@pytest.mark.parametrize("name", thinned(CELLS, 4))
def test_two_steps_and_two_passes_through_one_graph_are_eagers_bit_for_bit(name: str) -> None:
    cell = CELLS[name]
    torch.manual_seed(1)
    reference = cell.make()
    model = copy.deepcopy(reference)
    counts = offloaded(model)
    for one in (reference, model):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(2):
            args, kwargs = cell.arguments(cell.batch)
            optimizer.zero_grad()
            loss = total(one(*args, **kwargs))
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    assert counts
    assert min(counts) > 0
    same_state(reference, model)
