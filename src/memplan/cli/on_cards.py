"""``--device all`` of `memplan explain` and `memplan largest`: a table of the catalogue's cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memplan.cli.files import ResultFiles
from memplan.cli.options import Described, StepArguments, input_advice, subject_of, used_options
from memplan.cli.progress import line
from memplan.devices import Device, catalogue
from memplan.errors import InputError
from memplan.studies.capacity.on_cards import largest_on_cards, step_on_cards
from memplan.trace.recording.session import Target


def show_on_cards(
    arguments: StepArguments, described: Callable[[StepArguments], Described], title: str, results: ResultFiles,
    excluded: Mapping[str, Any], axis: str | None = None, most: int | None = None,
) -> int:  # fmt: skip
    """Report the memory of a step on each card of the catalogue, or the largest value of an axis that fits each card.
    ``described(arguments)`` imports the target and describes the step. ``axis`` is "batch" or "sequence"; None: the
    step as it is. ``excluded`` are options that cannot be combined with ``--device all``, with their values.

    Returns:
        The exit code: 1 if nothing fits any card.

    Raises:
        InputError: an ``excluded`` option was used.
    """
    from memplan.reports.on_cards import report

    if used := used_options({**excluded, "--world": arguments.world}):
        raise InputError(
            f"{used} with --device all", expected="a step alone: the memory of each card is the limit",
            do="Leave it out, or name one card",
        )  # fmt: skip
    subject = subject_of(described(arguments), arguments)

    def target_of(card: Device) -> Target:
        return replace(arguments, device=card.name).recorded_for()

    task = f"recording {title}" if axis is None else f"looking for the largest {axis}"
    with input_advice(arguments), line(task) as progress:
        if axis is None:
            result = step_on_cards(subject, catalogue(), target_of, arguments.settings, progress)
        else:
            result = largest_on_cards(
                subject, axis, catalogue(), target_of, most=most, settings=arguments.settings, progress=progress
            )
    result = replace(result, title=title)
    results.write_and_show(result.to_json, lambda: report(result))
    return int(not any(row.fits for row in result.rows))
