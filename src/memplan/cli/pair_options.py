"""The step options of a command that compares two steps: options for both sides, and ``--a``, ``--b`` for a side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from memplan.cli.options import StepArguments, step_options

_PAIRS = ("args", "kwargs")
"""Options NAME=VALUE, which a side replaces name by name."""


@click.command("compare")
@step_options
def _one_side(**values: Any) -> None:
    """Parses the options of a side; it is never invoked."""


def pair_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add to a command the step options for both sides, and ``--a`` and ``--b``; see `side_arguments`."""
    existing: list[click.Parameter] = getattr(function, "__click_params__", [])
    common = [parameter for parameter in _one_side.params if isinstance(parameter, click.Option)]
    sides = [
        click.Option(
            [f"--{side}", f"{side}_options"], multiple=True, metavar="OPTION=VALUE",
            help=f"An option for {side.upper()} alone: batch=8, autocast=bf16, arg=width=64, no-train.",
        )
        for side in "ba"
    ]  # fmt: skip
    function.__dict__["__click_params__"] = [*existing, *sides, *reversed(common)]
    return function


def side_arguments(target: str, common: Mapping[str, Any], texts: Sequence[str]) -> StepArguments:
    """Return the step options of a side: the options in ``texts`` (``batch=8``, ``no-train``) override ``common``.
    Raises click.UsageError for an unknown option, or an invalid value."""
    words = [f"--{text.strip()}" for text in texts]
    context = _one_side.make_context("compare", [*words, "--", target], obj=True)
    arguments = {field.name: common[field.name] for field in fields(StepArguments) if field.name in common}
    for name in arguments:
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if name in _PAIRS:
            replaced = {pair.partition("=")[0].strip() for pair in value}
            value = (*(pair for pair in common[name] if pair.partition("=")[0].strip() not in replaced), *value)
        arguments[name] = value
    return StepArguments(**(arguments | {"target": target, "argv": ()}))
