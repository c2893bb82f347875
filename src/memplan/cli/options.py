"""The options that describe a step, shared by all commands, and the step that they describe."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from memplan._text import printable
from memplan.cli.files import OUTPUT, ResultFiles
from memplan.errors import InputError, MemplanError, StepError, TargetError, UsageError
from memplan.trace.naming.parsing import check_arguments, literal, named, parameters
from memplan.trace.naming.targets import ByName, Target, contained, resolve

if TYPE_CHECKING:
    import torch

    from memplan.studies.axes.subject import Subject
    from memplan.trace.recording.boundaries import Build
    from memplan.trace.recording.session import Target as RecordedFor
    from memplan.trace.step import StepOptions
    from memplan.trace.trace import Trace

_BATCH_NAMES = ("batch", "batch_size")
_UNSET = (None, "none")
"""Value of --autocast and --dtype that changes nothing, for a side of a comparison."""

Decorated = Callable[..., Any]


class Whole(click.IntRange):
    """A whole number, as error messages call it."""

    name = "whole number"


debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
"""Option of every command, read by `memplan.cli.Commands`."""


def json_option(what: str) -> Callable[[Decorated], Decorated]:
    """Return the option ``--json``. ``what``: its content, for the help."""
    text = f"Write {what} as JSON, too; - for stdout alone."
    return click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help=text)


def result_options(what: str) -> Callable[[Decorated], Decorated]:
    """Return the options ``--json`` and ``--html``, checked and passed to the command as ``results``. ``what``: their
    content, for the help."""

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def with_files(*, json_file: str | None, html_file: str | None, **values: Any) -> Any:
            return function(results=ResultFiles(json_file, html_file).checked(), **values)

        text = "Write it as a page for any browser, too."
        html_option = click.option("--html", "html_file", type=OUTPUT, metavar="FILE", help=text)
        return json_option(what)(html_option(with_files))

    return decorate


def top_option(default: int, what: str) -> Callable[[Decorated], Decorated]:
    """Return the option ``--top``. ``what``: the rows that it limits, for the help."""
    return click.option(
        "--top", type=Whole(min=0), default=default, show_default=True, metavar="N",
        help=f"{what} to list; 0 for all.",
    )  # fmt: skip


def host_option(function: Decorated) -> Decorated:
    """Add ``--host``, whose value `memplan.explanation.host.read_host` reads."""
    return click.option(
        "--host", metavar="SIZE", help="Budget of the host's memory, such as 32GiB: whether it is kept, too."
    )(function)


def _target_arguments(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of the arguments after the target: raise UsageError if they do not follow ``--``."""
    if value and not ctx.find_root().obj:  # whether "--" was typed: see `Commands.main`
        raise click.UsageError(
            f"Got {' '.join(value)!r} besides the target. Arguments of its own come last, behind --", ctx
        )
    return value


def _show_output(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Callback of ``--show-output``: show the target's output until the command ends."""
    if value and not ctx.resilient_parsing:
        from memplan.trace.held_output import output_shown

        ctx.with_resource(output_shown())


show_output_option = click.option(
    "--show-output", is_flag=True, expose_value=False, callback=_show_output,
    help="Show what the target prints, with stand-in values, while it is recorded.",
)  # fmt: skip

_OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    click.argument("target"),
    click.argument("argv", nargs=-1, type=click.UNPROCESSED, callback=_target_arguments, metavar="[-- ARGUMENTS]"),
    click.option("--arg", "args", multiple=True, metavar="NAME=VALUE", help="Argument of the target."),
    click.option(
        "--input", "inputs", multiple=True, metavar="SPEC",
        help="An input, such as 8x3x224x224 or 8x1024:int64<50257. One option for each, in order.",
    ),
    click.option("--kwarg", "kwargs", multiple=True, metavar="NAME=SPEC", help="An input by name."),
    click.option("--target", "targets", multiple=True, metavar="SPEC", help="Further argument of the loss: labels."),
    click.option(
        "--loss", metavar="NAME",
        help="cross_entropy, mse_loss, any other of torch.nn.functional, or module:callable. Default: the "
        "output's .loss, else its sum.",
    ),
    click.option(
        "--optimizer", metavar="NAME",
        help="adamw, sgd:lr=0.1,momentum=0.9, any other of torch.optim, or module:callable. Default: none.",
    ),
    click.option("--autocast", metavar="DTYPE", help="Run under torch.autocast: bf16 or fp16."),
    click.option(
        "--dtype", metavar="DTYPE",
        help="Convert the weights, and inputs without a dtype of their own: bf16, fp16, float64.",
    ),
    click.option(
        "--train/--no-train", default=True,
        help="A training step, or forward only in evaluation mode under no_grad. Default: train.",
    ),
    click.option(
        "--batch", type=Whole(min=1), metavar="N",
        help="Leading dimension of the inputs, or the target's argument batch or batch_size.",
    ),
    click.option("--device", metavar="NAME", help="cpu, or a card such as h100 (memplan devices lists them)."),
    click.option(
        "--settings", metavar="CONF",
        help="Of the card's caching allocator, as in PYTORCH_ALLOC_CONF: expandable_segments:True.",
    ),
    click.option(
        "--assume", multiple=True, metavar="FILE:LINE=SHARE",
        help="How much is selected by value at a line, as in train.py:31=0.3. Default: all there can be.",
    ),
    click.option(
        "--cudnn", metavar="PATH",
        help="Environment whose cuDNN is asked for workspaces on a card. A version such as 9.19.0: its stored answers, "
        "else expected workspaces. off: intervals. Default: this environment, else the version of torch's CUDA build.",
    ),
    show_output_option,
    debug_option,
)  # fmt: skip


