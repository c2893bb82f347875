"""Tensors of the forward pass that every step leaves allocated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from memplan.checks.mended.savings import readers_of
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

HELD_FOR_GOOD = ("weight", "buffer", "optimizer_state", "parameter_gradient", "workspace")


@dataclass(frozen=True, slots=True)
class Growth:
    """What the steps leave allocated."""

    storages: tuple[Storage, ...]
    """Those of the first step that outlive the second, or are copied into a larger storage that does."""
    bytes_per_step: tuple[int, ...]
    """Bytes that each step leaves allocated at its end."""

    @property
    def bytes(self) -> int:
        """Bytes that the first step leaves; 0 if a later step leaves less than half of that, as with a cache."""
        size = sum(storage.bytes for storage in self.storages)
        return size if self.bytes_per_step[1:] and 2 * min(self.bytes_per_step[1:]) >= size else 0


def ticks_of_step(trace: Trace, step: int) -> tuple[int, int]:
    """Return the ticks at which a step begins and ends."""
    return trace.steps[step], trace.steps[step + 1] if step + 1 < len(trace.steps) else trace.end


def growth(trace: Trace, *, graph: bool) -> Growth:
    """Return what each step's forward pass leaves allocated at the step's end. ``graph``: whether to return tensors in
    a live autograd graph, or all others."""
    graphs = _LiveGraphs(trace)
    by_step: list[list[Storage]] = []
    for step in range(len(trace.steps)):
        begin, end = ticks_of_step(trace, step)
        by_step.append([
            s for s in trace.counted
            if begin < s.born <= end and (s.died is None or s.died > end)
            and s.cause not in HELD_FOR_GOOD and _is_computed_forward(trace, s) and (s in graphs) == graph
        ])  # fmt: skip
    if len(by_step) < 2:
        return Growth((), tuple(sum(s.bytes for s in storages) for storages in by_step))
    copied = [_copied_into_larger(trace, *pair) for pair in pairwise(by_step)]
    _, end_of_second = ticks_of_step(trace, step=1)
    first = [s for s in by_step[0] if s.id in copied[0] or s.died is None or s.died > end_of_second]
    sizes = [  # of a concatenation with an earlier storage, only what is new counts
        sum(storage.bytes for storage in storages) - sum(trace.storages[number].bytes for number in earlier)
        for storages, earlier in zip(by_step, [set[int](), *copied], strict=True)
    ]
    return Growth(tuple(first), tuple(sizes))


def _is_computed_forward(trace: Trace, storage: Storage) -> bool:
    """Return whether a forward op of a layer, or one that reads tensors, allocated a storage: not a data loader."""
    if storage.op is None:
        return False
    op = trace.ops[storage.op]
    return op.phase == "forward" and bool(op.layer or op.reads)


def _copied_into_larger(trace: Trace, earlier: list[Storage], later: list[Storage]) -> set[int]:
    """Return those of the earlier storages that are freed once an op has copied them into a larger, later storage, as
    ``outputs = torch.cat((outputs, new))`` does."""
    later_bytes = {storage.id: storage.bytes for storage in later}
    freed_bytes = {storage.id: storage.bytes for storage in earlier if storage.died is not None}
    copied: set[int] = set()
    for op in trace.ops:
        largest = max((later_bytes.get(number, 0) for number in op.writes), default=0)
        reads = [operand.storage for operand in op.reads if operand.storage in freed_bytes]
        copied.update(number for number in reads if freed_bytes[number] < largest)
    return copied


class _LiveGraphs:
    """The autograd graphs of a trace that no backward pass frees."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._readers = readers_of(op for op in trace.ops if op.phase == "forward")
        """By storage: the forward ops that read it."""
        freeing = [backward for backward in trace.passes if not backward.keeps]  # neither retain_graph nor create_graph
        self._freed = {
            op.gradient_of for op in trace.ops
            if op.phase == "backward"
            and (not trace.passes or any(backward.start <= op.start <= backward.end for backward in freeing))
        }  # fmt: skip
        """Indices of the forward ops whose part of the graph a backward pass frees."""

    def __contains__(self, storage: Storage) -> bool:
        """Return whether a live graph may refer to a storage."""
        maker = self._trace.ops[storage.op or 0]
        readers_with_gradient = [
            op for op in self._readers.get(storage.id, ())
            if any(operand.storage == storage.id and operand.name in op.needs_grad for operand in op.reads)
        ]  # fmt: skip
        has_graph = bool(readers_with_gradient) or in_graph(self._trace, maker)
        return has_graph and not any(op.index in self._freed for op in (maker, *readers_with_gradient))


def in_graph(trace: Trace, op: Op) -> bool:
    """Return whether an op reads the result of another op that requires a gradient. Weights do not count, nor
    autocast's copies of them: they require a gradient under no_grad as well."""
    for operand in (trace.storages[read.storage] for read in op.reads if read.name in op.needs_grad):
        if operand.cause != "weight" and operand.op is not None:
            maker = trace.ops[operand.op]
            reads_weights = all(trace.storages[read.storage].cause == "weight" for read in maker.reads)
            if maker.name != "aten._to_copy.default" or not reads_weights:
                return True
    return False
