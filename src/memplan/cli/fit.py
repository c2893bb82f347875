"""`memplan fit`: make a training step run within a budget of bytes, and prove that its result is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from memplan.cli.files import OUTPUT, ResultFiles, write
from memplan.cli.in_parts import check_options as check_inference
from memplan.cli.in_parts import fit_inference
from memplan.cli.on_board import board_options, check_options, fit_on
from memplan.cli.options import (
    Described,
    StepArguments,
    Whole,
    describe,
    input_advice,
    remove_parameters,
    result_options,
    step_options,
    top_option,
    used_options,
)
from memplan.cli.progress import progress
from memplan.cli.recipe_options import recipe_option, take_recipe
from memplan.cli.run import run
from memplan.cli.script_options import script_option, target_or_script
from memplan.errors import BudgetError, InputError, MemplanError, StepError, TargetError, VerificationError
from memplan.trace.naming.targets import contained, location

if TYPE_CHECKING:
    from torch import nn

    from memplan.integrations.scripts.request import Request
    from memplan.planning.plan.plan import Plan
    from memplan.verification.fitting.frontier import Frontier
    from memplan.verification.fitting.outcome import Outcome

HELP = """Make a training step run within a budget of bytes.

TARGET is path/to/file.py:callable or package.module:callable. The callable returns a module. The budget
is all that is on the device at any moment of the step: weights, inputs, gradients, activations and, where an
optimizer is named, its state and its update. Parts of the forward pass are run again, kept in a smaller form
or worked on in place; then the planned step runs beside the original one, and all results must be the same
bits. With --engine inductor each half of the step becomes fused kernels, and results must be the same but for
rounding. With --allow reordered, convolutions and what stands between them may run piece by piece, which
adds in another order. With --allow lossy the step may also compute and save in fewer bits, and where nothing else
fits store Adam's moments in 8 bits: the answer says how far its gradients are off. With --no-train, inference
is run on parts of its input along space, with the borders that each part's result reads, to the same result.

\b
  memplan fit examples/resnet18.py:make --input 16x3x224x224 \\
      --target "16:int64<1000" --loss cross_entropy --budget 400MiB
  memplan fit examples/resnet18.py:make --input 16x3x224x224 --predict \\
      --budget 400MiB --plan plan.json --frontier frontier.png
  memplan fit --script examples/train.py --budget 6GiB --device rtx4090 -- --batch-size 64
  memplan fit --model gpt2 --seq 512 --batch 4 --budget 5GiB --device rtx4090
  memplan fit examples/keyword_spotting.py:make --input 4x1x25x10 \\
      --target "4:int64<6" --loss cross_entropy --optimizer sgd:lr=0.05 \\
      --device-memory stm32f446 --reserve 32KiB

The first answers with peak and time before and after, what was decided about which value and why, and the
proof. The second runs nothing: it predicts, keeps the plan and draws peak against time, down to the smallest
budget that there is a plan for. The third takes a training script as it is, runs nothing either, and says which
lines to add to it; so does the fourth, of the script of transformers that a model stands for. The last says what of
a model can be trained on a microcontroller: all layers, the last ones, biases and head, or the head alone.

\b
Exit code: 0 done, or it fits already; 1 it does not fit, or the proof fails; 2 bad usage, a plan
for another model, or a step that cannot be planned.
"""
_POINTS = 9
_UPDATES = 4
"""Updates of a script to record before planning, as persistent state grows in the first of them."""


@dataclass(frozen=True)
class _Files:
    """Output paths as typed."""

    plan: str | None
    python: str | None
    frontier: str | None
    results: ResultFiles

    def checked(self) -> _Files:
        """Check and return the paths. Raises InputError, UsageError: two are the same, or no picture can be drawn."""
        options = {"--plan": self.plan, "--python": self.python, "--frontier": self.frontier}
        options |= {"--json": self.results.json, "--html": self.results.html}
        paths = {option: path for option, path in options.items() if path is not None}
        if self.frontier == "-":
            raise InputError("--frontier -", expected="a file: a picture is no text", do="Name one")
        if len(set(paths.values())) < len(paths):
            raise InputError("one file for several outputs", expected="a file for each", do="Name another")
        if self.frontier is not None:
            from memplan.reports.chart import check_drawable

            check_drawable(self.frontier, "--frontier")
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether a file goes to stdout, so that nothing else may be printed."""
        return "-" in (self.plan, self.python, self.results.json)


