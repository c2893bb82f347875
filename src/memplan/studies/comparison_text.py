"""A comparison in one paragraph: for `print`, logs, and the head of the report."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.explanation.text import LABELS
from memplan.planning.plan import format_seconds
from memplan.studies.comparison import CAST_COPIES, STEP, Apart, Comparison, Side

CAUSE_LABELS = LABELS | {CAST_COPIES: "weights in another dtype", STEP: "what the step holds"}
_CAUSES = 3
_CHANGE = 0.005


def headline(comparison: Comparison) -> str:
    """``A takes 1.1 GiB, B 0.7 GiB: 412.3 MiB less (-36 %): ...``, with the causes that differ most."""
    a, b = comparison.a, comparison.b
    text = f"{format_bytes(a.peak)} -> {format_bytes(b.peak)} peak: {changed(a.peak, b.peak)}"
    rows = sorted((row for row in comparison.by_cause if row.difference), key=lambda row: -abs(row.difference))
    parts = [f"{CAUSE_LABELS.get(row.cause, row.cause)} {signed(row.difference)}" for row in rows[:_CAUSES]]
    return text + (f" ({', '.join(parts)})" if parts else "")


def changed(a: int, b: int) -> str:
    """``412.3 MiB less, -36 %``."""
    if a == b:
        return "the same"
    share = f", {100 * (b - a) / a:+.0f} %" if a and abs(b - a) >= _CHANGE * a else ""
    return f"{format_bytes(abs(b - a))} {'less' if b < a else 'more'}{share}"


def signed(size: int) -> str:
    """Bytes with their sign: ``+1.2 MiB``."""
    return ("+" if size > 0 else "") + format_bytes(size)


def remarks(comparison: Comparison) -> Iterator[str]:
    """Sentences about outputs, results and zeros, in order."""
    a, b = comparison.a, comparison.b
    if a.outputs is not None and b.outputs is not None:
        if a.outputs == b.outputs:
            yield f"Both return {_listed(a.outputs)}."
        else:
            yield f"A returns {_listed(a.outputs)}, B {_listed(b.outputs)}."
    on = "On equal weights" if comparison.same_weights else "Each with its own weights"
    for row in comparison.apart:
        yield f"{on}, B's {row.what} {off_by(row, 'A')}."
    yield from zeros_of("A", a)
    yield from zeros_of("B", b)


def off_by(row: Apart, other: str) -> str:
    """``are 1.2 % from A's (relative, L2; 0.5 at most for one element)``."""
    if row.relative == 0:
        return f"are {other}'s bit for bit"
    if row.relative is None or row.largest is None:
        return f"cannot be held against {other}'s: one is zero throughout, infinite or not a number"
    relative = f"{100 * row.relative:.2g} %" if row.relative >= 1e-4 else f"{row.relative:.1e}"
    return f"are {relative} from {other}'s (relative, L2; {row.largest:.3g} at most for one element)"


def zeros_of(name: str, side: Side) -> Iterator[str]:
    """What zeros among the weights of a side do not save."""
    known = [zero for zero in side.zeros if zero.zeros is not None]
    masks = sum(zero.mask_bytes for zero in side.zeros)
    if known:
        count, of = sum(zero.zeros or 0 for zero in known), sum(zero.elements for zero in known)
        size = sum(zero.bytes for zero in known)
        fewer = sum(zero.bytes_of_fewer for zero in known)
        layers = f"{len(known)} layer{'' if len(known) == 1 else 's'}"
        text = f"{name}'s weights hold zeros: {100 * count / of:.0f} % of {layers}, which take {format_bytes(size)} "
        text += "all the same: a dense tensor holds a zero like any other number."
        if fewer:
            text += f" As many weights left out as whole channels would take {format_bytes(fewer)} less of weights"
            text += f", and about {format_bytes(_outputs_of_fewer(side))} less of these layers' outputs."
        empty = sum(zero.empty_channels or 0 for zero in known)
        if empty:
            text += f" {empty} output channels are zero throughout: they could go without changing the result."
        yield text
    if masks:
        yield (
            f"{name}'s masks add {format_bytes(masks)}, and each masked weight is there twice: as it was and "
            "multiplied by its mask. torch.nn.utils.prune.remove takes the masks away; the zeros stay."
        )
        if not known:
            yield f"How many zeros {name}'s masks make, a recording does not know: measure it, or pass the module."


def _outputs_of_fewer(side: Side) -> int:
    """What the outputs of pruned layers would take less, in proportion to their channels."""
    output = {part.name: part.output_bytes for part in side.layers}
    return sum(output.get(zero.layer, 0) * zero.fewer_channels // zero.channels for zero in side.zeros)


def _listed(outputs: tuple[str, ...]) -> str:
    return ", ".join(outputs[:4]) + (f" and {len(outputs) - 4} more" if len(outputs) > 4 else "")


def by_one_measure(a: Side, b: Side) -> bool:
    """Whether the seconds of two sides can be held against each other: both by a roofline, measured, or of plans."""
    return a.seconds_by.partition(" ")[0] == b.seconds_by.partition(" ")[0]


def seconds_sentence(comparison: Comparison) -> str | None:
    """Both times, where both are known; their ratio only where they are by one measure."""
    a, b = comparison.a, comparison.b
    if a.seconds is None or b.seconds is None:
        return None
    one, other = format_seconds(a.seconds), format_seconds(b.seconds)
    if a.seconds_by != b.seconds_by:
        one, other = f"{one} ({a.seconds_by})", f"{other} ({b.seconds_by})"
    if not by_one_measure(a, b):
        return f"Time of a step: {one}, and {other}: not by one measure."
    ratio = f", {100 * (b.seconds / a.seconds - 1):+.0f} %" if a.seconds else ""
    how = f" ({a.seconds_by})" if a.seconds_by == b.seconds_by else ""
    return f"Time of a step: {one} -> {other}{ratio}{how}."


def summary(comparison: Comparison) -> str:
    """The paragraph."""
    lines = [f"A: {comparison.a.title}", f"B: {comparison.b.title}", headline(comparison)]
    seconds = seconds_sentence(comparison)
    lines += [seconds] if seconds else []
    lines += remarks(comparison)
    notes = dict.fromkeys((*comparison.notes, *comparison.a.notes, *comparison.b.notes))
    return "\n".join(printable(line) for line in (*lines, *(f"note: {note}" for note in notes)))
