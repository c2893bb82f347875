"""Lower a planned step for fused kernels: decompose both passes into core ops and cut them into parts to compile.

What to save and what to recompute was decided on the undecomposed graph, and each pass is lowered by itself: Inductor
fuses within a part and does not decide what is saved between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from memplan import _torch
from memplan._torch import derivatives, inductor
from memplan.errors import CompileError
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph, Value
from memplan.planning.inductor.decompositions import decompositions
from memplan.planning.inductor.merge_convolution_backward import affordable_pairs
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import program, read_in_backward, returned_gradients
from memplan.planning.schedule.scheduler import Schedule, frees_gradient, may_change_after_return, schedule

CHUNKS = 8
"""Number of parts of the backward pass if it frees gradients. All gradients of a part are alive at once, and
nothing is fused across parts."""


@dataclass(frozen=True)
class Part:
    """Ops of one pass that are compiled together. Tensors are identified by the names of the pass's fx nodes. Each op
    is marked (`inductor.mark`) with the index of its action in the schedule's forward and backward actions,
    concatenated."""

    name: str
    """``forward``, or ``backward 0`` and so on."""
    lowerable: inductor.Lowerable
    """The part as Inductor takes it."""
    arguments: tuple[str, ...]
    """Tensors that it reads: arguments of the pass, and results of earlier parts."""
    freed_arguments: frozenset[str]
    """Arguments that nothing reads afterwards."""
    results: tuple[str, ...]
    """Tensors that it computes and that later parts or the caller of the pass need."""
    returned: tuple[str, ...]
    """Results of the pass that are returned after this part; it or an earlier part computes them."""
    freed_results: frozenset[str]
    """Tensors of `returned` that nothing reads afterwards."""


@contextmanager
def lowering(name: str) -> Iterator[None]:
    """Convert any exception while a part is traced, lowered or compiled to a `CompileError`."""
    try:
        yield
    except Exception as error:
        raise CompileError(
            f"The {name} pass could not be compiled: {type(error).__name__}: {_reason(error):.300}",
            expected="a step that Inductor can lower, and a compiler that works",
            do=_CUT_SHORT if isinstance(error, ImportError) and "file too short" in str(error) else _LEAVE_OUT,
        ) from error


_LEAVE_OUT = "Leave engine out: 'graph' runs torch's own kernels and compiles nothing"
_CUT_SHORT = "Delete that file: a process that was killed while it compiled has left it in Inductor's cache"


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, with the first line of a compiler's error if there is one."""
    first, *others = str(error).strip().splitlines() or [""]
    compiler_error = next((line.strip() for line in others if "error:" in line), None)
    return first if compiler_error is None else f"{first}: {compiler_error}"


Compiler = Callable[[Part], inductor.Boxed]
"""Compiles a part to a function."""


@dataclass(frozen=True)
class PassParts:
    """A forward or a backward pass, cut into parts."""

    arguments: tuple[str, ...]
    """Arguments of the pass."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fused:
    """A schedule as parts that can be compiled."""

    schedule: Schedule
    forward: PassParts
    backward: PassParts
    """Takes the inputs of the forward pass that it reads, then the saved tensors, then the gradients of the outputs."""
    read_inputs: tuple[int, ...]
    """Positions of the forward pass's inputs that the backward pass reads."""
    saved: tuple[int, ...]
    """Ids of the saved values: fewer than the schedule's if the core ops of the backward pass do not read them all."""
    written_inputs: tuple[int, ...]
    """Positions of the inputs that the forward pass changes: its last results are copied there."""
    gradient_groups_by_part: tuple[tuple[tuple[int, ...], ...], ...]
    """For each part of the backward pass: the groups of values whose gradients are returned after it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of both passes, in the order in which they run."""
        return (*self.forward.parts, *self.backward.parts)


def as_fused(graph: JointGraph, choices: Choices) -> Schedule:
    """Return the schedule of these choices without in-place ops: for fused kernels, the compiler plans memory reuse."""
    return schedule(graph, replace(choices, in_place=False, pieces=frozenset(), fused=True))


