"""Check: tensors outside of any graph that each step leaves allocated, as lists of outputs or reference cycles do."""

from __future__ import annotations

from collections.abc import Sequence

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.growth import HELD_FOR_GOOD, growth, ticks_of_step
from memplan.checks.mended.savings import matters, rows_of
from memplan.trace.records import HOST, Storage
from memplan.trace.trace import Trace

ID = "left-behind"
TITLE = "Each step leaves tensors behind that no graph holds"


def find(subject: Subject) -> list[Finding]:
    """Return a finding for tensors that a step never frees, and one for tensors in reference cycles."""
    return [*_never_freed(subject.trace), *_cycles(subject.trace)]


def _never_freed(trace: Trace) -> list[Finding]:
    """Return a finding for tensors outside of any graph that every step leaves allocated for good."""
    leaked = growth(trace, graph=False)
    size = leaked.bytes
    if not matters(trace, size):
        return []
    advice = (
        "Keep of them only what is needed later (a number, a mean), or write them to a file"
        if trace.device == HOST
        else "Move them to the host as they come: outputs.append(output.cpu())"
    )
    message = (
        f"every step leaves {format_bytes(size)} of tensors behind, as a list of outputs, torch.cat onto earlier ones "
        "or the features of a hook does; no graph holds them, so detach() would free nothing"
    )
    sizes = leaked.bytes_per_step
    return [_finding(trace, leaked.storages, size, message, advice, "kept", sizes)]


def _cycles(trace: Trace) -> list[Finding]:
    """Return a finding for tensors that only garbage collection frees, as the collector runs at a step's end."""
    if len(trace.collected) != len(trace.steps) + 1:  # the ticks of collections: before the first step, after each
        return []
    by_step: list[list[Storage]] = []
    for step, collected in enumerate(trace.collected[1:]):
        begin, end = ticks_of_step(trace, step)
        by_step.append([
            s for s in trace.counted
            if s.died is not None and begin < s.born and collected < s.died <= end
            and s.op is not None and s.cause not in HELD_FOR_GOOD
        ])  # fmt: skip
    sizes = [sum(storage.bytes for storage in storages) for storages in by_step]
    size = min(sizes, default=0)
    if not matters(trace, size):
        return []
    reentrant = any(backward.nested for backward in trace.passes)
    message = (
        f"every step leaves {format_bytes(size)} in reference cycles, which live on until Python's collector runs: "
        "each step before that adds as much, above the predicted peak"
    )
    advice = (
        "Call checkpoint(..., use_reentrant=False): the reentrant one can close a cycle around what it is given"
        if reentrant
        else "Break the cycle (an object that refers to itself through a closure, a hook or its graph; weakref helps), "
        "or call gc.collect() every few steps"
    )
    return [_finding(trace, by_step[0], size, message, advice, "cycles", sizes)]


def _finding(
    trace: Trace, storages: Sequence[Storage], size: int, message: str, advice: str, kind: str, sizes: Sequence[int]
) -> Finding:
    """Return the finding about storages that each step leaves behind: ``size`` bytes, ``sizes`` by step."""
    rows = rows_of(trace, storages)
    details = {"kind": kind, "bytes_per_step": list(sizes), "layers": rows}
    return Finding(ID, "warning", rows[0]["layer"], rows[0]["where"], size, message, (advice,), details)
