"""Capture a step, with what the model returns besides the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan.errors import InputError, UsageError
from memplan.exporting.source.step_layout import PersistentTensor, name_of, one_after_another
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.loss_module import WithLoss, default_loss
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.request import Request


@dataclass(frozen=True, slots=True)
class Normalization:
    """What a model sees of inputs of eight bits: ``(x - mean) / std`` in float32."""

    mean: tuple[float, ...]
    """One number, or one for each channel (dimension 1); `std` likewise."""
    std: tuple[float, ...]

    @classmethod
    def of(cls, given: Any) -> Normalization:
        """Return the normalization for a pair of numbers or of sequences of numbers.

        Raises:
            UsageError: it is no such pair, a number is not finite, or a deviation is 0.
        """
        try:  # + 0.0: a float, or TypeError for what is no number
            mean, std = ((x + 0.0,) if isinstance(x, (int, float)) else tuple(k + 0.0 for k in x) for x in given)
        except (TypeError, ValueError):
            mean, std = (), ()
        if not mean or len(std) not in (1, len(mean)) or not all(map(math.isfinite, (*mean, *std))) or 0 in std:
            raise UsageError(
                f"normalize={given!r}", expected="(mean, std): two finite numbers, or one of each for each channel",
                do="Give such as (127.5, 127.5)",
            )  # fmt: skip
        return cls(mean, std * len(mean) if len(std) == 1 else std)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the normalized input. Raises InputError if it has another number of channels."""
        if len(self.mean) == 1:
            return (x.to(dtype) - self.mean[0]) / self.std[0]
        if x.dim() < 2 or x.shape[1] != len(self.mean):
            shape = "x".join(map(str, x.shape))
            raise InputError(
                f"normalize for {len(self.mean)} channels, and an input of {shape}",
                expected="a mean and a deviation for each channel (dimension 1), or one for all", do="Give as many",
            )  # fmt: skip
        mean, std = (
            torch.tensor(numbers, dtype=dtype).reshape(-1, *[1] * (x.dim() - 2)) for numbers in (self.mean, self.std)
        )
        return (x.to(dtype) - mean) / std


class DeviceStep(WithLoss):
    """What a device computes: ``(*inputs, *targets) -> loss``. Without a loss function the loss is `default_loss`.

    Args:
        model: the user's model.
        loss: ``loss(output, *targets)``; None: the model returns its loss.
        targets: how many of the last arguments are targets.
        normalization: of inputs of eight bits; None: the model reads the bytes.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, targets: int, normalization: Normalization | None
    ) -> None:
        super().__init__(model, (lambda output: output) if loss is None else loss, targets)
        self.has_loss, self.normalization = loss is not None, normalization

    @classmethod
    def of(cls, step: nn.Module, normalization: Normalization | None) -> DeviceStep:
        """Return the step of a model, or of a model with its loss."""
        if isinstance(step, WithLoss):
            return cls(step.model, step.loss, step.targets, normalization)
        return cls(step, None, 0, normalization)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss."""
        return self.loss_of(self.model_output(*args, **kwargs), args)

    def model_output(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for the arguments of a step."""
        inputs, dtype = args[: len(args) - self.targets], next(self.model.parameters()).dtype
        if self.normalization is not None:
            is_bytes = [isinstance(x, torch.Tensor) and x.dtype in (torch.uint8, torch.int8) for x in inputs]
            inputs = tuple(
                self.normalization(x, dtype) if normalize else x for x, normalize in zip(inputs, is_bytes, strict=True)
            )
        return self.model(*inputs, **kwargs)

    def loss_of(self, output: Any, args: Sequence[Any]) -> torch.Tensor:
        """Return the loss of what the model returned for these arguments."""
        return default_loss(self.loss(output, *args[len(args) - self.targets :]))


def device_step(request: Request) -> DeviceStep:
    """Return the step of an export's request, which an export has set to a `DeviceStep`."""
    assert isinstance(request.step, DeviceStep), "an export sets it"
    return request.step


class WithOutputs(WithLoss):
    """A step that returns the loss, and names and tensors of the model's output.

    The tensors are detached. They are those of mappings, lists, tuples and dataclasses, named by keys and positions, as
    ``logits`` or ``states_0``.
    """

    def __init__(self, step: DeviceStep) -> None:
        super().__init__(step.model, step.loss, step.targets)
        self.step = (step,)  # in a tuple, so that its parameters are not this module's, too

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        """Return the loss, and names and tensors of the model's output."""
        output = self.step[0].model_output(*args, **kwargs)
        named = list(_named_tensors(output))
        if not named:
            raise InputError(
                f"the model returns a {type(output).__name__}",
                expected="a tensor, or a dict, list or tuple of tensors",
                do="Wrap it in a module that does",
            )
        return self.step[0].loss_of(output, args), [(name, tensor.detach()) for name, tensor in named]


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
    returned_values: tuple[int, ...]
    """Values of the tensors that the model returns."""
    outputs: tuple[PersistentTensor, ...]
    """Names and shapes of these tensors."""

    def forward_only(self, *, loss: bool) -> CapturedStep:
        """Return the forward pass, which changes no buffers, with the loss or without."""
        graph = self.graph
        ops = tuple(op for op in graph.ops if op.phase == "forward")
        # ops of the forward pass come first; values of the backward pass have none now
        values = tuple(replace(v, op=None) if v.op is not None and v.op >= len(ops) else v for v in graph.values)
        outputs = graph.outputs if loss else ()
        graph = replace(graph, values=values, ops=ops, outputs=outputs, gradients=(), mutations=(), forms=())
        return replace(self, graph=graph)


def capture_step(step: DeviceStep, call: Call) -> CapturedStep:
    """Capture a step as `capture` does.

    Raises:
        InputError: the model returns no tensors.
        UsageError, RecordingError: as of `capture`.
    """
    captured = capture(WithOutputs(step), call)
    results, recipe = captured.graph.outputs, captured.returned
    # what `WithOutputs` returns, with values of the graph in the place of tensors
    loss, named_outputs = recipe.structure.rebuild(results[position] for position in recipe.output_indices)
    values = captured.graph.values
    renamed = tuple(replace(v, path=name_of(v.path)) if v.kind in ("parameter", "buffer") else v for v in values)
    graph = replace(captured.graph, values=renamed, outputs=(loss,))
    outputs = one_after_another((name, values[value].shape) for name, value in named_outputs)
    return CapturedStep(graph, captured.constants, tuple(value for _, value in named_outputs), outputs)
