"""Lower a planned step for fused kernels: both passes as core ops, cut into parts that are compiled.

What is kept and what is made again was decided on the undecomposed graph, and each half is lowered by itself: Inductor
fuses within a part, and decides nothing about what lives between the passes.
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
"""Parts of the backward pass where gradients are used up as they come: what one part makes is there at once. Between
parts nothing is fused."""


@dataclass(frozen=True)
class Part:
    """Some ops of a half, compiled together. Tensors go by the names of the half's nodes. Each op is marked
    (`inductor.mark`) with the place of the action that it is of, in both passes of the schedule one after the other."""

    name: str
    lowerable: inductor.Lowerable
    takes: tuple[str, ...]
    drops: frozenset[str]
    """Taken tensors that nothing needs afterwards."""
    makes: tuple[str, ...]
    gives: tuple[str, ...]
    """Tensors handed out after it, from this part or an earlier one."""
    ends: frozenset[str]
    """Handed-out tensors that nothing needs afterwards."""


@contextmanager
def lowering(name: str) -> Iterator[None]:
    """Say what failed while a part is traced, lowered or compiled: Inductor raises whatever its passes and the compiler
    raise.

    Args:
        name: of the part.

    Raises:
        CompileError: in place of that.
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
    """Return the first line of what an error says, and the first in which a compiler does."""
    first, *more = str(error).strip().splitlines() or [""]
    compilers = next((line.strip() for line in more if "error:" in line), None)
    return first if compilers is None else f"{first}: {compilers}"


Compiler = Callable[[Part], inductor.Boxed]
"""Compiler of a part: returns its function."""


@dataclass(frozen=True)
class Half:
    """A forward or a backward pass, cut into parts."""

    takes: tuple[str, ...]
    """Names of its arguments."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fused:
    """A schedule as parts that can be compiled."""

    schedule: Schedule
    forward: Half
    backward: Half
    """Takes arguments of the forward pass, then what was saved, then the gradients of the outputs."""
    handed: tuple[int, ...]
    """Positions of the first among what the forward pass is handed."""
    saved: tuple[int, ...]
    """Ids of what is saved: less than the schedule says where the core ops of the backward pass do not read it all."""
    written: tuple[int, ...]
    """Positions of what the forward pass changes of what it is handed: its last results are copied there."""
    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    """For each part of the backward pass: the groups of values whose gradients are given after it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Compiled parts, in the order in which they run."""
        return (*self.forward.parts, *self.backward.parts)


def as_fused(graph: JointGraph, choices: Choices) -> Schedule:
    """Return the step under these choices, for fused kernels: what memory is used again is for the compiler to say."""
    return schedule(graph, replace(choices, in_place=False, pieces=frozenset(), fused=True))


def fused(of: Schedule) -> Fused:
    """Trace both halves of a schedule of `as_fused`."""
    graph, mode, own = of.graph, inductor.fake_mode(), decompositions(of.graph.is_on_card)
    functions: dict[str, Any] = {"mark": inductor.mark, "laid_out": laid_out}
    exec(compile(program(of, marked=True), "<memplan fused>", "exec"), functions)
    resident = [value for value in graph.values if value.kind in RESIDENT]
    read = read_in_backward(of)
    handed = tuple(at for at, value in enumerate(resident) if value.id in read)

    def forward(*inputs: Tensor) -> list[Tensor]:
        outputs, saved = functions["forward"](list(inputs))
        return [*_as_in(graph, outputs, graph.outputs), *_as_in(graph, saved, of.saved)]

    def backward(*given: Tensor) -> list[Tensor]:
        inputs: list[Any] = [None] * len(resident)
        for at, tensor in zip(handed, given, strict=False):
            inputs[at] = tensor
        rest = list(given[len(handed) :])
        saved, tangents = rest[: len(of.saved)], rest[len(of.saved) :]
        return [gradient for group in functions["backward"](inputs, saved, tangents) for _, gradient in group]

    with lowering("forward"):
        first = inductor.traced(forward, _fakes(resident, mode), mode, own)
    later = [*(resident[at] for at in handed), *(graph.values[value] for value in of.saved), *_tangents(graph)]
    with lowering("backward"):
        second = inductor.traced(backward, _fakes(later, mode), mode, own)
    assert not second.written, "the backward pass changes nothing that it is handed"
    if of.choices.joined:
        derivatives.join(second, joined(of))
    return _put_together(of, first, second, handed)


def laid_out(tensor: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an op's result in the graph's layout and dtype. What Inductor traces in an op's place can be laid out
    otherwise, and then views that follow become copies, or wider (the gradient of a group norm in bfloat16). It keeps
    its layout where the graph's strides leave gaps or overlap."""
    tensor = tensor.to(dtype)
    dims = range(tensor.dim())
    if all(tensor.shape[dim] <= 1 or tensor.stride(dim) == stride[dim] for dim in dims):
        return tensor
    order = sorted(dims, key=lambda dim: -stride[dim])
    back = [order.index(dim) for dim in dims]
    made = tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    same = all(made.shape[dim] <= 1 or made.stride(dim) == stride[dim] for dim in dims)
    return made if same else tensor


