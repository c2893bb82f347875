"""Unpadded kernels eat the border of the input: how many pixels on each side, by layer, and what padding would take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memplan._bytes import format_bytes
from memplan.checks.borders.border_costs import Costs, costs
from memplan.checks.fields.tensor_fields import Field, Loss
from memplan.checks.fields.walk import Followed, Output, follow
from memplan.checks.finding import Finding, Subject, number
from memplan.checks.op_names import base_name
from memplan.trace.trace import Trace

ID = "border-erosion"
TITLE = "Unpadded kernels lose the border of the input"

Sides = tuple[Fraction, Fraction]


@dataclass(frozen=True, slots=True)
class Row:
    """What the calls of one layer lose, per dimension and side, in positions of the input; negative: give back."""

    layer: str
    where: str | None
    lost: tuple[Sides, ...]

    @property
    def most(self) -> Fraction:
        """Largest of all its sides."""
        return max(abs(side) for sides in self.lost for side in sides)

    @property
    def total(self) -> Fraction:
        """Sum over both sides of all dimensions."""
        return sum((side for sides in self.lost for side in sides), Fraction(0))


def find(subject: Subject) -> list[Finding]:
    """Return a finding for the model's output that loses the most; none where no output loses anything.

    Where the path to the outputs ends on the way, what is lost up to there.
    """
    followed = follow(subject.trace)
    outputs = [output for output in followed.outputs if output.spatial]
    eroding = _eroding(outputs) or _eroding(outputs := [one for one in followed.ended.values() if one.spatial])
    if not eroding:
        return []
    worst = max(eroding, key=lambda output: (_net(output), -outputs.index(output)))
    if max(side for sides in lost(worst) for side in sides) <= subject.context:
        return []
    rows = layer_rows(subject.trace, worst)
    if _net(worst) <= 0:
        return [_shifted(worst, rows)]
    return [_eroded(subject, worst, followed, rows)]


def _eroding(outputs: list[Output]) -> list[Output]:
    return [output for output in outputs if any(max(sides) > 0 for sides in lost(output))]


def lost(output: Output) -> list[Sides]:
    """Return the positions of the input lost before and after, for each spatial dimension; never below 0."""
    return [tuple(max(Fraction(0), side) for side in field.lost(size)) for size, field in output.spatial]  # pyright: ignore[reportReturnType]  # two sides


def _net(output: Output) -> Fraction:
    """Return what is lost at one side and not covered at the other, in the dimension where that is most."""
    return max(sum(field.lost(size), Fraction(0)) for size, field in output.spatial)


def layer_rows(trace: Trace, output: Output) -> list[Row]:
    """Return what each layer takes from the border, in the order of the path that decides the field."""
    spatial = output.spatial
    found: dict[tuple[str, str | None], list[list[Fraction]]] = {}
    for place, (_, field) in enumerate(spatial):
        for loss in chain(field):
            op = trace.ops[loss.op]
            sides = found.setdefault((op.layer, op.where), [[Fraction(0), Fraction(0)] for _ in spatial])
            sides[place][0] += loss.before
            sides[place][1] += loss.after
    rows = [Row(layer, where, tuple((a, b) for a, b in sides)) for (layer, where), sides in found.items()]
    return [row for row in rows if row.most]


def chain(field: Field) -> list[Loss]:
    """Return what each op took, in the order of the path."""
    found: list[Loss] = []
    loss = field.losses
    while loss is not None:
        found.append(loss)
        loss = loss.parent
    return found[::-1]


def touching(output: Output) -> Fraction:
    """Return the share of the outputs whose field reaches beyond the input's border, where padding stands."""
    inside = Fraction(1)
    for size, field in output.spatial:
        clean = sum(
            all(span.low(place) >= 0 and span.high(place) < field.extent for span in field.spans)
            for place in range(size)
        )
        inside *= Fraction(clean, size)
    return 1 - inside


def _eroded(subject: Subject, output: Output, followed: Followed, rows: list[Row]) -> Finding:
    sides, spatial = lost(output), output.spatial
    left = [max(0.0, 1 - float(sum(pair)) / field.extent) for pair, (_, field) in zip(sides, spatial, strict=True)]
    share = 1 - math.prod(left)
    eaters = sorted((row for row in rows if row.total > 0), key=lambda row: -row.total)
    found = costs(subject, output, followed, [row.layer for row in eaters])
    context = f" (the input brings {subject.context} as context)" if subject.context else ""
    ends = {"from": _place(subject, _beginning(output, followed)), "to": _place(subject, _end(output, followed))}
    message = (
        f"{_extent(ends)} without its border: {_sides(sides)} are lost{context}, {_percent(share)} of the "
        f"field of view, by {_layers(eaters)}"
    )
    main = eaters[0] if eaters else Row("", None, ())
    details = _details(output, rows) | {"share": share} | ends | dict(found.details)
    return Finding(
        ID, "warning", main.layer, main.where, found.saved or 0, message + _saved(found), tuple(_advice(sides, found)),
        details,
    )  # fmt: skip


def _beginning(output: Output, followed: Followed) -> int | None:
    """Return the op that made what the output is followed from; None where that is an input of the step."""
    return followed.sources[output.spatial[0][1].source].op