def fused(planned: Schedule) -> Fused:
    """Trace both passes of a schedule of `as_fused` into core ops, and cut them into parts that can be compiled."""
    graph, mode, decomposition_of = planned.graph, inductor.fake_mode(), decompositions(planned.graph.is_on_card)
    functions: dict[str, Any] = {"mark": inductor.mark, "laid_out": laid_out}
    exec(compile(program(planned, marked=True), "<memplan fused>", "exec"), functions)  # adds forward and backward
    resident = [value for value in graph.values if value.kind in RESIDENT]
    read = read_in_backward(planned)
    read_inputs = tuple(index for index, value in enumerate(resident) if value.id in read)

    def forward(*inputs: Tensor) -> list[Tensor]:
        """Return the outputs, then the saved tensors."""
        outputs, saved = functions["forward"](list(inputs))
        return [*_as_declared(graph, outputs, graph.outputs), *_as_declared(graph, saved, planned.saved)]

    def backward(*arguments: Tensor) -> list[Tensor]:
        """Return all gradients. ``arguments``: the inputs that it reads, then saved tensors, then tangents."""
        inputs: list[Any] = [None] * len(resident)
        for index, tensor in zip(read_inputs, arguments, strict=False):  # the first of the arguments
            inputs[index] = tensor
        saved_begin, tangents_begin = len(read_inputs), len(read_inputs) + len(planned.saved)
        saved, tangents = list(arguments[saved_begin:tangents_begin]), list(arguments[tangents_begin:])
        return [gradient for group in functions["backward"](inputs, saved, tangents) for _, gradient in group]

    with lowering("forward"):
        forward_trace = inductor.traced(forward, _fake_tensors(resident, mode), mode, decomposition_of)
    backward_inputs = [
        *(resident[index] for index in read_inputs),
        *(graph.values[value] for value in planned.saved),
        *(value for value in graph.values if value.kind == "tangent"),
    ]
    with lowering("backward"):
        backward_trace = inductor.traced(backward, _fake_tensors(backward_inputs, mode), mode, decomposition_of)
    assert not backward_trace.written, "the backward pass does not change its inputs"
    if planned.choices.joined:
        derivatives.join(backward_trace, affordable_pairs(planned))
    return _partition(planned, forward_trace, backward_trace, read_inputs)