def _as_in(graph: JointGraph, tensors: Sequence[Tensor], values: Sequence[int]) -> list[Tensor]:
    """Cast tensors that are handed on to the graph's dtypes, which the code that reads them is generated for."""
    return [one.to(getattr(torch, graph.values[of].dtype)) for one, of in zip(tensors, values, strict=True)]


def _tangents(graph: JointGraph) -> list[Value]:
    return [value for value in graph.values if value.kind == "tangent"]


def _fakes(values: Sequence[Value], mode: Any) -> list[Tensor]:
    return [inductor.fake_tensor(one.shape, one.stride, getattr(torch, one.dtype), mode, one.place) for one in values]


def _put_together(of: Schedule, first: inductor.Traced, second: inductor.Traced, handed: tuple[int, ...]) -> Fused:
    chunks = tuple(tuple(chunk) for chunk in _chunks(of))
    inputs, ops, gradients = inductor.taken_apart(second)
    begin, end = len(handed), len(handed) + len(of.saved)
    used = {*inductor.read_by(ops), *gradients}
    needed = [at for at, node in enumerate(inputs[begin:end]) if node in used]
    takes = [*inputs[:begin], *(inputs[begin + at] for at in needed), *inputs[end:]]
    rest = iter(gradients)
    given = [[next(rest) for group in chunk for _ in group] for chunk in chunks]
    resident = [value for value in of.graph.values if value.kind in RESIDENT]
    node_of = {value.id: node for value, node in zip((resident[at] for at in handed), inputs, strict=False)}
    changing = [
        [node_of[v] for group in chunk for v in group if v in node_of and changed_at_once(of.graph, of.choices, v)]
        for chunk in chunks
    ]
    backward = _half(second, takes, ops, given, changing, stay=inputs[:begin], backward=True)
    inputs, ops, results = inductor.taken_apart(first)
    outputs = len(of.graph.outputs)
    kept = [
        *results[:outputs], *(results[outputs + at] for at in needed), *results[outputs + len(of.saved) :]
    ]  # fmt: skip
    forward = _half(first, inputs, ops, [kept], [[]], stay=inputs, backward=False)
    return Fused(of, forward, backward, handed, tuple(of.saved[at] for at in needed), first.written, chunks)


