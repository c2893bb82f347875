"""`memplan compare`: two steps side by side."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import ResultFiles, is_trace
from memplan.cli.options import StepArguments, describe, result_options, top_option
from memplan.cli.pair_options import pair_options, side_arguments
from memplan.cli.progress import progress
from memplan.errors import InputError, TargetError
from memplan.trace.naming.targets import contained

if TYPE_CHECKING:
    from memplan.studies.comparisons.compare import SideRequest

HELP = """Hold two steps against each other: bytes by cause and by layer, time, outputs.

A and B are targets, as of memplan explain, or files: what explain --json or
--trace, fit --json or --plan, or sweep --json wrote (a point of a sweep is
sweep.json#3, its third, or sweep.json#batch=8). Without B, it is A again. The
options are for both; --a and --b take those of one: --b autocast=bf16.

\b
  memplan compare examples/resnet18.py:make --input 32x3x224x224 \\
      --target "32:int64<1000" --loss cross_entropy --b autocast=bf16
  memplan compare nets.py:wide nets.py:deep --input 8x3x64x64 --device h100
  memplan compare nets.py:unet --input 1x1x64x64x64 --b arg=channels=16
  memplan compare nets.py:unet --input 1x1x64x64x64 --b no-train
  memplan compare nets.py:dense nets.py:pruned --input 8x3x64x64 --measure
  memplan compare before.json after.json
  memplan compare sweep.json#batch=8 sweep.json#batch=16

The first holds the same network in fp32 and under autocast against each other:
copies of weights that autocast makes stand apart. The time is a roofline's;
--measure really runs both, and says how far their results are apart.

\b
Exit code: 0 done; 2 bad usage, or a step that cannot be recorded.
"""


@click.command("compare", help=HELP)
@click.argument("a")
@click.argument("b", required=False)
@pair_options
@click.option("--measure", "really", is_flag=True, help="Really run both here, instead of predicting them.")
@top_option(12, "Layers")
@result_options("the comparison")
def command(
    a: str, b: str | None, a_options: tuple[str, ...], b_options: tuple[str, ...], really: bool, top: int,
    results: ResultFiles, **values: Any,
) -> int:  # fmt: skip
    """Compare two steps, print the comparison, and return the exit code. Without ``b``, it is ``a`` with other options;
    ``values`` are the options of both steps."""
    sides = [side_arguments(a, values, a_options), side_arguments(b or a, values, b_options)]
    if sides[0] == sides[1]:
        raise InputError(
            f"{a} twice, with the same options",
            expected="two targets, or an option for one of them",
            do="Name another B, or say what differs: --b autocast=bf16, --b arg=NAME=VALUE",
        )
    from memplan.reports.compare import report
    from memplan.studies.comparisons.compare import compare_requests

    with progress(f"{'running' if really else 'recording'} {a} and {b or a}"):
        comparison = compare_requests(
            _side_request(sides[0], _title(*sides)), _side_request(sides[1], _title(*reversed(sides))), measure=really
        )
    results.write_and_show(comparison.to_json, lambda: report(comparison, top))
    return 0


def _title(side: StepArguments, other: StepArguments) -> str:
    """Return a title for a side: its target, and the options that differ from the other side's as typed."""
    words = [side.target]
    for name, value in vars(side).items():
        if name == "target" or value == getattr(other, name):
            continue
        option = f"--{name.rstrip('s') if isinstance(value, tuple) else name}"
        if isinstance(value, tuple):
            words += [f"{option} {text}" for text in value if text not in getattr(other, name)]
        elif value is False:
            words.append("--no-train")
        elif value is not None and value is not True:
            words.append(f"{option} {value}")
    return " ".join(words)


def _side_request(side: StepArguments, title: str) -> SideRequest:
    """Return a side of the comparison: a target's step, or a saved result. Raises InputError if options of a step were
    used for a file, and TargetError if there is no such target or file."""
    from memplan.studies.comparisons.compare import SideRequest

    if not _is_file(side.target):
        with contained(side.target):
            described = describe(side)
        return SideRequest(
            title, described.what, described.options, side.device, side.settings, side.assumed, side.environment
        )
    _check_file(side.target)
    surplus = [option for option in side.changed_options() if option != "--settings"]
    if surplus:
        raise InputError(
            f"{side.target} is a file, and {', '.join(surplus)} was given for it, too",
            expected="a file alone: its step is already recorded",
            do="Leave the options out, or give them for the other side alone, with --a or --b",
        )
    return SideRequest(title, side.target, settings=side.settings)


def _check_file(path: str) -> None:
    """Raise TargetError if there is no such file."""
    from memplan.studies.comparisons.sides import split_point

    path = split_point(path)[0]
    if not os.path.isfile(path):
        raise TargetError(
            f"there is no file {path}", expected="package.module:callable, path/to/file.py:callable, or a file that "
            "memplan wrote", do="Check the path",
        )  # fmt: skip


def _is_file(target: str) -> bool:
    """Return whether a target is a saved result, or a point in it, rather than code."""
    from memplan.studies.comparisons.sides import split_point

    target = split_point(target)[0]
    return is_trace(target) or (":" not in target and not target.endswith(".py") and os.path.isfile(target))
