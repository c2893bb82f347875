"""Check: a loss that keeps several copies of vocabulary-sized logits, which a chunked loss would not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, saving
from memplan.checks.op_names import base_name
from memplan.simulation.simulate import live_at, simulate
from memplan.trace.record import record
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "loss-memory"
TITLE = "The loss holds logits of vocabulary size several times"

_CLASSES = 4096
"""Smallest number of classes that counts as a vocabulary."""
_PRODUCTS = ("mm", "addmm", "linear")
_STATE = ("weight", "buffer", "parameter_gradient", "optimizer_state")


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, for the largest softmax over a vocabulary."""
    trace = subject.trace
    softmaxes = [op for op in trace.ops if op.phase == "forward" and base_name(op.name) == "_log_softmax" and op.writes]
    wide = [op for op in softmaxes if trace.storages[op.writes[0]].shape[-1:] >= (_CLASSES,)]
    if not wide:
        return []
    return _finding(trace, max(wide, key=lambda op: (trace.storages[op.writes[0]].bytes, -op.index)))


def _finding(trace: Trace, op: Op) -> list[Finding]:
    """Return a finding if the copies of the logits take 5 % of the peak more than a loss in chunks would. ``op`` is the
    log_softmax of the logits."""
    logits = trace.storages[op.writes[0]]
    classes = logits.shape[-1]
    rows = logits.bytes // max(1, getattr(torch, logits.dtype).itemsize * classes)
    copies = [s for s in trace.counted if s.op is not None and _is_copy(s, rows, classes)]
    width = _hidden_size(trace, classes)
    chunk = chunked_peak(rows, classes, width, logits.dtype) if width is not None else None
    added = [] if chunk is None else _chunks(trace, [s for s in copies if s.died is not None], chunk)
    size = saving(trace, {storage.id: None for storage in copies}, added)
    if not matters(trace, size, share=0.05):
        return []
    at_once = max(sum(c in live for c in copies) for live in (live_at(trace, copy.born) for copy in copies))
    dtypes = sorted({storage.dtype for storage in copies})
    doubt = ""
    if chunk is None:
        doubt = "no linear layer makes them, or this torch has no loss in chunks: its chunks are not counted"
    elif len(dtypes) > 1:
        doubt = "in mixed precision the chunks' own copies are not counted"
    message = (
        f"logits of {rows} x {classes} are held {at_once} times at once ({', '.join(dtypes)}, "
        f"{format_bytes(logits.bytes)} each): the loss costs {'about ' if doubt else ''}{format_bytes(size)} at the "
        f"peak{f' (an estimate: {doubt})' if doubt else ''}"
    )
    chunk_bytes = f" (its chunks take {format_bytes(chunk)})" if chunk is not None else ""
    advice = (
        "torch.nn.functional.linear_cross_entropy(hidden, weight, target, options=LinearCrossEntropyOptions()) never "
        f"makes them whole{chunk_bytes}; on a GPU Liger's fused linear cross-entropy does the same"
        if hasattr(F, "linear_cross_entropy")
        else "Liger's fused linear cross-entropy never makes them whole; or call head and loss on chunks of the rows",
    )
    details = {"rows": rows, "classes": classes, "copies": at_once, "each": logits.bytes, "chunked": chunk,
               "estimate": bool(doubt)}  # fmt: skip
    return [Finding(ID, "warning", op.layer, op.where, size, message, advice, details)]


def _is_copy(storage: Storage, rows: int, classes: int) -> bool:
    """Return whether a storage is an activation with an element for each row (nearly all rows) and class."""
    if storage.shape[-1:] != (classes,) or storage.cause in _STATE:
        return False
    elements = storage.bytes // max(1, getattr(torch, storage.dtype).itemsize)
    return elements >= rows * classes * 0.9


def _hidden_size(trace: Trace, classes: int) -> int | None:
    """Return the input size of the linear layer that computes the logits; None if there is no such layer."""
    for op in trace.ops:
        if op.phase != "forward" or base_name(op.name) not in _PRODUCTS or not op.writes:
            continue
        result = trace.storages[op.writes[0]]
        if result.shape[-1:] == (classes,) and result.bytes:
            for shape in (trace.storages[operand.storage].shape for operand in op.reads):
                widths = [size for size in shape if size != classes]
                if len(shape) == 2 and classes in shape and widths:
                    return widths[0]
    return None


def chunked_peak(rows: int, classes: int, width: int, dtype: str) -> int | None:
    """Return bytes that torch's chunked loss allocates beyond its inputs and their gradients.

    None if this version of torch has no such loss. ``rows`` and ``classes`` are those of the logits, ``width`` that of
    the hidden states; ``dtype`` is of both.
    """
    if not hasattr(F, "linear_cross_entropy"):
        return None
    torch_dtype = getattr(torch, dtype)

    def build() -> Callable[[], Any]:
        weight = nn.Parameter(torch.zeros(classes, width, dtype=torch_dtype))
        hidden = torch.zeros(rows, width, dtype=torch_dtype, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.long)

        def step() -> None:
            weight.grad = hidden.grad = None
            F.linear_cross_entropy(hidden, weight, target, options=nn.LinearCrossEntropyOptions()).backward()

        return step

    peak = simulate(record(build, device="cpu", steps=1)).peak_allocated
    targets = torch.long.itemsize * rows
    inputs_and_gradients = 2 * torch_dtype.itemsize * width * (rows + classes) + targets
    return max(0, peak - inputs_and_gradients)


def _chunks(trace: Trace, copies: list[Storage], size: int) -> list[Storage]:
    """Return a storage of ``size`` bytes for each step with copies of the logits, live as long as any of them."""
    chunks: list[Storage] = []
    for begin, end in itertools.pairwise([*trace.steps, trace.end + 1]):
        in_step = [storage for storage in copies if begin < storage.born <= end]
        if in_step:
            died = max(storage.died or end for storage in in_step)
            chunks.append(replace(in_step[0], bytes=size, low=None, born=min(s.born for s in in_step), died=died))
    return chunks
