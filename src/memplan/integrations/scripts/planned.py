"""Plan the model of a script for a budget of the whole script, without running it, and write the lines to add."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, InputError, RecordingError
from memplan.explanation.card import card_use
from memplan.integrations.described_calls import copy_without_hooks, optimizer_factory, text_of
from memplan.integrations.scripts.model_call import ModelCall
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.script import Script
from memplan.integrations.scripts.unplanned_memory import unplanned_memory
from memplan.planning.api import plan_with_own_optimizer
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.settings import PlanOptions
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.simulate import simulate
from memplan.studies.capacity.limit import Room
from memplan.trace.record import record
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace
from memplan.verification.fitting.fit import fit
from memplan.verification.fitting.outcome import Fitting, Lines

_WIDTH = 76
_SMALL = 1 << 20
"""Elements of a tensor of integers up to which it has values."""
_LOWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}


_ROUNDS = 3
"""Attempts, each with a smaller budget, to find a plan whose bound holds in a recording of the script."""


def planned(trace: Trace, script: Script, request: Request) -> Fitting:
    """Plan the model of a recorded script, and record the script with the plan to confirm the bound. The request has
    the budget of the whole script. Raises InputError if no model was trained, or it was called with something that
    cannot be described; further as `memplan.plan`."""
    room = request.room
    assert room is not None, "the request has a budget"
    title = request.command.name
    timeline = simulate(trace)
    recorded = timeline.peak_reserved + room.context_of(trace)
    card = room.target.card
    band = card_use(trace, timeline, card).verdict.band if trace.expected and card is not None else None
    if room.holds(trace, AllocatorSettings()):
        return Fitting(title, room.limit, recorded, recorded_band=band)
    call = _plannable(script.call(trace), title)
    parts = [path for path, _ in call.module.named_modules() if path]
    tensors = [leaf for leaf in _torch.tree_leaves((call.inputs, call.kwargs)) if isinstance(leaf, Spec)]
    unplanned = unplanned_memory(trace, type(call.module).__name__, parts, tensors, call.calls)
    fitting = Fitting(
        title, room.limit, recorded, unplanned.in_steps, recorded - timeline.peak_allocated,
        outside=unplanned.between_steps, recorded_band=band,
    )  # fmt: skip
    options = dict(request.plan or ())
    if call.calls.start_with_gradients and not options.get("early"):
        options = {"accumulate": call.calls.calls_per_update, **options}
    for _ in range(_ROUNDS):
        fitting = _fit_within(fitting, call, room, options)
        # the kernels of a planned model cannot be recorded for a card
        if fitting.plan is None or room.target.card is not None:
            return fitting
        excess = _bytes_above_bound(fitting, script, call, options, len(trace.steps))
        if excess is None or excess <= 0:
            return fitting
        fitting = replace(fitting, beside=fitting.beside + excess)  # less is left for the model in the next round
    raise RecordingError(
        f"{title} takes more with each of {_ROUNDS} plans than their bounds",
        expected="a script that holds beside the model what it holds without a plan",
        do="Make the model fit in the script, with less: memplan run shows what it takes then",
    )


def _fit_within(fitting: Fitting, call: ModelCall, room: Room, options: Mapping[str, Any]) -> Fitting:
    """Plan the model within the budget that the script leaves; return the outcome with the plan or the shortfall.
    ``room`` has the limit of the whole script, ``options`` are further arguments of `memplan.plan`."""
    budget = max(room.limit - fitting.beside - fitting.surplus, 1)
    try:
        step = StepOptions(
            _with_ones(call.inputs), _with_ones(call.kwargs), optimizer=_optimizer(call), autocast=call.autocast
        )
        further = {name: value for name, value in options.items() if name != "early"}
        plan_options = PlanOptions(
            budget=budget, device=None if room.target.card is None else room.target.card.name, costs="roofline",
            gradients=GradientUse(updates_early=options.get("early", False)), **further,
        )  # fmt: skip
        # the lines to insert drop what memplan.fit returns, and with it an optimizer of the plan's own
        inner_plan = plan_with_own_optimizer(lambda: copy_without_hooks(call.module), step, plan_options)
    except BudgetError as error:
        return replace(fitting, plan=None, shortfall=error, lines=None)
    if fitting.outside + fitting.surplus > room.limit:
        return replace(fitting, plan=None, shortfall=_error_between_steps(fitting, inner_plan), lines=None)
    return replace(fitting, plan=inner_plan, lines=_lines(call, room, fitting.beside, options))


def _error_between_steps(fitting: Fitting, inner_plan: Plan) -> BudgetError:
    """Return the error of a script that exceeds its budget outside of the model's steps, where no plan helps."""
    return BudgetError(
        f"{fitting.title} takes {format_bytes(fitting.outside)} where its model is not trained, as in a validation",
        expected=f"no more than {format_bytes(fitting.budget - fitting.surplus)} there: a plan is of training steps",
        do="Let that part of the script take less, such as a smaller batch of the validation",
        smallest_budget=inner_plan.floor,
    )


