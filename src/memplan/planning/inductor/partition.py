"""Lower a planned step for fused kernels: decompose both passes into core ops and cut them into parts to compile.

What to save and what to recompute was decided on the undecomposed graph, and each pass is lowered by itself: Inductor
fuses within a part and does not decide what is saved between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from memplan.planning.inductor.merge_convolution_backward import joined
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import gives, program, read_in_backward
from memplan.planning.schedule.scheduler import Schedule, changed_at_once, frees_gradient, schedule

CHUNKS = 8
"""Number of parts of the backward pass if it frees gradients. All gradients of a part are alive at once, and
nothing is fused across parts."""


@dataclass(frozen=True)
class Part:
    """Ops of one pass that are compiled together. Tensors are identified by the names of the pass's fx nodes. Each op
    is marked (`inductor.mark`) with the index of its action in the schedule's forward and backward actions,
    concatenated."""

    name: str
    lowerable: inductor.Lowerable
    takes: tuple[str, ...]
    """Arguments."""
    drops: frozenset[str]
    """Arguments that nothing reads afterwards."""
    makes: tuple[str, ...]
    """Results."""
    gives: tuple[str, ...]
    """Results of the pass that are returned after this part; it or an earlier part computes them."""
    ends: frozenset[str]
    """Tensors of `gives` that nothing reads afterwards."""


@contextmanager
def lowering(name: str) -> Iterator[None]:
    """Convert any exception while a part is traced, lowered or compiled to a `CompileError`.

    Args:
        name: of the part.

    Raises:
        CompileError: in place of what Inductor or the compiler raised.
    """
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
class Half:
    """A forward or a backward pass, cut into parts."""

    takes: tuple[str, ...]
    """Arguments of the pass."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fused:
    """A schedule as parts that can be compiled."""

    schedule: Schedule
    forward: Half
    backward: Half
    """Takes the inputs of the forward pass that it reads, then the saved tensors, then the gradients of the outputs."""
    handed: tuple[int, ...]
    """Positions of the forward pass's inputs that the backward pass reads."""
    saved: tuple[int, ...]
    """Ids of the saved values: fewer than the schedule's if the core ops of the backward pass do not read them all."""
    written: tuple[int, ...]
    """Positions of the inputs that the forward pass changes: its last results are copied there."""
    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    """For each part of the backward pass: the groups of values whose gradients are returned after it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of both passes, in the order in which they run."""
        return (*self.forward.parts, *self.backward.parts)


def as_fused(graph: JointGraph, choices: Choices) -> Schedule:
    """Return the schedule of these choices without in-place ops: for fused kernels, the compiler plans memory reuse."""
    return schedule(graph, replace(choices, in_place=False, pieces=frozenset(), fused=True))


def fused(planned: Schedule) -> Fused:
    """Trace and partition both passes of a schedule of `as_fused`."""
    graph, mode, table = planned.graph, inductor.fake_mode(), decompositions(planned.graph.is_on_card)
    functions: dict[str, Any] = {"mark": inductor.mark, "laid_out": laid_out}
    exec(compile(program(planned, marked=True), "<memplan fused>", "exec"), functions)
    resident = [value for value in graph.values if value.kind in RESIDENT]
    read = read_in_backward(planned)
    handed = tuple(at for at, value in enumerate(resident) if value.id in read)

    def forward(*inputs: Tensor) -> list[Tensor]:
        outputs, saved = functions["forward"](list(inputs))
        return [*_as_declared(graph, outputs, graph.outputs), *_as_declared(graph, saved, planned.saved)]

    def backward(*arguments: Tensor) -> list[Tensor]:
        inputs: list[Any] = [None] * len(resident)
        for at, tensor in zip(handed, arguments, strict=False):
            inputs[at] = tensor
        tangents_begin = len(handed) + len(planned.saved)
        saved, tangents = list(arguments[len(handed) : tangents_begin]), list(arguments[tangents_begin:])
        return [gradient for group in functions["backward"](inputs, saved, tangents) for _, gradient in group]

    with lowering("forward"):
        first = inductor.traced(forward, _fakes(resident, mode), mode, table)
    backward_inputs = [
        *(resident[at] for at in handed),
        *(graph.values[value] for value in planned.saved),
        *(value for value in graph.values if value.kind == "tangent"),
    ]
    with lowering("backward"):
        second = inductor.traced(backward, _fakes(backward_inputs, mode), mode, table)
    assert not second.written, "the backward pass does not change its inputs"
    if planned.choices.joined:
        derivatives.join(second, joined(planned))
    return _partitioned(planned, first, second, handed)


