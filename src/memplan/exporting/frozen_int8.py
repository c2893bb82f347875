"""Compute the frozen part of a step in eight bits: quantize it on the user's data, and measure the error."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from memplan import _torch
from memplan._display import Printed
from memplan._text import counted
from memplan.errors import InputError, UsageError, VerificationError
from memplan.exporting.int8.frozen_part import FrozenPart, float_values, frozen_part
from memplan.exporting.int8.integer_layers import IntegerLayer, integer_layers, integer_values
from memplan.exporting.int8.layers import Convolution, View
from memplan.exporting.int8.rewriting import rewritten
from memplan.exporting.source.step_layout import tensors_of
from memplan.exporting.step_outputs import CapturedStep, device_step
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import JointGraph, Value
from memplan.planning.graph.op_schema import short
from memplan.planning.request import Request


@dataclass(frozen=True, slots=True)
class Int8Layer(Printed):
    """A layer of the frozen part in eight bits."""

    layer: str
    """Name of the module, or of the last of several that became one layer."""
    ops: tuple[str, ...]
    """PyTorch's ops that it computes."""
    scale: float
    zero: int
    """Its result is ``scale * (q - zero)`` for integers q from -128 to 127."""
    before: tuple[float, int] | None
    """Scale and zero point of the result before an activation by table; None without one."""
    error: float
    """Root of the mean squared error relative to that of the float32 result, on the calibration data."""

    def __str__(self) -> str:
        return f"{self.layer or 'the model'} ({', '.join(self.ops)}): {self.error:.2%}"


@dataclass(frozen=True)
class Int8Frozen(Printed):
    """The effect of computing the frozen part in eight bits."""

    DERIVED: ClassVar[tuple[str, ...]] = ("worst",)

    layers: tuple[Int8Layer, ...]
    borders: tuple[Int8Layer, ...]
    """The layers whose results go on in float32."""
    stays: tuple[str, ...]
    """Frozen ops that read layers in eight bits and stay in float32, and why."""
    weights: int
    """Number of weights in eight bits."""
    loss: float
    """Mean loss over the calibration data with the frozen part in float32."""
    int8_loss: float
    """The same with the frozen part in eight bits."""

    @property
    def worst(self) -> float:
        """Largest error of a result that goes on in float32."""
        return max((border.error for border in self.borders), default=0.0)

    def __str__(self) -> str:
        return (
            f"{counted(len(self.layers), 'frozen layer')} in eight bits; what they hand on is off by {self.worst:.2%}, "
            f"and the loss moves from {self.loss:.4g} to {self.int8_loss:.4g}"
        )


