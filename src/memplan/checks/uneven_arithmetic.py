"""Check: sizes that strides do not divide (rows dropped), upsampling to another size than before, and crops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.checks.fields.op_call import option_at
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
    """Size of a tensor along a spatial dimension, and the receptive field of its positions."""

    size: int
    field: Field

    @property
    def stride(self) -> Fraction:
        """Distance of the receptive fields of the first two positions, in positions of the input: the average over all
        would depend on the size where branches of different strides meet."""
        return self.field.stride(size=2)

    @property
    def grid(self) -> tuple[Fraction, int]:
        """Equal for tensors at the same resolution: the stride, and the number of the input's dimension."""
        return self.stride, self.field.source


def find(subject: Subject) -> list[Finding]:
    """Return findings for strides that leave the last rows of an input unread, for upsampling that does not give back
    the size before the downsampling, and for crops before skip connections."""
    trace, followed = subject.trace, follow(subject.trace)
    dense = any(output.spatial for output in followed.outputs)
    sizes = _sizes(trace, followed)
    findings: list[Finding] = []
    for form in trace.forms:
        op = trace.ops[form.op]
        findings += _dropped_rows(form, op, sizes, dense=dense)
        findings += _missed_size(form, op, sizes)
        findings += _crop(trace, form, op, sizes)
    return _merged(findings)


def _sizes(trace: Trace, followed: Followed) -> dict[int, list[_Size]]:
    """Map the index of each op to the spatial sizes of its first result."""
    sizes: dict[int, list[_Size]] = {}
    for form in trace.forms:
        results = followed.results.get(form.op, ())
        if form.writes and results:
            sizes[form.op] = [
                _Size(size_of(dim), field) for dim in results[0] for field in resolved(dim)[:1] if field.is_spatial
            ]
    return sizes


def _dropped_rows(form: Form, op: Op, sizes: dict[int, list[_Size]], *, dense: bool) -> list[Finding]:
    """Return a finding for the last rows of an input that no window of the kernel reaches.

    A stride larger than the kernel leaves such rows between windows anyway: as many do not count at the end. The
    finding is a warning if the output is ``dense``: has spatial dimensions.
    """
    windows = kernel_of(base_name(op.name), form)
    if windows is None or not form.writes:
        return []
    kernel, stride, padding, dilation = windows
    count = len(kernel)
    before, after = list(form.reads[0][1].shape[-count:]), form.writes[0].shape[-count:]
    rows: list[int] = []
    for n in range(count):
        reach = (kernel[n] - 1) * dilation[n]
        last_read = (after[n] - 1) * stride[n] - padding[n] + reach
        gap = max(0, stride[n] - reach - 1)  # rows between two windows
        rows.append(max(0, before[n] - 1 - last_read - gap))
    results = sizes.get(form.op, [])
    if not any(rows) or not results:
        return []
    # the result's stride, divided by the op's own, is that of the input
    pixels = [number(row * size.stride / step) for row, size, step in zip(rows, results, stride, strict=False)]
    message = (
        f"of its {_by(before)} input it never reads the last {_by(rows)}: its stride does not divide it "
        f"({' x '.join(f'{value:g}' for value in pixels)} pixels of the input)"
    )
    missing = [step - row if row else 0 for row, step in zip(rows, stride, strict=True)]
    advice = (
        f"Give inputs that the product of all strides divides, or pad by {_by(missing)} before it (ceil_mode=True of a "
        "pool does)",
    )
    details = {"kind": "dropped rows", "dropped": rows, "size": before, "stride": list(stride), "pixels": pixels}
    return [
        Finding(
            ID, "warning" if dense else "info", layer=op.layer, where=op.where, bytes=0, message=message, advice=advice,
            details=details,
        )
    ]  # fmt: skip