@click.command("fit", help=HELP)
@step_options
@click.option(
    "--budget",
    metavar="SIZE",
    help="400MiB, 8GB, a share of the step without a plan (70%), that less some bytes "
    "(-2GiB), or a card's name: what it has, less its context.",
)
@click.option(
    "--engine", type=click.Choice(["graph", "inductor"]), default="graph", show_default=True,
    help="What runs the plan: torch's own kernels, or fused ones, made first by a C++ compiler (on a card, by Triton).",
)  # fmt: skip
@click.option(
    "--allow", type=click.Choice(["exact", "reordered", "lossy"]), default="exact", show_default=True,
    help="What may change of the result: nothing, the order of sums, or what computing and saving in fewer bits, "
    "Adam's moments among them, changes.",
)  # fmt: skip
@click.option("--early", is_flag=True, help="Let the optimizer update each parameter in the backward pass.")
@click.option(
    "--accumulate", type=Whole(min=1), default=1, show_default=True, metavar="N",
    help="Backward passes to one update: gradients are held in between.",
)  # fmt: skip
@click.option("--predict", is_flag=True, help="Plan only: run nothing, allocate nothing.")
@click.option(
    "--costs", type=click.Choice(["measured", "roofline"]), default="measured", show_default=True,
    help="Seconds of an op: measured on this machine, or estimates that are the same every time (--predict).",
)  # fmt: skip
@click.option("--use-plan", "use_plan", metavar="FILE", help="Take the plan that --plan wrote, instead of a search.")
@board_options
@top_option(12, "Values of the plan")
@click.option("--plan", "plan_file", type=OUTPUT, metavar="FILE", help="Write the plan as JSON, for --use-plan.")
@click.option("--python", "python_file", type=OUTPUT, metavar="FILE", help="Write the planned step as Python, to read.")
@click.option("--frontier", "frontier_file", type=OUTPUT, metavar="FILE", help="Draw peak against time of plans.")
@click.option(
    "--peers", is_flag=True,
    help="With --frontier: run checkpoints per block, torch.compile and its memory budgets here, with --allow lossy "
    "autocast, too, and draw them beside.",
)  # fmt: skip
@result_options("everything")
def command(
    budget: str | None, engine: str, allow: str, early: bool, accumulate: int, predict: bool, costs: str,
    use_plan: str | None, top: int,
    plan_file: str | None, python_file: str | None, frontier_file: str | None, peers: bool, results: ResultFiles,
    board: str | None, reserve: str | None, normalize: str | None,
    trained_weights: Literal["float32", "int8"] | None, calibration: str | None, **values: Any,
) -> int:  # fmt: skip
    """Make a step fit, and return the exit code: 0 if it fits, 1 if it does not.

    The step is that of a board, inference, the training of a script, or a model's training step, which is only planned
    with ``--predict``. ``values`` are the options of the step, a script and a recipe; the others are as `HELP` and the
    options describe them.
    """
    recipe = take_recipe(values)
    if recipe is not None:  # fit takes a model or a script, not a step
        values |= {"target": None, "script": recipe.path}
    request = target_or_script(values)
    arguments = StepArguments(**values)
    used: dict[str, object] = {
        "--script": request, "--budget": budget, "--engine": engine != "graph", "--allow": allow != "exact",
        "--early": early, "--predict": predict, "--costs": costs != "measured", "--use-plan": use_plan,
        "--plan": plan_file, "--python": python_file, "--frontier": frontier_file, "--peers": peers,
        "--html": results.html, "--device": arguments.device, "--reserve": reserve, "--normalize": normalize,
        "--trained-weights": trained_weights, "--calibrate": calibration,
    }  # fmt: skip
    check_options(board, used)
    if board is not None:
        _check_step(arguments)
        return fit_on(
            board, arguments, reserve, normalize, trained_weights or "float32", calibration, accumulate, results
        )
    if not arguments.train:
        budget = check_inference(arguments, budget, used | {"--accumulate": accumulate > 1})
        with input_advice(arguments):
            described = describe(arguments)
            return fit_inference(arguments, described, _model_maker(described), budget, results)
    _check_options(arguments, budget, use_plan)
    _check_costs(costs, predict or request is not None)
    _check_peers(peers, frontier_file, predict)
    files = _Files(plan_file, python_file, frontier_file, results).checked()
    options = _changed(
        engine=(engine, "graph"), allow=(allow, "exact"), early=(early, False), accumulate=(accumulate, 1)
    )
    if request is not None:
        _check_script(use_plan, frontier_file, python_file)
        return _fit_script(request, budget, options, files, top)
    plan = None if use_plan is None else _read_plan(use_plan, budget)
    options["budget"] = budget if budget is not None or plan is None else plan.budget
    options |= _changed(costs=(costs, "measured"))
    task = f"{'planning' if predict else 'fitting'} {arguments.target}"
    with progress(task), contained(arguments.target), input_advice(arguments):
        described = describe(arguments)
        make = _model_maker(described)
        model = make if predict else make()
        frontier = None if frontier_file is None else _frontier(model, described, arguments, options, peers)
        outcome = _outcome(model, described, arguments, options | ({} if plan is None else {"plan": plan}))
    outcome = replace(outcome, frontier=frontier)
    _write(outcome, files)
    if not files.takes_stdout:
        from memplan.reports.fit import report
        from memplan.reports.terminal import show

        show(report(outcome, top))
    return 0 if outcome.fits else 1


