"""``--device all`` of `memplan explain` and `memplan largest`: a table of the catalogue's cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memplan.cli.files import ResultFiles
from memplan.cli.options import Described, StepArguments, subject_of, with_input_advice
from memplan.cli.progress import line
from memplan.devices import Device, catalogue
from memplan.errors import InputError, StepError
from memplan.studies.capacity.on_cards import largest_on_cards, step_on_cards
from memplan.trace.recording.session import Target


def show_on_cards(
    arguments: StepArguments, described: Callable[[StepArguments], Described], title: str, results: ResultFiles,
    surplus: Mapping[str, Any], axis: str | None = None, most: int | None = None,
) -> int:  # fmt: skip
    """Write and print what a step needs on each card, or the largest value of an axis that fits there.

    Args:
        arguments: of the step.
        described: returns it.
        title: its name.
        results: the files to write.
        surplus: values of options that do not go with all cards, by their names.
        axis: batch or sequence; None: the step as it is.
        most: the largest value to try.

    Returns:
        The exit code: 1 if nothing fits any card.

    Raises:
        InputError: one of ``surplus`` was used.
    """
    from memplan.reports.on_cards import report
    from memplan.reports.terminal import show

    surplus = {**surplus, "--world": arguments.world}
    if used := [option for option, value in surplus.items() if value]:
        raise InputError(
            f"{', '.join(used)} with --device all", expected="a step alone: the memory of each card is the limit",
            do="Leave it out, or name one card",
        )  # fmt: skip
    subject = subject_of(described(arguments), arguments)

    def target_of(card: Device) -> Target:
        return replace(arguments, device=card.name).recorded_for()

    try:
        with line(f"recording {title}" if axis is None else f"looking for the largest {axis}") as progress:
            if axis is None:
                found = step_on_cards(subject, catalogue(), target_of, arguments.settings, progress)
            else:
                found = largest_on_cards(
                    subject, axis, catalogue(), target_of, most=most, settings=arguments.settings, progress=progress
                )
    except StepError as error:
        raise with_input_advice(error, arguments) from error.__cause__
    found = replace(found, title=title)
    results.write(found.to_json)
    if not results.takes_stdout:
        show(report(found))
    return int(not any(row.fits for row in found.rows))