def step_options(function: Decorated) -> Decorated:
    """Add the target and the options of its step to a command; `StepArguments` takes their values."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def used_options(values: Mapping[str, Any], separator: str = ", ") -> str:
    """Return the options, of those in ``values``, that have a value: ``--trace, --html``; "" if none has."""
    return separator.join(option for option, value in values.items() if value)


def names_all(device: str | None) -> bool:
    """Return whether ``--device`` means all cards of the catalogue."""
    return device is not None and device.lower() == "all"


class RankNumber(Whole):
    """A rank, or "all" if the command supports it."""

    name = "rank"

    def __init__(self, *, takes_all: bool) -> None:
        """``takes_all``: whether the text "all" is a value, too."""
        super().__init__(min=0)
        self._takes_all = takes_all

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or "all"."""
        if value != "all":
            return super().convert(value, param, ctx)
        if not self._takes_all:
            raise InputError(
                "--rank all", expected="a rank: all of them are explained by memplan explain and memplan run",
                do="Name the fullest of those, as in --rank 3",
            )  # fmt: skip
        return value


def rank_options(function: Decorated) -> Decorated:
    """Add ``--world`` and ``--rank``, whose values are fields of `StepArguments`."""
    return _rank_options(function, RankNumber(takes_all=False), "R", "Which one. Default: 0.")


def all_ranks_options(function: Decorated) -> Decorated:
    """Add ``--world`` and ``--rank``, which can also be "all"."""
    text = "Which one; all: each that differs from others, the fullest first. Default: 0."
    return _rank_options(function, RankNumber(takes_all=True), "R|all", text)


def _rank_options(function: Decorated, number: RankNumber, metavar: str, text: str) -> Decorated:
    """Add ``--world``, and ``--rank`` with this type, placeholder and help."""
    rank = click.option("--rank", type=number, default=0, metavar=metavar, help=text)
    world = click.option("--world", type=Whole(min=1), metavar="N", help="Record one rank of N, without the others.")
    return world(rank(function))


def remove_parameters(command: click.Command, *names: str) -> click.Command:
    """Remove parameters from a command."""
    command.params = [parameter for parameter in command.params if parameter.name not in names]
    return command


@dataclass(frozen=True)
class StepArguments:
    """The values of `step_options` as typed."""

    target: str
    args: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    kwargs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    loss: str | None = None
    optimizer: str | None = None
    autocast: str | None = None
    dtype: str | None = None
    train: bool = True
    batch: int | None = None
    device: str | None = None
    settings: str | None = None
    assume: tuple[str, ...] = ()
    cudnn: str | None = None
    world: int | None = None
    rank: int = 0
    argv: tuple[str, ...] = ()
    """Arguments that the target reads from ``sys.argv``."""

    @property
    def environment(self) -> str | bool | None:
        """Environment or version of cuDNN to ask for workspaces, False for none, None for this environment."""
        return False if self.cudnn == "off" else self.cudnn

    @property
    def assumed(self) -> dict[str, float]:
        """Shares of ``--assume``, by ``FILE:LINE``. Raises UsageError for an option of another form."""
        return dict(_parse_assumption(text) for text in self.assume)

    def recorded_for(self) -> RecordedFor:
        """Return the device, and the rank, that the step is recorded for."""
        from memplan.trace.recording.session import choose_target

        return choose_target(self.device, self.assumed, self.environment, self.world, self.rank)

    def changed_options(self) -> list[str]:
        """Return the names of options that differ from their defaults, as typed."""
        repeated = [name for name in ("args", "inputs", "kwargs", "targets") if getattr(self, name)]
        single = [
            name for name in (
                "loss", "optimizer", "autocast", "dtype", "batch", "device", "settings", "assume", "cudnn", "world",
                "rank",
            ) if getattr(self, name)
        ]  # fmt: skip
        names = [*(f"--{name.removesuffix('s')}" for name in repeated), *(f"--{name}" for name in single)]
        return names if self.train else [*names, "--no-train"]


