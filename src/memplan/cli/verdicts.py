"""Exit code of an explained step: whether it fits, and whether branches were assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memplan.errors import MemplanError

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation

MEASURE = "Add --measure, which really runs the step (in Python: memplan.measure)"


def does_not_fit(explanation: Explanation) -> bool:
    """Return whether the verdict is that the step does not fit on its card."""
    on_host = explanation.host is None or explanation.host.fits
    return not on_host or (explanation.card is not None and explanation.card.verdict.answer == "does not fit")


def warn_of_branches(explanation: Explanation) -> int:
    """Print a warning and return 2 if the recording assumed a branch that depends on a value, else return 0."""
    branches = [assumption for assumption in explanation.assumptions if assumption.kind == "branch"]
    if not branches:
        return 0
    lines = dict.fromkeys(assumption.where for assumption in branches if assumption.where)
    message = MemplanError(
        f"a branch is decided by a value that a recording does not have, at {', '.join(lines) or 'an unknown line'}",
        expected="a step whose path follows from shapes; what is shown is one of its paths",
        do=MEASURE,
    )
    click.echo(f"memplan: {message}", err=True)
    return 2
