"""Changes that can shrink a convolution's workspace, each recorded, with cuDNN's plan for the changed step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan.checks.mended.changed_step import Change, ChangeError, NotRecorded, StepRecorder
from memplan.cudnn.cudnn_library import find_cudnn, title_of
from memplan.cudnn.stored_answers import versions
from memplan.simulation.simulate import simulate
from memplan.trace.spec import Spec
from memplan.trace.trace import Trace

MULTIPLE = 8
"""Channels and sizes of images that cuDNN's tensor core engines are made for come in multiples of this. (NVIDIA Deep
Learning Performance Documentation, Convolutional Layers User's Guide.)"""
_FORMATS = {4: ("channels_last", torch.channels_last), 5: ("channels_last_3d", torch.channels_last_3d)}


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, and the step's peak with it in bytes."""

    name: str
    do: str
    """What to do, in words."""
    peak: int


def remedies(recorder: StepRecorder, dimensions: int) -> list[Remedy]:
    """Return the changes for which the peak is known exactly, whether they lower it or not. ``dimensions``: of the
    input of the layer with the largest workspace, 4 or 5 with batch and channels."""
    known: list[Remedy] = []
    for name, do, trace in _changed_steps(recorder, dimensions):
        if isinstance(trace, Trace):
            has_interval = any(s.cause == "workspace" and s.low is not None for s in trace.counted)  # not from a plan
            if not has_interval:
                known.append(Remedy(name, do, simulate(trace).peak_allocated))
    return known


def _changed_steps(recorder: StepRecorder, dimensions: int) -> Iterator[tuple[str, str, Trace | NotRecorded]]:
    """Yield name, advice and recording of each change: channels last, padded inputs, other versions of cuDNN.
    ``dimensions`` are those of the convolution's input."""
    if dimensions in _FORMATS:
        name, layout = _FORMATS[dimensions]
        do = f"Lay the model out as {name}, by model.to(memory_format=torch.{name})"
        yield name, do, recorder.record(_in_format(dimensions, layout))
    padded = tuple(_padded(value) for value in recorder.options.inputs)
    if any(spec is not None for spec in padded):
        inputs = tuple(new or old for new, old in zip(padded, recorder.options.inputs, strict=True))
        sizes = ", ".join("x".join(map(str, spec.shape)) for spec in padded if spec is not None)
        yield "padded", f"Pad the input to {sizes}", recorder.record(options=replace(recorder.options, inputs=inputs))
    current = recorder.target.cudnn
    for version in versions():
        if current is not None and version != current.version:
            title = title_of(version)
            other = replace(recorder, target=replace(recorder.target, cudnn=find_cudnn(title)))
            yield f"cuDNN {title}", f"Run with cuDNN {title}", other.record()


def _in_format(dimensions: int, layout: torch.memory_format) -> Change:
    """Return a change that converts the convolutions to a memory format. They are the modules that own weights of so
    many dimensions, and at most biases besides."""

    def change(modules: dict[str, nn.Module]) -> None:
        ranks = {module: {weight.dim() for weight in module.parameters(recurse=False)} for module in modules.values()}
        convolutions = [module for module, dims in ranks.items() if dimensions in dims and dims <= {1, dimensions}]
        if not convolutions:
            raise ChangeError("no layer has weights of convolutions")
        for module in convolutions:
            module.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  # torch's stub has no such overload

    return change


def _padded(value: Any) -> Spec | None:
    """Return the spec of an input with spatial sizes rounded up to multiples of `MULTIPLE`. None if they are multiples
    already, or if the input is no image."""
    if not isinstance(value, (torch.Tensor, Spec)) or len(value.shape) not in _FORMATS:
        return None
    shape = (*value.shape[:2], *(math.ceil(size / MULTIPLE) * MULTIPLE for size in value.shape[2:]))
    return None if shape == tuple(value.shape) else Spec(shape, value.dtype)
