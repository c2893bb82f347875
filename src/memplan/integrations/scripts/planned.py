"""A plan of a script's model for a budget of the whole script, and the lines that would use it. Nothing runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, InputError, RecordingError
from memplan.integrations.described_calls import copied, maker, text_of
from memplan.integrations.scripts.beside import held_beside
from memplan.integrations.scripts.model_call import ModelCall
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.script import Script
from memplan.planning.api import plan
from memplan.planning.plan.plan import Plan
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.simulate import simulate
from memplan.studies.capacity.limit import Room
from memplan.trace.record import record
from memplan.trace.spec import Spec
from memplan.trace.trace import Trace
from memplan.verification.fitting.fit import fit
from memplan.verification.fitting.outcome import Fitting, Lines

_WIDTH = 76
_SMALL = 1 << 20
"""Elements of a tensor of integers up to which it has values."""
_LOWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}


_ROUNDS = 3
"""Plans for a script, each for less, whose recording may take more than its bound."""


def planned(trace: Trace, script: Script, request: Request) -> Fitting:
    """Plan the model of a script that was recorded. With the plan the script is recorded again: the bound has to hold.

    Args:
        trace: of the script.
        script: that was recorded.
        request: with the room that the script has to fit into.

    Raises:
        InputError: no model was trained, or it was called with something that cannot be described.
        UsageError, RecordingError: as `memplan.plan`.
    """
    room = request.room
    assert room is not None, "a budget was given"
    title = request.command.name
    context = 0 if room.target.card is None else room.target.card.capacity - room.target.card.usable("high")
    timeline = simulate(trace)
    recorded = timeline.peak_reserved + context
    if room.holds(trace, AllocatorSettings()):
        return Fitting(title, room.limit, recorded)
    call = _checked(script.call(trace), title)
    parts = [path for path, _ in call.module.named_modules() if path]
    tensors = [one for one in _torch.tree_leaves((call.inputs, call.kwargs)) if isinstance(one, Spec)]
    found = held_beside(trace, type(call.module).__name__, parts, tensors, call.calls)
    fitting = Fitting(
        title, room.limit, recorded, found.inside, recorded - timeline.peak_allocated, outside=found.outside
    )
    options = dict(request.plan or ())
    if call.calls.held and not options.get("early"):
        options = {"accumulate": call.calls.accumulated, **options}
    for _ in range(_ROUNDS):
        fitting = _fitting(fitting, call, room, options)
        if fitting.plan is None or room.target.card is not None:  # whose kernels are not those of a plan made here
            return fitting
        over = _over(fitting, script, call, options, len(trace.steps))
        if over is None or over <= 0:
            return fitting
        fitting = replace(fitting, beside=fitting.beside + over)
    raise RecordingError(
        f"{title} takes more with each of {_ROUNDS} plans than their bounds",
        expected="a script that holds beside the model what it holds without a plan",
        do="Make the model fit in the script, with less: memplan run shows what it takes then",
    )


def _fitting(fitting: Fitting, call: ModelCall, room: Room, options: Mapping[str, Any]) -> Fitting:
    """Return the outcome with a plan for what the script leaves, or why there is none."""
    budget = max(room.limit - fitting.beside - fitting.surplus, 1)
    try:
        found = plan(
            lambda: copied(call.module), *_known(call.inputs), kwargs=_known(call.kwargs), budget=budget,
            optimizer=_optimizer(call), autocast=call.autocast,
            device=None if room.target.card is None else room.target.card.name, costs="roofline", **options,
        )  # fmt: skip
    except BudgetError as error:
        return replace(fitting, plan=None, shortfall=error, lines=None)
    if fitting.outside + fitting.surplus > room.limit:
        return replace(fitting, plan=None, shortfall=_of_outside(fitting, found), lines=None)
    return replace(fitting, plan=found, lines=_lines(call, room, fitting.beside, options))


def _of_outside(fitting: Fitting, found: Plan) -> BudgetError:
    return BudgetError(
        f"{fitting.title} takes {format_bytes(fitting.outside)} where its model is not trained, as in a validation",
        expected=f"no more than {format_bytes(fitting.budget - fitting.surplus)} there: a plan is of training steps",
        do="Let that part of the script take less, such as a smaller batch of the validation",
        smallest_budget=found.floor,
    )


def _over(fitting: Fitting, script: Script, call: ModelCall, options: Mapping[str, Any], steps: int) -> int | None:
    """Return by how much the script takes more than its bound, recorded with the lines that are to be added; None where
    its calls do not run as planned in a recording."""
    assert fitting.planned is not None, "there is a plan"
    fitted = list[Any]()

    def fits(module: nn.Module) -> None:
        fitted.append(
            fit(
                module,
                *_known(call.inputs),
                kwargs=_known(call.kwargs),
                budget=fitting.budget - fitting.beside,
                optimizer=_optimizer(call),
                autocast=call.autocast,
                **options,
            )
        )

    with_lines = record(script.with_fit(fits), device="cpu", steps=steps)
    if not fitted or not fitted[-1].stats.planned:
        return None
    return simulate(with_lines).peak_allocated - fitting.planned


def _checked(call: ModelCall | None, title: str) -> ModelCall:
    if call is None:
        raise InputError(
            f"{title} called no model in training",
            expected="a script that trains a torch.nn.Module, with gradients",
            do="memplan run says what it does; plans are for training steps",
        )
    if call.refused is not None:
        raise call.refused
    if call.unknown:
        raise InputError(
            f"{title} calls {type(call.module).__name__} with {call.unknown}",
            expected="tensors, numbers, and lists or dicts of them",
            do="Make the model fit in the script: fitted = memplan.fit(model, ...), with inputs that it takes",
        )
    return call


def _known(arguments: Any) -> Any:
    """Return arguments with ones for small tensors of integers, as a recording reads them: masks decide branches."""

    def with_values(one: Any) -> Any:
        whole = isinstance(one, Spec) and not (one.dtype.is_floating_point or one.dtype.is_complex)
        return torch.ones(one.shape, dtype=one.dtype) if whole and math.prod(one.shape) <= _SMALL else one

    return _torch.tree_map(with_values, arguments)


def _optimizer(call: ModelCall) -> Any:
    return None if call.optimizer is None else maker(call.optimizer, call.options)


def _lines(call: ModelCall, room: Room, beside: int, options: Mapping[str, Any]) -> Lines:
    """Return what makes the model fit, as lines of the script. There a budget on a card is counted as here."""
    given = [call.name, *(_written(one) for one in call.inputs)]
    kwargs = {name: value for name, value in call.kwargs.items() if value is not None}
    given += [f"kwargs={_lined(kwargs)}"] if kwargs else []
    given.append(f"budget={room.limit - beside:_}")
    given += [f"optimizer={_kind(call)}"] if call.optimizer is not None else []
    given += [f'autocast="{_LOWER[call.autocast]}"'] if call.autocast in _LOWER else []
    given += [f"{name}={value!r}" for name, value in options.items()]
    imports = ["import memplan"]
    module = "" if call.optimizer is None else call.optimizer.__module__
    if module and not module.startswith("torch.") and module != "__main__":
        imports.append(f"import {module}")
    return Lines(call.line, call.before, (*imports, *_call(given)))


def _call(given: list[str]) -> list[str]:
    """Return a call of `memplan.fit`: on one line where that is short, else with a line for each argument."""
    short = f"memplan.fit({', '.join(given)})"
    long = "\n".join(("memplan.fit(", *(f"    {one}," for one in given), ")"))
    return [short] if len(short) <= _WIDTH and "\n" not in short else long.split("\n")


def _lined(kwargs: Mapping[str, Any]) -> str:
    """Return arguments by name as a dict: on one line where that is short, else with a line for each."""
    short = _written(kwargs)
    if len(short) <= _WIDTH - len("    kwargs=,"):
        return short
    rows = (f'        "{name}": {_named(name, one)},' for name, one in kwargs.items())
    return "\n".join(("{", *rows, "    }"))


def _written(value: Any) -> str:
    if isinstance(value, Spec):
        return f'"{text_of(value)}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{name}": {_named(name, one)}' for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_written, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def _named(name: str, value: Any) -> str:
    """Return an argument by name as Python; a mask is all ones, as most are."""
    if isinstance(value, Spec) and "mask" in name and not value.dtype.is_floating_point:
        return f"memplan.spec({_written(value)}, low=1)"
    return _written(value)


def _kind(call: ModelCall) -> str:
    """Return the optimizer as an argument of `memplan.fit`: its class, with the options that may cost memory."""
    kind = call.optimizer
    assert kind is not None, "it was looked at"
    torchs = kind.__module__.startswith("torch.optim")
    name = f"torch.optim.{kind.__name__}" if torchs else f"{kind.__module__}.{kind.__qualname__}"
    name = kind.__qualname__ if kind.__module__ == "__main__" else name
    defaults = {key: one.default for key, one in inspect.signature(kind).parameters.items()}
    differing = {
        key: value for key, value in call.options.items()
        if key != "lr" and isinstance(value, (bool, int, float, str, tuple)) and value != defaults.get(key)
    }  # fmt: skip
    if not differing:
        return name
    given = ", ".join(f"{key}={value!r}" for key, value in differing.items())
    return f"lambda parameters: {name}(parameters, {given})"
