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
    """Storages of the first step that outlive the second, or are copied into a larger one that does, and the bytes that
    each step leaves allocated at its end."""

    storages: tuple[Storage, ...]
    bytes_per_step: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes that the first step leaves; 0 if a later step leaves less than half of that, as with a cache."""
        size = sum(storage.bytes for storage in self.storages)
        return size if self.bytes_per_step[1:] and 2 * min(self.bytes_per_step[1:]) >= size else 0


def ticks_of_step(trace: Trace, step: int) -> tuple[int, int]:
    """Return the ticks at which a step begins and ends."""
    return trace.steps[step], trace.steps[step + 1] if step + 1 < len(trace.steps) else trace.end


def growth(trace: Trace, *, graph: bool) -> Growth:
    """Return what each step leaves allocated: with ``graph`` tensors in a live autograd graph, else all other tensors
    of its forward pass."""
    graphs = _LiveGraphs(trace)
    by_step: list[list[Storage]] = []
    for step in range(len(trace.steps)):
        begin, end = ticks_of_step(trace, step)
        by_step.append([
            s for s in trace.counted
            if begin < s.born <= end and (s.died is None or s.died > end)
            and s.cause not in HELD_FOR_GOOD and s.op is not None
            and (op := trace.ops[s.op]).phase == "forward" and (op.layer or op.reads) and (s in graphs) == graph
        ])  # fmt: skip
    copied = [_copied_into_larger(trace, *pair) for pair in pairwise(by_step)]
    first = [
        s for s in by_step[0] if s.id in copied[0] or s.died is None or s.died > ticks_of_step(trace, 1)[1]
    ] if copied else []  # fmt: skip
    sizes = [
        sum(storage.bytes for storage in storages) - sum(trace.storages[number].bytes for number in earlier)
        for storages, earlier in zip(by_step, [frozenset[int](), *copied], strict=True)
    ]
    return Growth(tuple(first), tuple(sizes))


def _copied_into_larger(trace: Trace, earlier: list[Storage], later: list[Storage]) -> frozenset[int]:
    """Return those of the earlier storages that are freed once an op has copied them into a larger, later storage, as
    ``kept = torch.cat((kept, new))`` does."""
    sizes = {storage.id: storage.bytes for storage in later}
    freed = {storage.id: storage.bytes for storage in earlier if storage.died is not None}
    return frozenset(
        operand.storage
        for op in trace.ops if not sizes.keys().isdisjoint(op.writes)
        for operand in op.reads
        if operand.storage in freed
        and freed[operand.storage] < max(sizes.get(number, 0) for number in op.writes)
    )  # fmt: skip


class _LiveGraphs:
    """The autograd graphs of a trace that no backward pass frees."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._readers = readers_of(op for op in trace.ops if op.phase == "forward")
        freeing = [(backward.start, backward.end) for backward in trace.passes if not backward.keeps]
        self._freed = {
            op.gradient_of
            for op in trace.ops
            if op.phase == "backward" and op.gradient_of is not None
            and (not trace.passes or any(start <= op.start <= end for start, end in freeing))
        }  # fmt: skip

    def __contains__(self, storage: Storage) -> bool:
        """Return whether a live graph may refer to a storage."""
        maker = self._trace.ops[storage.op or 0]
        readers = [
            op for op in self._readers.get(storage.id, ())
            if any(operand.storage == storage.id and operand.name in op.needs_grad for operand in op.reads)
        ]  # fmt: skip
        has_graph = bool(readers) or in_graph(self._trace, maker)
        return has_graph and not any(op.index in self._freed for op in (maker, *readers))


def in_graph(trace: Trace, op: Op) -> bool:
    """Return whether an op reads the result of another op that requires a gradient. Under no_grad only weights do, and
    autocast's copies of them."""
    operands = [trace.storages[r.storage] for r in op.reads if r.name in op.needs_grad]
    return any(
        storage.cause != "weight" and storage.op is not None and not _casts_weight(trace, trace.ops[storage.op])
        for storage in operands
    )


def _casts_weight(trace: Trace, op: Op) -> bool:
    return op.name == "aten._to_copy.default" and all(trace.storages[r.storage].cause == "weight" for r in op.reads)
