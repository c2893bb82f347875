"""What the missing padding saves, and what it would take instead: recorded wherever that is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from memplan._bytes import format_bytes
from memplan.checks.border_fix import Padding, padded
from memplan.checks.fields.tensors import Fields
from memplan.checks.fields.walk import Followed, Output, follow
from memplan.checks.mending import Remaker
from memplan.checks.mirror import Mirrored, mirrored
from memplan.checks.model import Subject, number
from memplan.planning.plan import Plan, format_seconds
from memplan.simulation.liveness import simulate
from memplan.trace.model import Storage, Trace


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes at the peak: ``saved`` without the padding; ``recorded`` says that the padded model was recorded."""

    saved: int
    recorded: bool
    sentence: str
    """What padding inside of the model takes."""
    mirrored: int | None = None
    """The peak with the input mirror-padded once."""
    details: Mapping[str, Any] = field(default_factory=dict)


def costs(subject: Subject, output: Output, followed: Followed, layers: Sequence[str]) -> Costs | None:
    """What it costs to keep the border that these layers lose; None where nothing can be said."""
    remaker = subject.remaker
    found = _recorded(subject.trace, remaker, output, layers) if remaker is not None else None
    if found is None:
        return _estimated(subject.trace, output, followed)
    if remaker is None:
        return found
    mirror = mirrored(output, followed)
    trace = remaker.record(lambda modules: None, lambda model: Mirrored(model, mirror)) if mirror is not None else None
    if trace is None or mirror is None:
        return found
    peak = simulate(trace).peak_allocated
    whole = [output for output in trace.returned if output.tensors][-1:]
    details = {
        **found.details, "mirror_pad": [list(pair) for pair in mirror.pads], "mirrored_peak": peak,
        "mirror_crop": [list(pair) for pair in mirror.crop], "mirror_reflects": mirror.reflects,
        "mirrored_output": list(whole[0].tensors[0].shape[-len(mirror.pads) :]) if whole else None,
    }  # fmt: skip
    return replace(found, mirrored=peak, details=details)


def _recorded(trace: Trace, remaker: Remaker | None, output: Output, layers: Sequence[str]) -> Costs | None:
    """From a recording of the padded model."""
    if remaker is None:
        return None
    padding = Padding()
    change = padded(layers, padding)
    mended = remaker.record(change)
    before = simulate(trace).peak_allocated
    if mended is None:  # a loss whose targets have the size of the smaller output: model alone, then
        bare = replace(remaker.options, loss=None, targets=())
        plain = remaker.record(lambda modules: None, options=bare)
        mended = remaker.record(change, options=bare)
        if plain is None or mended is None:
            return None
        before = simulate(plain).peak_allocated
    after = simulate(mended).peak_allocated
    details: dict[str, Any] = {"peak": before, "padded_peak": after, "padding": padding.changes}
    whole = [o for o in follow(mended).outputs if o.spatial][:1]
    if whole:
        details["padded_output"] = [size for size, _ in whole[0].spatial]
        details["padded_lost"] = [[number(max(Fraction(0), s)) for s in f.lost(size)] for size, f in whole[0].spatial]
    text = f"{format_bytes(after - before)} more at the peak" if after > before else "no byte more at the peak"
    planned = remaker.planned(change, before) if after > before else None
    if isinstance(planned, Plan):
        share = f" ({100 * planned.seconds / planned.step_seconds:.1f} % of the step)" if planned.step_seconds else ""
        text += f", or none with a plan that adds an estimated {format_seconds(planned.seconds)}{share}, bit for bit "
        text += "the same result"
        details["plan_seconds"], details["plan_peak"] = planned.seconds, planned.peak
    elif planned is not None and planned < after:
        text += f", of which an exact plan takes back {format_bytes(after - planned)}: {format_bytes(planned)} is the "
        text += "least that the padded step can be planned for"
        details["plan_smallest_budget"] = planned
    return Costs(after - before, True, text, details=details)


def _estimated(trace: Trace, output: Output, followed: Followed) -> Costs:
    """From the step with every tensor as much larger as its lost border would make it.

    Tensors are known by their shape: their gradients, and those of later steps, have it, too.
    """
    growth: dict[tuple[int, ...], float] = {}
    for form in trace.forms:
        for view, fields in zip(form.writes, followed.results.get(form.op, ()), strict=False):
            growth[view.shape] = max(growth.get(view.shape, 1.0), _growth(output, fields))
    storages = tuple(replace(s, bytes=round(s.bytes * _growth_of(s, trace, growth)), low=None) for s in trace.storages)
    before, after = (simulate(one).peak_allocated for one in (trace, replace(trace, storages=storages)))
    text = f"about {format_bytes(after - before)} more at the peak"
    return Costs(after - before, False, text, details={"estimated": True, "peak": before, "padded_peak": after})


_FIXED = ("weight", "buffer", "parameter_gradient", "optimizer_state")


def _growth_of(storage: Storage, trace: Trace, growth: Mapping[tuple[int, ...], float]) -> float:
    """By its shape; of a kernel's own scratch, which has none, as the largest of what its op reads and writes."""
    if storage.cause in _FIXED:
        return 1.0
    if storage.shape or storage.op is None:
        return growth.get(storage.shape, 1.0)
    op = trace.ops[storage.op]
    beside = (*(operand.storage for operand in op.reads), *op.writes)
    return max((growth.get(trace.storages[number].shape, 1.0) for number in beside), default=1.0)


def _growth(output: Output, fields: Fields) -> float:
    """How much larger a tensor would be that had lost nothing of the border so far."""
    return math.prod(
        1 + float(max(Fraction(0), sum(field.lost(size), Fraction(0))) / field.stride(size)) / size
        for size, field in replace(output, fields=fields).spatial
    )
