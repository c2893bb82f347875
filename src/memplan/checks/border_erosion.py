"""Check: unpadded kernels lose the border of the input; how many pixels, in which layers, and what padding costs."""

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
class LayerLoss:
    """Input positions that a layer loses, for each dimension and side; negative for a pad, which adds some."""

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
    """Return at most one finding, for the model's output that loses the most border.

    If no output with a known receptive field loses any, outputs are replaced by the last tensors before ops through
    which positions cannot be traced.
    """
    followed = follow(subject.trace)
    outputs = [output for output in followed.outputs if output.spatial]
    eroding = _eroding(outputs)
    if not eroding:
        outputs = [output for output in followed.last_traced.values() if output.spatial]
        eroding = _eroding(outputs)
    if not eroding:
        return []
    worst = max(eroding, key=lambda output: (_net_loss(output), -outputs.index(output)))
    if max(side for sides in border_losses(worst) for side in sides) <= subject.context:
        return []
    layers = layer_losses(subject.trace, worst)
    if _net_loss(worst) <= 0:
        return [_one_sided(worst, layers)]
    return [_erosion(subject, worst, followed, layers)]


def _eroding(outputs: list[Output]) -> list[Output]:
    return [output for output in outputs if any(max(sides) > 0 for sides in border_losses(output))]


def border_losses(output: Output) -> list[Sides]:
    """Return the positions of the input lost before and after, for each spatial dimension; never below 0."""
    return [tuple(max(Fraction(0), side) for side in field.lost(size)) for size, field in output.spatial]  # pyright: ignore[reportReturnType]  # two sides


def _net_loss(output: Output) -> Fraction:
    """Return the positions of the input lost on both sides together, in the dimension that loses most. A gain on one
    side offsets a loss on the other."""
    return max(sum(field.lost(size), Fraction(0)) for size, field in output.spatial)


def layer_losses(trace: Trace, output: Output) -> list[LayerLoss]:
    """Return what each layer loses of the border, in the order in which data passes the layers; none without a loss."""
    spatial = output.spatial
    losses: dict[tuple[str, str | None], list[list[Fraction]]] = {}  # layer and line -> [before, after] by dimension
    for dim, (_, field) in enumerate(spatial):
        for loss in losses_of_ops(field):
            op = trace.ops[loss.op]
            sides = losses.setdefault((op.layer, op.where), [[Fraction(0), Fraction(0)] for _ in spatial])
            sides[dim][0] += loss.before
            sides[dim][1] += loss.after
    layers = [LayerLoss(layer, where, tuple((a, b) for a, b in sides)) for (layer, where), sides in losses.items()]
    return [layer for layer in layers if layer.most]


def losses_of_ops(field: Field) -> list[Loss]:
    """Return the losses of all ops from the input to this field, first op first."""
    losses: list[Loss] = []
    loss = field.losses
    while loss is not None:
        losses.append(loss)
        loss = loss.parent
    return losses[::-1]


def share_in_padding(output: Output) -> Fraction:
    """Return the share of the outputs whose receptive field reaches beyond the input's border, into padding."""
    share_inside = Fraction(1)
    for size, field in output.spatial:
        inside = [
            all(span.low(position) >= 0 and span.high(position) < field.extent for span in field.spans)
            for position in range(size)
        ]
        share_inside *= Fraction(sum(inside), size)
    return 1 - share_inside


def _erosion(subject: Subject, output: Output, followed: Followed, layers: list[LayerLoss]) -> Finding:
    """Return the finding about an output that covers only a part of the input: pixels lost, layers, and the cost."""
    sides, spatial = border_losses(output), output.spatial
    covered = [max(0.0, 1 - float(sum(pair)) / field.extent) for pair, (_, field) in zip(sides, spatial, strict=True)]
    share = 1 - math.prod(covered)
    losing = sorted((layer for layer in layers if layer.total > 0), key=lambda layer: -layer.total)
    cost = costs(subject, output, followed, [layer.layer for layer in losing])
    context = f" (the input brings {subject.context} as context)" if subject.context else ""
    first_source = followed.sources[spatial[0][1].source]
    last_op = next((op for op, end in followed.last_traced.items() if end is output), None)
    path = {"from": _op_details(subject, first_source.op), "to": _op_details(subject, last_op)}
    message = (
        f"{_covers(path)} without its border: {_sides(sides)} are lost{context}, {_percent(share)} of the "
        f"field of view, by {_layers(losing)}"
    )
    if cost.saved is not None:
        message += f"; it saves {format_bytes(cost.saved)}" if cost.saved > 0 else "; it saves no memory"
    main = losing[0] if losing else LayerLoss(layer="", where=None, lost=())
    details = _details(output, layers) | {"share": share} | path | dict(cost.details)
    advice = tuple(_advice(sides, cost))
    return Finding(ID, "warning", main.layer, main.where, cost.saved or 0, message, advice, details)


def _op_details(subject: Subject, index: int | None) -> dict[str, Any] | None:
    """Return name, layer and line of the op with this index; None for None."""
    if index is None:
        return None
    op = subject.trace.ops[index]
    return {"op": base_name(op.name), "layer": op.layer, "where": op.where}


