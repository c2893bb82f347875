"""`memplan explain --lengths`: batches of different lengths, one after the other."""

from __future__ import annotations

from memplan.cli.files import is_trace
from memplan.cli.options import StepArguments, describe, input_advice, subject_of, used_options
from memplan.cli.outputs import Outputs
from memplan.cli.progress import progress
from memplan.errors import InputError
from memplan.trace.naming.targets import contained


def explain_lengths(arguments: StepArguments, text: str, outputs: Outputs, top: int, *, measured: bool) -> int:
    """Predict the memory of a sequence of batches with drawn lengths, print it, and return the exit code. ``text`` has
    lengths and their shares, or names a file of lengths. Raises InputError for wrong lengths, or an option that does
    not go with them."""
    _check(arguments, outputs, measured)
    from memplan.reports.lengths import report
    from memplan.studies.lengths.distribution import parse_lengths
    from memplan.studies.lengths.lengths import lengths_of

    shares = parse_lengths(text)
    target = arguments.recorded_for()
    with progress(f"recording {arguments.target}"), contained(arguments.target), input_advice(arguments):
        subject = subject_of(describe(arguments), arguments)
        lengths = lengths_of(subject, shares, target, settings=arguments.settings, title=arguments.target)
    outputs.results.write_and_show(lengths.to_json, lambda: report(lengths, top))
    return int(lengths.ran_out > 0)


def _check(arguments: StepArguments, outputs: Outputs, measured: bool) -> None:
    """Raise InputError for a trace or options that cannot be combined with ``--lengths``."""
    if is_trace(arguments.target):
        raise InputError(
            f"--lengths for {arguments.target}, a file", expected="a callable: other lengths are recorded anew",
            do="Name the callable",
        )  # fmt: skip
    values = {
        "--measure": measured, "--trace": outputs.trace, "--snapshot": outputs.snapshot,
        "--perfetto": outputs.perfetto, "--html": outputs.results.html,
    }  # fmt: skip
    if others := used_options(values):
        raise InputError(f"--lengths with {others}", expected="--json for its result", do="Leave the other options out")
