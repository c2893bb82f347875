"""How ops were called: their tensors as views, their options with the defaults of the schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memplan
from memplan.trace.recording.call_forms import tensors_in


def build() -> Any:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.MaxPool2d(2))
    x = torch.randn(1, 1, 16, 12)

    def step() -> None:
        model(x[:, :, 2:]).sum().backward()

    return step


def test_views_and_options() -> None:
    trace = memplan.record(build, device="cpu")
    crop, convolution, pool, _ = trace.forms
    assert trace.ops[crop.op].name == "aten.slice.Tensor"
    assert crop.writes[0].shape == (1, 1, 14, 12)
    assert crop.writes[0].offset == 2 * 12
    assert crop.writes[0].storage == crop.reads[0][1].storage
    assert convolution.read("input") == crop.writes[0]
    assert convolution.option("stride") == (2, 2)
    assert convolution.option("padding") == (0, 0)
    assert pool.option("dilation") == (1, 1)  # not given: the schema's default
    assert pool.option("nothing", 7) == 7
    (returned,) = trace.returned
    assert returned.layer == "Sequential"
    assert returned.tensors == pool.writes[:1]


def test_only_of_the_first_step_and_its_forward_ops() -> None:
    trace = memplan.record(build, device="cpu", steps=3)
    assert {(trace.ops[form.op].step, trace.ops[form.op].phase) for form in trace.forms} == {(0, "forward")}


def test_measured_they_are_the_same() -> None:
    recorded, measured = memplan.record(build, device="cpu"), memplan.measure(build, device="cpu")
    shapes = [[[view.shape for view in form.writes] for form in trace.forms] for trace in (recorded, measured)]
    assert shapes[0] == shapes[1]
    assert [form.options for form in recorded.forms] == [form.options for form in measured.forms]
    assert memplan.Trace.from_json(measured.to_json()) == measured


def test_where_layers_were_made() -> None:
    trace = memplan.record(build, device="cpu")
    made = {layer.name: layer.made for layer in trace.layers}
    assert (made["0"] or "").rpartition(":")[0].endswith("test_call_forms.py")
    assert made["Sequential"] is None  # it has no parameters of its own
    assert memplan.Trace.from_json(trace.to_json()) == trace


def test_tensors_in_what_a_module_returned() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        hidden: tuple[torch.Tensor, ...]
        name: str = "x"

    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors_in({"x": [a, (b,)], "y": Output(c, (a, b))})] == [1, 2, 3, 1, 2]
