"""`memplan explain`: where the memory of a step goes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from memplan._json import Unreadable, parse, read_text
from memplan.cli.files import begins_as_trace, is_trace
from memplan.cli.options import (
    Described,
    StepArguments,
    all_ranks_options,
    describe,
    host_option,
    input_advice,
    load_trace,
    names_all,
    step_options,
    top_option,
    used_options,
)
from memplan.cli.outputs import Outputs, output_options
from memplan.cli.progress import progress
from memplan.cli.recipe_options import recipe_option, take_recipe
from memplan.cli.verdicts import MEASURE, does_not_fit, warn_of_branches
from memplan.errors import DataDependentError, InputError
from memplan.trace.naming.targets import FORM, contained

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.trace.recording.boundaries import Build
    from memplan.trace.trace import Trace

HELP = """Say where the memory of a step goes, before it runs.

TARGET is path/to/file.py:callable or package.module:callable. The callable returns a module, or it is
a build: it makes model, data and optimizer and returns the step, a function without arguments. Or TARGET
is a file: a trace that --trace wrote, or an explanation that --json wrote.

\b
  memplan explain examples/resnet18.py:make --input 32x3x224x224 \\
      --target "32:int64<1000" --loss cross_entropy --optimizer adamw
  memplan explain examples/gpt2.py:build --arg batch=4 --arg sequence=512
  memplan explain examples/unet3d.py:build --device rtx4090 --snapshot unet3d.pickle
  memplan explain sharded.py:build --device h100 --world 8 --rank all

  memplan explain mymodels.py:net --input 8x512 --no-train --weights int8
  memplan explain --model llama-3.1-8b --recipe lora:r=16 --seq 4096 --checkpointing --device rtx4090
  memplan explain --model llama-3.1-8b --recipe lora:r=16 --seq 4096 --checkpointing --device all
  memplan explain mymodels.py:lm --input "8x2048:int64<32000" --optimizer adamw \\
      --lengths 512:0.6,2048:0.3,8192:0.1 --device h100

The first answers "44.6 MiB of weights -> 841.7 MiB peak: 75 % saved activations, ...", and says which
layer saves what, and why. The one with --weights makes the model, has torchao
quantize a copy, runs both here and says what it saves and how far the output is
off. The last one draws a thousand batches of these lengths. --device all is a table: the peak on each card,
and whether the step fits.

