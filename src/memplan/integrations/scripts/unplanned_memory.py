"""Memory of a script that a plan of its model does not count: a loss outside of the model, other models, tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

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
    start_with_gradients: bool = False
    """Whether gradients existed when a call began."""

    @property
    def calls_per_update(self) -> int:
        """Return the most calls between two updates: at least 2 if gradients existed when a call began, else 1."""
        if not self.start_with_gradients:
            return 1
        update_ends = [span.end for span in self.updates]
        calls_after_update = Counter(bisect_right(update_ends, call.start) for call in self.calls)
        return max((2, *calls_after_update.values()))


@dataclass(frozen=True)
class UnplannedMemory:
    """Bytes of a script that a plan of its model does not count."""

    in_steps: int
    """Peak of the uncounted bytes during the model's steps."""
    between_steps: int
    """Peak of all bytes at other times, such as during a validation."""


def unplanned_memory(
    trace: Trace, kind: str, paths: Iterable[str], inputs: Iterable[Spec], calls: Calls
) -> UnplannedMemory:
    """Return the peak bytes of a script that a plan of its model does not count.

    A plan counts, from the beginning of a call to the end of its backward pass and during updates: the model's weights
    and gradients, the call's inputs, what the call and its backward pass allocate, and with an optimizer its
    state and update. It does not count what an earlier call allocated and the script still references.

    Args:
        trace: the script, recorded without a plan.
        kind: class of the model.
        paths: of the modules below it.
        inputs: tensors that it was called with.
        calls: of the model; without updates where the plan has no optimizer.
    """
    planned = _PlannedMemory(trace, _layer_names(trace, kind, list(paths)), calls)
    counted_inputs = Counter((spec.shape, str(spec.dtype).removeprefix("torch.")) for spec in inputs)
    changes = defaultdict[int, int](int)  # tick -> change of all bytes
    # tick -> storages that begin (1) or cease (-1) to be live and not counted by the plan
    uncounted_changes = defaultdict[int, list[tuple[Storage, int]]](list)
    for storage in trace.counted:
        size, died = _size(storage, trace), _ALWAYS if storage.died is None else storage.died
        changes[storage.born] += size
        changes[died] -= size
        counted_until = planned.counted_until(storage)
        if counted_until < died:
            uncounted_changes[max(counted_until, storage.born)].append((storage, 1))
            uncounted_changes[died].append((storage, -1))
    in_steps = between_steps = level = uncounted = 0
    live_like_input = Counter[tuple[tuple[int, ...], str]]()  # shape and dtype -> storages of these that are live
    for tick in sorted({*changes, *uncounted_changes} - {_ALWAYS}):
        level += changes[tick]
        for storage, sign in uncounted_changes[tick]:
            key, size = (storage.shape, storage.dtype), _size(storage, trace)
            # for each input the plan counts a storage of its shape and dtype
            inputs_before = min(live_like_input[key], counted_inputs[key])
            live_like_input[key] += sign
            inputs_after = min(live_like_input[key], counted_inputs[key])
            uncounted += (sign - (inputs_after - inputs_before)) * size
        if planned.is_counting(tick):
            in_steps = max(in_steps, uncounted)
        else:
            between_steps = max(between_steps, level)
    return UnplannedMemory(in_steps, between_steps)


def _size(storage: Storage, trace: Trace) -> int:
    """Return the bytes of a storage: on a card in the allocator's blocks."""
    return storage.bytes if trace.device == HOST else round_to_blocks(storage.bytes)


