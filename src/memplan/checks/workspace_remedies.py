"""Ways out of large workspaces, each computed: the step is recorded again with the change, and cuDNN asked anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan.checks.mended.changed_step import Change, ChangeError, NotRecorded, Remaker
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


def remedies(remaker: Remaker, dimensions: int) -> list[Remedy]:
    """Return the changes that could be computed, whether they help or not.

    Args:
        remaker: records the step again.
        dimensions: of the images of the layer with the largest workspace, 4 or 5 with batch and channels.
    """
    found = list[Remedy]()
    for name, do, trace in _tried(remaker, dimensions):
        if not isinstance(trace, NotRecorded) and not _is_interval(trace):
            found.append(Remedy(name, do, simulate(trace).peak_allocated))
    return found


def _tried(remaker: Remaker, dimensions: int) -> Iterator[tuple[str, str, Trace | NotRecorded]]:
    if dimensions in _FORMATS:
        name, layout = _FORMATS[dimensions]
        do = f"Lay the model out as {name}, by model.to(memory_format=torch.{name})"
        yield name, do, remaker.record(_laid_out(dimensions, layout))
    padded = tuple(_padded(one) for one in remaker.options.inputs)
    if any(one is not None for one in padded):
        inputs = tuple(new or old for new, old in zip(padded, remaker.options.inputs, strict=True))
        sizes = ", ".join("x".join(map(str, one.shape)) for one in padded if one is not None)
        yield "padded", f"Pad the input to {sizes}", remaker.record(options=replace(remaker.options, inputs=inputs))
    asked = remaker.target.cudnn
    for version in versions():
        if asked is not None and version != asked.version:
            title = title_of(version)
            other = replace(remaker, target=replace(remaker.target, cudnn=find_cudnn(title)))
            yield f"cuDNN {title}", f"Run with cuDNN {title}", other.record()


def _laid_out(dimensions: int, layout: torch.memory_format) -> Change:
    def change(modules: dict[str, nn.Module]) -> None:
        weights = {module: [one.dim() for one in module.parameters(recurse=False)] for module in modules.values()}
        convolving = [one for one, sizes in weights.items() if dimensions in sizes and {*sizes} <= {1, dimensions}]
        if not convolving:
            raise ChangeError("no layer has weights of convolutions")
        for module in convolving:
            module.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  # torch's stub has no such overload

    return change


def _padded(given: Any) -> Spec | None:
    """Return images with sizes that are multiples; None of what is no image, or has such sizes."""
    if not isinstance(given, (torch.Tensor, Spec)) or len(given.shape) not in _FORMATS:
        return None
    shape = (*given.shape[:2], *(-(-size // MULTIPLE) * MULTIPLE for size in given.shape[2:]))
    return None if shape == tuple(given.shape) else Spec(shape, given.dtype)


def _is_interval(trace: Trace) -> bool:
    return any(one.cause == "workspace" and one.low is not None for one in trace.counted)
