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
from memplan.exporting.int8.integer_layers import Integers, integer_layers, integer_values
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
    """Scale and zero of the result before an activation by table; None without one."""
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

    part: FrozenPart
    layers: tuple[Integers, ...]
    constants: Mapping[int, torch.Tensor]
    """Constant tensors of the captured graph, by value."""

    def integers(self, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[Integers, np.ndarray]]:
        """Yield each layer with its result in int8, for tensors of the step's call."""
        values = self.part.graph.values
        read = {value: self.input_of(value, inputs) for integers in self.layers for value in integers.layer.reads}
        arrays = {value: tensor.detach().contiguous().numpy() for value, tensor in read.items() if tensor is not None}
        shapes = {integers.layer.out: values[integers.layer.out].shape for integers in self.layers}
        return integer_values(self.layers, arrays, shapes)

    def input_of(self, value: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return an input, or a view of one; None for what a layer computes."""
        of = self.part.graph.values[value]
        base = self.part.graph.values[of.base]
        return inputs[int(base.path)].reshape(of.shape) if base.kind == "input" else None

    def floats(
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

        def tensor(value: Value) -> torch.Tensor:
            if value.kind == "input":
                known = inputs[int(value.path)]
            else:
                known = self.constants[value.id] if value.kind == "constant" else named[value.path]
            return known.detach().to(dtype) if known.is_floating_point() else known

        with torch.no_grad():
            yield from float_values(self.part, tensor, dtype, replaced)

    @contextmanager
    def replacing(
        self, named: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Iterator[None]:
        """Within this context a step of PyTorch reads what the device computes in eight bits.

        Raises:
            VerificationError: PyTorch computes no such value.
        """
        borders = {
            integers.layer.out: torch.from_numpy(integers.type.floats(array)).to(dtype)
            for integers, array in self.integers(inputs)
            if integers.layer.out in self.part.borders
        }
        computed = self.floats(named, inputs, dtype, borders)
        # what is a view of another border is replaced with it
        pairs = [(tensor.clone(), other) for value, tensor in computed
                 if (other := borders.get(value)) is not None and not torch.equal(tensor, other)]  # fmt: skip
        with _torch.ResultsReplaced(pairs) as mode:
            yield
        if mode.left:
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
    captured: tuple[CapturedStep, CapturedStep] = field(repr=False)
    """The captured passes with integer kernels."""


def int8_step(request: Request, passes: tuple[CapturedStep, CapturedStep], batches: Any) -> Int8Step | None:
    """Quantize the frozen part of both passes on batches of data.

    Returns None if there is no layer before the first trained one.

    Raises:
        InputError: a batch does not fit the step, or the range of a layer on the data does not fit eight bits.
    """
    data = calibration_samples(request, batches)
    changed = {target for captured in passes for target in _changed(captured.graph)}
    trained = {passes[0].graph.values[of].path for of, _ in passes[0].graph.gradients}
    among, done = None, list[tuple[Int8Pass, CapturedStep]]()
    for captured in passes:
        part = _part(request, captured, trained | changed, among)
        among = part.calls
        done.append(_quantized(request, captured, part, data))
    (step, step_graph), (infer, infer_graph) = done
    if not step.layers:
        return None
    return Int8Step(step, infer, _report(request, step, data), (step_graph, infer_graph))


def _changed(graph: JointGraph) -> set[str]:
    """Return the names of the buffers that a step changes."""
    return {graph.values[target].path for target, _ in graph.mutations}


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
    wanted, samples = request.call.tensors, list[tuple[torch.Tensor, ...]]()
    for at, batch in enumerate(batches):
        given = call_of(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}).tensors
        sizes = {len(x) // len(like) if like.dim() and x.dim() else 1 for x, like in zip(given, wanted, strict=False)}
        pieces = sizes.pop() if len(sizes) == 1 else 0
        fits = len(given) == len(wanted) and all(
            x.shape == (torch.Size([pieces * len(like), *like.shape[1:]]) if like.dim() else like.shape)
            and x.is_floating_point() == like.is_floating_point()
            for x, like in zip(given, wanted, strict=True)
        )
        if not pieces or not fits:
            shapes = ", ".join("x".join(map(str, x.shape)) for x in given)
            raise InputError(
                f"batch {at} of calibrate: tensors of {shapes}",
                expected="inputs and targets in shapes and types of the step, or several of them one behind another",
                do="Drop the last, smaller batch: drop_last=True of a DataLoader"
                if samples and _is_incomplete(given, wanted)
                else "Give each batch as a tuple: inputs, then targets",
            )
        tensors = [_converted(x.detach(), like.dtype, at) for x, like in zip(given, wanted, strict=True)]
        parts = [x.chunk(pieces) if like.dim() else [x] * pieces for x, like in zip(tensors, wanted, strict=True)]
        samples += list(zip(*parts, strict=True))
    if not samples:
        raise InputError("calibrate has no batch", expected="batches of inputs and targets", do="Give some data")
    return samples


def _is_incomplete(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Return whether a batch differs from the step's inputs in the number of samples only."""
    return len(given) == len(wanted) and all(
        x.dim() == like.dim() and x.shape[1:] == like.shape[1:] for x, like in zip(given, wanted, strict=True)
    )


def _converted(tensor: torch.Tensor, dtype: torch.dtype, at: int) -> torch.Tensor:
    """Return a tensor of batch ``at`` in the step's dtype.

    Raises:
        InputError: the dtype does not hold an element, or an element is not finite.
    """
    if not dtype.is_floating_point and dtype != torch.bool and tensor.numel():
        bounds, low, high = torch.iinfo(dtype), int(tensor.min()), int(tensor.max())
        if low < bounds.min or high > bounds.max:
            raise InputError(
                f"batch {at} of calibrate: integers from {low} to {high}",
                expected=f"those of the step's {str(dtype).removeprefix('torch.')}: {bounds.min} to {bounds.max}",
                do="Give the data as the device reads it",
            )
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise InputError(
            f"batch {at} of calibrate: elements that are not finite",
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
    count = len(request.call.tensors) - device_step(request).targets
    inputs = [value.id for value in graph.values if value.kind == "input" and int(value.path) < count]
    return frozen_part(graph, frozen, inputs, captured.written, among)


def _quantized(
    request: Request, captured: CapturedStep, part: FrozenPart, data: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[Int8Pass, CapturedStep]:
    """Return the integers of a frozen part, and the captured pass with integer kernels."""
    plain, named = Int8Pass(part, (), captured.constants), tensors_of(request)
    ranges: dict[int, tuple[float, float]] = {}
    for inputs in data:
        read = ((value, plain.input_of(value, inputs)) for value in part.inputs)
        for value, tensor in (*((v, t) for v, t in read if t is not None), *plain.floats(named, inputs)):
            if tensor.is_floating_point() and tensor.numel():
                low, high = ranges.get(value, (0.0, 0.0))
                least, most = tensor.aminmax()  # not a number if an element is, as what NumPy makes of it
                ranges[value] = (float(np.minimum(low, float(least))), float(np.maximum(high, float(most))))
    known = {
        v.id: t
        for v in part.graph.values
        if v.id in captured.constants and (t := captured.constants[v.id]).numel() == 1
    }
    layers = tuple(integer_layers(part.layers, ranges, known))
    graph, constants = rewritten(part, layers, captured.constants)
    return replace(plain, layers=layers), replace(captured, graph=graph, constants=constants)


def _report(request: Request, step: Int8Pass, data: Sequence[tuple[torch.Tensor, ...]]) -> Int8Frozen:
    """Measure the error of each layer and of the loss on the calibration data."""
    named = tensors_of(request)
    errors, norms = defaultdict[int, float](float), defaultdict[int, float](float)
    for inputs in data:
        wanted = dict(step.floats(named, inputs))
        for integers, array in step.integers(inputs):
            exact = wanted[integers.layer.out].double().numpy()
            errors[integers.layer.out] += float(np.square(integers.type.floats(array).astype(np.float64) - exact).sum())
            norms[integers.layer.out] += float(np.square(exact).sum())
    rows = {
        integers.layer.out: Int8Layer(
            integers.layer.ops[-1].layer if integers.layer.ops else "(input)",
            tuple(short(op.target).strip("_") for op in integers.layer.ops),
            integers.type.scale, integers.type.zero,
            None if integers.before is integers.type else (integers.before.scale, integers.before.zero),
            (errors[integers.layer.out] / norms[integers.layer.out]) ** 0.5 if norms[integers.layer.out] else 0.0,
        )
        for integers in step.layers
    }  # fmt: skip
    views = {integers.layer.out for integers in step.layers if isinstance(integers.layer, View)}
    return Int8Frozen(
        tuple(row for value, row in rows.items() if value not in views),
        tuple(rows[value] for value in step.part.borders),
        tuple(dict.fromkeys(map(str, step.part.stops))),
        sum(integers.layer.weight.size for integers in step.layers if isinstance(integers.layer, Convolution)),
        *_losses(request, step, data),
    )


def _losses(request: Request, step: Int8Pass, data: Sequence[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Return the mean loss of a training step's forward pass with the frozen part in float32, and in eight bits."""

    def mean(within: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], Any]) -> float:
        module, total = copy.deepcopy(device_step(request)), 0.0
        named = tensors_of(replace(request, step=module, model=module.model))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for inputs in data:
                args, kwargs = request.call.rebuild(inputs)
                with within(named, inputs):
                    total += float(module(*args, **kwargs))
        return total / len(data)

    return mean(lambda named, inputs: nullcontext()), mean(lambda n, inputs: step.replacing(n, inputs, torch.float32))
