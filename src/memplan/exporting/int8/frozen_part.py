"""Find the layers before the first trained one that integer kernels can compute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memplan._display import Printed
from memplan.exporting.int8.layers import (
    Activation,
    Add,
    AveragePool,
    ByteInput,
    Convolution,
    Layer,
    MaxPool,
    Multiply,
    View,
)
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value, map_refs, refs
from memplan.planning.graph.op_schema import ELEMENTWISE, arguments_of, is_contiguous, overload, short

IDENTITIES = ("aten.alias.default", "aten.detach.default", "aten.clone.default", "aten.lift_fresh_copy.default")
"""Ops whose result is their operand, where that is contiguous."""
BYTES = ("uint8", "int8")


@dataclass(frozen=True, slots=True)
class FloatOp(Printed):
    """An op without a trained weight that stays in float32, although it reads layers in eight bits."""

    op: GraphOp
    why: str

    def __str__(self) -> str:
        name = short(self.op.target).strip("_")
        return f"{self.op.layer or 'the model'} ({name}): {self.why}"


@dataclass(frozen=True)
class FrozenPart:
    """The layers of a graph that integer kernels compute, in order."""

    graph: JointGraph
    layers: tuple[Layer, ...]
    values_read_in_float32: tuple[int, ...]
    """Values of the layers that other ops read, in order."""
    float_inputs: tuple[int, ...]
    """Values in float32 that the layers read: inputs, or views of them."""
    float_ops: tuple[FloatOp, ...]

    @property
    def calls(self) -> frozenset[tuple[str, str]]:
        """Layer of the model and op, of all ops that integer kernels compute."""
        return frozenset((op.layer, op.target) for layer in self.layers for op in layer.ops)


def frozen_part(
    graph: JointGraph, frozen: Mapping[int, torch.Tensor], inputs: Collection[int], written: Collection[int],
    among: Collection[tuple[str, str]] | None = None,
) -> FrozenPart:  # fmt: skip
    """Find the layers that integer kernels can compute.

    Args:
        graph: as captured.
        frozen: elements of parameters, buffers and constants that do not change, by value.
        inputs: the model's inputs.
        written: values that are copied to the caller's memory.
        among: ops that integer kernels may compute, as `calls` of another graph's frozen part; None: all.
    """
    return _Finder(graph, frozen, inputs, written, among).frozen_part()


class _Refused(Exception):
    """An op has no integer kernel, for a reason."""


class _Finder:
    """Goes through the forward ops in order, and finds the frozen layers that integer kernels can compute."""

    def __init__(
        self, graph: JointGraph, frozen: Mapping[int, torch.Tensor], inputs: Collection[int], written: Collection[int],
        among: Collection[tuple[str, str]] | None,
    ) -> None:  # fmt: skip
        self.graph, self.written, self.among = graph, written, among
        self.known = {value: tensor.detach() for value, tensor in frozen.items()}
        """By value that does not change: its elements."""
        values = graph.values
        self.floats = {v for v in inputs if values[v].dtype == "float32"}
        """Values in float32 that are inputs or views of them."""
        self.affine: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """By value that is ``factor * x + addend`` of an input x of eight bits: (x, factor, addend)."""
        self.byte_inputs = {v for v in inputs if values[v].dtype in BYTES}
        """Inputs of eight bits."""
        self.layers: list[Layer] = []
        """The layers so far that integer kernels can compute, in order."""
        self.maker: dict[int, Layer] = {}
        """By value that such a layer computes: the layer."""
        self.stops: list[FloatOp] = []
        """Ops that read these layers and stay in float32."""
        self.use_count: Counter[int] = Counter()
        """By value: the number of ops that read it, and of its uses as a result of the step."""
        for op in graph.ops:
            self.use_count.update(set(refs((op.args, op.kwargs))))
        self.use_count.update((*graph.outputs, *written))
        self.use_count.update(value for _, value in (*graph.gradients, *graph.mutations))

    def frozen_part(self) -> FrozenPart:
        """Follow the forward pass and return the layers that integer kernels compute, with the values at their ends."""
        for op in self.graph.ops:
            if op.phase == "forward":
                self._op(op)
        layers = self._connected()
        layer_ops = {op.index for layer in layers for op in layer.ops}
        results = {layer.output for layer in layers}
        read_outside = {v for op in self.graph.ops if op.index not in layer_ops for v in refs((op.args, op.kwargs))}
        step_results = {*self.graph.outputs, *self.written, *(new for _, new in self.graph.mutations)}
        borders = tuple(layer.output for layer in layers if layer.output in read_outside | step_results)
        operands = dict.fromkeys(value for layer in layers for value in layer.operands)  # unique, in order
        float_inputs = tuple(value for value in operands if value in self.floats and value not in results)
        stops = tuple(stop for stop in self.stops if results & set(refs((stop.op.args, stop.op.kwargs))))
        return FrozenPart(self.graph, tuple(layers), borders, float_inputs, stops)

    def _connected(self) -> list[Layer]:
        """Return the layers before or after a convolution, also through other layers: elsewhere rounding to eight bits
        is not worth its error."""
        descendants = set[int]()  # results of convolutions, and of layers that depend on them
        for layer in self.layers:
            if isinstance(layer, Convolution) or not descendants.isdisjoint(layer.operands):
                descendants.add(layer.output)
        ancestors = set[int]()  # operands and results of convolutions, and what these depend on
        for layer in reversed(self.layers):
            if isinstance(layer, Convolution) or layer.output in ancestors:
                ancestors |= {*layer.operands, layer.output}
        return [layer for layer in self.layers if layer.output in descendants | ancestors]

    # -- ops

    def _op(self, op: GraphOp) -> None:
        """Add a layer for an op of the forward pass, or compute the op if all its operands are constants.

        An op that reads a layer but has no integer kernel is noted with the reason, in ``stops``.
        """
        operands = [value for value in dict.fromkeys(refs((op.args, op.kwargs))) if value not in self.known]
        reads_layer = any(value in self.maker for value in operands)
        if op.random or op.must_run_once:
            if reads_layer:
                self.stops.append(FloatOp(op, "it draws random numbers, or has a side effect"))
            return
        if not operands:
            self._fold(op)
            return
        readable = self.floats | self.byte_inputs | self.maker.keys() | self.affine.keys()
        if not all(value in readable for value in operands):
            others = [value for value in operands if value not in readable]
            if reads_layer and all(map(self._is_running, others)):
                self.stops.append(FloatOp(op, "it updates running statistics; call .eval() on the layer"))
            return
        bytes_only = all(value in self.byte_inputs or value in self.affine for value in operands)
        if not (self.among is None or op.is_view or bytes_only or (op.layer, op.target) in self.among):
            return
        count = len(self.layers)
        try:
            self._add(op, operands)
        except _Refused as refused:
            del self.layers[count:]  # layers that convert bytes for the op
            self.maker = {layer.output: layer for layer in self.layers}
            if any(value in self.maker for value in operands):
                self.stops.append(FloatOp(op, str(refused)))

    def _is_running(self, value: int) -> bool:
        """Return whether a value is a buffer that the step changes, such as running statistics."""
        return self.graph.values[value].kind == "buffer"

    def _fold(self, op: GraphOp) -> None:
        """Compute an op whose operands are all constants; its results are constants, too."""
        if not op.outputs or not op.target.startswith("aten."):
            return
        args, kwargs = (map_refs(part, self.known.__getitem__) for part in (op.args, op.kwargs))
        results = overload(op.target)(*args, **kwargs)
        for number, tensor in zip(op.outputs, results if isinstance(results, (tuple, list)) else (results,)):  # noqa: B905
            if number is not None:
                self.known[number] = tensor

    def _add(self, op: GraphOp, operands: list[int]) -> None:
        """Add a layer for an op, or merge the op into the layer that computes its operand.

        `operands` are those that are no constants. Raises _Refused if no integer kernel computes the op.
        """
        if op.outputs[0] is None or any(output is not None for output in op.outputs[1:]):
            raise _Refused("several results are read")
        if any(not is_contiguous(self.graph.values[v]) for v in (*operands, op.outputs[0])):
            raise _Refused("its elements are not in the order of the shape")
        x = operands[0] if len(operands) == 1 else None  # the only operand
        if x is not None and (x in self.byte_inputs or x in self.affine) and self._of_bytes(op, x):
            return
        if op.target in IDENTITIES or op.is_view:
            self._view(op)
        elif op.target in _RULES:
            _RULES[op.target](self, op)
        elif x is not None and self._scaled(op, x):
            pass
        elif x is not None and op.target.removeprefix("aten.") in ELEMENTWISE:
            self._activation(op, x)
        else:
            raise _Refused("no integer kernel computes it")

    # -- inputs of eight bits

    def _of_bytes(self, op: GraphOp, x: int) -> bool:
        """If an op casts an input of eight bits to float32, or then adds or multiplies a constant, note its factor and
        addend in ``affine``. Return whether it does. `x` is its only operand that is no constant."""
        output = op.outputs[0]
        assert output is not None, "checked by the caller"
        if x in self.byte_inputs:
            if op.target != "aten._to_copy.default" or self.graph.values[output].dtype != "float32":
                return False
            self.affine[output] = (x, _ONE, _ZERO)
            return True
        factor_and_addend = self._factor_and_addend(op, x)
        if factor_and_addend is None:
            return False
        factor, addend = factor_and_addend
        source, source_factor, source_addend = self.affine[x]
        self.affine[output] = (source, source_factor * factor, source_addend * factor + addend)
        return True

    def _factor_and_addend(self, op: GraphOp, x: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (factor, addend) if an op's result is ``factor * x + addend`` with constants, else None. Each is
        a number, or a vector of a number for each channel."""
        name, arguments = short(op.target), arguments_of(op.target, op.args, op.kwargs)
        if name not in ("add", "sub", "mul", "div") or arguments.get("rounding_mode") is not None:
            return None
        x_is_first = arguments["self"] == Ref(x)
        if not x_is_first and (arguments["other"] != Ref(x) or name == "div"):
            return None
        constant = self._by_channel(arguments["other" if x_is_first else "self"], self.graph.values[x].shape)
        if constant is None:
            return None
        if name in ("mul", "div"):
            return (constant if name == "mul" else 1 / constant), _ZERO
        alpha = float(arguments.get("alpha", 1)) * (1 if name == "add" else -1)  # the factor of the second operand
        return (_ONE, alpha * constant) if x_is_first else (alpha * _ONE, constant)

    def _by_channel(self, other: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return an operand as a tensor in float64: a scalar, or a vector of a number for each channel.

        None if it is neither a number nor such a constant. `shape` is that of the other operand, (N, C, ...).
        """
        if not isinstance(other, Ref):
            return torch.tensor(float(other), dtype=torch.float64)
        tensor = self.known.get(other.value)
        if tensor is None or tensor.dim() > len(shape):
            return None
        if tensor.numel() == 1:
            return tensor.double().reshape(())
        sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
        by_channel = len(shape) > 1 and sizes == (1, shape[1], *[1] * (len(shape) - 2))
        return tensor.double().reshape(-1) if by_channel else None

    def _source(self, op: GraphOp, x: int) -> int:
        """Return `x`, an operand of a layer. If it is computed from bytes of an input, add a depthwise 1x1 convolution
        that computes it: only convolutions read such bytes."""
        if x not in self.affine:
            if x in self.byte_inputs:
                raise _Refused("it reads the bytes of an input as integers")
            return x
        shape = self.graph.values[x].shape
        channels, plane = shape[1] if len(shape) > 1 else 1, _plane(shape)
        layer = Convolution(
            [], (self.affine[x][0],), x, weight=np.ones((channels, 1, 1, 1)), bias=np.zeros(channels), input_size=plane,
            output_size=plane, groups=channels, byte_input=self._bytes_of(x, channels),
        )  # fmt: skip
        self._append(layer)
        self.affine.pop(x)  # the layer computes it now
        return x

    def _bytes_of(self, x: int, channels: int) -> ByteInput:
        """Return how a convolution computes `x` from the bytes of an input: a factor and an addend for each channel."""
        source, factor, addend = self.affine[x]
        return ByteInput(
            self.graph.values[source].dtype, _for_channels(factor, channels), _for_channels(addend, channels)
        )

    # -- layers

    def _append(self, layer: Layer) -> None:
        self.layers.append(layer)
        self.maker[layer.output] = layer

    def _convolve(self, op: GraphOp, x: int, **fields: Any) -> None:
        """Add a convolution of `x` with these ``fields``. If `x` is computed from the bytes of an input, it reads
        the bytes."""
        assert op.outputs[0] is not None, "checked by the caller"
        channels = fields["weight"].shape[1] * fields.get("groups", 1)
        if x in self.affine:
            fields |= {"byte_input": self._bytes_of(x, channels)}
            x = self.affine[x][0]
        elif x in self.byte_inputs:
            raise _Refused("it reads the bytes of an input as integers")
        self._append(Convolution([op], (x,), op.outputs[0], **fields))

    def _mergeable(self, x: int) -> Layer | None:
        """Return the layer that computes operand `x` of an op, if nothing but this op reads `x`."""
        return self.maker.get(x) if self.use_count[x] == 1 else None

    def _merge(self, x: int, merge: Callable[[Layer], None]) -> None:
        """Merge an op into the layer that computes its operand `x`: ``merge(layer)`` sets ``layer.output`` to the op's
        result."""
        layer = self.maker.pop(x)
        merge(layer)
        self.maker[layer.output] = layer

    def _view(self, op: GraphOp) -> None:
        """Add a layer that only changes the shape; a view of an input in float32 needs none."""
        x, output = next(refs((op.args, op.kwargs))), op.outputs[0]
        assert output is not None, "checked by the caller"
        if x in self.floats:
            if op.is_view:
                self.floats.add(output)
                return
            raise _Refused("it copies an input")
        self._append(View([op], (self._source(op, x),), output))

    def _activation(self, op: GraphOp, x: int) -> None:
        """Add an elementwise function of `x`. If nothing else reads `x`, its layer applies bounds such as ReLU's, and a
        convolution any other function, too, by a table."""
        assert op.outputs[0] is not None, "checked by the caller"
        if any(self.known[v].numel() != 1 for v in refs((op.args, op.kwargs)) if v in self.known):
            raise _Refused("it reads a tensor of constants")
        layer, bounds = self._mergeable(x), _bounds(op)
        if layer is not None and bounds is not None and layer.can_bound:
            self._merge(x, lambda layer: layer.merge_bounds(op, *bounds))
        elif isinstance(layer, Convolution) and layer.value_before_table is None:
            layer.value_before_table = layer.output
            self._merge(x, lambda layer: layer.merge(op))
        else:
            self._append(Activation([op], (self._source(op, x),), op.outputs[0]))

    def _scaled(self, op: GraphOp, x: int) -> bool:
        """Add an op that multiplies `x` by constants or adds them; return whether it does.

        It is folded into the convolution that computes `x`, or else, with a constant for each channel, becomes a
        depthwise convolution. With a single constant and no such convolution, return False.
        """
        factor_and_addend, layer = self._factor_and_addend(op, x), self._mergeable(x)
        if factor_and_addend is None:
            return False
        if isinstance(layer, Convolution) and layer.scalable:
            factor, addend = (_for_channels(tensor, len(layer.bias)) for tensor in factor_and_addend)
            self._merge(x, lambda _: layer.merge_scale(op, factor, addend))
            return True
        if all(tensor.dim() == 0 for tensor in factor_and_addend):
            return False
        self._by_channel_alone(op, x, *factor_and_addend)
        return True

    def _by_channel_alone(self, op: GraphOp, x: int, factor: torch.Tensor, addend: torch.Tensor) -> None:
        """Add a factor and an addend for each channel as a depthwise convolution."""
        shape = self.graph.values[x].shape
        channels, plane = shape[1], _plane(shape)
        weight = _for_channels(factor, channels).reshape(-1, 1, 1, 1)
        bias = _for_channels(addend, channels)
        self._convolve(op, x, weight=weight, bias=bias, input_size=plane, output_size=plane, groups=channels)

    def convolution(self, op: GraphOp) -> None:
        """Add a convolution with a constant weight, over one or two dimensions."""
        x, weight, bias, stride, padding, dilation, transposed, _, groups = op.args
        values = self.graph.values
        if transposed:
            raise _Refused("it is transposed")
        if weight.value not in self.known or (bias is not None and bias.value not in self.known):
            raise _Refused("its weight is computed")
        if len(values[x.value].shape) not in (3, 4):
            raise _Refused("its planes have more than two dimensions")
        weights = self.known[weight.value].double().numpy()
        weights = weights[:, :, None] if weights.ndim == 3 else weights  # over one dimension: kernels of height 1
        biases = np.zeros(len(weights)) if bias is None else self.known[bias.value].double().numpy()
        plane, result = _plane(values[x.value].shape), _plane(values[op.outputs[0] or 0].shape)
        self._convolve(
            op, x.value, weight=weights, bias=biases, input_size=plane, output_size=result, stride=_pair(stride, 1),
            padding=_pair(padding, 0), dilation=_pair(dilation, 1), groups=groups,
        )  # fmt: skip

    def linear(self, op: GraphOp) -> None:
        """Add a product with a constant weight (mm or addmm) as a convolution over planes of 1 x 1."""
        bias, x, weight = op.args[:3] if len(op.args) > 2 else (None, *op.args)
        arguments = arguments_of(op.target, op.args, op.kwargs)
        if weight.value not in self.known or x.value in self.known or (arguments.get("beta", 1) != 1):
            raise _Refused("it is no product with a constant weight")
        weights = self.known[weight.value].double().numpy().T[:, :, None, None] * float(arguments.get("alpha", 1))
        biases = np.zeros(len(weights))
        if bias is not None:
            if bias.value not in self.known or self.known[bias.value].dim() != 1:
                raise _Refused("its bias is computed")
            biases = np.broadcast_to(self.known[bias.value].double().numpy(), biases.shape)
        operand = x.value
        if operand in self.affine:
            _, factor, addend = self.affine[operand]
            if factor.dim() or addend.dim():  # by channel of the image, not by input of the layer
                operand = self._source(op, operand)
        self._convolve(op, operand, weight=weights, bias=biases, input_size=(1, 1), output_size=(1, 1))

    def batch_norm(self, op: GraphOp) -> None:
        """Fold a batch norm in evaluation mode into the convolution before it, or add it as a depthwise one."""
        arguments = arguments_of(op.target, op.args, op.kwargs)
        if arguments.get("training"):
            raise _Refused("it computes statistics of the batch; call .eval() on the layer")
        x = arguments["input"].value
        weight, bias, mean, variance = (
            None if arguments.get(name) is None else self.known[arguments[name].value].double().numpy()
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        assert mean is not None, "in evaluation mode it has one"
        assert variance is not None, "and the other"
        factor = (1.0 if weight is None else weight) / np.sqrt(variance + arguments["eps"])
        addend = (0.0 if bias is None else bias) - mean * factor
        layer = self._mergeable(x)
        if isinstance(layer, Convolution) and layer.scalable:
            self._merge(x, lambda _: layer.merge_scale(op, factor, addend))
        else:
            self._by_channel_alone(op, x, torch.from_numpy(factor), torch.from_numpy(addend))

    def add(self, op: GraphOp) -> None:
        """Add a sum or difference of two values, or of a value and a constant."""
        arguments = arguments_of(op.target, op.args, op.kwargs)
        x, y = arguments["self"], arguments["other"]
        operands = [ref.value for ref in (x, y) if isinstance(ref, Ref) and ref.value not in self.known]
        if len(operands) == 1:  # and a constant
            # without a convolution to fold a number into, the sum is an elementwise function of its operand
            if not self._scaled(op, operands[0]):
                self._activation(op, operands[0])
            return
        first, second = (self.graph.values[value] for value in operands)
        if first.shape != second.shape:
            raise _Refused("its operands have several shapes")
        factor = float(arguments.get("alpha", 1)) * (-1 if short(op.target) == "sub" else 1)
        reads = tuple(self._source(op, value) for value in operands)
        assert op.outputs[0] is not None, "checked by the caller"
        self._append(Add([op], reads, op.outputs[0], factor))

    def multiply(self, op: GraphOp) -> None:
        """Add a product of two values, or of a value and a constant."""
        operands = [ref.value for ref in op.args[:2] if isinstance(ref, Ref) and ref.value not in self.known]
        if len(operands) == 1:  # and a constant
            # without a convolution to fold a number into, the product is an elementwise function of its operand
            if not self._scaled(op, operands[0]):
                self._activation(op, operands[0])
            return
        # the operand with more elements first
        operands = sorted(operands, key=lambda value: -math.prod(self.graph.values[value].shape))
        large, small = (self.graph.values[value].shape for value in operands)
        by_channel = len(small) == len(large) > 2 and small == (*large[:2], *[1] * (len(large) - 2))
        if small != large and not by_channel:
            raise _Refused("its operands have several shapes")
        reads = tuple(self._source(op, value) for value in operands)
        assert op.outputs[0] is not None, "checked by the caller"
        self._append(Multiply([op], reads, op.outputs[0], math.prod(large) // math.prod(small)))

    # -- pools

    def _window(self, op: GraphOp, kernel: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
        """Return the fields of `Window` for a pool op, whose sizes are lists as in PyTorch or None."""
        x, output = op.args[0].value, op.outputs[0]
        assert output is not None, "checked by the caller"
        plane, result = (self.graph.values[v].shape[-2:] for v in (x, output))
        window = _pair(kernel, 1)
        return {
            "ops": [op], "operands": (self._source(op, x),), "output": output,
            "planes": math.prod(self.graph.values[output].shape) // math.prod(result), "input_size": plane,
            "output_size": result, "kernel": window, "stride": window if not stride else _pair(stride, 1),
            "padding": _pair(padding, 0), "dilation": _pair(dilation, 1),
        }  # fmt: skip

    def largest(self, op: GraphOp) -> None:
        """Add a max pool."""
        kernel, stride, padding, dilation = (*op.args[1:5], *[None] * 4)[:4]  # trailing defaults are left out of args
        self._append(MaxPool(**self._window(op, kernel, stride, padding, dilation)))

    def average(self, op: GraphOp) -> None:
        """Add an average pool whose windows count as many elements everywhere."""
        arguments = arguments_of(op.target, op.args, op.kwargs)
        padding, ceil = arguments.get("padding") or [0], arguments.get("ceil_mode", False)
        if ceil or (any(padding) and not arguments.get("count_include_pad", True)):
            raise _Refused("its windows are of several sizes")
        fields = self._window(
            op, arguments["kernel_size"], stride=arguments.get("stride"), padding=padding, dilation=None
        )
        divisor = arguments.get("divisor_override") or math.prod(fields["kernel"])
        self._append(AveragePool(**fields, divisor=divisor))

    def adaptive_average(self, op: GraphOp) -> None:
        """Add an adaptive average pool whose windows are all of one size."""
        output = op.outputs[0]
        assert output is not None, "checked by the caller"
        plane, result = (self.graph.values[v].shape[-2:] for v in (op.args[0].value, output))
        if any(size % count for size, count in zip(plane, result, strict=True)):
            raise _Refused("its windows are of several sizes")
        kernel = [size // count for size, count in zip(plane, result, strict=True)]
        self._append(
            AveragePool(
                **self._window(op, kernel, stride=kernel, padding=None, dilation=None), divisor=math.prod(kernel)
            )
        )

    def mean(self, op: GraphOp) -> None:
        """Add a mean over whole planes as an average pool with one window."""
        x, output = op.args[0].value, op.outputs[0]
        assert output is not None, "checked by the caller"
        shape = self.graph.values[x].shape
        dims = sorted(d % len(shape) for d in (op.args[1] or range(len(shape))))
        if len(shape) < 3 or dims != list(range(2, len(shape))):
            raise _Refused("it is no mean over whole planes")
        plane = _plane(shape)
        self._append(
            AveragePool(
                [op], (self._source(op, x),), output, planes=math.prod(shape[:2]), input_size=plane, output_size=(1, 1),
                kernel=plane, stride=plane, padding=(0, 0), dilation=(1, 1), divisor=math.prod(plane),
            )
        )  # fmt: skip


_ONE = torch.ones((), dtype=torch.float64)
_ZERO = torch.zeros((), dtype=torch.float64)

_RULES: Mapping[str, Callable[[_Finder, GraphOp], None]] = {
    "aten.convolution.default": _Finder.convolution,
    "aten.addmm.default": _Finder.linear,
    "aten.mm.default": _Finder.linear,
    "aten._native_batch_norm_legit_no_training.default": _Finder.batch_norm,
    "aten.native_batch_norm.default": _Finder.batch_norm,
    "aten.add.Tensor": _Finder.add,
    "aten.sub.Tensor": _Finder.add,
    "aten.mul.Tensor": _Finder.multiply,
    "aten.max_pool2d_with_indices.default": _Finder.largest,
    "aten.avg_pool2d.default": _Finder.average,
    "aten._adaptive_avg_pool2d.default": _Finder.adaptive_average,
    "aten.mean.dim": _Finder.mean,
}


def _bounds(op: GraphOp) -> tuple[float, float] | None:
    """Return the bounds that an activation sets; None for another op."""
    arguments = arguments_of(op.target, op.args, op.kwargs)
    if op.target == "aten.relu.default":
        return 0.0, math.inf
    if op.target == "aten.hardtanh.default":
        return float(arguments.get("min_val", -1.0)), float(arguments.get("max_val", 1.0))
    if op.target in ("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"):
        low, high = arguments.get("min"), arguments.get("max")
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return None


def _pair(sizes: Any, default: int) -> tuple[int, int]:
    """Return (height, width) from PyTorch's list of a size for each dimension; `default` where it has none."""
    if sizes is None or len(sizes) == 0:
        return default, default
    return (default, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _plane(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of (N, C, ...): 1 for missing dimensions, and all but the last merged to the height."""
    return math.prod(shape[2:-1]), math.prod(shape[2:][-1:])


def _for_channels(tensor: torch.Tensor, channels: int) -> np.ndarray:
    """Return a number, or a vector of one for each channel, as a vector in float64."""
    return np.broadcast_to(tensor.reshape(-1).numpy(), (channels,)).astype(np.float64)


def float_values(
    part: FrozenPart,
    tensors: Callable[[Value], torch.Tensor],
    floats: torch.dtype = torch.float32,
    replaced: Mapping[int, torch.Tensor] | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Run the ops of the frozen part in PyTorch; yield each value of the graph with its elements.

    Args:
        part: of a captured graph.
        tensors: elements of parameters, buffers, inputs and constants.
        floats: the type to which inputs of eight bits are cast.
        replaced: elements that later ops read in place of what was computed. What is yielded is what was computed.
    """
    needed_values, needed_ops = {layer.output for layer in part.layers}, list[GraphOp]()
    for op in reversed(part.graph.ops):
        if op.phase == "forward" and any(output in needed_values for output in op.outputs if output is not None):
            needed_values |= set(refs((op.args, op.kwargs)))
            needed_ops.append(op)
    values: dict[int, torch.Tensor] = {}

    def tensor_of(value: int) -> torch.Tensor:
        if value not in values:
            values[value] = tensors(part.graph.values[value])
        return values[value]

    for op in reversed(needed_ops):
        args, kwargs = map_refs(op.args, tensor_of), map_refs(op.kwargs, tensor_of)
        if op.target == "aten._to_copy.default" and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": floats}
        results = overload(op.target)(*args, **kwargs)
        for number, tensor in zip(op.outputs, results if isinstance(results, (tuple, list)) else (results,)):  # noqa: B905
            if number is not None and tensor is not None:
                yield number, tensor
                other = None if replaced is None else replaced.get(number)
                values[number] = tensor if other is None else other