@dataclass(frozen=True)
class Described:
    """A step that a command can record."""

    target: Target
    arguments: Mapping[str, Any]
    options: StepOptions
    batch_name: str | None
    """Name of the target's argument for the batch, if any."""

    @property
    def what(self) -> Callable[[], Any]:
        """Return a callable without arguments that calls the target and returns a module or a step."""
        return _call_target(self.target, self.arguments, self.options)

    def build(self, *, on_card: bool = False) -> Build:
        """Return the ``build`` argument of `record` and `measure`."""
        from memplan.trace.step import build_of

        return build_of(self.what, self.options, on_card=on_card)

    @property
    def batch(self) -> int | None:
        """Leading dimension of the first input, else the value of the target's argument for the batch, else None."""
        if self.options.batch is not None or self.batch_name is None:
            return self.options.batch
        default = (parameters(self.target.what) or {})[self.batch_name].default
        batch = self.arguments.get(self.batch_name, default)
        return batch if isinstance(batch, int) and not isinstance(batch, bool) else None

    def training(self) -> Described:
        """Return the training step of the same model and inputs."""
        return replace(self, options=replace(self.options, train=True))

    def with_batch(self, new: int) -> Described:
        """Return the same step with another batch."""
        arguments = dict(self.arguments) | ({self.batch_name: new} if self.batch_name else {})
        return replace(self, arguments=arguments, options=self.options.with_batch(new))


def _parse_assumption(text: str) -> tuple[str, float]:
    """Parse ``FILE:LINE=SHARE`` into ``FILE:LINE`` and the share."""
    line, _, share = text.rpartition("=")
    try:
        return line, float(share)
    except ValueError:
        raise UsageError(
            f"--assume {text}",
            expected="FILE:LINE=SHARE with a share from 0 to 1, as in train.py:31=0.3",
            do="Take the line from the message that names it",
        ) from None


def describe(step: StepArguments) -> Described:
    """Import the target and parse all options. Sets ``sys.argv`` to the target's file and its arguments after ``--``.
    Raises TargetError if there is no such target, and InputError if an option is malformed, or contradicts another."""
    arguments = {name: literal(text) for name, text in named(step.args, "--arg").items()}
    sys.argv = [step.target.rpartition(":")[0], *step.argv]
    target = resolve_quietly(step.target)
    known = parameters(target.what) or {}
    batch_name = next((name for name in _BATCH_NAMES if name in known), None)
    if step.batch is not None and batch_name is not None and batch_name in arguments:
        raise InputError(
            f"--batch {step.batch} and --arg {batch_name}={arguments[batch_name]}",
            expected="one of them",
            do="Leave one out",
        )
    options = _read_options(step)
    if step.batch is not None and batch_name is not None:
        arguments[batch_name] = step.batch
    check_arguments(target.what, arguments, title=target.text, option="--arg")
    if step.batch is not None:
        if batch_name is None and options.batch is None:
            raise InputError(
                f"--batch {step.batch}, and no --input with a leading dimension to replace",
                expected=f"an --input, or a target with an argument named {' or '.join(_BATCH_NAMES)}",
                do="Give the --input, or add the argument to the target",
            )
        options = options.with_batch(step.batch)
    return Described(target, arguments, options, batch_name)


def subject_of(described: Described, arguments: StepArguments) -> Subject:
    """Return the step as a subject of axes."""
    from memplan.studies.axes.subject import Subject

    return Subject(ByName(arguments.target, arguments.argv), described.options, described.arguments)


def resolve_quietly(text: str) -> Target:
    """Resolve a target. As the command ends, say on stderr how many lines the import printed that were not shown.
    Raises TargetError as `resolve`."""
    target, context = resolve(text), click.get_current_context(silent=True)
    if target.printed_lines and context is not None:
        by = f"that importing {text.rpartition(':')[0]} printed"
        lines = f"1 line {by} is" if target.printed_lines == 1 else f"{target.printed_lines} lines {by} are"
        message = f"memplan: {lines} not shown (--show-output)"
        context.find_root().call_on_close(lambda: click.echo(printable(message), err=True))
    return target