\b
Exit code: 0 done; 1 does not fit on the card that --device names; 2 bad
usage, a step that cannot be recorded, or one whose path depends on a value that
a recording does not have.
"""


@click.command("explain", help=HELP)
@step_options
@all_ranks_options
@click.option("--measure", "really", is_flag=True, help="Really run the step here, instead of predicting it.")
@top_option(12, "Layers")
@click.option(
    "--weights", type=click.Choice(("int8", "int4")),
    help="With --no-train: quantize the weights by torchao, too, and run both here.",
)  # fmt: skip
@click.option(
    "--activations", type=click.Choice(("int8",)), help="With --weights: the inputs of quantized layers, too."
)
@click.option(
    "--lengths", metavar="SHARES|FILE",
    help="Lengths of sequences, or sizes of images, and their shares of all batches: 512:0.6,2048:0.4; "
    "or a file with a length a line.",
)  # fmt: skip
@host_option
@output_options
def command(
    really: bool, top: int, host: str | None, weights: str | None, activations: str | None, lengths: str | None,
    outputs: Outputs, **values: Any,
) -> int:  # fmt: skip
    """Explain a step, print the explanation, and return the exit code: 1 if it does not fit its card, 2 if a branch was
    assumed. A step on all cards, on all ranks, with quantized weights or with drawn lengths is explained and printed by
    a module of its own. ``values`` are the options of the step, its rank and a recipe; the others are as `HELP`
    describes them."""
    recipe = take_recipe(values)
    if values["target"] is None:
        raise InputError("no TARGET", expected=f"one: {FORM}; or --model llama-3.1-8b, say", do="Name one")
    arguments = StepArguments(**values)
    from memplan.explanation.host import read_host
    from memplan.reports.explain import report
    from memplan.reports.terminal import show

    room = read_host(host, measured=really)
    quantizes = weights is not None or activations is not None
    if room is not None and (lengths is not None or quantizes):
        raise InputError(
            "--host with --lengths, --weights or --activations", expected="one of them", do="Leave out --host"
        )
    if names_all(arguments.device) and not is_trace(arguments.target):
        from memplan.cli.on_cards import show_on_cards

        surplus = {
            "--measure": really, "--host": host, "--weights": weights, "--activations": activations,
            "--lengths": lengths, "--trace": outputs.trace, "--snapshot": outputs.snapshot,
            "--perfetto": outputs.perfetto,
        }  # fmt: skip
        title = arguments.target if recipe is None else recipe.title
        # `describe` imports the target, so it comes after the check of the surplus
        return show_on_cards(arguments, describe, title, outputs.results, surplus)
    if values["rank"] == "all":
        from memplan.cli.roles import check, explain_roles

        if lengths is not None or quantizes:
            raise InputError(
                "--rank all with --lengths or --weights", expected="one of them", do="Leave out --rank all"
            )
        check(arguments.world, really, outputs)
        return explain_roles(arguments, room, outputs, top)
    if quantizes:
        from memplan.cli.quantize import quantize

        return quantize(arguments, weights, activations, outputs, top)
    if lengths is not None:
        from memplan.cli.lengths import explain_lengths

        return explain_lengths(arguments, lengths, outputs, top, measured=really)
    saved = _read_saved(arguments, really, host, outputs)
    if saved is not None:
        outputs.results.write_and_show(saved.to_json, lambda: report(saved, top))
        return warn_of_branches(saved) or int(does_not_fit(saved))
    # A recipe's model has billions of parameters: recordings with larger batches, for how the peak grows with the
    # batch, would take twice as long as the answer.
    trace, explanation = _explain(arguments, really, room, scales=recipe is None)
    if recipe is not None:
        explanation = replace(explanation, title=recipe.title, source=recipe.script)
    outputs.write(trace, explanation, explanation.to_json, arguments.settings)
    if not outputs.takes_stdout:
        show(report(explanation, top))
    return warn_of_branches(explanation) or int(does_not_fit(explanation))


recipe_option(command)


def _read_saved(arguments: StepArguments, really: bool, host: str | None, outputs: Outputs) -> Explanation | None:
    """Return the explanation of a target that is a file which --json wrote. Return None for other targets. Raises
    InputError if options that describe a step were used, or the explanation is damaged."""
    from memplan.explanation.model import Explanation

    if not arguments.target.endswith(".json") or begins_as_trace(arguments.target):
        return None
    try:
        data = parse(read_text(arguments.target))
    except OSError:
        return None
    except Unreadable as error:
        raise InputError(f"{arguments.target}: {error}", expected=_FILES, do="Explain the step again") from None
    if not isinstance(data, dict) or data.get("format") != Explanation.FORMAT:
        return None
    explanation = Explanation.from_dict(data, arguments.target)
    values = dict.fromkeys(arguments.changed_options(), True) | {
        "--measure": really, "--host": host, "--trace": outputs.trace,
        "--snapshot": outputs.snapshot, "--perfetto": outputs.perfetto,
    }  # fmt: skip
    if unused := used_options(values):
        raise InputError(
            f"{arguments.target} is an explanation, and {unused} was given, too",
            expected="an explanation alone: its step is no longer there",
            do="Leave the options out, or name a callable",
        )
    return explanation


_FILES = "what memplan explain --trace or --json wrote"


def _explain(arguments: StepArguments, really: bool, host: int | None, scales: bool) -> tuple[Trace, Explanation]:
    """Record the target's step, run it (``really``), or load its trace, and explain it. With ``scales`` it is recorded
    with larger batches as well, for how the peak grows with the batch."""
    if is_trace(arguments.target):
        return _explain_file(arguments, really, host)
    task = f"{'running' if really else 'recording'} {arguments.target}"
    with progress(task), contained(arguments.target), input_advice(arguments):
        try:
            return _explain_target(describe(arguments), arguments, really, host, scales)
        except DataDependentError as error:
            raise DataDependentError(error.found, expected=error.expected, do=MEASURE) from error


def _explain_target(
    described: Described, arguments: StepArguments, really: bool, host: int | None, scales: bool
) -> tuple[Trace, Explanation]:
    """Explain the step of a target from a recording or, with ``really``, from a run. Further arguments are as for
    `_explain`."""
    from memplan.explanation.explain import explain_build, explain_trace
    from memplan.trace.measure import measure

    if really:
        trace = measure(described.build(), device=arguments.device)
        train = None if arguments.train else False
        return trace, explain_trace(trace, title=arguments.target, train=train, host=host)
    target = arguments.recorded_for()

    def build_of_step(batch: int | None, train: bool) -> Build:
        step = described if batch is None else described.with_batch(batch)
        return (step.training() if train else step).build(on_card=target.card is not None)

    return explain_build(
        build_of_step, target, train=arguments.train, batch=described.batch if scales else None, title=arguments.target,
        settings=arguments.settings, host=host,
    )  # fmt: skip


def _explain_file(arguments: StepArguments, really: bool, host: int | None) -> tuple[Trace, Explanation]:
    """Explain a saved trace. ``really``: whether ``--measure`` was used, which is an error; ``host``: budget of the
    host's memory in bytes."""
    from memplan.explanation.explain import explain_trace
    from memplan.explanation.host import read_host

    trace = load_trace(arguments, *(["--measure"] if really else []))
    host = read_host(host, measured=trace.origin != "recorded")
    trains = any(op.phase == "backward" for op in trace.ops)
    return trace, explain_trace(trace, title=arguments.target, train=trains, settings=arguments.settings, host=host)
