"""Report of what of a model can be trained on a microcontroller."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.exporting.board_fit import BoardFit, TrainedPart
from memplan.reports.document import Code, Document, Facts, Field, Line, document, name_field, table_of

_LEGEND = (
    "RAM: arena, state (weights, optimizer, statistics) and inputs, each within one bank; of a step that does not fit, "
    "the smallest there is. Flash: weights, then code and tables for the core without libm."
)
_SMALLER = (
    "Layers before the first trained one would take less in eight bits, which is lossy: give batches of your data "
    "(--calibrate FILE.py:callable)."
)
_MEANS = "+ arena: the same with the input in the arena; int8: with layers before the first trained one in eight bits."
_SHORT = {
    "weights in eight bits": "int8 weights",
    "input in the arena": "arena",
    "frozen layers in eight bits": "int8",
}
_CONSTANTS = " RAM and flash count weights and tables, which are copied into SRAM; the code is not counted."


def report(fit: BoardFit) -> Document:
    """Return the verdict, the board, a row for each part of the model, and how to export the largest one that fits."""
    best, board = fit.best, fit.board
    if best is None:
        verdict = Line(f"{fit.model} on {board.name}: nothing of it can be trained", "bad")
    else:
        how = "".join(f", {words}" for words in best.means)
        verdict = Line(
            f"{fit.model} on {board.name}: {best.what} can be trained, in {format_bytes(best.ram)} of RAM{how}"
        )
    fields = [
        name_field("Trained", _row_name, shrinks_to=16),
        Field("weights", lambda part: f"{part.weights:,}", right=True, number=lambda part: part.weights, drop=3),
        Field(
            "RAM",
            lambda part: ("" if part.arena else "> ") + format_bytes(part.ram) if part.ram else "-",
            right=True,
            number=lambda part: part.ram,
        ),
        Field(
            "arena",
            lambda part: format_bytes(part.arena) if part.arena else "-",
            right=True,
            number=lambda part: part.arena,
            drop=2,
        ),
        Field(
            "state",
            lambda part: format_bytes(part.state) if part.state else "-",
            right=True,
            number=lambda part: part.state,
            drop=1,
        ),
        Field("flash", _flash, right=True),
        Field("fits", lambda part: "yes" if part.fits else f"no, {part.lacks}"),
    ]
    return document(
        verdict,
        [Facts(_facts(fit))],
        [table_of(fit.parts, fields)],
        [] if best is None else _advice(fit, best),
        [] if best is None or not best.frozen_error else [f"In eight bits: {best.frozen_error}."],
        [_SMALLER] if _frozen_part_helps(fit) else [],
        [_MEANS] if any(part.means[-1:] not in ((), ("weights in eight bits",)) for part in fit.parts) else [],
        [
            Line(_LEGEND if not board.constants_in_sram else _LEGEND.rpartition(" Flash:")[0] + _CONSTANTS, "dim"),
            Line("Data sheet:", "dim"),
            Code(board.source),
        ],  # not wrapped, to be copied
    )


def _row_name(part: TrainedPart) -> str:
    """Return the part's name or, of a row that follows the plain one of the same part, what makes it smaller."""
    return f"+ {', '.join(_SHORT[words] for words in part.means)}" if part.means else part.what


def _frozen_part_helps(fit: BoardFit) -> bool:
    """Return whether a part that lacks SRAM or flash has frozen layers, and no data says their ranges."""
    whole = fit.parts[0].parameters
    return not fit.calibrated and any(
        part.lacks in ("SRAM", "flash") and part.parameters != whole for part in fit.parts
    )


def _facts(fit: BoardFit) -> dict[str, str]:
    """Return the board's figures, and those of the step that are the same for each trained part, by label.

    "head" is the name of the model's last trained layer.
    """
    board = fit.board
    banks = ", ".join(f"{bank.name} {format_bytes(bank.bytes)}" for bank in board.banks)
    flash = "outside of the chip, not checked" if board.flash is None else format_bytes(board.flash)
    return {
        "board": f"{board.title}: {board.core}, {board.megahertz} MHz{'' if board.fpu else ', without FPU'}",
        "SRAM": f"{format_bytes(board.sram)} ({banks})" if len(board.banks) > 1 else banks,
        "flash": flash,
        "head": fit.head,
        "inputs": format_bytes(fit.parts[0].inputs),
        "reserve": format_bytes(fit.reserve),
        **({"note": board.note} if board.note else {}),
    }


def _flash(part: TrainedPart) -> str:
    """Return the flash of a trained part as text: bytes of weights and tables, plus bytes of code if they are known."""
    if part.flash is None:
        return "-"
    return format_bytes(part.flash) + ("" if part.code is None else f" + {format_bytes(part.code)}")


def _advice(fit: BoardFit, best: TrainedPart) -> list[str]:
    """Return the memory bank of each array if the part ``best`` is trained, and the options that export its step."""
    by_bank: dict[str, list[str]] = {}
    for what, bank in best.banks.items():
        if what != "reserve" or fit.reserve:
            by_bank.setdefault(bank, []).append(what)
    where = "; ".join(f"{', '.join(arrays)} in {bank}" for bank, arrays in by_bank.items())
    separate = "" if best.in_one_bank else " --arena-apart"
    narrow = " --trained-weights int8" if best.trained_weights == "int8" else ""
    narrow += " --frozen-layers int8 --calibrate TARGET" if best.frozen_layers == "int8" else ""
    separate += " --input-in-arena" if best.input_in_arena else ""
    frozen = "" if best.parameters == fit.parts[0].parameters else ", with requires_grad=False for all other parameters"
    code = "" if best.code is not None else "; code is not counted: there is no cross compiler for the core"
    return [
        f"{best.what[0].upper()}{best.what[1:]}: {where}{code}.",
        f"Export: memplan export --budget {best.budget}{separate}{narrow}{frozen}.",
    ]
