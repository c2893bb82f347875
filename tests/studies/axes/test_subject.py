"""What a study records is the step as it was described."""

from __future__ import annotations

import cloudpickle
import torch
from torch import nn

import memplan
from memplan.studies.axes.changed_layers import LayerChange
from memplan.studies.axes.subject import Maker, Subject
from memplan.trace.step import StepOptions


def perceptron(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def peak(subject: Subject) -> int:
    return memplan.simulate(memplan.record(subject.build(on_card=False), device="cpu")).peak_allocated


def test_arguments_are_those_of_the_callable() -> None:
    options = StepOptions(("2x4",), optimizer=torch.optim.SGD).checked()
    changed = Subject(perceptron, options).with_arguments(width=32)
    right = memplan.explain(lambda: perceptron(32), "2x4", optimizer=torch.optim.SGD, device="cpu")
    assert peak(changed) == right.timeline.peak_allocated
    assert changed.title == "perceptron"
    assert list(changed.parameters()) == ["width"]


def test_a_maker_can_be_sent_to_another_process() -> None:
    maker = Maker(perceptron, {"width": 6}, (LayerChange("1", "out_features", 3),))
    sent = cloudpickle.loads(cloudpickle.dumps(maker))
    assert repr(sent()) == repr(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