def _bytes_above_bound(
    fitting: Fitting, script: Script, call: ModelCall, options: Mapping[str, Any], steps: int
) -> int | None:
    """Record the script with the planned model and return the bytes of its peak above the plan's bound.

    None if no call of the model was planned: all fell back to eager. ``steps`` are recorded; ``options`` are further
    arguments of `memplan.fit`.
    """
    assert fitting.planned is not None, "there is a plan"
    fitted: Any = None

    def fit_model(module: nn.Module) -> None:
        nonlocal fitted
        fitted = fit(
            module, *_with_ones(call.inputs), kwargs=_with_ones(call.kwargs), budget=fitting.budget - fitting.beside,
            optimizer=_optimizer(call), autocast=call.autocast, **options,
        )  # fmt: skip

    with_plan = record(script.with_fit(fit_model), device="cpu", steps=steps)
    if fitted is None or not fitted.stats.planned:
        return None
    return simulate(with_plan).peak_allocated - fitting.planned


def _plannable(call: ModelCall | None, title: str) -> ModelCall:
    """Return the call of a script's model, if it can be planned. ``title`` is the script's name. Raises InputError if
    there is no call, or an argument of it cannot be described, and MemplanError if a plan would not equal eager
    mode."""
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


def _with_ones(arguments: Any) -> Any:
    """Return arguments with tensors of ones in place of the specs of small integer tensors. Masks, which can decide
    branches, have the value 1 in recordings as well."""

    def with_values(leaf: Any) -> Any:
        if not isinstance(leaf, Spec) or leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return leaf
        return torch.ones(leaf.shape, dtype=leaf.dtype) if math.prod(leaf.shape) <= _SMALL else leaf

    return _torch.tree_map(with_values, arguments)


def _optimizer(call: ModelCall) -> Callable[[Any], Any] | None:
    """Return a function from parameters to the optimizer that updates the model in the script; None without one."""
    return None if call.optimizer is None else optimizer_factory(call.optimizer, call.options)


def _lines(call: ModelCall, room: Room, unplanned: int, options: Mapping[str, Any]) -> Lines:
    """Return the lines to insert into the script, which fit its model within the limit less ``unplanned`` bytes.
    ``options`` are further arguments of `memplan.fit`."""
    arguments = [call.name, *(_python_text(argument) for argument in call.inputs)]
    imports = ["import memplan"]
    kwargs = {name: value for name, value in call.kwargs.items() if value is not None}
    if kwargs:
        arguments.append(f"kwargs={_kwargs_text(kwargs)}")
    arguments.append(f"budget={room.limit - unplanned:_}")
    if call.optimizer is not None:
        arguments.append(f"optimizer={_optimizer_text(call.optimizer, call.options)}")
        module = call.optimizer.__module__
        if not module.startswith("torch.") and module != "__main__":
            imports.append(f"import {module}")
    if call.autocast in _LOWER:
        arguments.append(f'autocast="{_LOWER[call.autocast]}"')
    arguments += [f"{name}={value!r}" for name, value in options.items()]
    return Lines(call.line, call.before, (*imports, *_fit_call(arguments)))


def _fit_call(arguments: list[str]) -> list[str]:
    """Return the lines of a call of `memplan.fit`: a single line if short, else a line per argument."""
    short = f"memplan.fit({', '.join(arguments)})"
    if len(short) <= _WIDTH and "\n" not in short:
        return [short]
    return "\n".join(("memplan.fit(", *(f"    {argument}," for argument in arguments), ")")).split("\n")


def _kwargs_text(kwargs: Mapping[str, Any]) -> str:
    """Return keyword arguments as the text of a dict: a single line if short, else a line per argument."""
    short = _python_text(kwargs)
    if len(short) <= _WIDTH - len("    kwargs=,"):
        return short
    rows = (f'        "{name}": {_keyword_text(name, value)},' for name, value in kwargs.items())
    return "\n".join(("{", *rows, "    }"))


def _python_text(value: Any) -> str:
    """Return an argument as Python text, with specs in the notation of `memplan.spec`."""
    if isinstance(value, Spec):
        return f'"{text_of(value)}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{name}": {_keyword_text(name, item)}' for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_python_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def _keyword_text(name: str, value: Any) -> str:
    """Return a keyword argument's value as Python text; a mask is written as all ones, as most are."""
    if isinstance(value, Spec) and "mask" in name and not value.dtype.is_floating_point:
        return f"memplan.spec({_python_text(value)}, low=1)"
    return _python_text(value)


def _optimizer_text(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> str:
    """Return an optimizer as a Python argument of `memplan.fit`: its class, with the options that are no defaults. The
    learning rate is left out, since it costs no memory."""
    if kind.__module__ == "__main__":
        name = kind.__qualname__
    elif kind.__module__.startswith("torch.optim"):
        name = f"torch.optim.{kind.__name__}"
    else:
        name = f"{kind.__module__}.{kind.__qualname__}"
    defaults = {key: parameter.default for key, parameter in inspect.signature(kind).parameters.items()}
    differing = [
        f"{key}={value!r}" for key, value in options.items()
        if key != "lr" and isinstance(value, (bool, int, float, str, tuple)) and value != defaults.get(key)
    ]  # fmt: skip
    return f"lambda parameters: {name}(parameters, {', '.join(differing)})" if differing else name