@dataclass(frozen=True)
class Int8Pass:
    """The frozen part of one pass, and its integers."""

    frozen_part: FrozenPart
    layers: tuple[IntegerLayer, ...]
    constants: Mapping[int, torch.Tensor]
    """Constant tensors of the captured graph, by value."""

    def integer_values(self, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[IntegerLayer, np.ndarray]]:
        """Yield each layer with its result in int8, for tensors of the step's call."""
        values = self.frozen_part.graph.values
        operands = {value for integers in self.layers for value in integers.layer.operands}
        tensors = {value: self.input_of(value, inputs) for value in operands}
        arrays = {
            value: tensor.detach().contiguous().numpy() for value, tensor in tensors.items() if tensor is not None
        }
        shapes = {integers.layer.output: values[integers.layer.output].shape for integers in self.layers}
        return integer_values(self.layers, arrays, shapes)

    def input_of(self, value: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the tensor of a value that is an input or a view of one; None for what a layer computes."""
        shape = self.frozen_part.graph.values[value].shape
        base = self.frozen_part.graph.values[self.frozen_part.graph.base(value)]
        return inputs[int(base.path)].reshape(shape) if base.kind == "input" else None

    def float_values(
        self, named: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32,
        replaced: Mapping[int, torch.Tensor] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:  # fmt: skip
        """Yield values of the graph with what PyTorch computes for them.

        Args:
            named: parameters and buffers by their names in the model.
            inputs: tensors of the step's call.
            dtype: of floats.
            replaced: elements that later ops read in place of what was computed.
        """

        def tensor_of(value: Value) -> torch.Tensor:
            if value.kind == "input":
                tensor = inputs[int(value.path)]
            else:
                tensor = self.constants[value.id] if value.kind == "constant" else named[value.path]
            return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

        with torch.no_grad():
            yield from float_values(self.frozen_part, tensor_of, dtype, replaced)

    @contextmanager
    def int8_results_in_place(
        self, named: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Iterator[None]:
        """Within this context a step of PyTorch reads what the device computes in eight bits.

        Raises:
            VerificationError: PyTorch computes no such value.
        """
        device_results = {
            integers.layer.output: torch.from_numpy(integers.result_type.floats(array)).to(dtype)
            for integers, array in self.integer_values(inputs)
            if integers.layer.output in self.frozen_part.values_read_in_float32
        }
        # (what PyTorch computes, what it is to read instead). A view of a replaced result is equal to the device's
        # already, and needs no pair.
        replacements = [
            (tensor.clone(), device_result)
            for value, tensor in self.float_values(named, inputs, dtype, device_results)
            if (device_result := device_results.get(value)) is not None and not torch.equal(tensor, device_result)
        ]
        with _torch.ResultsReplaced(replacements) as mode:
            yield
        if mode.left:  # pairs whose first tensor no op computed
            raise VerificationError(
                "the frozen part does not compute twice the same", expected="a deterministic model",
                do="Report it, or leave out frozen_layers='int8'",
            )  # fmt: skip


@dataclass(frozen=True)
class Int8Step:
    """Both passes with the frozen part in eight bits."""

    step: Int8Pass
    infer: Int8Pass
    report: Int8Frozen
    int8_passes: tuple[CapturedStep, CapturedStep] = field(repr=False)
    """The captured passes with integer kernels."""


def int8_step(request: Request, passes: tuple[CapturedStep, CapturedStep], batches: Any) -> Int8Step | None:
    """Quantize the frozen part of both passes on batches of data.

    Returns None if there is no layer before the first trained one.

    Raises:
        InputError: a batch does not fit the step, or the range of a layer on the data does not fit eight bits.
    """
    samples = calibration_samples(request, batches)
    step, infer = passes
    changed = {path for captured in passes for path in _changed_buffers(captured.graph)}
    trained = {step.graph.values[parameter].path for parameter, _ in step.graph.gradients}
    step_part = _part(request, step, trained | changed, among=None)
    infer_part = _part(request, infer, trained | changed, among=step_part.calls)  # no more than in the step
    int8_pass, int8_captured = _quantized(request, step, step_part, samples)
    int8_infer, int8_infer_captured = _quantized(request, infer, infer_part, samples)
    if not int8_pass.layers:
        return None
    report = _report(request, int8_pass, samples)
    return Int8Step(int8_pass, int8_infer, report, int8_passes=(int8_captured, int8_infer_captured))


def _changed_buffers(graph: JointGraph) -> set[str]:
    """Return the names of the buffers that a step changes."""
    return {graph.values[buffer].path for buffer, _ in graph.mutations}


def calibration_samples(request: Request, batches: Any) -> list[tuple[torch.Tensor, ...]]:
    """Return the tensors of a call of the step for each sample of the calibration data.

    A batch may have a multiple of the step's number of samples in each tensor: it is split into several calls.

    Raises:
        InputError: a batch does not fit the step, or there is none.
        UsageError: ``batches`` is no iterable of batches.
    """
    if isinstance(batches, (torch.Tensor, nn.Module, str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise UsageError(
            f"calibrate=a {type(batches).__name__}", expected="an iterable of batches, each a tuple of inputs and "
            "targets", do="Pass such as [(x, y)], or a DataLoader"
        )  # fmt: skip
    step_tensors, samples = request.call.tensors, list[tuple[torch.Tensor, ...]]()
    for number, batch in enumerate(batches):
        tensors = call_of(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}).tensors
        calls = _calls_in(tensors, step_tensors)
        if not calls:
            shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
            raise InputError(
                f"batch {number} of calibrate: tensors of {shapes}",
                expected="inputs and targets in shapes and types of the step, or several of them one behind another",
                do="Drop the last, smaller batch: drop_last=True of a DataLoader"
                if samples and _is_incomplete(tensors, step_tensors)
                else "Give each batch as a tuple: inputs, then targets",
            )
        by_tensor = list[Sequence[torch.Tensor]]()  # of each tensor, its part in each call
        for tensor, like in zip(tensors, step_tensors, strict=True):
            converted = _converted(tensor.detach(), like.dtype, number)
            by_tensor.append(converted.chunk(calls) if like.dim() else [converted] * calls)
        samples += list(zip(*by_tensor, strict=True))
    if not samples:
        raise InputError("calibrate has no batch", expected="batches of inputs and targets", do="Give some data")
    return samples


def _calls_in(tensors: Sequence[torch.Tensor], step_tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of calls of the step that a batch is split into; 0 if it does not fit the step."""
    pairs = list(zip(tensors, step_tensors, strict=False))
    calls_by_tensor = {len(tensor) // len(like) if like.dim() and tensor.dim() else 1 for tensor, like in pairs}
    if len(tensors) != len(step_tensors) or len(calls_by_tensor) != 1:
        return 0
    (calls,) = calls_by_tensor
    for tensor, like in pairs:
        shape = torch.Size([calls * len(like), *like.shape[1:]]) if like.dim() else like.shape
        if tensor.shape != shape or tensor.is_floating_point() != like.is_floating_point():
            return 0
    return calls


def _is_incomplete(tensors: Sequence[torch.Tensor], step_tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a batch differs from the step's inputs in the number of samples only."""
    return len(tensors) == len(step_tensors) and all(
        tensor.dim() == like.dim() and tensor.shape[1:] == like.shape[1:]
        for tensor, like in zip(tensors, step_tensors, strict=True)
    )


def _converted(tensor: torch.Tensor, dtype: torch.dtype, batch: int) -> torch.Tensor:
    """Return a tensor of batch number ``batch`` in the step's dtype.

    Raises:
        InputError: the dtype does not hold an element, or an element is not finite.
    """
    if not dtype.is_floating_point and dtype != torch.bool and tensor.numel():
        bounds, low, high = torch.iinfo(dtype), int(tensor.min()), int(tensor.max())
        if low < bounds.min or high > bounds.max:
            raise InputError(
                f"batch {batch} of calibrate: integers from {low} to {high}",
                expected=f"those of the step's {str(dtype).removeprefix('torch.')}: {bounds.min} to {bounds.max}",
                do="Give the data as the device reads it",
            )
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise InputError(
            f"batch {batch} of calibrate: elements that are not finite",
            expected="numbers, which have a range",
            do="Leave such samples out",
        )
    return converted


def _part(request: Request, captured: CapturedStep, unfrozen: set[str], among: Any) -> FrozenPart:
    """Find the frozen part of a captured pass. Parameters and buffers named in `unfrozen` change during training; with
    `among`, the (layer, op) of another pass's frozen part, no other ops belong to it."""
    tensors, graph = tensors_of(request), captured.graph
    frozen = {v.id: tensors[v.path] for v in graph.values
              if v.kind in ("parameter", "buffer") and v.path not in unfrozen}  # fmt: skip
    frozen |= captured.constants
    input_count = len(request.call.tensors) - device_step(request).targets  # targets are the last tensors
    inputs = [value.id for value in graph.values if value.kind == "input" and int(value.path) < input_count]
    return frozen_part(graph, frozen, inputs, captured.returned_values, among)


def _quantized(
    request: Request, captured: CapturedStep, part: FrozenPart, samples: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[Int8Pass, CapturedStep]:
    """Return the integers of a frozen part, and the captured pass with integer kernels."""
    float_pass, named = Int8Pass(part, (), captured.constants), tensors_of(request)
    ranges: dict[int, tuple[float, float]] = {}
    for inputs in samples:
        read = [(value, float_pass.input_of(value, inputs)) for value in part.float_inputs]
        for value, tensor in (*read, *float_pass.float_values(named, inputs)):
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                low, high = ranges.get(value, (0.0, 0.0))  # a range contains 0
                smallest, largest = tensor.aminmax()  # not a number if an element is, as what NumPy makes of it
                ranges[value] = (float(np.minimum(low, float(smallest))), float(np.maximum(high, float(largest))))
    numbers = {value: tensor for value, tensor in captured.constants.items() if tensor.numel() == 1}
    layers = tuple(integer_layers(part.layers, ranges, numbers))
    graph, constants = rewritten(part, layers, captured.constants)
    return replace(float_pass, layers=layers), replace(captured, graph=graph, constants=constants)


def _report(request: Request, step: Int8Pass, samples: Sequence[tuple[torch.Tensor, ...]]) -> Int8Frozen:
    """Measure the error of each layer and of the loss on the calibration data."""
    named = tensors_of(request)
    squared_errors, squared_norms = defaultdict[int, float](float), defaultdict[int, float](float)
    for inputs in samples:
        floats = dict(step.float_values(named, inputs))
        for integers, array in step.integer_values(inputs):
            value = integers.layer.output
            exact = floats[value].double().numpy()
            squared_errors[value] += float(
                np.square(integers.result_type.floats(array).astype(np.float64) - exact).sum()
            )
            squared_norms[value] += float(np.square(exact).sum())
    reports = dict[int, Int8Layer]()
    for integers in step.layers:
        layer, result, before = integers.layer, integers.result_type, integers.type_before_table
        norm = squared_norms[layer.output]
        reports[layer.output] = Int8Layer(
            layer.ops[-1].layer if layer.ops else "(input)", tuple(short(op.target).strip("_") for op in layer.ops),
            scale=result.scale, zero=result.zero_point,
            before=None if before is result else (before.scale, before.zero_point),
            error=(squared_errors[layer.output] / norm) ** 0.5 if norm else 0.0,
        )  # fmt: skip
    views = {integers.layer.output for integers in step.layers if isinstance(integers.layer, View)}
    loss, int8_loss = _losses(request, step, samples)
    weights = [integers.layer.weight for integers in step.layers if isinstance(integers.layer, Convolution)]
    return Int8Frozen(
        layers=tuple(report for value, report in reports.items() if value not in views),
        borders=tuple(reports[value] for value in step.frozen_part.values_read_in_float32),
        stays=tuple(dict.fromkeys(map(str, step.frozen_part.float_ops))),
        weights=sum(weight.size for weight in weights), loss=loss, int8_loss=int8_loss,
    )  # fmt: skip


def _losses(request: Request, step: Int8Pass, samples: Sequence[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Return the mean loss of a training step's forward pass with the frozen part in float32, and in eight bits."""

    def mean_loss(context: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], Any]) -> float:
        module, total = copy.deepcopy(device_step(request)), 0.0
        named = tensors_of(replace(request, step=module, model=module.model))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # the same dropouts in both
            for inputs in samples:
                args, kwargs = request.call.rebuild(inputs)
                with context(named, inputs):
                    total += float(module(*args, **kwargs))
        return total / len(samples)

    in_float32 = mean_loss(lambda named, inputs: nullcontext())
    in_int8 = mean_loss(lambda named, inputs: step.int8_results_in_place(named, inputs, torch.float32))
    return in_float32, in_int8
