"""Sizes that do not come out even: rows that a stride drops, upsampling that does not give them back, crops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.checks.fields.rules import kernel_of
from memplan.checks.fields.tensor_fields import Field, resolved, size_of
from memplan.checks.fields.walk import Followed, follow
from memplan.checks.finding import Finding, Subject, number
from memplan.checks.op_names import base_name
from memplan.trace.records import Form, Op
from memplan.trace.trace import Trace

ID = "uneven-arithmetic"
TITLE = "Strides drop rows and columns, or sizes do not come back"

_MERGING = ("cat", "add", "sub", "mul")


@dataclass(frozen=True, slots=True)
class _Size:
    """A tensor's size along one dimension of the input, and the field of its positions."""

    op: int
    size: int
    field: Field


def find(subject: Subject) -> list[Finding]:
    """Find every op whose stride drops rows that it could read, every upsampling that misses the size it came from, and
    every crop of a path before it meets another."""
    trace, followed = subject.trace, follow(subject.trace)
    dense = any(output.spatial for output in followed.outputs)
    sizes = _sizes(trace, followed)
    found: list[Finding] = []
    for form in trace.forms:
        op = trace.ops[form.op]
        found += [_dropped(op, form, *rows, dense=dense) for rows in _rows_dropped(form, op, sizes)]
        found += [_not_back(op, *missed) for missed in _missed(form, op, sizes)]
        found += _crop(trace, form, op, sizes)
    return _once(found)


def _sizes(trace: Trace, followed: Followed) -> dict[tuple[int, int], list[_Size]]:
    """Return the sizes along dimensions that a kernel slides along, in the input's order, by op and storage."""
    found: dict[tuple[int, int], list[_Size]] = {}
    for form in trace.forms:
        for view, fields in zip(form.writes, followed.results.get(form.op, ()), strict=False):
            spatial = [(size_of(dim), field) for dim in fields for field in resolved(dim)[:1] if field.windowed]
            found[form.op, view.storage] = [_Size(form.op, size, field) for size, field in spatial]
            break
    return found


def _rows_dropped(
    form: Form, op: Op, sizes: dict[tuple[int, int], list[_Size]]
) -> Iterator[tuple[list[int], list[int], list[Field]]]:
    """Yield rows behind the last window, beyond the gap that a stride larger than its kernel leaves anyway."""
    window = kernel_of(base_name(op.name), form)
    if window is None or not form.writes:
        return
    kernel, stride, padding, dilation = window
    count = len(kernel)
    before, after = form.reads[0][1].shape[-count:], form.writes[0].shape[-count:]
    rows: list[int] = []
    for n in range(count):
        reach = (kernel[n] - 1) * dilation[n]
        last = (after[n] - 1) * stride[n] - padding[n] + reach
        rows.append(max(0, before[n] - 1 - last - max(0, stride[n] - reach - 1)))
    after_sizes = sizes.get((form.op, form.writes[0].storage), [])
    if any(rows) and after_sizes:
        yield rows, list(before), [size.field for size in after_sizes]


def _dropped(op: Op, form: Form, rows: list[int], sizes: list[int], fields: list[Field], *, dense: bool) -> Finding:
    stride = [field.stride(2) for field in fields]
    window = kernel_of(base_name(op.name), form)
    assert window is not None, "only windows drop rows"
    pixels = [row * across / step for row, across, step in zip(rows, stride, window[1], strict=False)]
    shown = " x ".join(map(str, sizes))
    message = (
        f"of its {shown} input it never reads the last {' x '.join(map(str, rows))}: its stride does not divide it"
        f"{_in_pixels(pixels)}"
    )
    missing = " x ".join(str(step - row if row else 0) for row, step in zip(rows, window[1], strict=True))
    advice = (
        f"Give inputs that the product of all strides divides, or pad by {missing} before it (ceil_mode=True of a pool "
        "does)",
    )
    details = {"dropped": rows, "size": sizes, "stride": list(window[1]), "pixels": [number(p) for p in pixels]}
    severity = "warning" if dense else "info"
    return Finding(ID, severity, op.layer, op.where, 0, message, advice, {"kind": "dropped rows"} | details)


