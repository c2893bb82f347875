"""Memory of a script that a plan of its model does not count: a loss outside of the model, other models, tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from memplan._bytes import round_to_blocks
from memplan.trace.records import HOST, Op, Storage
from memplan.trace.spec import Spec
from memplan.trace.trace import Trace

_NAMED = ("weight", "buffer", "parameter_gradient")
_NEVER = -1
_ALWAYS = 1 << 62


@dataclass(frozen=True)
class Span:
    """Ticks of a call or an update, first and last."""

    start: int
    end: int


@dataclass
class Calls:
    """When a model was called with gradients, and when the optimizer of its plan updated it."""

    calls: list[Span] = field(default_factory=list[Span])
    updates: list[Span] = field(default_factory=list[Span])
    held: bool = False
    """Whether gradients existed when a call began."""

    @property
    def accumulated(self) -> int:
        """Return the most calls between two updates; at least 2 if gradients existed when a call began."""
        ends = [span.end for span in self.updates]
        between = Counter(bisect_right(ends, call.start) for call in self.calls)
        return max((between.most_common(1) or [(0, 1)])[0][1], 2) if self.held else 1


@dataclass(frozen=True)
class Beside:
    """Bytes of a script that a plan of its model does not count."""

    inside: int
    """Peak of the uncounted bytes during the model's steps."""
    outside: int
    """Peak of all bytes at other times, such as during a validation."""


def held_beside(trace: Trace, kind: str, parts: Iterable[str], inputs: Iterable[Spec], calls: Calls) -> Beside:
    """Return the peak bytes of a script that a plan of its model does not count.

    A plan counts, from the beginning of a call to the end of its backward pass and during updates: the model's weights
    and gradients, the call's inputs, what the call and its backward pass make, and with an optimizer its state and
    update. What an earlier call made and is still alive (its output in a variable) it does not count.

    Args:
        trace: the script, recorded without a plan.
        kind: class of the model.
        parts: paths of the modules below it.
        inputs: tensors that it was called with.
        calls: of the model; without updates where the plan has no optimizer.
    """
    own = _Own(trace, _layers(trace, kind, list(parts)), calls)
    counted = Counter((spec.shape, str(spec.dtype).removeprefix("torch.")) for spec in inputs)
    all_changes, other_changes = defaultdict[int, int](int), defaultdict[int, list[tuple[Storage, int]]](list)
    for storage in trace.counted:
        size, died = _size(storage, trace), _ALWAYS if storage.died is None else storage.died
        all_changes[storage.born] += size
        all_changes[died] -= size
        since = own.until(storage)
        if since < died:
            other_changes[max(since, storage.born)].append((storage, 1))
            other_changes[died].append((storage, -1))
    inside = outside = level = others = 0
    alive = Counter[tuple[tuple[int, ...], str]]()
    for tick in sorted({*all_changes, *other_changes} - {_ALWAYS}):
        level += all_changes[tick]
        for storage, sign in other_changes[tick]:
            key, size = (storage.shape, storage.dtype), _size(storage, trace)
            before = min(alive[key], counted[key])
            alive[key] += sign
            others += sign * size - (min(alive[key], counted[key]) - before) * size
        if own.is_counting(tick):
            inside = max(inside, others)
        else:
            outside = max(outside, level)
    return Beside(inside, outside)


def _size(storage: Storage, trace: Trace) -> int:
    return storage.bytes if trace.device == HOST else round_to_blocks(storage.bytes)


class _Own:
    """What a plan of the model counts of a script, and when."""

    def __init__(self, trace: Trace, layers: frozenset[str], calls: Calls) -> None:
        self._trace, self._layers, self._calls = trace, layers, calls
        self._starts = [call.start for call in calls.calls]
        self._update_starts = [update.start for update in calls.updates]
        self._states = {
            storage for op in trace.ops if self._updates(op.start, op.end) for storage in op.writes
        }  # fmt: skip
        self._forward = {op.index for op in trace.ops if op.phase == "forward" and self._in_call(op.start)}
        self._steps = self._spans()
        self._step_starts = [step.start for step in self._steps]

    def is_counting(self, tick: int) -> bool:
        """Return whether a plan counts what is its own at a tick: a call or its backward pass runs, or an update."""
        at = bisect_right(self._step_starts, tick) - 1
        return (at >= 0 and tick <= self._steps[at].end) or self._updates(tick, tick)

    def until(self, storage: Storage) -> int:
        """Return the tick until which a plan counts a storage, such as the next call's; -1 where it never does."""
        if storage.cause in _NAMED and storage.name:
            return _ALWAYS if storage.name.rpartition(".")[0] in self._layers else _NEVER
        if storage.cause == "optimizer_state":
            return _ALWAYS if storage.id in self._states else _NEVER
        if storage.op is None or not self._makes(self._trace.ops[storage.op]):
            return _NEVER
        following = bisect_right(self._starts, storage.born)
        return self._starts[following] if following < len(self._starts) else _ALWAYS

    def _makes(self, op: Op) -> bool:
        """Return whether an op is one of a planned step."""
        if op.phase == "optimizer":
            return self._updates(op.start, op.end)
        if op.phase == "forward":
            return op.index in self._forward
        if op.gradient_of is not None:
            return op.gradient_of in self._forward
        return (
            op.phase == "backward" and op.layer in self._layers and bool(self._starts) and op.start >= self._starts[0]
        )

    def _in_call(self, tick: int) -> bool:
        at = bisect_right(self._starts, tick) - 1
        return at >= 0 and tick <= self._calls.calls[at].end

    def _updates(self, start: int, end: int) -> bool:
        at = bisect_right(self._update_starts, start) - 1
        return at >= 0 and end <= self._calls.updates[at].end

    def _spans(self) -> list[Span]:
        """Return each call with its backward pass, up to the next call; all of it where it has no backward pass."""
        backward = [op.end for op in self._trace.ops if op.phase == "backward" and self._makes(op)]
        found = list[Span]()
        for number, start in enumerate(self._starts):
            following = self._starts[number + 1] - 1 if number + 1 < len(self._starts) else _ALWAYS
            at = bisect_right(backward, following) - 1
            last = backward[at] if at >= 0 and backward[at] > start else following
            found.append(Span(start, max(last, self._calls.calls[number].end)))
        return found


def _layers(trace: Trace, kind: str, parts: Collection[str]) -> frozenset[str]:
    """Return the names that a model's layers have in a trace: behind its class, or its place in what it is a part of,
    where it is not the only one."""
    names = {layer.name for layer in trace.layers} | {op.layer for op in trace.ops}
    roots = ["", *dict.fromkeys(f"{layer.name}." for layer in trace.layers if layer.kind == kind)]
    root = max(roots, key=lambda root: sum(f"{root}{part}" in names for part in parts))
    return frozenset({root.removesuffix(".") or kind, *(f"{root}{part}" for part in parts)})
