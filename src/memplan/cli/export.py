"""`memplan export`: write a training step as C for a small device, under a budget of bytes."""

from __future__ import annotations

import os
from typing import Any, Literal

import click

from memplan.cli.files import write
from memplan.cli.options import (
    StepArguments,
    Whole,
    describe,
    input_advice,
    json_option,
    remove_parameters,
    resolve_quietly,
    step_options,
)
from memplan.cli.progress import progress
from memplan.errors import BudgetError, InputError, VerificationError
from memplan.trace.naming.targets import contained

HELP = """Write a training step as C99 for a small device, under a budget of bytes.

TARGET is path/to/file.py:callable or package.module:callable. The callable returns a module in float32. What is
written needs libm and nothing else: no allocation, no recursion, one arena with fixed addresses. The budget is all
the RAM of a step: weights that are trained, the optimizer's state, statistics, inputs and the arena. Parameters that
need no gradient stay in flash.

\b
  memplan export examples/keyword_spotting.py:make --input 1x1x49x10 \\
      --target "1:int64<12" --loss cross_entropy --optimizer sgd:lr=0.01 \\
      --budget 300KiB --folder device/

Where a C compiler is found, the files are compiled, run under sanitizers, and compared with PyTorch step by step.

\b
Exit code: 0 done; 1 it does not fit, or the proof fails; 2 bad usage, or an
operation without a C kernel.
"""


@click.command("export", help=HELP)
@step_options
@click.option("--budget", metavar="SIZE", required=True, help="256KiB, 1MiB: RAM of the device.")
@click.option("--folder", metavar="FOLDER", required=True, help="Where the files go.")
@click.option(
    "--accumulate", type=Whole(min=1), default=1, show_default=True, metavar="N",
    help="Calls of the step whose gradients are summed for one update.",
)  # fmt: skip
@click.option("--clip-norm", type=float, metavar="X", help="Bound of the norm of all gradients before an update.")
@click.option("--clip-value", type=float, metavar="X", help="Bound of each element of the gradients.")
@click.option(
    "--normalize", metavar="MEAN/STD",
    help="Of inputs in uint8 or int8: 127.5/58, or a number for each channel, 124,116,104/58,57,57.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="Of files and functions. Default: the model's class.")
@click.option(
    "--search-update",
    "batches",
    metavar="TARGET",
    help="A callable that returns batches of inputs and targets: by their gradients it is chosen what to train.",
)
@click.option(
    "--frozen-weights",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="Precision of the weights in flash, which are not trained. int8: with a scale for each output channel.",
)
@click.option(
    "--frozen-layers",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="How layers before the first trained one compute. int8: by integers, on the ranges of --calibrate.",
)
@click.option(
    "--trained-weights",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="Precision of the trained weights, in RAM. int8: SGD without momentum; lossy, the report says how much.",
)
@click.option(
    "--calibrate", "calibration", metavar="TARGET",
    help="A callable that returns batches of inputs and targets, for --frozen-layers int8.",
)  # fmt: skip
@click.option("--weights-file", is_flag=True, help="Write weights to NAME.bin, which the caller reads, not a header.")
@click.option(
    "--arena-apart", is_flag=True, help="Give the arena to NAME_init: it may lie in another bank than the state."
)
@click.option(
    "--input-in-arena", is_flag=True,
    help="The largest input lies in the arena: other buffers take its place after its last use.",
)  # fmt: skip
@click.option("--flash", metavar="SIZE", help="256KiB, 1MiB: refuse what takes more flash than that.")
@click.option("--verify/--no-verify", default=None, help="Compile and prove. Default: where a C compiler is found.")
@click.option(
    "--device", "core", type=click.Choice(["cortex-m4", "cortex-m7"]),
    help="Compile for this core, too, and run the steps on an emulated one.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Write into a folder that holds other files.")
@json_option("the figures")
def command(
    budget: str, folder: str, accumulate: int, clip_norm: float | None, clip_value: float | None, normalize: str | None,
    name: str | None, batches: str | None, frozen_weights: Literal["float32", "int8"],
    frozen_layers: Literal["float32", "int8"], trained_weights: Literal["float32", "int8"],
    calibration: str | None, weights_file: bool, arena_apart: bool, input_in_arena: bool, flash: str | None,
    verify: bool | None, core: str | None, force: bool, json_file: str | None, **values: Any,
) -> int:  # fmt: skip
    """Export a training step as C, print what it takes, and return the exit code: 1 if it exceeds the budget, or if the
    compiled step differs from PyTorch's.

    ``values`` are the options of the step; the others are as `HELP` and the options describe them.
    """
    from memplan.exporting.export import export
    from memplan.reports.exports.export import report, shortfall_report
    from memplan.reports.terminal import show

    folder = os.path.abspath(folder)  # the target may change the directory
    arguments = StepArguments(**values)
    for option in ("--kwarg", "--autocast", "--dtype"):
        if option in arguments.changed_options():
            raise InputError(option, expected="positional inputs in float32", do="Leave it out")
    with progress(f"exporting {arguments.target}"), contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        step = described.options
        loss, optimizer = step.callables
        try:
            model = described.target.what(**described.arguments)
            data, ranges = (None if target is None else read_batches(target) for target in (batches, calibration))
            exported = export(
                model, *step.inputs, targets=step.targets, loss=loss, optimizer=optimizer, budget=budget,
                accumulate=accumulate, clip_norm=clip_norm, clip_value=clip_value,
                normalize=None if normalize is None else read_normalization(normalize), folder=folder, name=name,
                search_update=data, frozen_weights=frozen_weights, frozen_layers=frozen_layers,
                trained_weights=trained_weights, calibrate=ranges,
                weights_file=weights_file, arena_apart=arena_apart, input_in_arena=input_in_arena, flash=flash,
                verify=verify, device=core, force=force,
            )  # fmt: skip
        except BudgetError as error:
            show(shortfall_report(error))
            return 1
        except VerificationError as error:
            click.echo(f"memplan: {error}", err=True)
            return 1
    if json_file is not None:
        write(json_file, exported.to_json())
    if json_file != "-":
        show(report(exported))
    return 0


def read_normalization(text: str) -> tuple[tuple[float, ...], ...]:
    """Return mean and deviation of ``MEAN/STD``, numbers or a number for each channel. Raises InputError."""
    try:
        mean, std = (tuple(map(float, part.split(","))) for part in text.split("/"))
    except ValueError as error:
        raise InputError(f"--normalize {text}", expected="MEAN/STD", do="Give such as 127.5/58") from error
    return mean, std


def read_batches(target: str) -> Any:
    """Return what the callable of a target returns: batches of inputs and targets."""
    with contained(target):
        return resolve_quietly(target).what()


remove_parameters(command, "train", "device", "settings", "assume", "cudnn")
