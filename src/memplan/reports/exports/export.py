"""Report of an exported C training step: RAM and flash, memory techniques, the proof; and its JSON."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan.errors import BudgetError
from memplan.exporting.exported import Exported
from memplan.exporting.frozen_int8 import Int8Frozen
from memplan.exporting.int8_training import Int8Trained
from memplan.exporting.update_search import UpdateChoice
from memplan.reports.document import Document, Facts, Field, Line, Part, document, name_field, number_field, table_of

MOST_WEIGHTS = 16
"""Rows of the table of weights that are trained in eight bits."""
HOLDERS = 8
"""Rows of the tables of buffers in RAM at the peak and of trained tensors."""


def report(exported: Exported) -> Document:
    """Report the figures of an export, the trained parameters, the buffers in RAM at the peak, and the proof."""
    techniques = [
        name_field("One after another", lambda lever: lever[0], shrinks_to=20),
        number_field("in use at once", lambda lever: lever[1]),
    ]
    in_ram = [name_field("In RAM at the peak", str, shrinks_to=20), number_field("bytes", lambda tensor: tensor.bytes)]
    proof = [f"Proof: {exported.verdict}"] + ([] if exported.core is None else [f"On {exported.core}"])
    return document(
        f"{exported.folder}/{exported.name}.c: a training step in {format_bytes(exported.ram)} of RAM",
        [Facts(_facts(exported))],
        [table_of(exported.levers, techniques)],
        [] if exported.choice is None else _choice(exported.choice),
        [] if exported.int8 is None else _int8(exported.int8),
        [] if exported.int8_trained is None else _int8_trained(exported.int8_trained),
        [table_of(exported.held_by, in_ram, HOLDERS, "all")],
        proof,
    )


def _facts(exported: Exported) -> dict[str, str]:
    """Return the figures of an export by label."""
    renamed = exported.name != exported.given_name.lower()
    return {
        **({"name": f"{exported.name}, for {exported.given_name}"} if renamed else {}),
        "arena": f"{format_bytes(exported.arena)} ({format_bytes(exported.live)} in use at once)",
        "weights and state": f"{format_bytes(exported.state)} ({exported.trained} weights are trained)",
        "inputs": format_bytes(exported.inputs),
        **_in_arena(exported),
        **{
            f"{name}, in eight bits": "in floats in a buffer of the arena" if buffer else "normalized as it is read"
            for name, buffer in exported.byte_inputs
        },
        "flash": f"{format_bytes(exported.flash)} of weights, beside the code ({exported.frozen} are frozen)",
        **({} if exported.int8 is None else {"before what is trained": str(exported.int8)}),
        **({} if exported.rounding is None else {"in eight bits": str(exported.rounding)}),
        **({} if exported.int8_trained is None else {"lossy training": str(exported.int8_trained)}),
        "smallest budget": format_bytes(exported.smallest_budget),
        "in the backward pass": f"{exported.recomputed} results recomputed",
        "updated element by element": f"{exported.fused} parameters",
    }


def _in_arena(exported: Exported) -> dict[str, str]:
    """Return what to know of an input that lies in the arena, by label."""
    if exported.in_arena is None:
        return {}
    name, size = exported.in_arena
    return {f"{name}, in the arena": f"passed from elsewhere, its {format_bytes(size)} come on top"}


def _int8(int8: Int8Frozen) -> Iterator[Part]:
    """Yield the layers in eight bits with the largest errors first, and the ops that stay in float32."""
    fields = [
        name_field("In eight bits", lambda row: row.layer or "the model", shrinks_to=20),
        name_field("operations", lambda row: ", ".join(row.ops), shrinks_to=20),
        Field("error", lambda row: f"{row.error:.2%}", right=True, number=lambda row: row.error),
    ]
    yield table_of(sorted(int8.layers, key=lambda row: -row.error), fields, HOLDERS, "all")
    yield from (f"In float32: {reason}" for reason in int8.stays)


def _int8_trained(trained: Int8Trained) -> Iterator[Part]:
    """Yield the weights that are trained in eight bits, in the order of the model."""
    fields = [
        name_field("Trained in eight bits", lambda row: row.name, shrinks_to=20),
        number_field("bytes", lambda row: row.elements),
        Field("rounded by", lambda row: f"{row.rounding:.2%}", right=True, number=lambda row: row.rounding),
        Field("update, in steps", lambda row: f"{row.step:.2g}", right=True, number=lambda row: row.step),
        Field("at its bound", lambda row: f"{row.at_bound:.2%}", right=True, number=lambda row: row.at_bound),
    ]
    yield table_of(trained.weights, fields, MOST_WEIGHTS, "all")


def _choice(choice: UpdateChoice) -> Iterator[Part]:
    """Yield the parameters that the update search chose to train, largest gradient first."""
    yield str(choice)
    fields = [
        name_field("Trained", lambda tensor: tensor.path, shrinks_to=20),
        number_field("bytes", lambda tensor: tensor.bytes),
        Field("gradient norm", lambda tensor: f"{tensor.gradient:.3g}", right=True, number=lambda row: row.gradient),
    ]
    yield table_of(sorted(choice.trained, key=lambda tensor: -tensor.gradient), fields, HOLDERS, "all")


def shortfall_report(error: BudgetError) -> Document:
    """Return the smallest budget or flash size that would fit, and why the export does not."""
    what = "budget" if error.timeline is not None else "flash"
    least = format_bytes(error.smallest_budget)
    return document(Line(f"It does not fit. The smallest {what} that it fits is {least}.", "bad"), [str(error)])