def _covers(path: dict[str, dict[str, Any] | None]) -> str:
    """Return the beginning of the message, such as "the output covers the input".

    ``path`` has the ops (see `_op_details`) between which positions are known: "from" is None for the model's input,
    "to" is None for its output.
    """
    begin, end = path["from"], path["to"]
    source = "the input" if begin is None else f"what {_op_in_layer(begin)} makes"
    target = "the output" if end is None else f"what goes into {_op_in_layer(end)}"
    reason = "" if begin is None and end is None else " (the path ends there: the positions it reads depend on values)"
    return f"{target} covers {source}{reason}"


def _op_in_layer(op: dict[str, Any]) -> str:
    return f"{op['op']} in {op['layer']}" if op["layer"] else op["op"]


def _one_sided(output: Output, layers: list[LayerLoss]) -> Finding:
    """Return a finding for outputs whose fields lie to one side although nothing is lost in sum, as after a strided
    convolution with an odd kernel."""
    sides = border_losses(output)
    main = max(layers, key=lambda layer: layer.most, default=LayerLoss(layer="", where=None, lost=()))
    message = (
        f"the outputs' fields lie to one side of where the outputs stand: {_sides(sides)} are covered less, as many "
        "more on the other side; no border is lost in sum"
    )
    details = _details(output, layers) | {"share": 0}
    advice = (
        "Nothing, where causality or a stride makes it so on purpose; else choose kernels as even as their strides, "
        "or align_corners and output_padding so that way down and way up match",
    )
    return Finding(
        ID, "info", layer=main.layer, where=main.where, bytes=0, message=message, advice=advice, details=details
    )


def _details(output: Output, layers: list[LayerLoss]) -> dict[str, Any]:
    """Return the numbers of an output for ``Finding.details``, each in the order of the spatial dimensions."""
    spatial = output.spatial
    # two standard deviations to each side, if all weights are equal: there is 95 % of an output's gradient
    # (Luo et al. 2016, arXiv:1701.04128)
    effective = [min(float(field.width), 4 * math.sqrt(field.variance) + 1) for _, field in spatial]
    return {
        "lost": [(number(a), number(b)) for a, b in border_losses(output)],
        "stride": [number(abs(field.stride(size))) for size, field in spatial],
        "input": [field.extent for _, field in spatial],
        "output": [size for size, _ in spatial],
        "receptive_field": [field.width for _, field in spatial],
        "effective_receptive_field": [round(width, 1) for width in effective],
        "touching_padding": round(float(share_in_padding(output)), 4),
        "layers": [
            {"layer": layer.layer, "where": layer.where, "lost": [(number(a), number(b)) for a, b in layer.lost]}
            for layer in layers
        ],
    }  # fmt: skip


def _advice(sides: list[Sides], cost: Costs) -> list[str]:
    """Return the ways to keep the border: padding inside of the model, a mirror-padded input, overlapping tiles, and
    `memplan.fit`, which cuts an input into tiles for inference.

    ``sides`` are the positions lost before and after, for each dimension.
    """
    inside = f"pad inside of the model (--fix prints the change, where it can): {cost.sentence}"
    pads = cost.details.get("mirror_pad") or [[math.ceil(a), math.ceil(b)] for a, b in sides]
    mirror = f"or mirror-pad the input once, by {_widths(pads)}: the interior does not change"
    if cost.mirrored is not None:
        mirror += f"; the peak is {format_bytes(cost.mirrored)} then"
    most = math.ceil(max(side for pair in sides for side in pair))
    tile = f"or cut tiles that overlap by {most} pixels on each side, and say so: --context {most}"
    inference = "or memplan.fit(model.eval(), image, budget=..., train=False), for inference"
    return [inside, mirror, tile, inference]


def _sides(sides: list[Sides]) -> str:
    """Return ``50 pixels on each side, 100 per dimension``, or the text of `_widths` if any two sides differ."""
    if len({side for pair in sides for side in pair}) == 1:
        value = number(sides[0][0])
        return f"{value:g} pixel{'' if value == 1 else 's'} on each side, {2 * value:g} per dimension"
    return _widths(sides)


def _widths(pairs: Sequence[Sequence[Fraction | int]]) -> str:
    """Return the pixels before and after each dimension as text, such as ``3 x 4 pixels on each side`` or ``3 pixels
    before and 4 after in each dimension``."""
    widths = [(f"{number(a):g}", f"{number(b):g}") for a, b in pairs]
    before, after = widths[0]
    same_in_all_dimensions = len(set(widths)) == 1
    if all(a == b for a, b in widths):
        return f"{before if same_in_all_dimensions else ' x '.join(a for a, _ in widths)} pixels on each side"
    if same_in_all_dimensions:
        return f"{before} pixels before and {after} after in each dimension"
    return f"{' x '.join(a if a == b else f'{a} before and {b} after' for a, b in widths)} pixels"


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.0f} %" if value >= 1 else f"{value:.1g} %"


def _layers(layers: list[LayerLoss]) -> str:
    """Return text such as ``3 layers, most by stem.conv (2 x 1+0)``: the first layer's pixels by dimension, before and
    after it where they differ."""
    if not layers:
        return "layers that cannot be named"
    pairs = {tuple(number(side) for side in sides) for sides in layers[0].lost}
    pixels = " x ".join(f"{a:g}" if a == b else f"{a:g}+{b:g}" for a, b in sorted(pairs, reverse=True))
    first = f"{layers[0].layer or 'an op outside of layers'} ({pixels})"
    return first if len(layers) == 1 else f"{len(layers)} layers, most by {first}"
