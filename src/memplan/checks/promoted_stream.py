"""Check: activations of a half-precision model in float32, because some weights or buffers are stored in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import Change, StepRecorder, module_at
from memplan.checks.mended.growth import HELD_FOR_GOOD
from memplan.checks.mended.savings import live_at_peak, matters, peak_of, rows_of
from memplan.checks.op_names import base_name
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "promoted-stream"
TITLE = "Weights in float32 promote the activations of a half-precision model"

_CAST = "_to_copy"
_HALF = ("bfloat16", "float16")
_OWN = ("weight", "buffer")


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all weights and buffers in float32 whose ops have results in float32."""
    trace = subject.trace
    promoting = _promoting(trace)
    dtype = _half_dtype(trace, promoting)
    if subject.recorder is None or dtype is None:
        return []
    lowered, mended = _recorded_in_half(subject.recorder, trace, promoting, dtype)
    if mended is None:
        return []
    size = peak_of(trace) - peak_of(mended)
    if not matters(trace, min(size, _activations(trace) - _activations(mended))):
        return []
    op_of_result = {op.writes[0]: op.index for number in reversed(lowered) for op in promoting[number]}
    rows = rows_of(trace, [trace.storages[number] for number in op_of_result], op_of_result)
    kept = sum(trace.storages[number].bytes for number in lowered)
    message = (
        f"{len(lowered)} weights and buffers are in float32 in a model that computes in {dtype}, and so are the "
        f"results of their layers and what is added to these: {format_bytes(size)} more at the peak than with all in "
        f"{dtype}, {format_bytes(kept // 2)} of it in the weights themselves"
    )
    advice = (
        f"Keep norms, embeddings and the head in {dtype}, too (model.to(torch.{dtype}); norms compute in float32 "
        "inside anyway): peft's prepare_model_for_kbit_training casts them to float32",
        f"Or cast what such a layer returns back to {dtype}, where its weights have to stay in float32",
    )
    names = sorted(trace.storages[number].name for number in lowered)
    details = {"names": names, "dtype": dtype, "stored": kept, "layers": rows}
    return [Finding(ID, "warning", rows[0]["layer"], rows[0]["where"], size, message, advice, details)]


def _promoting(trace: Trace) -> dict[int, list[Op]]:
    """Map the storages of weights and buffers in float32 to the forward ops of the first step that they promote. Those
    read it and allocate a result in float32. Casts do not count, and views allocate nothing."""
    promoting: dict[int, list[Op]] = {}
    for op in trace.ops:
        if op.phase != "forward" or op.step != 0 or base_name(op.name) == _CAST or not op.writes:
            continue
        result = trace.storages[op.writes[0]]
        if result.dtype == "float32" and result.op == op.index:
            for number in {operand.storage for operand in op.reads}:
                storage = trace.storages[number]
                if storage.cause in _OWN and storage.dtype == "float32" and storage.name:
                    promoting.setdefault(number, []).append(op)
    return promoting


def _half_dtype(trace: Trace, promoting: dict[int, list[Op]]) -> str | None:
    """Return the dtype, "bfloat16" or "float16", that a half-precision model computes in; None for other models.

    Of a half-precision model more elements of weights are stored in half precision or quantized than are cast by
    autocast (masters of mixed precision, adapters) or multiplied in float32.
    """
    forward = [op for op in trace.ops if op.phase == "forward" and op.step == 0]
    lower = masters = 0  # elements
    for number in {operand.storage for op in forward for operand in op.reads}:
        storage = trace.storages[number]
        if storage.cause in _OWN and storage.dtype not in ("float32", "float64", "int64", "bool"):
            lower += math.prod(storage.shape)
    cast = {
        op.reads[0].storage
        for op in forward
        if base_name(op.name) == _CAST and op.reads and op.writes and trace.storages[op.writes[0]].dtype in _HALF
    }
    multiplied = {number for number, ops in promoting.items() if _is_multiplied(trace.storages[number], ops)}
    for number in cast | multiplied:
        storage = trace.storages[number]
        if storage.cause == "weight" and storage.dtype == "float32":
            masters += math.prod(storage.shape)
    results = [trace.storages[number] for op in forward for number in op.writes]
    computed = {dtype: sum(storage.bytes for storage in results if storage.dtype == dtype) for dtype in _HALF}
    dtype = max(_HALF, key=lambda name: computed[name])
    return dtype if promoting and lower > masters and computed[dtype] else None


def _is_multiplied(storage: Storage, ops: Iterable[Op]) -> bool:
    """Return whether a weight belongs to a product or a convolution: not to a norm or an embedding, even if a
    head shares that. ``ops`` are the ops that read it."""
    return len(storage.shape) > 1 and not any(base_name(op.name) == "embedding" for op in ops)


def _recorded_in_half(
    recorder: StepRecorder, trace: Trace, promoting: dict[int, list[Op]], dtype: str
) -> tuple[Sequence[int], Trace | None]:
    """Record the step with weights and buffers cast to half precision; return their storages and the trace.

    All of ``promoting`` are cast. If that step fails, those that are multiplied stay: the model may cast the operands
    explicitly. The trace is None if that step fails, too.
    """
    all_numbers = list(promoting)
    others = [number for number in all_numbers if not _is_multiplied(trace.storages[number], promoting[number])]
    for numbers in (all_numbers, others) if len(others) < len(all_numbers) else (all_numbers,):
        mended = recorder.record(_lowered([trace.storages[number].name for number in numbers], dtype))
        if isinstance(mended, Trace):
            return numbers, mended
    return all_numbers, None


def _lowered(names: Iterable[str], dtype: str) -> Change:
    """Return a change that casts the parameters and buffers with these names."""

    def change(modules: dict[str, nn.Module]) -> None:
        for name in names:
            path, _, attribute = name.rpartition(".")
            tensor = getattr(module_at(modules, path), attribute)
            tensor.data = tensor.data.to(getattr(torch, dtype))

    return change


def _activations(trace: Trace) -> int:
    """Return the bytes at the peak without weights, buffers, their gradients, optimizer states and workspaces."""
    return sum(storage.bytes for storage in live_at_peak(trace) if storage.cause not in HELD_FOR_GOOD)
