"""Check: gradients that several ranks reduce more than once before an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.checks.data_parallel import observed
from memplan.checks.finding import Finding, Subject

ID = "reduced-twice"
TITLE = "Gradients are reduced across the ranks more than once before an update"

_MOST = 0.5
"""Least share of the gradients' bytes that must be reduced again for a finding."""


def find(subject: Subject) -> list[Finding]:
    """Return a finding for each `DistributedDataParallel` whose gradients are reduced again or by micro-batches."""
    return [finding for use in observed(subject) for finding in (*_by_hand(use), *_by_each_pass(use))]


def _by_hand(use: _torch.DataParallelUse) -> Iterator[Finding]:
    """Yield a finding for each line of code that reduces most gradients again by all_reduce."""
    for where, gradients in use.by_hand.items():
        size = sum(use.sizes[gradient] for gradient in gradients)
        if size < _MOST * sum(use.sizes.values()):
            continue
        message = (
            f"{len(gradients)} gradients ({format_bytes(size)}) are reduced by all_reduce after "
            "DistributedDataParallel has averaged them: each step sends them twice, and where they are summed and not "
            "divided, they are as many times too large as there are ranks"
        )
        advice = "Leave the all_reduce of gradients away, or train the module without DistributedDataParallel"
        details = {"kind": "by hand", "gradients": len(gradients), "sent": size}
        yield Finding(ID, "warning", layer="", where=where, bytes=0, message=message, advice=(advice,), details=details)


def _by_each_pass(use: _torch.DataParallelUse) -> Iterator[Finding]:
    """Yield a finding if every micro-batch's backward pass reduces most gradients, instead of only the last one's."""
    size = sum(use.sizes.values())
    times = min((_times_reduced(update, use.sizes, _MOST * size) for update in use.updates), default=0)
    if times < 2:
        return
    message = (
        f"gradients ({format_bytes(size)}) are reduced {times} times before each update, once by each backward pass: "
        "once, by the last, gives the same sums"
    )
    advice = (
        "Run all micro-batches but the last within model.no_sync(), forward pass and backward pass: gradients are "
        "whole on each rank in any case, so that it takes no memory"
    )
    yield Finding(
        ID, "info", layer="", where=use.where, bytes=0, message=message, advice=(advice,),
        details={"kind": "each pass", "times": times, "sent": size},
    )  # fmt: skip


def _times_reduced(reductions: Mapping[int, int], sizes: Mapping[int, int], size: float) -> int:
    """Return how often gradients of at least ``size`` bytes in all are reduced before an update. ``reductions`` maps a
    gradient to the number of its reductions, ``sizes`` to its bytes."""
    for times in sorted(set(reductions.values()), reverse=True):
        if sum(sizes[gradient] for gradient, count in reductions.items() if count >= times) >= size:
            return times
    return 0