remove_parameters(command, "cudnn")
script_option(command)
recipe_option(command)


def _changed(**options: tuple[object, object]) -> dict[str, Any]:
    """Return the options, each given as (value, default), that differ from their defaults."""
    return {name: value for name, (value, default) in options.items() if value != default}


def _check_script(use_plan: str | None, frontier: str | None, python: str | None) -> None:
    """Raise InputError for options that cannot be combined with a script."""
    wrong = used_options({"--use-plan": use_plan, "--frontier": frontier, "--python": python})
    if wrong:
        raise InputError(
            f"{wrong} with --script",
            expected="--plan and --json, as files to write",
            do="Leave it out, or name a callable that makes the model",
        )


def _fit_script(request: Request, budget: str | None, options: dict[str, Any], files: _Files, top: int) -> int:
    """Plan the model of a script within a budget, print the plan, and return the exit code. ``options`` are those of
    the plan, ``top`` is the number of rows; 0 for all."""
    from memplan.reports.fit import script_report
    from memplan.reports.terminal import show
    from memplan.studies.capacity.limit import room_of

    room = room_of(request.device, budget, assume=dict(request.assume))
    request = replace(request, device=request.device or room.device, room=room, plan=tuple(options.items()))
    fitting = run(replace(request, steps=_UPDATES)).fitting
    assert fitting is not None, "the request has a plan"
    files.results.write(fitting.to_json)
    if fitting.plan is not None and files.plan is not None:
        write(files.plan, fitting.plan.to_json())
    if not files.takes_stdout:
        show(script_report(fitting, top))
    return 0 if fitting.fits else 1


def _check_step(arguments: StepArguments) -> None:
    """Raise InputError for options of a step that an export does not have."""
    for option in ("--kwarg", "--autocast", "--dtype", "--no-train", "--settings"):
        if option in arguments.changed_options():
            raise InputError(option, expected="positional inputs in float32", do="Leave it out")


