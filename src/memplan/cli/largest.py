"""`memplan largest`: the largest batch, size or sequence that fits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from memplan._text import whole_number
from memplan.cli.files import ResultFiles
from memplan.cli.options import (
    StepArguments,
    Whole,
    input_advice,
    names_all,
    rank_options,
    result_options,
    step_options,
    subject_of,
)
from memplan.cli.progress import line
from memplan.cli.recipe_options import recipe_option, take_recipe
from memplan.cli.run import run
from memplan.cli.script_options import script_option, target_or_script
from memplan.cli.sweep import describe_first_point
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.studies.axes.sliding_window import Window
    from memplan.studies.capacity.largest import Largest

HELP = """Find the largest batch, size or sequence that fits a card or a budget, without trying it on a GPU.

TARGET and its options are those of memplan explain. The answer is recorded, and so is the next value, which does
not fit.

\b
  memplan largest examples/resnet18.py:make --input 8x3x224x224 \\
      --optimizer adamw --axis batch --device rtx4090
  memplan largest examples/unet3d.py:make --input 1x1x96x96x96 --optimizer adamw \\
      --axis patch --divisible 16 --aspect 1,1,0.5 --device a100-40gb --margin 5%
  memplan largest examples/unet3d.py:make --input 1x1x96x96x96 --axis patch \\
      --divisible 16 --window 512x512x320 --overlap 0.5 --device t4
  memplan largest examples/resnet18.py:make --input 8x3x64x64 --axis batch \\
      --budget 600MiB --device cpu --fit
  memplan largest --script examples/train.py --device rtx4090 -- --epochs 3
  memplan largest --model llama-3.1-8b --recipe lora:r=16 --checkpointing \\
      --axis sequence --divisible 1024 --device rtx4090
  memplan largest --model llama-3.1-8b --recipe lora:r=16 --checkpointing \\
      --axis sequence --device all

The first answers "the largest batch is 962" with what it needs, what the next one would, and how many recordings it
took. --window counts inference over a whole volume in patches: the aggregation buffer, not the patch, may be largest.

--device all answers for each card of the catalogue, of batches or sequences that are powers of two times 1, 1.25, 1.5
and 1.75. The answer and the next of them are recorded, once for all cards with the same kernels and workspaces.

A value at which the model fails, as sizes that it cannot halve, is listed with its reason, and the search goes on with
those that work.

