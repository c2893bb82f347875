"""`memplan layouts`: ways to train a module with several cards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from memplan._text import whole_number
from memplan.cli.files import ResultFiles
from memplan.cli.options import StepArguments, Whole, resolve_quietly, result_options, step_options, subject_of
from memplan.cli.progress import line
from memplan.cli.script_options import script_option, target_or_script
from memplan.cli.sweep import describe_first_point
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request
    from memplan.studies.layouts.layouts import Layouts

_SECONDS = 900.0
"""After which the run of a script in a layout is ended."""

HELP = """Compare ways to train a model with several cards: copies, shards, parts of layers, checkpoints.

TARGET makes a module, and its options are those of memplan explain. Each layout is one rank's training step under
DistributedDataParallel, fully_shard or (--tensor) parallelize_module, recorded alone. A target that shards its model
by itself is explained by memplan explain --world N.

\b
  memplan layouts examples/gpt.py:make --input 1x1024:int64<50257 \\
      --optimizer adamw --autocast bf16 --world 8 --device rtx4090 --micro-batch 1,4,16
  memplan layouts model.py:llama --input 1x8192:int64<128256 --optimizer adamw \\
      --autocast bf16 --world 8 --device h100 --tensor 1,2,4,8
  memplan layouts --script train.py --world 8 --device h100 --micro-batch 1,4
  memplan layouts --script torchtitan.train --world 8 --device h100 -- --job.config_file llama3_8b.toml

A script of Accelerate or of a Trainer is started as accelerate launch would start it, torchtitan.train by its flags.

Says the fastest layout that fits, and the bytes and the least time of all.

\b
Exit code: 0 found; 1 nothing fits; 2 bad usage, or nothing can be recorded.
"""


@click.command("layouts", help=HELP)
@step_options
@click.option("--world", type=Whole(min=1), required=True, metavar="N", help="Number of ranks, a card each.")
@click.option(
    "--micro-batch", metavar="N,N", help="Samples of a rank at a time. Default: 1, or the script's own.",
)  # fmt: skip
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
    world: int, micro_batch: str | None, tensor: str, tensor_plan: str | None, loss_parallel: bool, per_node: int,
    link: float | None, results: ResultFiles, **values: Any,
) -> int:  # fmt: skip
    """Compare layouts of ``world`` ranks, print them, and return the exit code: 1 if none fits. ``link`` is in GB/s.
    ``values`` are the options of the step and of ``--script``; the others are as the options describe them."""
    from memplan.reports.layouts import report
    from memplan.studies.layouts.layouts import find_layouts
    from memplan.trace.recording.session import choose_target

    sizes = [] if micro_batch is None else _numbers("--micro-batch", micro_batch)
    degrees = _numbers("--tensor", tensor)
    bandwidth = None if link is None else link * 1e9
    settings = values["settings"]
    request = target_or_script(values | {"world": world, "rank": 0}, modules=True)
    if request is not None:
        if tensor_plan is not None:
            raise InputError(
                "--tensor-plan with --script", expected="a script that shares its layers", do="Leave it out"
            )
        result = _of_script(replace(request, settings=settings), sizes, degrees, loss_parallel, per_node, bandwidth)
        results.write_and_show(result.to_json, lambda: report(result))
        return int(result.best is None)
    if not values["train"]:
        raise InputError("--no-train", expected="a training step", do="Leave it out")
    arguments = StepArguments(**{name: value for name, value in values.items() if name not in _OF_SCRIPTS})
    subject = subject_of(describe_first_point(arguments, batches=None, vary={}), arguments)
    target = choose_target(arguments.device, arguments.assumed, arguments.environment, world, rank=0)
    with line("recording layouts") as progress:
        result = find_layouts(
            subject, target, sizes or [1], tensor=degrees,
            tensor_plan=None if tensor_plan is None else resolve_quietly(tensor_plan).what,
            loss_parallel=loss_parallel, per_node=per_node, link=bandwidth, settings=settings, title=arguments.target,
            progress=progress,
        )  # fmt: skip
    results.write_and_show(result.to_json, lambda: report(result))
    return int(result.best is None)


_OF_SCRIPTS = ("script", "unprotected")
script_option(command)


def _of_script(
    request: Request, sizes: list[int], degrees: list[int], loss_parallel: bool, per_node: int, link: float | None
) -> Layouts:
    """Compare the layouts of a script that takes them from its flags or its launcher. ``sizes`` are micro-batches, []
    for the script's own; ``degrees`` numbers of ranks that share each layer; ``link`` bytes a second to another
    machine, None for those of the catalogue."""
    from memplan.devices import find
    from memplan.integrations.scripts.launchers import launcher_of
    from memplan.integrations.scripts.script_layouts import script_layouts
    from memplan.trace.records import HOST

    script, world = request.command, request.world
    launcher = launcher_of(script)
    if launcher is None:
        raise InputError(
            f"--script {script.target}: nothing sets its layout from outside that memplan knows",
            expected="a TARGET that makes the module, which is sharded here; torchtitan.train; or a script of "
            "Accelerate or a Trainer, whose layout its launcher sets",
            do="Only its micro-batch and world can vary: the largest micro-batch by memplan largest --world "
            f"{world} --device CARD --script {script.target}, what a rank takes by memplan run --world {world} "
            f"--rank all --device CARD --batch N {script.target}",
        )
    if request.device is None or request.device == HOST:
        raise InputError(f"device {request.device}", expected="a card, which a rank has to itself", do="Name one: h100")
    with line("recording layouts") as progress:
        return script_layouts(
            replace(request, limit=_SECONDS), launcher, find(request.device), sorted(set(sizes)), tensor=degrees,
            losses=(False, True) if loss_parallel else (False,), per_node=per_node, link=link, progress=progress,
        )  # fmt: skip


def _numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a text such as ``1,2,4``. Raises InputError, with the name of the option, for others."""
    numbers: list[int] = []
    for part in text.split(","):
        number = whole_number(part.strip())
        if number is None or number < 1:
            raise InputError(f"{option} {text!r}", expected="whole numbers from 1: 1,2,4", do="Write them so")
        numbers.append(number)
    return numbers