def _end(output: Output, followed: Followed) -> int | None:
    """Return the op at which the path ends; None where it ends with an output of the model."""
    return next((op for op, one in followed.ended.items() if one is output), None)


def _place(subject: Subject, index: int | None) -> dict[str, Any] | None:
    if index is None:
        return None
    op = subject.trace.ops[index]
    return {"op": base_name(op.name), "layer": op.layer, "where": op.where}


def _extent(ends: dict[str, dict[str, Any] | None]) -> str:
    """Say what covers what: the output the input, as far as the path between them can be followed."""
    begin, end = ends["from"], ends["to"]
    seen = "the input" if begin is None else f"what {_named(begin)} makes"
    by = "the output" if end is None else f"what goes into {_named(end)}"
    reason = "" if begin is None and end is None else " (the path ends there: the positions it reads depend on values)"
    return f"{by} covers {seen}{reason}"


def _named(place: dict[str, Any]) -> str:
    return f"{place['op']} in {place['layer']}" if place["layer"] else place["op"]


def _shifted(output: Output, rows: list[Row]) -> Finding:
    """Report outputs whose fields lie to one side, with nothing lost in sum, as after a strided convolution of odd
    kernel."""
    sides = lost(output)
    main = max(rows, key=lambda row: row.most, default=Row("", None, ()))
    message = (
        f"the outputs' fields lie to one side of where the outputs stand: {_sides(sides)} are covered less, as many "
        "more on the other side; no border is lost in sum"
    )
    details = _details(output, rows) | {"share": 0}
    advice = (
        "Nothing, where causality or a stride makes it so on purpose; else choose kernels as even as their strides, "
        "or align_corners and output_padding so that way down and way up match",
    )
    return Finding(ID, "info", main.layer, main.where, 0, message, advice, details)


def _details(output: Output, rows: list[Row]) -> dict[str, Any]:
    spatial = output.spatial
    return {
        "lost": [(number(a), number(b)) for a, b in lost(output)],
        "stride": [number(abs(field.stride(size))) for size, field in spatial],
        "input": [field.extent for _, field in spatial],
        "output": [size for size, _ in spatial],
        "receptive_field": [field.width for _, field in spatial],
        "effective_receptive_field": [_effective(field) for _, field in spatial],
        "touching_padding": round(float(touching(output)), 4),
        "layers": [
            {"layer": row.layer, "where": row.where, "lost": [(number(a), number(b)) for a, b in row.lost]}
            for row in rows
        ],
    }  # fmt: skip


def _effective(field: Field) -> float:
    """Return the pixels within two deviations of the centre, where Luo et al. 2016 (arXiv:1701.04128) find 95 % of what
    an output answers to; for equal weights."""
    return round(min(float(field.width), 4 * math.sqrt(field.variance) + 1), 1)


def _saved(found: Costs) -> str:
    if found.saved is None:
        return ""
    return f"; it saves {format_bytes(found.saved)}" if found.saved > 0 else "; it saves no memory"


def _advice(sides: list[Sides], found: Costs) -> list[str]:
    inside = f"pad inside of the model (--fix prints the change, where it can): {found.sentence}"
    pads = found.details.get("mirror_pad") or [[math.ceil(a), math.ceil(b)] for a, b in sides]
    mirror = f"or mirror-pad the input once, by {_widths(pads)}: the interior does not change"
    if found.mirrored is not None:
        mirror += f"; the peak is {format_bytes(found.mirrored)} then"
    most = math.ceil(max(side for pair in sides for side in pair))
    tile = f"or cut tiles that overlap by {most} pixels on each side, and say so: --context {most}"
    return [inside, mirror, tile]


def _sides(sides: list[Sides]) -> str:
    """Write ``50 pixels on each side``, or for each dimension."""
    if len({side for pair in sides for side in pair}) == 1:
        value = number(sides[0][0])
        return f"{value:g} pixel{'' if value == 1 else 's'} on each side, {2 * value:g} per dimension"
    return _widths(sides)


def _widths(pairs: Sequence[Sequence[Fraction | int]]) -> str:
    """Write the widths in front and behind, of all dimensions where they are alike, else of each."""
    found = [(f"{number(a):g}", f"{number(b):g}") for a, b in pairs]
    if all(a == b for a, b in found):
        return f"{' x '.join(a for a, _ in found) if len(set(found)) > 1 else found[0][0]} pixels on each side"
    if len(set(found)) == 1:
        return f"{found[0][0]} pixels before and {found[0][1]} after in each dimension"
    return f"{' x '.join(a if a == b else f'{a} before and {b} after' for a, b in found)} pixels"


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.0f} %" if value >= 1 else f"{value:.1g} %"


def _layers(rows: list[Row]) -> str:
    if not rows:
        return "layers that cannot be named"
    first = f"{rows[0].layer or 'an op outside of layers'} ({_each(rows[0])})"
    return first if len(rows) == 1 else f"{len(rows)} layers, most by {first}"


def _each(row: Row) -> str:
    pairs = {tuple(number(side) for side in sides) for sides in row.lost}
    return " x ".join(f"{a:g}" if a == b else f"{a:g}+{b:g}" for a, b in sorted(pairs, reverse=True))
