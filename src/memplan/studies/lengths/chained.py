"""Chain steps of different lengths, each recorded alone, into a single Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memplan.errors import InputError
from memplan.trace.records import Engines, ExpectedSize, Storage
from memplan.trace.trace import Trace

_OF_THE_MODEL = ("weight", "buffer", "optimizer_state", "parameter_gradient")

_Key = tuple[str, int]
"""Identifies a storage that outlives its step, such as a gradient, at any length: the name of its parameter or of the
op that allocates it, and a number among the storages of the same name."""


@dataclass(frozen=True)
class _SecondStep:
    """The second step of a recording, which every later batch of the same length repeats."""

    trace: Trace
    inputs: tuple[Storage, ...]
    """Storages of the batch, allocated before the step."""
    allocated: tuple[Storage, ...]
    """Storages allocated in the step, in order."""
    keys: Mapping[int, _Key]
    """By id, keys of the storages that outlive the first or the second step."""
    freed: Mapping[_Key, int]
    """Key of a storage from the first step -> tick at which the second step frees it."""

    @property
    def start(self) -> int:
        """Tick at which the step begins."""
        return self.trace.steps[1]


def chained(traces: Mapping[int, Trace], order: Sequence[int]) -> Trace:
    """Return the trace of batches of these lengths, with a step for each batch and without ops.

    Weights, buffers and optimizer states are those of the first batch. A storage that outlives its step, such as a
    gradient, is freed where a step of the next batch's length frees it. The inputs of a batch are allocated before its
    step; then the inputs of the previous batch are freed.

    ``traces``: length -> recording of two steps, all for the same device. Raises InputError if the model itself differs
    between lengths.
    """
    used = {length: traces[length] for length in sorted(set(order))}
    inputs = _input_indices(used)
    second_steps = {length: _second_step(trace, inputs) for length, trace in used.items()}
    chain = _Chain(second_steps[order[0]])
    for before, length in pairwise(order):
        chain.append(second_steps[length], freed_before=second_steps[before].freed)
    return chain.trace()


class _Chain:
    """Appends steps to the first step of a recording."""

    def __init__(self, first: _SecondStep) -> None:
        """Begin with all of a recording up to its second step."""
        self._recording = first.trace
        """The recording of the first step, whose other facts the result has."""
        self._end = first.start
        """Ticks so far."""
        self._steps = [first.trace.steps[0]]
        """Tick at which each step ends."""
        self._calls = [call for call in first.trace.calls if call.tick <= self._end]
        """Calls of the allocator so far."""
        self._inputs: list[int] = []
        """Numbers of the storages of the last batch."""
        self._outliving: dict[_Key, int] = {}
        """Numbers of the storages that outlive the last step, by key."""
        self.storages: list[Storage] = []
        """Storages of all steps so far, with new numbers."""
        self.engines: list[Engines] = []
        """Engines of workspaces, by these numbers."""
        self.expected: list[ExpectedSize] = []
        """Expected sizes of workspaces, likewise."""
        self.measured: list[int] = []
        """Numbers of the storages whose size was measured."""
        self._engines_of: dict[int, dict[int, Engines]] = {}
        """By id() of a trace: its engines by storage."""
        self._sizes_of: dict[int, dict[int, ExpectedSize]] = {}
        """By id() of a trace: its expected sizes by storage."""
        inputs = {storage.id for storage in first.inputs}
        for storage in first.trace.counted:
            if storage.born <= self._end:
                freed_later = storage.died is not None and storage.died > self._end
                number = self._add(first.trace, storage, shift=0, died=None if freed_later else storage.died)
                if storage.id in inputs:
                    self._inputs.append(number)
                elif freed_later:
                    self._outliving[first.keys[storage.id]] = number

    def append(self, step: _SecondStep, *, freed_before: Mapping[_Key, int]) -> None:
        """Append a step: the batch's inputs are allocated, then those of the previous batch are freed, then the step
        runs.

        ``freed_before``: by key, the storages that a step of the previous batch's length would free.
        """
        self._steps.append(self._end)
        inputs = [
            self._add(step.trace, storage, shift=self._end + ticks - storage.born, died=None)
            for ticks, storage in enumerate(step.inputs, 1)  # a tick each
        ]
        self._end += len(inputs)
        for number in self._inputs:
            self._end += 1
            self._free(number, self._end)
        self._inputs = inputs
        shift = self._end - step.start  # of ticks, from the recording to the chain
        self._end = step.trace.end + shift
        for key, number in self._outliving.items():
            if key in step.freed:
                self._free(number, step.freed[key] + shift)
            elif key in freed_before:  # a step of this length has no such tensor
                self._end += 1
                self._free(number, self._end)
        self._outliving = {}
        for storage in step.allocated:
            number = self._add(step.trace, storage, shift, storage.died)
            if storage.died is None:
                self._outliving[step.keys[storage.id]] = number
        self._calls += [replace(call, tick=call.tick + shift) for call in step.trace.calls if call.tick > step.start]

    def trace(self) -> Trace:
        """The trace of all steps so far, without ops."""
        recording = self._recording
        return Trace(
            origin=recording.origin, device=recording.device, torch=recording.torch, ops=(),
            storages=tuple(self.storages), layers=recording.layers, steps=tuple(self._steps), end=self._end,
            calls=tuple(self._calls), engines=tuple(self.engines), measured=tuple(self.measured),
            expected=tuple(self.expected),
        )  # fmt: skip

    def _add(self, trace: Trace, storage: Storage, shift: int, died: int | None) -> int:
        """Append a copy of a storage of ``trace``, ``shift`` ticks later, and return its number.

        ``died``: tick in ``trace`` at which it is freed; None for never.
        """
        number = len(self.storages)
        self.storages.append(
            Storage(
                number, storage.bytes, storage.cause, storage.born + shift, None if died is None else died + shift,
                op=None, dtype=storage.dtype, shape=storage.shape, device=storage.device, name=storage.name,
                sharers=(), low=storage.low, stream=storage.stream, used_on=storage.used_on,
            )
        )  # fmt: skip
        if storage.cause == "workspace":
            self._add_workspace(trace, storage.id, number)
        return number

    def _free(self, number: int, tick: int) -> None:
        self.storages[number] = replace(self.storages[number], died=tick)

    def _add_workspace(self, trace: Trace, old: int, new: int) -> None:
        """Copy what is known of a workspace: cuDNN's engine and its expected size."""
        if id(trace) not in self._engines_of:
            self._engines_of[id(trace)] = {engine.storage: engine for engine in trace.engines}
            self._sizes_of[id(trace)] = {size.storage: size for size in trace.expected}
        if (engine := self._engines_of[id(trace)].get(old)) is not None:
            self.engines.append(replace(engine, storage=new))
        if (size := self._sizes_of[id(trace)].get(old)) is not None:
            self.expected.append(replace(size, storage=new))
        if old in trace.measured:
            self.measured.append(new)


