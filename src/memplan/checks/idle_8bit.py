"""Check: optimizers of 8 bits (or fewer) most of whose states are in 32 bits, or whose states are a small part."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import StepRecorder
from memplan.checks.mended.savings import matters, peak_of, saving
from memplan.trace.records import Storage

ID = "idle-8bit"
TITLE = "An 8-bit optimizer has no effect"

_NARROW = re.compile(r"u?int8|float8_\w+|float4_\w+")
_BY_NAME = re.compile(r"(8|4)_?bit|fp(8|4)", re.IGNORECASE)
_BLOCK = 256
"""Elements of a state for each scale of four bytes: bitsandbytes, torchao."""
_SMALLEST = 4096
"""Elements below which both libraries keep a state in 32 bits."""


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about the states of all optimizers of a step."""
    trace = subject.trace
    states = [s for s in trace.counted if s.cause == "optimizer_state" and s.died is None]
    weight_shapes = {trace.storages[number].shape for number in trace.optimized}
    narrow = [state for state in states if _NARROW.fullmatch(state.dtype)]
    wide = [s for s in states if s not in narrow and math.prod(s.shape) > 1 and s.shape in weight_shapes]
    if not narrow:  # an 8-bit optimizer may still have left all of its states in 32 bits
        recorder = subject.recorder
        if recorder is None or not _are_left_out(wide) or not _is_8bit_by_name(recorder):
            return []
    size = saving(trace, {state.id: replace(state, bytes=_in_8_bits(state)) for state in wide})
    narrow_bytes, wide_bytes = sum(state.bytes for state in narrow), sum(state.bytes for state in wide)
    details = {
        "narrow": narrow_bytes, "wide": wide_bytes, "tensors": len(wide),
        "small": sum(math.prod(state.shape) < _SMALLEST for state in wide),
    }  # fmt: skip
    if wide_bytes > narrow_bytes and matters(trace, size):
        message = (
            f"an optimizer of 8 bits keeps {format_bytes(wide_bytes)} of its states in {wide[0].dtype} and "
            f"{format_bytes(narrow_bytes)} in 8 bits: with all in 8 bits, the step takes {format_bytes(size)} less at "
            f"the peak ({details['small']} of {len(wide)} such states have fewer than {_SMALLEST} elements)"
        )
        advice = (
            "Let it quantize smaller tensors (min_8bit_size= of bitsandbytes' optimizers), or train fewer and larger "
            "ones: bitsandbytes and torchao leave tensors below 4096 elements in 32 bits, torchao also those that are "
            "no multiple of its block",
            "Take back what keeps larger ones in 32 bits: bitsandbytes' StableEmbedding, and "
            "GlobalOptimManager.override_config(..., optim_bits=32)",
        )
        return [
            Finding(ID, "warning", layer="", where=None, bytes=size, message=message, advice=advice, details=details)
        ]
    in_32_bits = {state.id: replace(state, bytes=4 * math.prod(state.shape)) for state in narrow}  # 4 bytes an element
    larger = replace(trace, storages=tuple(in_32_bits.get(s.id, s) for s in trace.storages))
    spared = peak_of(larger) - peak_of(trace)
    if matters(trace, spared):
        return []
    message = (
        f"an optimizer of 8 bits holds {format_bytes(narrow_bytes + wide_bytes)} of states, and with all of them in 32 "
        f"bits the step would take {format_bytes(spared)} more at its peak of {format_bytes(peak_of(trace))}"
    )
    advice = ("Take the optimizer of 32 bits: it is exact, and the memory is elsewhere (memplan explain says where)",)
    return [Finding(ID, "info", layer="", where=None, bytes=0, message=message, advice=advice, details=details)]


def _in_8_bits(state: Storage) -> int:
    """Return the bytes of a state as 8-bit codes with a scale in float32 for each block of `_BLOCK` elements."""
    elements = math.prod(state.shape)
    return elements + 4 * math.ceil(elements / _BLOCK)


def _are_left_out(states: Sequence[Storage]) -> bool:
    """Return whether an 8-bit optimizer may leave all these states in 32 bits: each is small, or no whole blocks."""
    sizes = [math.prod(state.shape) for state in states]
    return bool(sizes) and all(size < _SMALLEST or size % _BLOCK for size in sizes)


def _is_8bit_by_name(recorder: StepRecorder) -> bool:
    """Record the step, and return whether an optimizer or a base class of it has 8 or 4 bits in its name."""
    names = set[str]()

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        names.update(kind.__name__ for kind in type(optimizer).__mro__)

    hook = register_optimizer_step_pre_hook(note)
    try:
        recorder.record()
    finally:
        hook.remove()
    return any(map(_BY_NAME.search, names))