class _PlannedMemory:
    """Which storages of a script a plan of the model counts, and at which ticks. ``layers`` are the names of the
    model's layers in the trace."""

    def __init__(self, trace: Trace, layers: frozenset[str], calls: Calls) -> None:
        """``layers``: names of the model's layers in the trace; ``calls``: ticks of its calls and of the updates."""
        self._trace, self._layers, self._calls = trace, layers, calls
        self._starts = [call.start for call in calls.calls]
        """Ticks at which the model's calls begin."""
        self._update_starts = [update.start for update in calls.updates]
        """Ticks at which the optimizers' updates begin."""
        self._updated_storages = {
            storage for op in trace.ops if self._is_in_update(op.start, op.end) for storage in op.writes
        }  # fmt: skip
        """Storages that these updates write."""
        self._forward = {op.index for op in trace.ops if op.phase == "forward" and self._in_call(op.start)}
        """Indices of the forward ops of the calls."""
        self._steps = self._step_spans()
        """Begin and end of each step that a plan counts, in ticks."""
        self._step_starts = [step.start for step in self._steps]
        """Ticks at which these steps begin."""

    def is_counting(self, tick: int) -> bool:
        """Return whether a call, its backward pass or an update runs at a tick: only then a plan counts storages."""
        latest = bisect_right(self._step_starts, tick) - 1  # the last step that began; -1: none
        return (latest >= 0 and tick <= self._steps[latest].end) or self._is_in_update(start=tick, end=tick)

    def counted_until(self, storage: Storage) -> int:
        """Return the tick until which a plan counts a storage, such as the start of the next call; -1: never."""
        if storage.cause in _NAMED and storage.name:
            return _ALWAYS if storage.name.rpartition(".")[0] in self._layers else _NEVER
        if storage.cause == "optimizer_state":
            return _ALWAYS if storage.id in self._updated_storages else _NEVER
        if storage.op is None or not self._is_of_planned_step(self._trace.ops[storage.op]):
            return _NEVER
        following = bisect_right(self._starts, storage.born)
        return self._starts[following] if following < len(self._starts) else _ALWAYS

    def _is_of_planned_step(self, op: Op) -> bool:
        """Return whether an op belongs to a call of the model, its backward pass or its update."""
        if op.phase == "optimizer":
            return self._is_in_update(op.start, op.end)
        if op.phase == "forward":
            return op.index in self._forward
        if op.gradient_of is not None:
            return op.gradient_of in self._forward
        return (
            op.phase == "backward" and op.layer in self._layers and bool(self._starts) and op.start >= self._starts[0]
        )

    def _in_call(self, tick: int) -> bool:
        """Return whether the model's forward pass runs at a tick."""
        latest = bisect_right(self._starts, tick) - 1
        return latest >= 0 and tick <= self._calls.calls[latest].end

    def _is_in_update(self, start: int, end: int) -> bool:
        """Return whether the ticks from ``start`` to ``end`` lie within an update."""
        latest = bisect_right(self._update_starts, start) - 1
        return latest >= 0 and end <= self._calls.updates[latest].end

    def _step_spans(self) -> list[Span]:
        """Return the ticks from each call to the end of its backward pass; to the next call if it has none."""
        backward_ends = [op.end for op in self._trace.ops if op.phase == "backward" and self._is_of_planned_step(op)]
        spans = list[Span]()
        for call, following in zip_longest(self._calls.calls, self._calls.calls[1:]):
            before_next = _ALWAYS if following is None else following.start - 1
            last_backward = bisect_right(backward_ends, before_next) - 1
            end = before_next
            if last_backward >= 0 and backward_ends[last_backward] > call.start:
                end = backward_ends[last_backward]
            spans.append(Span(call.start, max(end, call.end)))
        return spans


def _layer_names(trace: Trace, kind: str, paths: Collection[str]) -> frozenset[str]:
    """Return the names of a model's layers in a trace.

    In a trace of a larger model they begin with the path of the model: the path with which most names exist.
    """
    names = {layer.name for layer in trace.layers} | {op.layer for op in trace.ops}
    roots = ["", *dict.fromkeys(f"{layer.name}." for layer in trace.layers if layer.kind == kind)]
    root = max(roots, key=lambda root: sum(f"{root}{path}" in names for path in paths))
    return frozenset({root.removesuffix(".") or kind, *(f"{root}{path}" for path in paths)})