def _chunks(of: Schedule) -> Iterator[list[tuple[int, ...]]]:
    """Yield the lists of gradients that are given, by the parts that make them: one part where they all stay, else a
    new one after each share of the bytes that do not."""
    values, graph = of.graph.values, of.graph
    groups = gives(of)
    sizes = [sum(values[v].own_bytes for v in group if frees_gradient(graph, of.choices, v)) for group in groups]
    share, chunk, size = sum(sizes) / CHUNKS, list[tuple[int, ...]](), 0
    for group, more in zip(groups, sizes, strict=True):
        chunk.append(group)
        size += more
        if share and size >= share:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _half(
    of: inductor.Traced,
    takes: Sequence[fx.Node],
    ops: Sequence[fx.Node],
    given: Sequence[Sequence[fx.Node]],
    changing: Sequence[Sequence[fx.Node]],
    *,
    stay: Sequence[fx.Node],
    backward: bool,
) -> Half:
    """Return a traced function in parts, each up to the last of its results, and to the last op that reads what changes
    then.

    Args:
        of: the function.
        takes: its arguments, without those that nothing reads.
        ops: its ops in order.
        given: the results after each part.
        changing: the arguments that may change when these are given, as updates do to parameters.
        stay: the arguments that are somebody else's, too.
        backward: see `inductor.Lowerable`.
    """
    place = {node: at for at, node in enumerate(ops)}
    ends, end = list[int](), 0
    for results, arguments in zip(given, changing, strict=True):
        waits_for = (*results, *inductor.readers(ops, arguments))
        end = max([end, *(place.get(node, -1) + 1 for node in waits_for)])
        ends.append(end)
    cuts = [ops[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    last: dict[fx.Node, int] = {}
    for at, (inside, results) in enumerate(zip(cuts, given, strict=True)):
        last |= dict.fromkeys((*inside, *inductor.read_by(inside), *results), at)
    parts = list[Part]()
    for at, (inside, results) in enumerate(zip(cuts, given, strict=True)):
        out = set(results)
        makes = [node for node in inside if last[node] > at or node in out]
        read = inductor.read_by(inside)
        dropped = [node for node in read if last[node] == at and node not in out]
        freed = [node for node in dropped if node not in stay]
        parts.append(
            Part(
                f"backward {at}" if backward else "forward",
                inductor.lowerable(of, inside, makes, freed, backward=backward),
                tuple(node.name for node in read),
                frozenset(node.name for node in dropped),
                tuple(node.name for node in makes),
                tuple(node.name for node in results),
                frozenset(node.name for node in out if last[node] == at),
            )
        )
    return Half(tuple(node.name for node in takes), tuple(parts))


class Halves:
    """The two functions of a planned step, as `memplan.planning.schedule.codegen` describes them, of compiled parts.

    Args:
        of: what runs.
        compiler: makes a function of each part.
    """

    def __init__(self, of: Fused, compiler: Compiler) -> None:
        self._of = of
        self._outputs, self._saved = len(of.schedule.graph.outputs), len(of.saved)
        self._forward, self._backward = (
            [(part, compiler(part)) for part in half.parts] for half in (of.forward, of.backward)
        )

    def forward(self, inputs: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs, and what is saved. The list that is handed in is emptied."""
        targets = [inputs[at] for at in self._of.written]
        (results,) = _run(self._of.forward.takes, self._forward, inputs)
        cut = self._outputs + self._saved
        _torch.copy_all(targets, results[cut:])
        return results[: self._outputs], results[self._outputs : cut]

    def backward(
        self, inputs: list[Any], saved: list[Tensor], tangents: list[Tensor]
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield lists of gradients, each with its value; all of a part are made before the first is given. Each list
        has to be emptied by who takes it; those that are handed in are emptied."""
        given = [*(inputs[at] for at in self._of.handed), *saved, *tangents]
        for one in (inputs, saved, tangents):
            one.clear()
        running = _run(self._of.backward.takes, self._backward, given)
        for chunk, results in zip(self._of.chunks, running, strict=True):
            results.reverse()
            for group in chunk:
                yield [(value, results.pop()) for value in group]


def _run(
    names: Sequence[str], parts: Iterable[tuple[Part, inductor.Boxed]], given: list[Any]
) -> Iterator[list[Tensor]]:
    """Run parts one after the other, and free what none of those that follow reads."""
    parts = list(parts)
    used = {name for part, _ in parts for name in (*part.takes, *part.gives)}
    there = {name: one for name, one in zip(names, given, strict=True) if name in used}
    given.clear()
    for part, function in parts:
        arguments = [there.pop(name) if name in part.drops else there[name] for name in part.takes]
        there.update(zip(part.makes, function(arguments), strict=True))
        results = [there[name] for name in part.gives]
        for name in part.ends:
            del there[name]
        yield results