def laid_out(tensor: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an op's result with the graph's strides and dtype. The decomposition that Inductor traces can have others:
    then later views become copies, or the dtype is wider (the gradient of a group norm in bfloat16). The tensor keeps
    its layout if the graph's strides have gaps or overlap."""
    tensor = tensor.to(dtype)
    dims = range(tensor.dim())
    if all(tensor.shape[dim] <= 1 or tensor.stride(dim) == stride[dim] for dim in dims):
        return tensor
    order = sorted(dims, key=lambda dim: -stride[dim])
    inverse = [order.index(dim) for dim in dims]
    copy = tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
    matches = all(copy.shape[dim] <= 1 or copy.stride(dim) == stride[dim] for dim in dims)
    return copy if matches else tensor


def _as_declared(graph: JointGraph, tensors: Sequence[Tensor], values: Sequence[int]) -> list[Tensor]:
    """Cast results to the graph's dtypes, which the code that reads them is generated for."""
    return [tensor.to(getattr(torch, graph.values[v].dtype)) for tensor, v in zip(tensors, values, strict=True)]


def _fakes(values: Sequence[Value], mode: Any) -> list[Tensor]:
    return [inductor.fake_tensor(v.shape, v.stride, getattr(torch, v.dtype), mode, v.place) for v in values]


def _partitioned(planned: Schedule, first: inductor.Traced, second: inductor.Traced, handed: tuple[int, ...]) -> Fused:
    chunks = tuple(tuple(chunk) for chunk in _chunks(planned))
    inputs, ops, gradients = inductor.taken_apart(second)
    begin, end = len(handed), len(handed) + len(planned.saved)
    used = {*inductor.read_by(ops), *gradients}
    needed = [at for at, node in enumerate(inputs[begin:end]) if node in used]
    takes = [*inputs[:begin], *(inputs[begin + at] for at in needed), *inputs[end:]]
    gradient_nodes = iter(gradients)
    results_of = [[next(gradient_nodes) for group in chunk for _ in group] for chunk in chunks]
    resident = [value for value in planned.graph.values if value.kind in RESIDENT]
    node_of = {value.id: node for value, node in zip((resident[at] for at in handed), inputs, strict=False)}
    changing = list[list[fx.Node]]()
    for chunk in chunks:
        returned = (v for group in chunk for v in group if v in node_of)
        changing.append([node_of[v] for v in returned if changed_at_once(planned.graph, planned.choices, v)])
    backward = _half(second, takes, ops, results_of, changing, stay=inputs[:begin], backward=True)
    inputs, ops, results = inductor.taken_apart(first)
    outputs = len(planned.graph.outputs)
    read_results = [
        *results[:outputs], *(results[outputs + at] for at in needed), *results[outputs + len(planned.saved) :]
    ]  # fmt: skip
    forward = _half(first, inputs, ops, [read_results], [[]], stay=inputs, backward=False)
    return Fused(planned, forward, backward, handed, tuple(planned.saved[at] for at in needed), first.written, chunks)


def _chunks(planned: Schedule) -> Iterator[list[tuple[int, ...]]]:
    """Yield the groups of gradients of each part of the backward pass: a single part if it frees no gradient, else
    parts that each free about a `CHUNKS`-th of the bytes."""
    values, graph = planned.graph.values, planned.graph
    groups = gives(planned)
    sizes = [sum(values[v].own_bytes for v in group if frees_gradient(graph, planned.choices, v)) for group in groups]
    share, chunk, size = sum(sizes) / CHUNKS, list[tuple[int, ...]](), 0
    for group, group_size in zip(groups, sizes, strict=True):
        chunk.append(group)
        size += group_size
        if share and size >= share:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _half(
    traced: inductor.Traced, takes: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[Sequence[fx.Node]],
    changing: Sequence[Sequence[fx.Node]], *, stay: Sequence[fx.Node], backward: bool,
) -> Half:  # fmt: skip
    """Cut a traced function into parts. Each part ends after the op of its last result, and after the last op that
    reads an argument that changes once these results are returned.

    Args:
        traced: the function.
        takes: its arguments, without those that nothing reads.
        ops: its ops in order.
        results: the results to return after each part.
        changing: the arguments that may change when these are returned, as parameters that are updated in the backward
            pass.
        stay: the arguments that the caller keeps, too.
        backward: see `inductor.Lowerable`.
    """
    position = {node: at for at, node in enumerate(ops)}
    ends, end = list[int](), 0
    for part_results, arguments in zip(results, changing, strict=True):
        waits_for = (*part_results, *inductor.readers(ops, arguments))
        end = max([end, *(position.get(node, -1) + 1 for node in waits_for)])
        ends.append(end)
    cuts = [ops[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    last_part: dict[fx.Node, int] = {}
    for at, (part_ops, part_results) in enumerate(zip(cuts, results, strict=True)):
        last_part |= dict.fromkeys((*part_ops, *inductor.read_by(part_ops), *part_results), at)
    parts = list[Part]()
    for at, (part_ops, part_results) in enumerate(zip(cuts, results, strict=True)):
        returned = set(part_results)
        makes = [node for node in part_ops if last_part[node] > at or node in returned]
        read = inductor.read_by(part_ops)
        dropped = [node for node in read if last_part[node] == at and node not in returned]
        freed = [node for node in dropped if node not in stay]
        parts.append(Part(
            f"backward {at}" if backward else "forward",
            inductor.lowerable(traced, part_ops, makes, freed, backward=backward),
            tuple(node.name for node in read), frozenset(node.name for node in dropped),
            tuple(node.name for node in makes), tuple(node.name for node in part_results),
            frozenset(node.name for node in returned if last_part[node] == at),
        ))  # fmt: skip
    return Half(tuple(node.name for node in takes), tuple(parts))


class Halves:
    """Forward and backward functions of a planned step, made of compiled parts. See
    `memplan.planning.schedule.codegen` for their signatures.

    Args:
        step: the fused step.
        compiler: compiles each part to a function.
    """

    def __init__(self, step: Fused, compiler: Compiler) -> None:
        self._step = step
        self._outputs, self._saved = len(step.schedule.graph.outputs), len(step.saved)
        self._forward, self._backward = (
            [(part, compiler(part)) for part in half.parts] for half in (step.forward, step.backward)
        )

    def forward(self, inputs: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs and the saved tensors. ``inputs`` is cleared."""
        targets = [inputs[at] for at in self._step.written]
        (results,) = _run(self._step.forward.takes, self._forward, inputs)
        saved_end = self._outputs + self._saved
        _torch.copy_all(targets, results[saved_end:])
        return results[: self._outputs], results[self._outputs : saved_end]

    def backward(
        self, inputs: list[Any], saved: list[Tensor], tangents: list[Tensor]
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield lists of (value id, gradient). A part computes all of its gradients before the first is yielded. The
        caller has to clear each list; the lists of arguments are cleared here."""
        arguments = [*(inputs[at] for at in self._step.handed), *saved, *tangents]
        for tensors in (inputs, saved, tangents):
            tensors.clear()
        running = _run(self._step.backward.takes, self._backward, arguments)
        for chunk, results in zip(self._step.chunks, running, strict=True):
            results.reverse()
            for group in chunk:
                yield [(value, results.pop()) for value in group]


def _run(
    names: Sequence[str], parts: Iterable[tuple[Part, inductor.Boxed]], tensors: list[Any]
) -> Iterator[list[Tensor]]:
    """Run parts in order, yield the results of each, and free what no later part reads. ``tensors`` is cleared."""
    parts = list(parts)
    used = {name for part, _ in parts for name in (*part.takes, *part.gives)}
    live = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name in used}
    tensors.clear()
    for part, function in parts:
        arguments = [live.pop(name) if name in part.drops else live[name] for name in part.takes]
        live.update(zip(part.makes, function(arguments), strict=True))
        results = [live[name] for name in part.gives]
        for name in part.ends:
            del live[name]
        yield results
