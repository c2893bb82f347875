"""Steps of different lengths, each recorded by itself, as one Trace in which they follow each other."""

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
"""What a step keeps for the next: the name of its parameter, else the op that allocates it; and a number among such."""


@dataclass(frozen=True)
class _Steady:
    """The second step of a recording, which every later batch of its length repeats."""

    trace: Trace
    inputs: tuple[Storage, ...]
    """Of the batch: allocated before the step."""
    born: tuple[Storage, ...]
    """Allocated in the step, in order."""
    keys: Mapping[int, _Key]
    """Of the storages that the step before or this step keeps for the next."""
    freed: Mapping[_Key, int]
    """What the step before kept -> the tick at which this step frees it."""

    @property
    def start(self) -> int:
        """The tick at which the step begins."""
        return self.trace.steps[1]


def chained(traces: Mapping[int, Trace], order: Sequence[int]) -> Trace:
    """Return the trace of batches of these lengths, a step each, without ops.

    Weights, buffers and what the first step leaves for all later ones are those of the first batch. What a step keeps
    for the next, such as gradients, is freed where a step of the next length frees it. The inputs of a batch are
    allocated when it begins; then those of the batch before are freed.

    Args:
        traces: length -> recording of two steps, all for one device.
        order: the length of each batch.

    Raises:
        InputError: the model itself differs between lengths.
    """
    used = {length: traces[length] for length in sorted(set(order))}
    places = _places_of_inputs(used)
    steady = {length: _steady(trace, places) for length, trace in used.items()}
    chain = _Chain()
    first = steady[order[0]]
    trace, end = first.trace, first.start
    kept = dict[_Key, int]()
    inputs = list[int]()
    of_batch = {storage.id for storage in first.inputs}
    for storage in trace.counted:
        if storage.born <= end:
            freed_later = storage.died is not None and storage.died > end
            number = chain.add(trace, storage, 0, None if freed_later else storage.died)
            if storage.id in of_batch:
                inputs.append(number)
            elif freed_later:
                kept[first.keys[storage.id]] = number
    calls = [call for call in trace.calls if call.tick <= end]
    steps = [trace.steps[0]]
    for before, length in pairwise(order):
        step = steady[length]
        steps.append(end)
        arrived = [
            chain.add(step.trace, storage, end + place - storage.born, None)
            for place, storage in enumerate(step.inputs, 1)
        ]
        end += len(arrived)
        for number in inputs:
            end += 1
            chain.free(number, end)
        inputs = arrived
        shift = end - step.start
        end = step.trace.end + shift
        for key, number in kept.items():
            if key in step.freed:
                chain.free(number, step.freed[key] + shift)
            elif key in steady[before].freed:  # a step of this length has no such tensor
                end += 1
                chain.free(number, end)
        kept = {}
        for storage in step.born:
            number = chain.add(step.trace, storage, shift, storage.died)
            if storage.died is None:
                kept[step.keys[storage.id]] = number
        calls += [replace(call, tick=call.tick + shift) for call in step.trace.calls if call.tick > step.start]
    return Trace(
        origin=trace.origin, device=trace.device, torch=trace.torch, ops=(), storages=tuple(chain.storages),
        layers=trace.layers, steps=tuple(steps), end=end, calls=tuple(calls), engines=tuple(chain.engines),
        measured=tuple(chain.measured), expected=tuple(chain.expected),
    )  # fmt: skip


class _Chain:
    """The storages of the chained trace, and what is known of the workspaces among them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.engines: list[Engines] = []
        self.expected: list[ExpectedSize] = []
        self.measured: list[int] = []
        self._engines: dict[int, dict[int, Engines]] = {}
        self._expected: dict[int, dict[int, ExpectedSize]] = {}

    def add(self, trace: Trace, storage: Storage, shift: int, died: int | None) -> int:
        """Append a storage of ``trace``, ``shift`` ticks later; return its number."""
        number = len(self.storages)
        self.storages.append(
            Storage(
                number, storage.bytes, storage.cause, storage.born + shift, None if died is None else died + shift,
                None, storage.dtype, storage.shape, storage.device, storage.name, (), storage.low, storage.stream,
                storage.used_on,
            )
        )  # fmt: skip
        if storage.cause == "workspace":
            self._add_workspace(trace, storage.id, number)
        return number

    def free(self, number: int, tick: int) -> None:
        """Set when a storage is freed."""
        self.storages[number] = replace(self.storages[number], died=tick)

    def _add_workspace(self, trace: Trace, old: int, new: int) -> None:
        if id(trace) not in self._engines:
            self._engines[id(trace)] = {engine.storage: engine for engine in trace.engines}
            self._expected[id(trace)] = {size.storage: size for size in trace.expected}
        if (engine := self._engines[id(trace)].get(old)) is not None:
            self.engines.append(replace(engine, storage=new))
        if (size := self._expected[id(trace)].get(old)) is not None:
            self.expected.append(replace(size, storage=new))
        if old in trace.measured:
            self.measured.append(new)


def _steady(trace: Trace, places: Sequence[int]) -> _Steady:
    """Return the second step of a recording, with the inputs at these places among what building leaves."""
    built, start = _built(trace), trace.steps[1]
    inputs = tuple(built[place] for place in places)
    ids = {storage.id for storage in inputs}
    before = [s for s in trace.counted if s.born <= start and s.died is not None and s.died > start and s.id not in ids]
    born = sorted((s for s in trace.counted if s.born > start), key=lambda storage: storage.born)
    keys = _keys_of(trace, before)
    freed = {keys[storage.id]: storage.died for storage in before if storage.died is not None}
    keys |= _keys_of(trace, (storage for storage in born if storage.died is None))
    return _Steady(trace, inputs, tuple(born), keys, freed)


def _keys_of(trace: Trace, storages: Iterable[Storage]) -> dict[int, _Key]:
    """Return what each of the storages that a step keeps is to the next step."""
    counts = Counter[str]()
    keys = dict[int, _Key]()
    for storage in sorted(storages, key=lambda storage: storage.born):
        name = storage.name or ("" if storage.op is None else trace.ops[storage.op].name)
        keys[storage.id] = (name, counts[name])
        counts[name] += 1
    return keys


def _built(trace: Trace) -> list[Storage]:
    """Return the storages that building leaves, in order."""
    start = trace.steps[0]
    left = (s for s in trace.counted if s.born <= start and (s.died is None or s.died > start))
    return sorted(left, key=lambda storage: storage.born)


def _places_of_inputs(traces: Mapping[int, Trace]) -> list[int]:
    """Return which of the storages that building leaves are those of the batch: their bytes differ between lengths.

    Raises:
        InputError: another of them differs, too.
    """
    built = {length: _built(trace) for length, trace in traces.items()}
    if len({len(storages) for storages in built.values()}) > 1:
        raise InputError(
            f"the step is built otherwise at length {min(built)} than at {max(built)}",
            expected="one model for all lengths", do="Give the lengths of one model, or make it the same for all",
        )  # fmt: skip
    rows = list(zip(*built.values(), strict=True))
    places = [place for place, row in enumerate(rows) if len({storage.bytes for storage in row}) > 1]
    for place in places:
        storage = rows[place][0]
        if storage.cause in _OF_THE_MODEL:
            raise InputError(
                f"{storage.name or storage.cause} has another size at length {max(built)} than at {min(built)}",
                expected="one model for all lengths: only its inputs differ",
                do="Make the model for the longest, and give the inputs",
            )
    return places
