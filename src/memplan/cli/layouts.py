"""`memplan layouts`: ways to train a module with several cards."""

from __future__ import annotations

from typing import Any

import click

from memplan._text import whole_number
from memplan.cli.files import ResultFiles
from memplan.cli.options import StepArguments, Whole, resolve_quietly, result_options, step_options, subject_of
from memplan.cli.progress import line
from memplan.cli.sweep import describe_first_point
from memplan.errors import InputError

HELP = """Compare ways to train a model with several cards: copies, shards, parts of layers, checkpoints.

TARGET makes a module, and its options are those of memplan explain. Each layout is one rank's training step under
DistributedDataParallel, fully_shard or (--tensor) parallelize_module, recorded alone. A target that shards its model
by itself is explained by memplan explain --world N.

\b
  memplan layouts examples/gpt.py:make --input 1x1024:int64<50257 \\
      --optimizer adamw --autocast bf16 --world 8 --device rtx4090 --micro-batch 1,4,16
  memplan layouts model.py:llama --input 1x8192:int64<128256 --optimizer adamw \\
      --autocast bf16 --world 8 --device h100 --tensor 1,2,4,8

Says the fastest layout that fits, and the bytes and the least time of all.

\b
Exit code: 0 found; 1 nothing fits; 2 bad usage, or nothing can be recorded.
"""


@click.command("layouts", help=HELP)
@step_options
@click.option("--script", metavar="FILE", help="A script has its own layout: says which commands vary the rest.")
@click.option("--world", type=Whole(min=1), required=True, metavar="N", help="Number of ranks, a card each.")
@click.option("--micro-batch", default="1", show_default=True, metavar="N,N", help="Samples of a rank at a time.")
@click.option(
    "--tensor",
    default="1",
    show_default=True,
    metavar="N,N",
    help="Ranks that share each layer, and the sequence between layers.",
)
@click.option(
    "--tensor-plan",
    metavar="TARGET",
    help="A callable that shares the layers: (model, mesh). Default: for transformers of linear layers.",
)
@click.option("--loss-parallel", is_flag=True, help="Also: the loss on each rank's shard of the logits.")
@click.option("--per-node", type=Whole(min=1), default=8, show_default=True, metavar="N", help="Cards of a machine.")
@click.option(
    "--link", type=click.FloatRange(min=0, min_open=True), metavar="GB/S",
    help="Of a card to other machines, instead of the catalogue's.",
)  # fmt: skip
@result_options("everything")
def command(
    script: str | None, world: int, micro_batch: str, tensor: str, tensor_plan: str | None,
    loss_parallel: bool, per_node: int, link: float | None, results: ResultFiles, **values: Any,
) -> int:  # fmt: skip
    """Run the command and return its exit code."""
    from memplan.reports.layouts import report
    from memplan.studies.layouts.layouts import find_layouts
    from memplan.trace.recording.session import choose_target

    if script is not None:
        raise InputError(
            f"--script {script}, which makes its own mesh and shards by itself",
            expected="a TARGET that makes the module, which is sharded here",
            do="Only its micro-batch and world can vary: the largest micro-batch by memplan largest --world "
            f"{world} --device CARD --script {script}, what a rank takes by memplan run --world {world} --rank all "
            f"--device CARD --batch N {script}",
        )
    if values["target"] is None:
        raise InputError(
            "no TARGET", expected="one: path/to/file.py:callable or package.module:callable", do="Name one"
        )
    sizes, degrees = _numbers("--micro-batch", micro_batch), _numbers("--tensor", tensor)
    if not values["train"]:
        raise InputError("--no-train", expected="a training step", do="Leave it out")
    arguments = StepArguments(**values)
    subject = subject_of(describe_first_point(arguments, None, {}), arguments)
    target = choose_target(arguments.device, arguments.assumed, arguments.environment, world, 0)
    with line("recording layouts") as progress:
        result = find_layouts(
            subject, target, sizes, tensor=degrees,
            tensor_plan=None if tensor_plan is None else resolve_quietly(tensor_plan).what,
            loss_parallel=loss_parallel, per_node=per_node,
            link=None if link is None else link * 1e9, settings=arguments.settings, title=arguments.target,
            progress=progress,
        )  # fmt: skip
    results.write_and_show(result.to_json, lambda: report(result))
    return int(result.best is None)


for _parameter in command.params:
    if _parameter.name == "target":
        _parameter.required = False


def _numbers(option: str, text: str) -> list[int]:
    """Return the numbers of an option's text."""
    numbers = [number for part in text.split(",") if (number := whole_number(part.strip())) is not None and number > 0]
    if len(numbers) <= text.count(","):
        raise InputError(f"{option} {text!r}", expected="whole numbers from 1: 1,2,4", do="Write them so")
    return numbers
