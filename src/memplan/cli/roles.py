"""`--rank all` of `memplan explain` and `memplan run`: a report for ranks that do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.cli.files import is_trace
from memplan.cli.options import StepArguments, describe, input_advice, used_options
from memplan.cli.outputs import Outputs
from memplan.cli.progress import line
from memplan.cli.verdicts import does_not_fit, warn_of_branches
from memplan.errors import InputError
from memplan.trace.naming.targets import contained

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request, RunResult
    from memplan.reports.document import Document
    from memplan.studies.roles.roles import Roles
    from memplan.trace.trace import Trace


def check(world: int | None, really: bool, outputs: Outputs) -> None:
    """Raise InputError for options that cannot be combined with ``--rank all``."""
    if world is None:
        raise InputError("--rank all without --world", expected="the number of ranks", do="Add it: --world 8")
    values = {
        "--measure": really, "--trace": outputs.trace, "--snapshot": outputs.snapshot, "--perfetto": outputs.perfetto,
    }  # fmt: skip
    if others := used_options(values, " and "):
        raise InputError(
            f"--rank all with {others}", expected="these for a single rank",
            do="Name the fullest rank, as in --rank 3",
        )  # fmt: skip


def explain_roles(arguments: StepArguments, room: int | None, outputs: Outputs, top: int) -> int:
    """Explain all ranks of a target and return the exit code. ``room``: budget of the host's memory in bytes. Raises
    InputError if the target is a file."""
    from memplan.explanation.explain import explain_trace
    from memplan.studies.roles.roles import find_roles
    from memplan.trace.record import record_for

    if is_trace(arguments.target):
        raise InputError(
            f"{arguments.target} is of a single rank, and --rank all was given, too", expected="a callable",
            do="Leave out --world and --rank",
        )  # fmt: skip
    world = arguments.world or 1
    trains = None if arguments.train else False  # None: if the step has backward ops
    # `contained`: a sys.exit in the target's code ends in a StepError
    with line(f"recording {arguments.target}") as progress, contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        target = replace(arguments, rank=0).recorded_for()
        build = described.build(on_card=target.card is not None)
        roles = find_roles(
            lambda rank: record_for(build, replace(target, rank=rank)),
            lambda trace, title: explain_trace(
                trace, title=title, train=trains, card=target.card,
                settings=arguments.settings, host=room,
            ),
            world, title=arguments.target, progress=progress,
        )  # fmt: skip
    return _show(roles, outputs, top)


def run_roles(
    request: Request, run: Callable[[Request], RunResult], room: int | None, settings: str | None, outputs: Outputs,
    top: int,
) -> int:  # fmt: skip
    """Record all ranks of a script, each by ``run(request)`` in a process of its own, and return the exit code.
    ``room``: budget of the host's memory in bytes."""
    from memplan.explanation.explain import explain_trace
    from memplan.reports import run as reports
    from memplan.studies.roles.roles import find_roles

    ran: dict[int, RunResult] = {}

    def record(rank: int) -> Trace:
        ran[rank] = run(replace(request, rank=rank))
        return ran[rank].trace

    roles = find_roles(
        record, lambda trace, title: explain_trace(trace, title=title, settings=settings, host=room),
        request.world or 1, title=request.command.name,
    )  # fmt: skip
    fullest = roles.fullest
    shown = ran[next(rank for rank in roles.recorded if rank in fullest.ranks)]
    return _show(roles, outputs, top, reports.report(str(shown.command), shown.facts, fullest.explanation, top))


def _show(roles: Roles, outputs: Outputs, top: int, fullest: Document | None = None) -> int:
    """Write and print the ranks. Return the exit code."""
    from memplan.reports.roles import report

    outputs.results.write_and_show(roles.to_json, lambda: report(roles, top, fullest))
    branches = max(warn_of_branches(role.explanation) for role in roles.roles)
    return branches or int(any(does_not_fit(role.explanation) for role in roles.roles))
