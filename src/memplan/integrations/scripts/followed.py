"""`memplan.whole_run`: the phases of a script, from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence

from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.loaders import Rules
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Request
from memplan.studies.runs import whole_run as runs
from memplan.studies.runs.whole_run import WholeRun


def whole_run(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    device: str | None = None,
    measure: bool = False,
    batch: int | None = None,
    settings: str | None = None,
    limit: float = 300.0,
    unprotected: bool = False,
) -> WholeRun:
    """Follow an unchanged script through training, evaluation, checkpoints and further epochs.

    The script runs in a process of its own, on tensors without values and with short loaders. What it would write, send
    or start does not happen.

    Args:
        script: path of the script.
        arguments: of the script, as in ``sys.argv``.
        device: ``cpu``, or a card such as ``h100``; None for this machine's.
        measure: whether to run it for real, here and to its end, instead.
        batch: number of samples in a batch, instead of the loader's.
        settings: of the card's caching allocator, as in ``PYTORCH_ALLOC_CONF``.
        limit: seconds after which the script is ended.
        unprotected: whether to run it where nothing can hold back what it writes, sends or starts.

    Returns:
        The peaks of its phases, in bytes, with all batches of its loaders.

    Raises:
        InputError: there is no such script.
        UsageError: nothing can hold back what the script does, and ``unprotected`` is not set.
        StepError: the script raised, or ended before it called a model.

    Example:
        >>> run = memplan.whole_run("train.py", device="rtx4090")
        >>> largest = max(run.phases, key=lambda phase: phase.allocated)
        >>> largest.kind, largest.where, run.allocated < run.reserved
        ('train', 'train.py:9', True)
    """
    command = Command(os.fspath(script), tuple(arguments))
    request = Request(
        command, device, really=measure, rules=Rules(batch=batch), phases=True, limit=limit, unprotected=unprotected,
        settings=settings,
    )  # fmt: skip
    ran = run_script(request)
    return runs.whole_run(ran.trace, ran.facts, title=command.name, settings=settings)[0]
