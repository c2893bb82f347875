"""`memplan fit --device-memory`: what of a model can be trained on a microcontroller."""

from __future__ import annotations

from typing import Any, Literal

import click

from memplan.cli.export import read_batches, read_normalization
from memplan.cli.files import ResultFiles
from memplan.cli.options import Decorated, StepArguments, describe, input_advice
from memplan.cli.progress import progress
from memplan.errors import InputError
from memplan.trace.naming.targets import contained


def board_options(function: Decorated) -> Decorated:
    """Add the options of a fit on a board."""
    for option in (
        click.option(
            "--normalize", metavar="MEAN/STD", help="With --device-memory: of inputs in uint8 or int8, as 127.5/58."
        ),
        click.option(
            "--trained-weights", type=click.Choice(["float32", "int8"]),
            help="With --device-memory: int8 also plans, in weights of eight bits, what does not fit otherwise. Lossy.",
        ),
        click.option(
            "--calibrate", "calibration", metavar="TARGET",
            help="With --device-memory: a callable that returns batches of inputs and targets. What does not fit "
            "otherwise is planned with the layers before the first trained one in eight bits. Lossy.",
        ),
        click.option(
            "--reserve", metavar="SIZE",
            help="With --device-memory: SRAM that the application needs besides, such as 32KiB.",
        ),
        click.option(
            "--device-memory", "board", metavar="BOARD",
            help="A microcontroller, such as stm32h743 or pico, in place of a budget: what of the model can be trained "
            "in its SRAM and flash.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def fit_on(
    name: str, arguments: StepArguments, reserve: str | None, normalize: str | None,
    trained_weights: Literal["float32", "int8"], calibration: str | None, accumulate: int, results: ResultFiles,
) -> int:  # fmt: skip
    """Plan the steps that fit on a board, show them and return the exit code. ``trained_weights="int8"`` plans parts
    that do not fit in eight bits, too. ``calibration``: target of the batches on which frozen layers are quantized;
    None: they stay in float32."""
    from memplan._bytes import parse_bytes
    from memplan.devices.boards import find_board
    from memplan.exporting.board_fit import fit_on_board
    from memplan.exporting.optimizer_rules import Gradients
    from memplan.exporting.step_outputs import Normalization
    from memplan.reports.exports.board import report

    board = find_board(name)
    size = 0 if reserve is None else parse_bytes(reserve)
    seen = None if normalize is None else Normalization.of(read_normalization(normalize))
    with progress(f"planning {arguments.target} for {board.name}"), contained(arguments.target):
        described = describe(arguments)
        with input_advice(arguments):
            model: Any = described.target.what(**described.arguments)
            fit = fit_on_board(
                model, described.options, board, reserve=size, gradients=Gradients(accumulate), normalization=seen,
                trained_weights=trained_weights, calibrate=None if calibration is None else read_batches(calibration),
            )  # fmt: skip
    results.write_and_show(fit.to_json, lambda: report(fit))
    return 0 if fit.fits else 1


def check_options(board: str | None, used: dict[str, object]) -> None:
    """Raise InputError for options that do not go with a board, or need one. ``used`` has each such option by its name;
    false where it was left out."""
    alone = ("--reserve", "--normalize", "--trained-weights", "--calibrate")
    wrong = [option for option, value in used.items() if value and (board is None) == (option in alone)]
    if wrong and board is None:
        raise InputError(
            f"{wrong[0]} without --device-memory", expected="a microcontroller", do="Add --device-memory BOARD"
        )
    if wrong:
        raise InputError(
            f"{', '.join(wrong)} with --device-memory {board:.40}",
            expected="the step's own options alone: the board's memory is the budget, the plan that of an export",
            do="Leave out the others",
        )
