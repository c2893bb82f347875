"""List the storages live at a tick, such as the peak, with their owners."""

from __future__ import annotations

from memplan.explanation.layers import origin_word
from memplan.explanation.model import OwnerRow
from memplan.simulation.simulate import live_at
from memplan.trace.records import Layer, Storage
from memplan.trace.trace import Trace

_Key = tuple[str, str, str | None, str, str, int, tuple[int, ...], str]


def owners_at(trace: Trace, tick: int) -> tuple[OwnerRow, ...]:
    """Return the owners of the storages live after a tick, the largest first; equal storages share a row."""
    layers = {
        trace.storages[storage].name: layer for layer in trace.layers for storage in (*layer.weights, *layer.buffers)
    }
    root = next((layer for layer in trace.layers if not layer.name), None)
    sizes_by_key: dict[_Key, list[int]] = {}
    for storage in live_at(trace, tick):
        if storage.bytes:
            layer = layers.get(storage.name, root) if storage.name else root
            sizes_by_key.setdefault(_key(trace, storage, layer), []).append(storage.bytes)
    rows = [OwnerRow(*key, len(sizes), sum(sizes)) for key, sizes in sizes_by_key.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _key(trace: Trace, storage: Storage, layer: Layer | None) -> _Key:
    """Return the fields of a storage's `OwnerRow` except count and bytes.

    ``layer``: the layer that owns the parameter or buffer in the storage, or whose gradient it is; else the root.
    """
    step = sum(start < storage.born for start in trace.steps) - 1
    name, layer_name, where, phase = storage.name, layer.name if layer else "", None, "forward"
    if storage.op is not None:
        op = trace.ops[storage.op]
        name, layer_name = name or origin_word(op, trace), layer_name or op.layer
        where, phase = op.where, op.phase
    if layer is not None:
        where = where or layer.made
    if step < 0:
        phase = "build"
    return name, layer_name, where, storage.cause, phase, step, storage.shape, storage.dtype
