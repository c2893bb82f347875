"""What a script holds beside its model's step: the loss outside of the model, other models, tensors of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch

from memplan.planning.graph.placement import blocks
from memplan.trace.records import HOST, Storage
from memplan.trace.spec import Spec
from memplan.trace.trace import Trace

_OWNED = ("weight", "buffer", "parameter_gradient", "optimizer_state")


def held_beside(trace: Trace, kind: str, parts: Iterable[str], inputs: Iterable[Spec], *, updates: bool) -> int:
    """Return the most bytes held at any moment of a script's steps that a plan of its model does not count.

    A plan counts the model's weights, its layers' tensors, the call's inputs and, with an optimizer, state and update.

    Args:
        trace: the script, recorded.
        kind: class of the model.
        parts: paths of the modules below it.
        inputs: tensors that it was called with.
        updates: whether the plan has an optimizer.
    """
    own = _layers(trace, kind, list(parts))
    counted = Counter((one.shape, _name(one.dtype)) for one in inputs)
    first = trace.steps[0]
    changes = list[tuple[int, int, Storage]]()
    for storage in trace.counted:
        over = storage.died is not None and storage.died <= first
        if over or _is_own(storage, trace, own, updates=updates):
            continue
        changes.append((storage.born, 1, storage))
        changes += [] if storage.died is None else [(storage.died, -1, storage)]
    level = most = 0
    alive = Counter[tuple[tuple[int, ...], str]]()
    for _, sign, storage in sorted(changes, key=lambda change: change[:2]):
        key = storage.shape, storage.dtype
        size = storage.bytes if trace.device == HOST else blocks(storage.bytes)
        before = min(alive[key], counted[key])
        alive[key] += sign
        level += sign * size - (min(alive[key], counted[key]) - before) * size
        most = max(most, level)
    return most


def _is_own(storage: Storage, trace: Trace, own: frozenset[str], *, updates: bool) -> bool:
    if storage.cause in _OWNED:
        owner = storage.name.rpartition(".")[0]
        return (storage.cause != "optimizer_state" or updates) and (not storage.name or owner in own)
    if storage.op is None:
        return False
    op = trace.ops[storage.op]
    return op.layer in own or (op.phase == "optimizer" and updates)


def _layers(trace: Trace, kind: str, parts: Collection[str]) -> frozenset[str]:
    """Return the names that a model's layers have in a trace: where there are several models, with its class before."""
    names = {layer.name for layer in trace.layers} | {op.layer for op in trace.ops}
    prefixed = {f"{kind}.{part}" for part in parts}
    return frozenset({kind, *(prefixed if prefixed & names else parts)})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
