"""Capture a step, with what the model returns besides the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan.errors import InputError
from memplan.exporting.source.step_layout import PersistentTensor, laid_out, name_of
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.loss_module import WithLoss, default_loss
from memplan.planning.graph.joint_graph import JointGraph


class WithOutputs(WithLoss):
    """A model and its loss, as one module: ``(*inputs, *targets) -> loss, names and tensors of the model's output``.

    The tensors are detached. They are those of mappings, lists, tuples and dataclasses, named by keys and positions, as
    ``logits`` or ``states_0``. Without a loss function the loss is `default_loss`.
    """

    def __init__(self, step: nn.Module) -> None:
        if isinstance(step, WithLoss):
            super().__init__(step.model, step.loss, step.targets)
        else:
            super().__init__(step, lambda output: output, 0)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        """Return the loss, and names and tensors of the model's output."""
        cut = len(args) - self.targets
        output = self.model(*args[:cut], **kwargs)
        named = list(_named_tensors(output))
        if not named:
            raise InputError(
                f"the model returns a {type(output).__name__}",
                expected="a tensor, or a dict, list or tuple of tensors",
                do="Wrap it in a module that does",
            )  # fmt: skip
        return default_loss(self.loss(output, *args[cut:])), [(name, tensor.detach()) for name, tensor in named]


def flat_output(output: Any) -> np.ndarray:
    """Return the elements of a model's output as a device writes them, in float64."""
    return np.concatenate([tensor.detach().double().numpy().reshape(-1) for _, tensor in _named_tensors(output)])


def _named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's output with their names; one that is the whole output is called ``output``."""
    if isinstance(output, torch.Tensor):
        yield name or "output", output
        return
    if isinstance(output, Mapping):
        parts = list(output.items())
    elif isinstance(output, (list, tuple)):
        parts = list(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    elif dataclasses.is_dataclass(output):
        parts = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    else:
        parts = []
    for key, part in parts:
        yield from _named_tensors(part, f"{name}_{key}" if name else str(key))


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, with parameters and buffers under their names in the user's model."""

    graph: JointGraph
    """Its only output is the loss; of a model without the loss it has none."""
    constants: Mapping[int, torch.Tensor]
    """Constant tensors of the graph, by value."""
    written: tuple[int, ...]
    """Values of the tensors that the model returns."""
    outputs: tuple[PersistentTensor, ...]
    """Names and shapes of these tensors."""

    def forward_only(self, *, loss: bool) -> CapturedStep:
        """Return the forward pass, which changes no buffers, with the loss or without."""
        graph = self.graph
        ops = tuple(op for op in graph.ops if op.phase == "forward")
        values = tuple(replace(v, op=None) if v.op is not None and v.op >= len(ops) else v for v in graph.values)
        outputs = graph.outputs if loss else ()
        graph = replace(graph, values=values, ops=ops, outputs=outputs, gradients=(), mutations=(), forms=())
        return replace(self, graph=graph)


def capture_step(step: nn.Module, call: Call) -> CapturedStep:
    """Capture a step as `capture` does.

    Raises:
        InputError: the model returns no tensors.
        UsageError, RecordingError: as of `capture`.
    """
    captured = capture(WithOutputs(step), call)
    made, recipe = captured.graph.outputs, captured.returned
    loss, returned = recipe.structure.rebuild(made[position] for position in recipe.order)
    values = captured.graph.values
    named = tuple(replace(v, path=name_of(v.path)) if v.kind in ("parameter", "buffer") else v for v in values)
    graph = replace(captured.graph, values=named, outputs=(loss,))
    outputs = laid_out((name, values[value].shape) for name, value in returned)
    return CapturedStep(graph, captured.constants, tuple(value for _, value in returned), outputs)
