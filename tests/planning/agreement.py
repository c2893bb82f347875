"""A captured graph, run op by op as torch runs it, beside the model itself: bit for bit the same, or a list of what is
not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import differentiable
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, map_refs
from memplan.trace.structure import take_apart

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class Run:
    """What a step gave."""

    outputs: list[Tensor]
    gradients: dict[tuple[str, str], Tensor]
    sizes: list[str] = field(default_factory=list)
    """Ops that made more or fewer bytes than the graph says."""


class Interpreter:
    """Runs a graph, all forward ops, the writes, all backward ops. Nothing is freed."""

    def __init__(self, captured: Captured, model: nn.Module, call: Call) -> None:
        self.graph = captured.graph
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.tensors: dict[int, Tensor] = {}
        for value in self.graph.values:
            if value.kind == "parameter":
                self.tensors[value.id] = parameters[value.path]
            elif value.kind == "buffer":
                self.tensors[value.id] = buffers[value.path]
            elif value.kind == "input":
                self.tensors[value.id] = call.tensors[int(value.path)]
            elif value.kind in RESIDENT:
                self.tensors[value.id] = captured.constants[value.id]
        self.sizes: list[str] = []

    def forward(self) -> list[Tensor]:
        for op in self.graph.ops:
            if op.phase == "forward":
                self.run(op)
        for target, source in self.graph.mutations:
            self.tensors[target].copy_(self.tensors[source])
        return [self.tensors[value] for value in self.graph.outputs]

    def backward(self, tangents: list[Tensor]) -> dict[int, Tensor]:
        handed = [value.id for value in self.graph.values if value.kind == "tangent"]
        self.tensors.update(zip(handed, tangents, strict=True))
        for op in self.graph.ops:
            if op.phase == "backward":
                self.run(op)
        return {of: self.tensors[gradient] for of, gradient in self.graph.gradients}

    def run(self, op: GraphOp) -> None:
        function: Any = torch.ops
        for part in op.target.split("."):
            function = getattr(function, part)
        args, kwargs = (map_refs(part, self.tensors.__getitem__) for part in (op.args, op.kwargs))
        made = function(*args, **kwargs)
        for value, tensor in zip(op.outputs, made if op.returns_tuple else (made,), strict=True):
            if value is not None:
                self.keep(op, value, tensor)

    def keep(self, op: GraphOp, number: int, tensor: Tensor) -> None:
        value = self.graph.values[number]
        said = (value.shape, f"torch.{value.dtype}")
        assert (tuple(tensor.shape), str(tensor.dtype)) == said, (
            f"{op.target} made {tensor.shape} {tensor.dtype}, {said}"
        )
        owner = tensor if number == value.base else self.tensors[value.base]
        assert owner.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), f"{op.target} is no view"
        if number == value.base and "opaque" not in op.target:
            others = {t.untyped_storage().data_ptr() for t in self.tensors.values() if t.numel()}
            assert tensor.untyped_storage().data_ptr() not in others or not tensor.numel(), f"{op.target} is a view"
            if tensor.untyped_storage().nbytes() != value.bytes:
                self.sizes.append(f"{op.target}: {tensor.untyped_storage().nbytes()}, said {value.bytes}")
        self.tensors[number] = tensor


def copied(value: Any) -> Any:
    """Arguments with tensors of their own, in the same layout."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_(leaf.requires_grad)

    return tree_map(one, value)


def difference(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    autocast: Autocast = contextlib.nullcontext,
) -> tuple[Captured, list[str]]:
    """Capture a call, run it as a graph and as it is; what came out otherwise."""
    kwargs = dict(kwargs or {})
    with autocast():
        captured = capture(model, call_of(args, kwargs))
    reference, own = copy.deepcopy(model), copy.deepcopy(model)
    args_1, kwargs_1 = copied((args, kwargs))
    call_1, call_2 = call_of(args_1, kwargs_1), call_of(*copied((args, kwargs)))
    torch.manual_seed(7)
    with autocast():
        output = reference(*args_1, **kwargs_1)
    drawn = torch.get_rng_state()
    expected = list(take_apart(output)[0])
    starts = list({id(tensor): tensor for tensor in differentiable(output)}.values())
    draw = torch.Generator().manual_seed(1)
    tangents = {id(one): torch.empty_like(one).normal_(generator=draw) for one in starts}  # laid out as the output
    torch.autograd.backward(starts, [tangents[id(one)] for one in starts])
    interpreter = Interpreter(captured, own, call_2)
    torch.manual_seed(7)
    with torch.no_grad():
        made = interpreter.forward()
        found = [] if torch.equal(torch.get_rng_state(), drawn) else ["the random stream"]
        outputs = [made[at] for at in captured.returned.output_indices]
        first = [captured.returned.output_indices.index(at) for at in captured.outputs_with_tangent]
        assert sorted(id(expected[at]) for at in first) == sorted(tangents), "the outputs that backward starts from"
        gradients = interpreter.backward([tangents[id(expected[at])] for at in first])
    found += [f"output {at}" for at, one in enumerate(expected) if not same(outputs[at], one)]
    found += compared_gradients(captured, gradients, reference, call_1)
    found += [
        f"buffer {name}" for name, one in reference.named_buffers() if not same(dict(own.named_buffers())[name], one)
    ]
    found += [f"input {at}" for at, one in enumerate(call_1.tensors) if not same(call_2.tensors[at], one)]
    return captured, found


def compared_gradients(captured: Captured, gradients: dict[int, Tensor], reference: nn.Module, call: Call) -> list[str]:
    given = {(captured.graph.values[of].kind, captured.graph.values[of].path): one for of, one in gradients.items()}
    wanted: dict[tuple[str, str], Tensor | None] = {("parameter", n): p.grad for n, p in reference.named_parameters()}
    wanted |= {("input", str(at)): one.grad for at, one in enumerate(call.tensors) if one.is_leaf}
    found: list[str] = []
    for key in {*given, *wanted}:
        one, other = given.get(key), wanted.get(key)
        if one is None and other is None:
            continue
        if other is None and one is not None and not one.any():
            continue
        if one is None or other is None or not same(one, other):
            found.append(f"gradient of {key[1]}")
    return sorted(found)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
