"""Who holds the peak: what is alive there, the largest first."""

from __future__ import annotations

from memplan.explanation.layers import origin_word
from memplan.explanation.model import HolderRow
from memplan.simulation.simulate import live_at
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

_Key = tuple[str, str, str | None, str, str, int, tuple[int, ...], str]


def holders_at(trace: Trace, tick: int) -> tuple[HolderRow, ...]:
    """Return what is alive right after an event, the largest first; storages that are alike share a row."""
    owners = {storage: layer.name for layer in trace.layers for storage in (*layer.weights, *layer.buffers)}
    named = {trace.storages[storage].name: layer for storage, layer in owners.items()}
    made = {layer.name: layer.made for layer in trace.layers}
    found: dict[_Key, list[int]] = {}
    for storage in live_at(trace, tick):
        if storage.bytes:
            found.setdefault(_key(trace, storage, named, made), []).append(storage.bytes)
    rows = [HolderRow(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _key(trace: Trace, storage: Storage, named: dict[str, str], made: dict[str, str | None]) -> _Key:
    op = trace.ops[storage.op] if storage.op is not None else None
    owner = named.get(storage.name, "") if storage.name else ""
    step = sum(start < storage.born for start in trace.steps) - 1
    return (
        storage.name or ("" if op is None else origin_word(op, trace)),
        owner or (op.layer if op is not None else ""),
        (op.where if op is not None else None) or made.get(owner),
        storage.cause,
        "build" if step < 0 else op.phase if op is not None else "forward",
        step,
        storage.shape,
        storage.dtype,
    )