def _second_step(trace: Trace, input_indices: Sequence[int]) -> _SecondStep:
    """Return the second step of a recording. ``input_indices``: of the batch's inputs among the `_built` storages."""
    built, start = _built(trace), trace.steps[1]
    inputs = tuple(built[index] for index in input_indices)
    ids = {storage.id for storage in inputs}
    # what the first step leaves and the second frees
    live = [s for s in trace.counted if s.born <= start and s.died is not None and s.died > start]
    first = [storage for storage in live if storage.id not in ids]
    allocated = sorted((s for s in trace.counted if s.born > start), key=lambda storage: storage.born)
    keys = _keys_of(trace, first)
    freed = {keys[storage.id]: storage.died for storage in first if storage.died is not None}
    keys |= _keys_of(trace, (storage for storage in allocated if storage.died is None))
    return _SecondStep(trace, inputs, tuple(allocated), keys, freed)


def _keys_of(trace: Trace, storages: Iterable[Storage]) -> dict[int, _Key]:
    """Return the keys, by id, of storages that outlive their step: (name, number among those of the same name)."""
    counts = Counter[str]()
    keys = dict[int, _Key]()
    for storage in sorted(storages, key=lambda storage: storage.born):
        name = storage.name or ("" if storage.op is None else trace.ops[storage.op].name)
        keys[storage.id] = (name, counts[name])
        counts[name] += 1
    return keys


def _built(trace: Trace) -> list[Storage]:
    """Return the storages that exist when the first step begins, in the order of their allocation."""
    start = trace.steps[0]
    live = (s for s in trace.counted if s.born <= start and (s.died is None or s.died > start))
    return sorted(live, key=lambda storage: storage.born)


def _input_indices(traces: Mapping[int, Trace]) -> list[int]:
    """Return the indices of the batch's inputs among the `_built` storages: those whose bytes differ between lengths.
    Raises InputError if the size of a weight or optimizer state, or the number of storages, differs."""
    built = {length: _built(trace) for length, trace in traces.items()}
    if len({len(storages) for storages in built.values()}) > 1:
        raise InputError(
            f"the step is built otherwise at length {min(built)} than at {max(built)}",
            expected="one model for all lengths", do="Give the lengths of one model, or make it the same for all",
        )  # fmt: skip
    rows = list(zip(*built.values(), strict=True))
    indices = [index for index, row in enumerate(rows) if len({storage.bytes for storage in row}) > 1]
    for index in indices:
        storage = rows[index][0]
        if storage.cause in _OF_THE_MODEL:
            raise InputError(
                f"{storage.name or storage.cause} has another size at length {max(built)} than at {min(built)}",
                expected="one model for all lengths: only its inputs differ",
                do="Make the model for the longest, and give the inputs",
            )
    return indices