\b
Exit code: 0 found; 1 not even the smallest fits; 2 bad usage, or no value
can be recorded.
"""


@click.command("largest", help=HELP)
@step_options
@rank_options
@click.option(
    "--axis",
    default="batch",
    show_default=True,
    metavar="NAME",
    help="batch, size, patch, sequence, or an argument of the target.",
)
@click.option("--budget", metavar="SIZE", help="400MiB, 8GB: instead of what the card has, or for the CPU.")
@click.option(
    "--divisible", type=Whole(min=1), default=1, show_default=True, metavar="N", help="Multiples of it alone."
)
@click.option("--aspect", metavar="SHARES", help="What a size is multiplied by in each dimension: 1,1,0.5.")
@click.option("--margin", default="0", show_default=True, metavar="SHARE", help="Of the budget, to be left free: 5%.")
@click.option("--most", type=Whole(min=1), metavar="N", help="The largest value to try.")
@click.option(
    "--workspace", type=click.Choice(("high", "low")), default="high", show_default=True,
    help="The bound to count of cuDNN's workspaces that are known as an interval only (--cudnn off).",
)  # fmt: skip
@click.option("--fit", "planned", is_flag=True, help="Also the largest after planning, with its time.")
@click.option("--window", metavar="SIZES", help="Infer a volume of these sizes in patches: 512x512x320.")
@click.option("--overlap", type=float, default=0.25, show_default=True, metavar="SHARE", help="Of two patches.")
@click.option("--window-batch", type=Whole(min=1), default=1, show_default=True, metavar="N", help="Patches at a time.")
@result_options("everything")
def command(
    axis: str, budget: str | None, divisible: int, aspect: str | None, margin: str, most: int | None, workspace: str,
    planned: bool, window: str | None, overlap: float, window_batch: int, results: ResultFiles, **values: Any,
) -> int:  # fmt: skip
    """Find the largest value of an axis that fits, print it, and return the exit code: 1 if not even the smallest fits.

    ``values`` are the options of the step, a script and a recipe; the others are as `HELP` and the options describe
    them.
    """
    from memplan.studies.capacity.limit import room_of

    recipe = take_recipe(values)
    request = target_or_script(values)
    arguments = StepArguments(**values)
    if recipe is not None and axis == "sequence" and recipe.positions is not None:
        most = min(most or recipe.positions, recipe.positions)  # a recording does not raise beyond them
    title = arguments.target if recipe is None else recipe.title
    if names_all(arguments.device):
        from memplan.cli.on_cards import show_on_cards

        first = partial(describe_first_point, batches=None, vary={})
        surplus = {
            "--script": request, "--budget": budget, "--window": window, "--fit": planned, "--aspect": aspect,
            "--divisible": divisible != 1, "--margin": margin != "0", "--workspace": workspace != "high",
        }  # fmt: skip
        return show_on_cards(arguments, first, title, results, surplus, axis, most)
    volume = _window(window, overlap, window_batch)
    if planned and arguments.world is not None:
        raise InputError("--fit with --world", expected="a step of one process", do="Leave one out")
    room = room_of(
        arguments.device, budget, margin, workspace, arguments.assumed, arguments.environment, arguments.world,  # pyright: ignore[reportArgumentType]
        arguments.rank,
    )  # fmt: skip
    if request is not None:
        if axis != "batch" or divisible != 1 or aspect is not None or planned or volume is not None:
            raise InputError(
                "--script with another axis than batch, or with --divisible, --aspect, --fit or --window",
                expected="--axis batch: the batch that its loader gives is made larger",
                do="Leave it out, or name a callable that makes the model",
            )
        largest = run(
            replace(request, device=request.device or room.device, room=room, most=most, settings=values["settings"])
        ).largest
        assert largest is not None, "the request has a room"
        return _report(largest, results)
    options = {"divisible": divisible, "aspect": _shares(aspect), "most": most, "fit": planned}
    return _report(_find(arguments, axis, room, volume, options, title), results)


def _report(largest: Largest, results: ResultFiles) -> int:
    """Write and print the result; return the exit code."""
    from memplan.reports.largest import report

    results.write_and_show(largest.to_json, lambda: report(largest))
    best = largest.planned or largest
    return int(best.value == 0)


def _find(
    arguments: StepArguments, axis: str, room: Any, window: Window | None, options: dict[str, Any], title: str
) -> Largest:
    """Return the largest value of an axis that fits. ``options`` are further arguments of `find_largest`."""
    from memplan.studies.capacity.largest import find_largest

    vary = {axis: (options["divisible"],)} if axis not in ("batch", "size", "patch", "sequence") else {}
    subject = subject_of(describe_first_point(arguments, batches=None, vary=vary), arguments)
    subject = replace(subject, window=window)
    with input_advice(arguments), line(f"looking for the largest {axis}") as progress:
        return find_largest(subject, axis, room, settings=arguments.settings, title=title, progress=progress, **options)


def _window(text: str | None, overlap: float, batch: int) -> Window | None:
    """Return the volume of ``--window`` to infer in patches; None without that option. ``overlap`` is the share of two
    neighbouring patches, ``batch`` the number of patches at a time."""
    from memplan.studies.axes.sliding_window import Window

    if text is None:
        if overlap != 0.25 or batch != 1:
            raise InputError("--overlap or --window-batch without --window", expected="the volume", do="Give --window")
        return None
    sizes: list[int] = []
    for part in text.split("x"):
        size = whole_number(part.strip())
        if size is None:
            raise InputError(f"--window {text!r}", expected="sizes joined by x, as in 512x512x320", do="Write it so")
        sizes.append(size)
    return Window(tuple(sizes), overlap, batch).checked()


def _shares(text: str | None) -> tuple[float, ...] | None:
    """Return the numbers of ``--aspect``; None without that option."""
    if text is None:
        return None
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise InputError(
            f"--aspect {text!r}", expected="a share for each dimension, as in 1,1,0.5", do="Write it so"
        ) from None


script_option(command)
recipe_option(command)