def _by(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def _missed_size(form: Form, op: Op, sizes: dict[int, list[_Size]]) -> list[Finding]:
    """Return a finding for a transposed convolution whose result misses the size of the last tensor at its resolution.

    A difference of the convolution's stride or more is not reported: it comes from borders that unpadded kernels cut
    off, not from a size that the stride does not divide. ``sizes`` has the spatial sizes of each op's result, by index.
    """
    if not form.option("transposed", False) or not form.writes:
        return []
    result = sizes.get(form.op, [])
    resolution = [size.grid for size in result]
    earlier = [of_op for index, of_op in sizes.items() if index < form.op]
    same_resolution = [of_op for of_op in earlier if [size.grid for size in of_op] == resolution]
    if not same_resolution:
        return []
    actual, expected = [size.size for size in result], [size.size for size in same_resolution[-1]]
    missing = [b - a for a, b in zip(actual, expected, strict=True)]
    strides = form.option("stride")
    if not any(missing) or any(abs(gap) >= option_at(strides, n) for n, gap in enumerate(missing)):
        return []
    message = f"it gives {_by(actual)} where there were {_by(expected)} at this stride on the way down"
    advice = (
        f"output_padding={tuple(max(0, gap) for gap in missing)}, or output_size=the other's size when it is called, "
        "or inputs that the product of all strides divides",
    )
    details = {"kind": "size not back", "size": actual, "expected": expected}
    return [
        Finding(ID, "warning", layer=op.layer, where=op.where, bytes=0, message=message, advice=advice, details=details)
    ]


def _crop(trace: Trace, form: Form, op: Op, sizes: dict[int, list[_Size]]) -> list[Finding]:
    """Return a finding for a crop whose result is merged with another path, as in networks without padding. ``sizes``
    has the spatial sizes of each op's result, by index."""
    if base_name(op.name) not in ("slice", "narrow") or not form.writes or not form.reads:
        return []
    result = form.writes[0]
    dim = int(form.option("dim", 0)) % len(result.shape)
    old, new = form.reads[0][1].shape[dim], result.shape[dim]
    cropped_sizes = [size for size in sizes.get(form.op, []) if size.size == new]
    if old <= new or not cropped_sizes or int(form.option("step", 1)) != 1:
        return []
    merging = (f for f in trace.forms if f.op > form.op and base_name(trace.ops[f.op].name) in _MERGING)
    operands = [view for later in merging for _, view in later.reads if len(view.shape) > dim]
    if not any(view.storage == result.storage and view.shape[dim:] == result.shape[dim:] for view in operands):
        return []
    start = int(form.option("start", 0) or 0)
    stride = cropped_sizes[0].stride
    pixels = number(start * stride), number((old - new - start) * stride)
    message = (
        f"a crop from {old} to {new} before it meets another path: {pixels[0]:g} pixels of the input before and "
        f"{pixels[1]:g} after are computed, and not used here"
    )
    advice = ("Pad the convolutions of the other path, so that both have one size",)
    uneven = (old - new) % 2 == 1
    details = {"kind": "crop", "size": old, "kept": new, "pixels": pixels, "uneven": uneven}
    return [
        Finding(
            ID, "warning" if uneven else "info", layer=op.layer, where=op.where, bytes=0, message=message,
            advice=advice, details=details,
        )
    ]  # fmt: skip


def _merged(findings: list[Finding]) -> list[Finding]:
    """Return a single finding for each kind, layer and line: of crops the largest, whose message lists the others."""
    groups: dict[tuple[str, str | None, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.layer, finding.where, finding.details["kind"]), []).append(finding)
    return [_merged_crops(group) if group[0].details["kind"] == "crop" else group[0] for group in groups.values()]


def _merged_crops(crops: list[Finding]) -> Finding:
    """Return the finding about the largest crop of a line, with the sizes of the line's other crops in its message."""
    ordered = sorted(crops, key=lambda crop: (crop.details["uneven"], sum(crop.details["pixels"])), reverse=True)
    sizes = dict.fromkeys((crop.details["size"], crop.details["kept"]) for crop in ordered)
    others = ", ".join(f"{old} to {new}" for old, new in list(sizes)[1:])
    return replace(ordered[0], message=ordered[0].message + (f" (here also from {others})" if others else ""))
