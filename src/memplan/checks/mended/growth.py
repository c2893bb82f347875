"""What each step leaves behind: tensors of its forward pass that are still there when it is over, and the next one."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.checks.mended.savings import readers_of
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

HELD_FOR_GOOD = ("weight", "buffer", "optimizer_state", "parameter_gradient", "workspace")


@dataclass(frozen=True, slots=True)
class Growth:
    """Storages that the first step leaves to all later ones, and how many bytes of that kind each step leaves."""

    storages: tuple[Storage, ...]
    bytes_per_step: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return bytes that the first step leaves; 0 where later steps do not leave as much, as with a cache."""
        size = sum(storage.bytes for storage in self.storages)
        return size if self.bytes_per_step[1:] and 2 * min(self.bytes_per_step[1:]) >= size else 0


def part_of(trace: Trace, step: int) -> tuple[int, int]:
    """Return the ticks at which a step begins and ends."""
    return trace.steps[step], trace.steps[step + 1] if step + 1 < len(trace.steps) else trace.end


def growth(trace: Trace, *, graph: bool) -> Growth:
    """Return what each step leaves behind: with ``graph`` what a graph holds, else tensors that none does."""
    split = _Graphs(trace)
    left: list[list[Storage]] = []
    for step in range(len(trace.steps)):
        begin, end = part_of(trace, step)
        born = [s for s in trace.counted if begin < s.born <= end and s.cause not in HELD_FOR_GOOD and s.op is not None]
        stays = [s for s in born if s.died is None or s.died > end]
        left.append([s for s in stays if _is_of_forward(trace, s) and split.holds(s) == graph])
    first = [s for s in left[0] if s.died is None or s.died > part_of(trace, 1)[1]] if len(left) > 1 else []
    return Growth(tuple(first), tuple(sum(storage.bytes for storage in storages) for storages in left))


def _is_of_forward(trace: Trace, storage: Storage) -> bool:
    op = trace.ops[storage.op or 0]
    return op.phase == "forward" and bool(op.layer or op.reads)


class _Graphs:
    """Tells tensors that lie in a graph which no backward pass has freed from those that do not."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._readers = readers_of(op for op in trace.ops if op.phase == "forward")
        freed = [(one.start, one.end) for one in trace.passes if not one.keeps]
        passed = (op for op in trace.ops if op.phase == "backward" and op.gradient_of is not None)
        known = bool(trace.passes)
        self._freed = {
            op.gradient_of for op in passed if not known or any(start <= op.start <= end for start, end in freed)
        }

    def holds(self, storage: Storage) -> bool:
        """Return whether a graph may hold it."""
        makers = [self._trace.ops[storage.op or 0]]
        readers = [op for op in self._readers.get(storage.id, ()) if _for_gradient(op, storage.id)]
        graded = bool(readers) or any(in_graph(self._trace, op) for op in makers)
        return graded and not any(op.index in self._freed for op in (*makers, *readers))


def _for_gradient(op: Op, storage: int) -> bool:
    return any(operand.storage == storage and operand.name in op.needs_grad for operand in op.reads)


def in_graph(trace: Trace, op: Op) -> bool:
    """Return whether an op reads a result that requires a gradient: under no_grad only the weights themselves do."""
    needed = [trace.storages[r.storage] for r in op.reads if r.name in op.needs_grad]
    return any(storage.cause != "weight" and storage.op is not None for storage in needed)
