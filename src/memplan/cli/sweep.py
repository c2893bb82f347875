"""`memplan sweep`: which memory is fixed and which grows with batch, size, or any argument."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import OUTPUT, ResultFiles, is_trace
from memplan.cli.options import (
    Described,
    StepArguments,
    Whole,
    describe,
    input_advice,
    remove_parameters,
    resolve_quietly,
    result_options,
    step_options,
    subject_of,
)
from memplan.cli.progress import bar
from memplan.errors import InputError
from memplan.trace.naming.parsing import named, parameters

if TYPE_CHECKING:
    from memplan.studies.axes.axes import Axis
    from memplan.studies.sweeps.sweep import Sweep

Values = tuple[Any, ...]

HELP = """Say what grows with batch, size, or any argument of a model, and what is fixed.

TARGET and its options are those of memplan explain. Each axis takes values joined by commas, or a range FIRST:LAST:STEP
that includes its end; all combinations are recorded, once each, without a GPU.

\b
  memplan sweep examples/resnet18.py:make --input 8x3x224x224 --batch 1,2,4,8,16
  memplan sweep examples/unet3d.py:make --input 1x1x96x96x96 \\
      --size 64:128:32 --precision fp32,bf16 --device rtx4090 --chart unet3d.png
  memplan sweep examples/gpt2.py:build --vary layers=6,12,24 --vary sequence=256:1024:256
  memplan sweep examples/unet3d.py:make --input 1x1x96x96x96 --set "*.kernel_size=1,3"

For each point: the peak, its parts (weights, saved, gradients, workspaces ...); for each axis, the fixed part and the
slope with the largest deviation; and where another part becomes the largest. Ctrl-C keeps what is done.

\b
Exit code: 0 done (points that failed are listed with their reason); 2 bad
usage, or no point could be recorded; 130 interrupted.
"""


@click.command("sweep", help=HELP)
@step_options
@click.option("--batch", "batches", metavar="VALUES", help="Of the inputs' leading dimension: 1,2,4,8.")
@click.option("--size", "sizes", metavar="VALUES", help="Of all spatial dimensions: 64:256:32, or 96x96x48,128x128x64.")
@click.option("--sequence", "lengths", metavar="VALUES", help="Of the length of token inputs: 256:2048:256.")
@click.option(
    "--precision", "precisions", metavar="VALUES", help="fp32, bf16, fp16 (autocast), bf16-true, fp16-true (converted)."
)
@click.option("--vary", "varied", multiple=True, metavar="NAME=VALUES", help="An argument of the target: depth=1,2,3.")
@click.option(
    "--set", "changed", multiple=True, metavar="LAYERS.NAME=VALUES",
    help="An attribute of the layers that a pattern names, as named_modules() does: encoder.*.kernel_size=3,5,7; "
    ".NAME=VALUES is one of the model itself.",
)  # fmt: skip
@click.option("--jobs", type=Whole(min=1), metavar="N", help="Processes. Default: as many as save time.")
@result_options("every point")
@click.option(
    "--chart", "chart_file", type=OUTPUT, metavar="FILE", help="Draw the parts of every point: .png, .svg or .pdf."
)
def command(
    batches: str | None, sizes: str | None, lengths: str | None, precisions: str | None, varied: tuple[str, ...],
    changed: tuple[str, ...], jobs: int | None, results: ResultFiles, chart_file: str | None, **values: Any,
) -> int:  # fmt: skip
    """Record a step at all points of its axes, print what grows, and return the exit code: 130 if it was interrupted.

    ``values`` are the options of the step; the others are texts of axes and files, as `HELP` and the options describe
    them.
    """
    from memplan.reports.chart import check_drawable, picture
    from memplan.reports.sweep import draw, report
    from memplan.reports.terminal import show
    from memplan.studies.axes.ranges import values_of

    if chart_file is not None:
        check_drawable(chart_file, "--chart")
    texts = {"batch": batches, "size": sizes, "sequence": lengths, "precision": precisions}
    named_axes = {name: values_of(text, f"--{name}") for name, text in texts.items() if text is not None}
    vary = {name: values_of(text, f"--vary {name}") for name, text in named(varied, "--vary").items()}
    layers = [_parse_layers(text) for text in changed]
    sweep = _sweep(StepArguments(**values), named_axes, vary, layers, jobs)
    results.write(sweep.to_json)
    if chart_file is not None:
        from memplan._text import write_whole

        write_whole(chart_file, picture(partial(draw, sweep), chart_file))
    if not results.takes_stdout:
        show(report(sweep))
    if sweep.interrupted:
        click.echo(f"memplan: interrupted after {len(sweep.rows)} of {sweep.points} points, which were kept", err=True)
        return 130
    return 0


remove_parameters(command, "batch", "autocast", "dtype")


def _sweep(
    arguments: StepArguments, named_axes: dict[str, Values], vary: dict[str, Values], layers: list[tuple[str, Values]],
    jobs: int | None,
) -> Sweep:  # fmt: skip
    """Record the points of all axes. ``layers`` has patterns of layers with an attribute (``encoder.*.kernel_size``),
    and its values."""
    from memplan.studies.axes.axes import Argument, axis_of
    from memplan.studies.sweeps.sweep import sweep_subject

    described = describe_first_point(arguments, named_axes.get("batch"), vary)
    subject = subject_of(described, arguments)
    axes: list[tuple[Axis, Values]] = [(axis_of(name, subject), values) for name, values in named_axes.items()]
    axes += [(Argument(name), values) for name, values in vary.items()]
    axes += [(axis_of(name, subject), values) for name, values in layers]
    target = arguments.recorded_for()
    with input_advice(arguments), bar(f"recording {arguments.target}") as progress:
        return sweep_subject(
            subject, axes, target, settings=arguments.settings, jobs=jobs, progress=progress, title=arguments.target
        )


def describe_first_point(arguments: StepArguments, batches: Values | None, vary: dict[str, Values]) -> Described:
    """Return the step at the first values of its axes, so that an axis may set an argument without a default.

    ``batches`` are the values of the batch, ``vary`` those of arguments of the target by name. Raises TargetError and
    InputError as `describe`, and for a trace, which cannot be recorded for other values."""
    if is_trace(arguments.target):
        raise InputError(
            f"{arguments.target} is a trace",
            expected="a callable: other values are recorded anew",
            do="Name the callable",
        )
    fixed = named(arguments.args, "--arg")
    for name in vary:
        if name in fixed:
            raise InputError(f"--vary {name} and --arg {name}", expected="one of them", do="Leave one out")
    known = parameters(resolve_quietly(arguments.target).what) or {}
    needed = [name for name in vary if name in known and known[name].default is known[name].empty]
    args = (*arguments.args, *(f"{name}={vary[name][0]!r}" for name in needed))
    first = batches[0] if batches and isinstance(batches[0], int) and batches[0] > 0 else None
    return describe(replace(arguments, args=args, batch=first))


def _parse_layers(text: str) -> tuple[str, Values]:
    """Parse ``LAYERS.NAME=VALUES`` into the axis's name and its values."""
    from memplan.studies.axes.ranges import values_of

    name, equals, values = text.partition("=")
    pattern, dot, attribute = name.strip().rpartition(".")
    if not equals or not dot or not attribute.isidentifier():
        raise InputError(
            f"--set {text!r}", expected="--set LAYERS.NAME=VALUES, as in encoder.*.kernel_size=3,5", do="Write it so"
        )
    return f"{pattern}.{attribute}", values_of(values, f"--set {name.strip()}")