def _in_pixels(pixels: list[Fraction]) -> str:
    shown = [number(value) for value in pixels]
    return f" ({' x '.join(f'{value:g}' for value in shown)} pixels of the input)"


def _missed(form: Form, op: Op, sizes: dict[tuple[int, int], list[_Size]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield an upsampling that comes back to a stride that there was on the way down, at another size: what it gave,
    what there was. A difference of a whole step or more is the border that unpadded kernels lost, and no arithmetic."""
    if not form.option("transposed", False) or not form.writes:
        return
    own = sizes.get((form.op, form.writes[0].storage), [])
    steps = form.option("stride")
    earlier = [group for (index, _), group in sizes.items() if index < form.op and len(group) == len(own)]
    for group in reversed(earlier):
        if [size.field.stride(2) for size in group] != [size.field.stride(2) for size in own]:
            continue
        if [size.field.source for size in group] != [size.field.source for size in own]:
            continue
        given, there = [size.size for size in own], [size.size for size in group]
        gaps = [abs(a - b) for a, b in zip(given, there, strict=True)]
        if any(gaps) and all(gap < steps[min(n, len(steps) - 1)] for n, gap in enumerate(gaps)):
            yield given, there
        return


def _not_back(op: Op, given: list[int], there: list[int]) -> Finding:
    message = (
        f"it gives {' x '.join(map(str, given))} where there were {' x '.join(map(str, there))} at this stride on the "
        "way down"
    )
    short = [b - a for a, b in zip(given, there, strict=True)]
    advice = (
        f"output_padding={tuple(max(0, gap) for gap in short)}, or output_size=the other's size when it is called, or "
        "inputs that the product of all strides divides",
    )
    details = {"kind": "size not back", "size": given, "expected": there}
    return Finding(ID, "warning", op.layer, op.where, 0, message, advice, details)


def _crop(trace: Trace, form: Form, op: Op, sizes: dict[tuple[int, int], list[_Size]]) -> list[Finding]:
    """Return a crop whose result meets another path, as skip connections of unpadded networks do."""
    if base_name(op.name) not in ("slice", "narrow") or not form.writes or not form.reads:
        return []
    place = int(form.option("dim", 0)) % len(form.writes[0].shape)
    old, new = form.reads[0][1].shape[place], form.writes[0].shape[place]
    group = sizes.get((form.op, form.writes[0].storage), [])
    along = [size for size in group if size.size == new]
    if old <= new or not along or int(form.option("step", 1)) != 1:
        return []
    meets = any(
        later.op > form.op
        and base_name(trace.ops[later.op].name) in _MERGING
        and any(view.storage == form.writes[0].storage and view.shape[place:] == form.writes[0].shape[place:]
                for _, view in later.reads if len(view.shape) > place)
        for later in trace.forms
    )  # fmt: skip
    if not meets:
        return []
    start = int(form.option("start", 0) or 0)
    stride = along[0].field.stride(2)
    pixels = number(start * stride), number((old - new - start) * stride)
    message = (
        f"a crop from {old} to {new} before it meets another path: {pixels[0]:g} pixels of the input before and "
        f"{pixels[1]:g} after are computed, and not used here"
    )
    advice = ("Pad the convolutions of the other path, so that both have one size",)
    uneven = (old - new) % 2 == 1
    details = {"kind": "crop", "size": old, "kept": new, "pixels": pixels, "uneven": uneven}
    return [Finding(ID, "warning" if uneven else "info", op.layer, op.where, 0, message, advice, details)]


def _once(findings: list[Finding]) -> list[Finding]:
    """Keep one finding for each layer and line: of the crops of a line the one that takes most, and name the others."""
    found: dict[tuple[str, str | None, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.layer, finding.where, finding.details["kind"]), []).append(finding)
    return [_with_others(group) if group[0].details["kind"] == "crop" else group[0] for group in found.values()]


def _with_others(crops: list[Finding]) -> Finding:
    ordered = sorted(crops, key=lambda one: (one.details["uneven"], sum(one.details["pixels"])), reverse=True)
    sizes = dict.fromkeys((one.details["size"], one.details["kept"]) for one in ordered)
    others = ", ".join(f"{size} to {kept}" for size, kept in list(sizes)[1:])
    return replace(ordered[0], message=ordered[0].message + (f" (here also from {others})" if others else ""))
