"""Check: gradients that several ranks reduce more than once before an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.checks.data_parallel import observed
from memplan.checks.finding import Finding, Subject

ID = "reduced-twice"
TITLE = "Gradients are reduced across the ranks more than once before an update"

_MOST = 0.5
"""Least share of the gradients' bytes that must be reduced again for a finding."""


def find(subject: Subject) -> list[Finding]:
    """Return a finding for each `DistributedDataParallel` whose gradients are reduced again, by hand or by each
    micro-batch."""
    return [finding for use in observed(subject) for finding in (*_by_hand(use), *_by_each_pass(use))]


def _by_hand(use: _torch.DataParallelUse) -> Iterator[Finding]:
    """Yield a finding for each line of code that reduces most gradients again by all_reduce."""
    for where, keys in use.by_hand.items():
        size = sum(use.sizes[key] for key in keys)
        if size < _MOST * sum(use.sizes.values()):
            continue
        message = (
            f"{len(keys)} gradients ({format_bytes(size)}) are reduced by all_reduce after DistributedDataParallel has "
            "averaged them: each step sends them twice, and where they are summed and not divided, they are as many "
            "times too large as there are ranks"
        )
        advice = "Leave the all_reduce of gradients away, or train the module without DistributedDataParallel"
        details = {"kind": "by hand", "gradients": len(keys), "sent": size}
        yield Finding(ID, "warning", "", where, 0, message, (advice,), details)


def _by_each_pass(use: _torch.DataParallelUse) -> Iterator[Finding]:
    """Yield a finding if every micro-batch's backward pass reduces most gradients, instead of only the last one's."""
    times = _least_often(use.updates, _MOST * sum(use.sizes.values()), use)
    if times < 2:
        return
    size = sum(use.sizes.values())
    message = (
        f"gradients ({format_bytes(size)}) are reduced {times} times before each update, once by each backward pass: "
        "once, by the last, gives the same sums"
    )
    advice = (
        "Run all micro-batches but the last within model.no_sync(), forward pass and backward pass: gradients are "
        "whole on each rank in any case, so that it takes no memory"
    )
    yield Finding(ID, "info", "", use.where, 0, message, (advice,), {"kind": "each pass", "times": times, "sent": size})


def _least_often(updates: Sequence[dict[int, int]], size: float, use: _torch.DataParallelUse) -> int:
    """Return the largest n for which gradients of at least ``size`` bytes are reduced n times before every update.

    0 without updates. ``updates``: for each update, the number of reductions by gradient.
    """
    times: list[int] = []
    for counts in updates:
        descending = sorted(set(counts.values()), reverse=True)
        enough = (n for n in descending if sum(use.sizes[key] for key, count in counts.items() if count >= n) >= size)
        times.append(next(enough, 0))
    return min(times, default=0)
