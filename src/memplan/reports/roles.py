"""Report of `memplan.roles`: the memory of every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan._bytes import format_bytes_as_torch, signed
from memplan._text import counted, ranks_text
from memplan.explanation.model import LABELS
from memplan.reports import explain
from memplan.reports.document import Document, Field, Part, document, name_field, number_field, table_of
from memplan.studies.roles.grouping import ALL
from memplan.studies.roles.roles import Role, Roles

_DIFFERENCES = 3


def report(result: Roles, top: int = 12, fullest: Document | None = None) -> Document:
    """Report each role, which is a group of ranks with equal steps, the explanation of the fullest rank, and the causes
    of the others. ``fullest`` replaces the explanation of the fullest rank; tables have ``top`` rows, 0 for all."""
    text = summary(result) + (explain.report(result.fullest.explanation, top) if fullest is None else fullest)
    for role in result.roles[1:]:
        text += explain.causes(role.explanation)
    return text


def summary(result: Roles) -> Document:
    """Return a row for each group of equal ranks, the highest peak first, and the ranks that were recorded."""
    first, on_card = result.fullest, result.fullest.explanation.card is not None
    # without the word "ranks", which the header has
    fields = [name_field("Ranks", lambda role: ranks_text(role.ranks).partition(" ")[2], shrinks_to=8, from_left=False)]
    if any(role.stages for role in result.roles):
        fields.append(Field("stages", lambda role: ", ".join(map(str, role.stages)) or "-"))
    fields.append(number_field("allocated peak", lambda role: role.explanation.timeline.peak_allocated, _gib))
    if on_card:
        fields += [
            number_field("reserved", lambda role: role.explanation.timeline.peak_reserved, _gib),
            Field("of card", lambda role: f"{100 * (role.reserved_share or 0):.1f}%", right=True, drop=1),
        ]
    fields.append(Field("largest cause", _largest, shrinks_to=12))
    below = ("", *(f"beside the first: {_difference_from(role, first)}" for role in result.roles[1:]))
    return document(
        f"{result.title}: {counted(result.world, 'rank')} on {result.device}",
        _head(result),
        [replace(table_of(result.roles, fields), below=below)],
    )


def _head(result: Roles) -> Iterator[Part]:
    """Yield the memory of the fullest rank, and the ranks that were recorded."""
    timeline = result.fullest.explanation.timeline
    who = ranks_text(result.fullest.ranks)
    equal = "All ranks do the same" if len(result.roles) == 1 else f"The fullest: {who}"
    reserved = f", {_gib(timeline.peak_reserved)} reserved" if result.fullest.explanation.card is not None else ""
    yield f"{equal}: {_gib(timeline.peak_allocated)} allocated{reserved}."
    most = result.fullest.explanation.by_cause_most
    states = sum(most.get(cause, 0) for cause in ("weight", "parameter_gradient", "optimizer_state"))
    yield (f"In Megatron's words, at most: weight and optimizer {_mb(states)}, activation {_mb(most.get('saved', 0))}.")
    if result.world <= ALL:
        yield f"All {counted(result.world, 'rank')} were recorded." if result.world > 1 else "It was recorded."
    else:
        yield (
            f"Recorded: {ranks_text(result.recorded)}. The others lie between recorded ranks that do the same, along "
            "each dimension of the meshes: shards never grow with the rank. What a rank between does by its own number "
            "is not seen."
        )
    if result.unsettled:
        yield (
            f"{ranks_text(result.unsettled).capitalize()} lie between ranks that differ; they are listed with the rank "
            "before them, whose shards are at least as large."
        )


def _largest(role: Role) -> str:
    """Return the cause with the most bytes at the peak of a role's ranks, and these bytes."""
    return f"{LABELS[role.largest]}, {_gib(role.explanation.by_cause[role.largest])}"


def _difference_from(role: Role, first: Role) -> str:
    """Describe how the causes at the peak differ from those of the first role, the largest differences first."""
    sizes, first_sizes = role.explanation.by_cause, first.explanation.by_cause
    differences = ((size - first_sizes.get(cause, 0), cause) for cause, size in sizes.items())
    changes = sorted(differences, key=lambda row: -abs(row[0]))
    texts = [f"{signed(size)} {LABELS[cause]}" for size, cause in changes if size]
    return ", ".join(texts[:_DIFFERENCES]) or "the same peak"


def _gib(size: int) -> str:
    """Return bytes in GiB with two digits, as torchtitan prints them; small sizes as torch prints them."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 28 else format_bytes_as_torch(size)


def _mb(size: int) -> str:
    """Return bytes as Megatron's report of theoretical memory prints them: weights with gradients and states of the
    optimizer, and saved activations, in MB of 1024 x 1024."""
    return f"{size / (1 << 20):.2f} MB"