def _check_options(arguments: StepArguments, budget: str | None, use_plan: str | None) -> None:
    """Raise InputError for options that contradict each other, before anything is imported."""
    if "--settings" in arguments.changed_options():
        raise InputError("--settings", expected="a training step on this machine", do="Leave it out")
    if budget is None and use_plan is None:
        raise InputError("no budget", expected="one: --budget 400MiB, or a plan's own with --use-plan", do="Give it")
    if budget is not None:
        from memplan.planning.relative_budget import read_any_budget

        read_any_budget(budget)  # raises for text that is no budget


def _check_costs(costs: str, predict: bool) -> None:
    """Raise InputError for estimated seconds of ops in a proof, which measures the step."""
    if costs != "measured" and not predict:
        raise InputError(
            f"--costs {costs} without --predict", expected="a prediction: a proof measures", do="Add --predict"
        )


def _check_peers(peers: bool, frontier: str | None, predict: bool) -> None:
    """Raise InputError for ``--peers`` where no frontier is drawn, or nothing may run."""
    if peers and (frontier is None or predict):
        raise InputError(
            f"--peers {'with --predict' if predict else 'without --frontier'}",
            expected="a frontier to draw them beside, and steps that may run here: they are measured",
            do="Leave --predict out" if predict else "Add --frontier FILE",
        )


def _read_plan(path: str, budget: str | None) -> Plan:
    """Return the plan of a file. Raises InputError if it cannot be read, or its peak exceeds the budget."""
    from memplan._bytes import format_bytes
    from memplan.planning.plan.plan import Plan
    from memplan.planning.relative_budget import read_any_budget

    try:
        plan = Plan.load(path)
    except OSError as error:
        raise InputError(
            f"--use-plan {path} cannot be read ({error.strerror})",
            expected="a plan that --plan wrote",
            do="Check the path",
        ) from error
    size = None if budget is None else read_any_budget(budget)
    if isinstance(size, int) and plan.peak > size:  # the budget of a card's name is not known here
        raise InputError(
            f"the plan of {path} has a peak of {format_bytes(plan.peak)}, and the budget is {format_bytes(size)}",
            expected="a plan within the budget",
            do="Plan anew, without --use-plan",
        )
    return plan


def _outcome(
    model: nn.Module | Callable[[], nn.Module], described: Described, arguments: StepArguments, options: dict[str, Any]
) -> Outcome:
    """Fit a model; only plan it if it is a callable that builds the model. ``options`` are arguments of `memplan.plan`
    and `memplan.fit`: budget and what differs from their defaults."""
    from torch import nn

    import memplan
    from memplan.verification.fitting.outcome import Outcome

    call_options = _call_options(described, arguments) | options
    try:
        if not isinstance(model, nn.Module):
            plan = memplan.plan(model, *described.options.inputs, **call_options)
            return Outcome(arguments.target, plan, changed=not plan.changes_nothing)
        fitted = memplan.fit(model, *described.options.inputs, **call_options)
    except BudgetError as error:
        return Outcome(arguments.target, plan=None, changed=False, shortfall=error)
    except VerificationError as error:
        return Outcome(arguments.target, plan=None, proof=error.proof, changed=False, notes=(f"{error.do}.",))
    outcome = Outcome(arguments.target, fitted.plan, fitted.proof, changed=fitted.changed, notes=tuple(fitted.notes))
    fitted.undo()
    return outcome


def _call_options(described: Described, arguments: StepArguments) -> dict[str, Any]:
    """Return the arguments that `memplan.plan` and `memplan.fit` share, without model, inputs and budget."""
    options = described.options
    return {
        "kwargs": dict(options.kwargs),
        "targets": options.targets,
        "loss": options.loss,
        "optimizer": options.optimizer,
        "autocast": options.autocast,
        "device": arguments.device,
    }