def laid_out(tensor: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an op's result with the graph's strides and dtype; with its own strides if the graph's have gaps or
    overlap.

    The decomposition that Inductor traces can have other strides, so that later views would become copies, or a wider
    dtype, as for the gradient of a group norm in bfloat16.
    """

    def has_strides(tensor: Tensor) -> bool:
        return all(tensor.shape[dim] <= 1 or tensor.stride(dim) == stride[dim] for dim in dims)

    tensor = tensor.to(dtype)
    dims = range(tensor.dim())
    if has_strides(tensor):
        return tensor
    by_stride = sorted(dims, key=lambda dim: -stride[dim])  # contiguous in this order of dimensions
    inverse = [by_stride.index(dim) for dim in dims]
    copy = tensor.permute(by_stride).clone(memory_format=torch.contiguous_format).permute(inverse)
    return copy if has_strides(copy) else tensor


def _as_declared(graph: JointGraph, tensors: Sequence[Tensor], values: Sequence[int]) -> list[Tensor]:
    """Cast results to the graph's dtypes, which the code that reads them is generated for."""
    return [tensor.to(getattr(torch, graph.values[v].dtype)) for tensor, v in zip(tensors, values, strict=True)]


def _fake_tensors(values: Sequence[Value], mode: Any) -> list[Tensor]:
    """Return a fake tensor with the layout of each value. ``mode``: torch's FakeTensorMode."""
    return [inductor.fake_tensor(v.shape, v.stride, getattr(torch, v.dtype), mode, v.place) for v in values]


def _partition(
    planned: Schedule, forward_trace: inductor.Traced, backward_trace: inductor.Traced, read_inputs: tuple[int, ...]
) -> Fused:
    """Cut the traced passes into parts, and drop saved values that no op of the backward pass reads. ``read_inputs``:
    the resident values that the backward pass reads, by their index among all resident values."""
    chunks = tuple(tuple(chunk) for chunk in _chunks(planned))  # the groups of gradients that each part returns
    inputs, ops, gradients = inductor.inputs_ops_results(backward_trace)
    saved_begin, saved_end = len(read_inputs), len(read_inputs) + len(planned.saved)
    read_nodes = {*inductor.read_by(ops), *gradients}
    read_saved = [index for index, node in enumerate(inputs[saved_begin:saved_end]) if node in read_nodes]
    arguments = [*inputs[:saved_begin], *(inputs[saved_begin + index] for index in read_saved), *inputs[saved_end:]]
    # a chunk consists of groups of values; each value has a gradient
    remaining_gradients = iter(gradients)
    gradients_of_chunk = [[next(remaining_gradients) for group in chunk for _ in group] for chunk in chunks]
    resident = [value for value in planned.graph.values if value.kind in RESIDENT]
    node_of = {resident[index].id: node for index, node in zip(read_inputs, inputs, strict=False)}
    updated_at_once = list[list[fx.Node]]()
    for chunk in chunks:
        read_values = (value for group in chunk for value in group if value in node_of)
        updated = (value for value in read_values if may_change_after_return(planned.graph, planned.choices, value))
        updated_at_once.append([node_of[value] for value in updated])
    backward = _cut_into_parts(
        backward_trace, arguments, ops, gradients_of_chunk, updated_at_once, kept_by_caller=inputs[:saved_begin],
        backward=True,
    )  # fmt: skip
    inputs, ops, results = inductor.inputs_ops_results(forward_trace)
    outputs_end, saved_end = len(planned.graph.outputs), len(planned.graph.outputs) + len(planned.saved)
    # outputs, saved tensors that are read, new values of inputs
    read_results = [
        *results[:outputs_end],
        *(results[outputs_end + index] for index in read_saved),
        *results[saved_end:],
    ]
    forward = _cut_into_parts(forward_trace, inputs, ops, [read_results], [[]], kept_by_caller=inputs, backward=False)
    saved = tuple(planned.saved[index] for index in read_saved)
    return Fused(planned, forward, backward, read_inputs, saved, forward_trace.written, chunks)


def _chunks(planned: Schedule) -> Iterator[list[tuple[int, ...]]]:
    """Yield the groups of values whose gradients each part of the backward pass returns. There is a single part if the
    pass frees no gradient, else parts that each free about a `CHUNKS`-th of the bytes."""
    values, graph = planned.graph.values, planned.graph
    groups = returned_gradients(planned)
    freed = [  # bytes by group
        sum(values[value].contiguous_bytes for value in group if frees_gradient(graph, planned.choices, value))
        for group in groups
    ]
    bytes_per_chunk, chunk, chunk_bytes = sum(freed) / CHUNKS, list[tuple[int, ...]](), 0
    for group, group_bytes in zip(groups, freed, strict=True):
        chunk.append(group)
        chunk_bytes += group_bytes
        if bytes_per_chunk and chunk_bytes >= bytes_per_chunk:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk


def _cut_into_parts(
    traced: inductor.Traced, arguments: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[Sequence[fx.Node]],
    updated_at_once: Sequence[Sequence[fx.Node]], *, kept_by_caller: Sequence[fx.Node], backward: bool,
) -> PassParts:  # fmt: skip
    """Cut a traced function into parts. Each part ends after the op of its last result, and after the last op that
    reads an argument that changes once these results are returned.

    Args:
        traced: the function.
        arguments: the arguments of the function that it reads.
        ops: its ops in order.
        results: the results to return after each part.
        updated_at_once: the arguments that may change when these are returned, as parameters do that are updated in the
            backward pass.
        kept_by_caller: the arguments to which the caller keeps references.
        backward: see `inductor.Lowerable`.
    """
    op_index = {node: index for index, node in enumerate(ops)}
    ends, end = list[int](), 0
    for part_results, updated in zip(results, updated_at_once, strict=True):
        included = (*part_results, *inductor.readers(ops, updated))
        end = max([end, *(op_index.get(node, -1) + 1 for node in included)])  # -1: an argument that is a result
        ends.append(end)
    cuts = [ops[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    last_part: dict[fx.Node, int] = {}
    for part, (part_ops, part_results) in enumerate(zip(cuts, results, strict=True)):
        last_part |= dict.fromkeys((*part_ops, *inductor.read_by(part_ops), *part_results), part)
    parts = list[Part]()
    for part, (part_ops, part_results) in enumerate(zip(cuts, results, strict=True)):
        returned = set(part_results)
        part_outputs = [node for node in part_ops if last_part[node] > part or node in returned]
        read = inductor.read_by(part_ops)
        last_read = [node for node in read if last_part[node] == part and node not in returned]
        freeable = [node for node in last_read if node not in kept_by_caller]
        parts.append(Part(
            f"backward {part}" if backward else "forward",
            inductor.lowerable(traced, part_ops, part_outputs, freeable, backward=backward),
            arguments=tuple(node.name for node in read),
            freed_arguments=frozenset(node.name for node in last_read),
            results=tuple(node.name for node in part_outputs),
            returned=tuple(node.name for node in part_results),
            freed_results=frozenset(node.name for node in returned if last_part[node] == part),
        ))  # fmt: skip
    return PassParts(tuple(node.name for node in arguments), tuple(parts))


class CompiledPasses:
    """Forward and backward functions of a planned step, made of compiled parts. See `memplan.planning.schedule.codegen`
    for their signatures. ``compiler`` compiles each part to a function."""

    def __init__(self, step: Fused, compiler: Compiler) -> None:
        self._step = step
        self._output_count, self._saved_count = len(step.schedule.graph.outputs), len(step.saved)
        self._forward = [(part, compiler(part)) for part in step.forward.parts]
        """Parts of the forward pass, each with its compiled function."""
        self._backward = [(part, compiler(part)) for part in step.backward.parts]
        """The same of the backward pass."""

    def forward(self, inputs: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs and the saved tensors. ``inputs`` is cleared."""
        written_inputs = [inputs[index] for index in self._step.written_inputs]
        (results,) = _run(self._step.forward.arguments, self._forward, inputs)  # it has a single part
        outputs_end, saved_end = self._output_count, self._output_count + self._saved_count
        _torch.copy_all(written_inputs, results[saved_end:])
        return results[:outputs_end], results[outputs_end:saved_end]

    def backward(
        self, inputs: list[Any], saved: list[Tensor], tangents: list[Tensor]
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield lists of (value, its gradient). A part computes all of its gradients before the first is yielded. The
        caller has to clear each list; the lists of arguments are cleared here."""
        arguments = [*(inputs[index] for index in self._step.read_inputs), *saved, *tangents]
        for tensors in (inputs, saved, tangents):
            tensors.clear()
        results_of_parts = _run(self._step.backward.arguments, self._backward, arguments)
        for chunk, results in zip(self._step.gradient_groups_by_part, results_of_parts, strict=True):
            results.reverse()  # so that `pop` takes them in order and this list keeps none alive
            for group in chunk:
                yield [(value, results.pop()) for value in group]


def _run(
    names: Sequence[str], parts: Sequence[tuple[Part, inductor.Boxed]], tensors: list[Any]
) -> Iterator[list[Tensor]]:
    """Run the parts of a pass in order, yield the results of each, and free tensors that no later part reads. ``names``
    are those of ``tensors``, the arguments of the pass; that list is cleared."""
    used = {name for part, _ in parts for name in (*part.arguments, *part.returned)}
    live = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name in used}
    tensors.clear()  # the caller's list would keep them alive
    for part, function in parts:
        arguments = [live.pop(name) if name in part.freed_arguments else live[name] for name in part.arguments]
        live.update(zip(part.results, function(arguments), strict=True))
        results = [live[name] for name in part.returned]
        for name in part.freed_results:
            del live[name]
        yield results
