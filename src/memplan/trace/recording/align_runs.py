"""Matches the profiled calls of two runs of a step: under a dispatch mode, and without."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from memplan import _torch

_ROOT, _MERGED = -1, -2
_MAX_EDITS = 1000
"""Sequences that differ in more items than this are matched at their common beginning and end only."""


def without_mode(profile: _torch.Profile) -> _torch.Profile:
    """Return the profile of a run under a mode as it would be without the mode.

    An op under the mode is called twice, by the step and then by the mode: these are merged.
    """
    merged = list(range(len(profile.calls)))
    calls = list(profile.calls)
    for number, call in enumerate(profile.calls):
        parent = merged[call.parent] if call.parent >= 0 else _ROOT
        calls[number] = call._replace(parent=parent)
        # the mode may call the in-place variant
        if call.at_mark and parent != _ROOT and call.name.rstrip("_") == calls[parent].name.rstrip("_"):
            merged[number] = parent
            calls[parent] = calls[parent]._replace(name=call.name, mark=call.mark, at_mark=True)
            calls[number] = call._replace(parent=_MERGED)
    events = [event._replace(call=merged[event.call] if event.call >= 0 else _ROOT) for event in profile.events]
    return _torch.Profile(events, calls, profile.ranges)


def matched_calls(first: Sequence[_torch.Call], second: Sequence[_torch.Call]) -> dict[int, int]:
    """Return call of the first run -> call of the second. Children of matched calls match by name, in order."""
    children_of_first, children_of_second = _children(first), _children(second)
    matched = {_ROOT: _ROOT}
    stack = [(_ROOT, _ROOT)]
    while stack:
        parent, other_parent = stack.pop()
        children, others = children_of_first[parent], children_of_second[other_parent]
        names = [first[call].name for call in children], [second[call].name for call in others]
        pairs = [(children[i], others[j]) for i, j in aligned(*names)]
        matched.update(pairs)
        stack.extend(pairs)
    return matched


def _children(calls: Sequence[_torch.Call]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {number: [] for number in range(_ROOT, len(calls))}
    for number, call in enumerate(calls):
        if call.parent != _MERGED:
            children[call.parent].append(number)
    return children


def aligned(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence, by Myers' "An O(ND) difference algorithm" (1986)."""
    low = _common_prefix(first, second)
    high = _common_prefix(first[low:][::-1], second[low:][::-1])
    head = [(i, i) for i in range(low)]
    tail = [(len(first) - i, len(second) - i) for i in range(high, 0, -1)]
    inner = _aligned(first[low : len(first) - high], second[low : len(second) - high])
    return [*head, *((low + i, low + j) for i, j in inner), *tail]


def _common_prefix(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _aligned(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    if not first or not second:
        return []
    zero = _MAX_EDITS + 1
    reach = array("i", [0] * (2 * zero + 1))
    history: list[array[int]] = []
    for edits in range(min(len(first) + len(second), _MAX_EDITS) + 1):
        history.append(reach[zero - edits - 1 : zero + edits + 2])
        for k in range(-edits, edits + 1, 2):
            x = reach[zero + k + 1] if _steps_down(reach, zero, k, edits) else reach[zero + k - 1] + 1
            while x < len(first) and x - k < len(second) and first[x] == second[x - k]:
                x += 1
            reach[zero + k] = x
            if x >= len(first) and x - k >= len(second):
                return _backtracked(history, len(first), len(second))
    return []


def _steps_down(reach: array[int], zero: int, k: int, edits: int) -> bool:
    """Return whether the furthest path to diagonal ``k`` ends by skipping an item of the second sequence."""
    return k == -edits or (k != edits and reach[zero + k - 1] < reach[zero + k + 1])


def _backtracked(history: Sequence[array[int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        reach, zero, k = history[edits], edits + 1, x - y
        before = k + 1 if _steps_down(reach, zero, k, edits) else k - 1
        start_x = reach[zero + before] if edits else 0
        start_y = start_x - before if edits else 0
        while x > start_x and y > start_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start_x, start_y
    return pairs[::-1]