def _model_maker(described: Described) -> Callable[[], nn.Module]:
    """Return a callable that builds the model in training mode. It raises TargetError if the target returns no module,
    and StepError if the target raises."""
    target = described.target

    def make() -> nn.Module:
        """Call the target, and return its model in training mode and the dtype of the options."""
        from torch import nn

        try:
            with contained(target.text):
                model = target.what(**described.arguments)
        except MemplanError:
            raise
        except Exception as error:  # the user's code can raise anything; the original stays as __cause__
            raised = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"
            raise StepError(f"{target.text} raised {raised}", where=location(error)) from error
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{target.text}{f' at {target.where}' if target.where else ''} returned "
                f"{'None' if model is None else f'a value of type {type(model).__name__}'}",
                expected="a module: what can be made to fit is a model, not a step that is written out",
                do="Name a callable that returns the model, and give --input, --loss and --optimizer",
            )
        _initialize_lazy_layers(model, described)
        model = model if described.options.dtype is None else model.to(described.options.dtype)
        return model if model.training else model.train()

    make.__qualname__ = make.__name__ = target.name
    return make


def _initialize_lazy_layers(model: nn.Module, described: Described) -> None:
    """Call a model with lazy layers once, which allocates their parameters."""
    import torch
    from torch.nn.parameter import is_lazy

    from memplan.trace.spec import realize

    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        with torch.no_grad():
            model.eval()(*realize(described.options.inputs), **realize(described.options.kwargs))
        model.train()


def _frontier(
    model: nn.Module | Callable[[], nn.Module], described: Described, arguments: StepArguments, options: dict[str, Any],
    peers: bool,
) -> Frontier:  # fmt: skip
    """Plan for several budgets, from the peak of eager mode to the smallest budget that has a plan.

    A module is planned for this machine, a callable that builds one for the device in ``arguments``. ``options`` are
    arguments of `memplan.fit` that differ from their defaults. With ``peers``, also measure torch's own ways to save
    memory.
    """
    from torch import nn

    from memplan.planning.cost.op_timing import step_seconds
    from memplan.planning.levers.lever import GradientUse
    from memplan.planning.planner import Planner
    from memplan.planning.request import request
    from memplan.planning.settings import PlanOptions
    from memplan.verification.fitting.frontier import Frontier, Point
    from memplan.verification.peers.trials import measure_peers

    other_options = {name: option for name, option in options.items() if name != "early"}
    runs_here = isinstance(model, nn.Module)  # on the CPU, which has no card to offload values from
    plan_options = PlanOptions(
        device=arguments.device, gradients=GradientUse(updates_early=options.get("early", False)),
        host_memory=not runs_here, **other_options,
    )  # fmt: skip
    checked = request(model, described.options, plan_options, fake=True)
    same_call = "the call"  # key of the planner's caches: the call is captured once
    with checked.under_autocast():
        planner = Planner(checked.step)
        study = planner.study(checked.call, checked.settings, same_call)
        plans = planner.frontier(checked.call, checked.settings, _POINTS, same_call)
        eager = study.eager_peak(checked.settings)
    budget = checked.bounded(eager).bytes  # which may be a share of eager mode's peak
    points = tuple(
        Point(plan.peak, plan.seconds, str(plan.precision) if plan.precision.lossy else "") for plan in plans
    )
    seconds = step_seconds(study.captured.graph) or None
    peer_results = measure_peers(checked, eager) if peers else ()
    return Frontier(arguments.target, points, eager, seconds, budget, peer_results)


def _write(outcome: Outcome, files: _Files) -> None:
    """Write the outcome to the files of the options."""
    files.results.write(outcome.to_json)
    if outcome.plan is not None and files.plan is not None:
        write(files.plan, outcome.plan.to_json())
    if outcome.plan is not None and files.python is not None:
        write(files.python, outcome.plan.as_python())
    if files.frontier is not None and outcome.frontier is not None:
        from memplan._text import write_whole
        from memplan.reports.chart import picture
        from memplan.reports.frontier import draw

        write_whole(files.frontier, picture(partial(draw, outcome.frontier), files.frontier))
