"""Matches the profiled calls of two runs of a step, the first under a dispatch mode, the second without."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from memplan import _torch

_ROOT, _MERGED = -1, -2


def without_mode(profile: _torch.Profile) -> _torch.Profile:
    """Return the profile of a run under a dispatch mode with the call tree of a run without the mode.

    Under the mode an op is called twice, by the step and then, within that call, by the mode: the two calls are merged.
    """
    merged = list(range(len(profile.calls)))  # call -> the call that it is merged into, or itself
    calls = list(profile.calls)
    for number, call in enumerate(profile.calls):
        parent = merged[call.parent] if call.parent >= 0 else _ROOT
        calls[number] = call._replace(parent=parent)
        # the mode may call the in-place variant ("add_" within "add")
        if call.at_mark and parent != _ROOT and call.name.rstrip("_") == calls[parent].name.rstrip("_"):
            merged[number] = parent
            calls[parent] = calls[parent]._replace(name=call.name, mark=call.mark, at_mark=True)
            calls[number] = call._replace(parent=_MERGED)
    events = [event._replace(call=merged[event.call] if event.call >= 0 else _ROOT) for event in profile.events]
    return _torch.Profile(events, calls, profile.ranges)


def matched_calls(first: _torch.Profile, second: _torch.Profile) -> dict[int, int]:
    """Match the calls of two runs as trees: children of matched calls match by name, in order.

    Calls that allocate match first: by name and bytes, then by name. Calls without allocations could mislead: a view,
    such as `detach`, is called more often under a mode. And names alone cannot identify tensors that only the first run
    of a process creates.

    Returns call of the first run -> call of the second.
    """
    children_of_first, children_of_second = _children(first.calls), _children(second.calls)
    bytes_in_first, bytes_in_second = _allocated_bytes(first), _allocated_bytes(second)
    matched = {_ROOT: _ROOT}
    stack = [(_ROOT, _ROOT)]
    while stack:
        parent, other_parent = stack.pop()
        children, others = children_of_first[parent], children_of_second[other_parent]
        keys, other_keys = _keys(first, children, bytes_in_first), _keys(second, others, bytes_in_second)
        pairs = [(children[index], others[other]) for index, other in _aligned_in_turn(keys, other_keys)]
        matched.update(pairs)
        stack.extend(pairs)
    return matched


def _allocated_bytes(run: _torch.Profile) -> dict[int, int]:
    """Return call -> bytes of the allocations in it and in the calls within; calls that allocate nothing are absent."""
    allocated: dict[int, int] = {}
    for event in run.events:
        call = event.call
        while event.bytes > 0 and call >= 0:  # no free, and not outside of all calls
            allocated[call] = allocated.get(call, 0) + event.bytes
            call = run.calls[call].parent
    return allocated


def _keys(run: _torch.Profile, calls: Sequence[int], allocated: Mapping[int, int]) -> list[list[Hashable]]:
    """Return the keys of the calls for three rounds of matching, a list with a key for each call: (name, bytes), then
    name, both None for calls without allocations; then the name of any call. ``allocated``: call -> bytes."""
    names: list[Hashable] = [run.calls[call].name for call in calls]
    of_allocating: list[Hashable] = [run.calls[call].name if call in allocated else None for call in calls]
    with_bytes: list[Hashable] = [
        (run.calls[call].name, allocated[call]) if call in allocated else None for call in calls
    ]
    return [with_bytes, of_allocating, names]


def _aligned_in_turn(
    first: Sequence[Sequence[Hashable]], second: Sequence[Sequence[Hashable]]
) -> list[tuple[int, int]]:
    """Align two sequences in several rounds, each with its own keys: by the first keys, then by the next keys between
    matched pairs. Items whose key is None take no part in the round.

    ``first``, ``second``: for each round, the keys of the items. Returns the pairs of indices that match.
    """
    pairs: list[tuple[int, int]] = []
    for keys, others in zip(first, second, strict=True):
        ends = (len(keys), len(others))
        for (index, other), (next_index, next_other) in pairwise([(-1, -1), *pairs, ends]):
            left = [item for item in range(index + 1, next_index) if keys[item] is not None]
            right = [item for item in range(other + 1, next_other) if others[item] is not None]
            matches = aligned([keys[item] for item in left], [others[item] for item in right])
            pairs.extend((left[position], right[other_position]) for position, other_position in matches)
        pairs.sort()
    return pairs


def _children(calls: Sequence[_torch.Call]) -> dict[int, list[int]]:
    """Return call -> the calls directly within it, in order."""
    children: dict[int, list[int]] = {number: [] for number in range(_ROOT, len(calls))}
    for number, call in enumerate(calls):
        if call.parent != _MERGED:
            children[call.parent].append(number)
    return children


def aligned(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Align two sequences: return the index pairs of items that match, in order.

    Most runs are nearly equal, so the common suffix and prefix match at once; between them, difflib decides. The suffix
    matches first, since runs differ at the beginning, where only the first run imports modules, which may create
    tensors.
    """
    suffix = _common_prefix(first[::-1], second[::-1])
    prefix = _common_prefix(first[: len(first) - suffix], second[: len(second) - suffix])
    ends = len(first) - suffix, len(second) - suffix
    differing = SequenceMatcher(None, first[prefix : ends[0]], second[prefix : ends[1]], autojunk=False)
    blocks = [  # (start in the first, start in the second, number of items) of equal runs
        (0, 0, prefix),
        *((prefix + start, prefix + other, size) for start, other, size in differing.get_matching_blocks()),
        (*ends, suffix),
    ]
    return [(start + k, other + k) for start, other, size in blocks for k in range(size)]


def _common_prefix(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return how many of the first items are equal."""
    for length, (item, other) in enumerate(zip(first, second, strict=False)):
        if item != other:
            return length
    return min(len(first), len(second))
