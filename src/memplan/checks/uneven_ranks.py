"""Check: a rank that holds more than the others that train the same, or puts its tensors on another rank's card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan import _torch
from memplan._bytes import format_bytes
from memplan._text import ranks_text
from memplan.checks.finding import Finding, Severity, Subject
from memplan.checks.mended.savings import live_at_peak, matters, peak_of
from memplan.explanation.model import LABELS
from memplan.simulation.odd_ranks import beyond_median, is_odd
from memplan.trace.recording.loads import Elsewhere, loads_elsewhere
from memplan.trace.trace import Trace

ID = "uneven-ranks"
TITLE = "A rank holds more than the others, or puts its tensors on another rank's card"

_ALL = 4
"""Of so many ranks all are recorded; of more the first two and the last."""
_SHARDS = ("weight", "optimizer_state", "parameter_gradient")
_Owner = tuple[str, str, str | None]


def find(subject: Subject) -> list[Finding]:
    """Return findings about loads onto another card and about the rank with the highest peak; [] for a single rank."""
    recorder = subject.recorder
    world = None if recorder is None else recorder.target.world
    if recorder is None or world is None or not subject.trace.groups:
        return []
    own_rank = recorder.target.rank
    traces = {own_rank: subject.trace}
    loads: dict[int, Sequence[Elsewhere]] = {}  # rank -> its loads onto other cards
    ranks = _others(subject.trace, world, own_rank)
    if any("torch.load PUTS" in assumption.text for assumption in subject.trace.assumptions):
        ranks.append(own_rank)  # its trace has such loads, but not their bytes
    for rank in ranks:
        with loads_elsewhere() as elsewhere:
            trace = replace(recorder, target=replace(recorder.target, rank=rank)).record()
        if isinstance(trace, Trace):
            traces[rank] = trace
            if elsewhere:
                loads[rank] = list(elsewhere)
    return [*_elsewhere(loads, world), *_holds_more(traces)]


def _others(trace: Trace, world: int, rank: int) -> list[int]:
    """Return the ranks to compare ``rank`` with: those with the same pipeline stage, all if there is no pipeline.

    With more than `_ALL` such ranks, only the first two and the last. Two ranks train the same stage if a process
    group has both, but no further rank of ``rank``'s pipeline. ``world`` is the number of ranks.
    """
    same_stage = set(range(world))
    for pipeline in (set(group.ranks) for group in trace.groups if group.piped):
        groups = [set(group.ranks) for group in trace.groups if pipeline.intersection(group.ranks) == {rank}]
        same_stage &= {rank}.union(*groups)
    ordered = sorted(same_stage - {rank})
    return ordered if len(same_stage) <= _ALL else sorted({*ordered[:2], ordered[-1]})


def _elsewhere(loads: dict[int, Sequence[Elsewhere]], world: int) -> Iterator[Finding]:
    """Yield a finding about calls of `torch.load` that put tensors on the card of another rank, if there are any.
    ``loads`` has these calls by rank; ``world`` is the number of ranks."""
    if not loads:
        return
    rank, calls = min(loads.items())
    size, first = sum(call.bytes for call in calls), calls[0]
    others = _torch.Rank(0, world).local_world - 1
    message = (
        f"torch.load puts {format_bytes(size)} of rank {rank} on {first.device}, and not on its own "
        f"card: the {others} other ranks of a machine put {format_bytes(others * size)} there, beside a CUDA "
        "context each"
    )
    advice = (
        "Load to the host, torch.load(path, map_location='cpu'), or to the rank's own card, "
        "map_location=f'cuda:{local_rank}'",
    )
    details = {"kind": "elsewhere", "ranks": sorted(loads), "bytes_per_rank": size, "device": str(first.device)}
    yield Finding(
        ID, "warning", layer="", where=first.where, bytes=others * size, message=message, advice=advice, details=details
    )


def _holds_more(traces: dict[int, Trace]) -> Iterator[Finding]:
    """Yield a finding about the rank with the highest peak, if that is much above the lowest."""
    peaks = {rank: peak_of(trace) for rank, trace in traces.items()}
    ordered = sorted(peaks, key=lambda rank: (peaks[rank], -rank))
    least, most = ordered[0], ordered[-1]
    size = peaks[most] - peaks[least]
    if not matters(traces[most], size) or not is_odd(peaks[most], peaks[least]):
        return
    rows = beyond_median({rank: _owners(traces[rank]) for rank in (most, least)})[most]
    (cause, layer, where), _, beyond = rows[0] if rows else (("", "", None), 0, 0)
    uneven = cause in _SHARDS
    severity: Severity = "info" if uneven else "warning"
    place = (f" of {layer}" if layer else "") + (f" at {where}" if where else "")
    lowest = ranks_text([rank for rank in sorted(peaks) if peaks[rank] == peaks[least]])
    message = f"rank {most} holds {format_bytes(size)} more at its peak than {lowest}"
    if beyond > 0:
        message += f": {format_bytes(beyond)} of it are {LABELS.get(cause, cause)}{place}"
    advice = (
        "A weight that the ranks do not divide is sharded unevenly: make its first dimension a multiple of their "
        "number (pad the vocabulary), or shard another one (fully_shard(..., shard_placement_fn=...))"
        if uneven
        else "Free it after its use, or keep it on the host: a full state dict by get_model_state_dict with "
        "StateDictOptions(full_state_dict=True, cpu_offload=True), outputs by .cpu()"
    )
    details = {"kind": "shards" if uneven else "holds", "peaks": {str(rank): peak for rank, peak in peaks.items()}}
    yield Finding(ID, severity, layer, where, size, message, (advice,), details)


def _owners(trace: Trace) -> dict[_Owner, int]:
    """Return the bytes that are live at the peak, by cause, layer and line."""
    sizes: dict[_Owner, int] = {}
    for storage in live_at_peak(trace):
        op = None if storage.op is None else trace.ops[storage.op]
        owner = storage.cause, "" if op is None else op.layer, None if op is None else op.where
        sizes[owner] = sizes.get(owner, 0) + storage.bytes
    return sizes