def _read_options(arguments: StepArguments) -> StepOptions:
    """Return the options of the step: specs parsed, loss and optimizer imported."""
    from memplan.trace.naming.step_parts import loss_of, optimizer_of
    from memplan.trace.spec import dtype_of
    from memplan.trace.step import StepOptions

    dtype = None if arguments.dtype in _UNSET else dtype_of(arguments.dtype)
    train = arguments.train
    if arguments.targets and arguments.loss is None and train:
        raise InputError(
            "--target without --loss", expected="a loss that takes it", do="Give --loss cross_entropy, say"
        )
    if not train and (arguments.targets or arguments.loss or arguments.optimizer):
        click.echo("memplan: --no-train runs forward only: loss, targets and optimizer are left out", err=True)
    return StepOptions(
        inputs=tuple(_spec(text, dtype) for text in arguments.inputs),
        kwargs={name: _value(text, dtype) for name, text in named(arguments.kwargs, "--kwarg").items()},
        targets=tuple(_spec(text, dtype) for text in arguments.targets) if train else (),
        loss=loss_of(arguments.loss, "--loss") if train and arguments.loss else None,
        optimizer=optimizer_of(arguments.optimizer, "--optimizer") if train and arguments.optimizer else None,
        autocast=None if arguments.autocast in _UNSET else arguments.autocast,
        train=train,
        dtype=dtype,
    ).checked()


def _spec(text: str, dtype: torch.dtype | None) -> Any:
    """Parse a spec such as ``8x3x224x224``, with this dtype if it names none."""
    from memplan.trace.spec import spec

    return spec(text, dtype)


def _value(text: str, dtype: torch.dtype | None) -> Any:
    """Parse the value of ``--kwarg``: None, True, False, or a spec."""
    word = literal(text)
    return word if word is None or isinstance(word, bool) else _spec(text, dtype)


def _call_target(target: Target, arguments: Mapping[str, Any], options: StepOptions) -> Callable[[], Any]:
    """Return a callable without arguments that calls the target, and returns its module or step.

    It raises TargetError if the target returns something else, and InputError if it returns a step and options were
    used that apply to modules only.
    """

    def make() -> Any:
        from torch import nn

        with contained(target.text):
            result = target.what(**arguments)
        if isinstance(result, nn.Module):
            return result
        if not callable(result):
            location = f" at {target.where}" if target.where else ""
            kind = "None" if result is None else f"a value of type {type(result).__name__}"
            raise TargetError(
                f"{target.text}{location} returned {kind}",
                expected="a module, or a step: a callable without arguments that runs one training step",
                do="Return one of these",
            )
        if not options.train or options.autocast is not None or options.dtype is not None:
            raise InputError(
                f"{target.text} returned a step, and --no-train, --autocast or --dtype was given",
                expected="these only for a module; a step brings its own",
                do="Leave them out, or name a callable that returns the module",
            )

        def run() -> Any:
            with contained(f"the step of {target.text}"):
                return result()

        return run

    make.__qualname__ = make.__name__ = target.name
    return make


@contextmanager
def input_advice(arguments: StepArguments) -> Iterator[None]:
    """Within this context, an error that a layer raises becomes an InputError that names the inputs, a common cause."""
    try:
        yield
    except StepError as error:
        raise _with_input_advice(error, arguments) from error.__cause__


def _with_input_advice(error: StepError, arguments: StepArguments) -> MemplanError:
    """Return an error of a layer as an InputError that names the inputs; others are returned unchanged."""
    from memplan.trace.step import WHOLE

    specs = [*(f"--input {text}" for text in arguments.inputs), *(f"--kwarg {text}" for text in arguments.kwargs)]
    if not specs or error.layer is None:
        return error
    do = "Change them, or mend the model; it should raise the same outside of memplan"
    if WHOLE.search(error.found) and any(":" not in text for text in specs):  # the layer needs integers
        do = "Describe indices as whole numbers below their end, as in 8x1024:int64<50257"
    expected = f"inputs that the model takes (it was given {' '.join(specs)})"
    advice = InputError(error.found, expected=expected, do=do)
    for note in getattr(error, "__notes__", ()):
        advice.add_note(note)
    return advice


def load_trace(arguments: StepArguments, *more: str) -> Trace:
    """Load the trace file that a target names. ``more``: other options that do not go with a trace.

    Raises:
        InputError: options that describe a step were used, or the file is no trace.
        TargetError: the file cannot be read.
    """
    from memplan.trace.trace import Trace

    surplus = [*(option for option in arguments.changed_options() if option != "--settings"), *more]
    if surplus:
        raise InputError(
            f"{arguments.target} is a trace, and {', '.join(surplus)} was given, too",
            expected="a trace alone: its step is already recorded",
            do="Leave the options out, or name a callable",
        )
    try:
        return Trace.load(arguments.target)
    except OSError as error:
        raise TargetError(
            f"{arguments.target} cannot be read ({error.strerror})",
            expected="a trace that memplan explain --trace wrote",
            do="Check the path",
        ) from error
