"""The step options of a command that compares two steps, with prefix ``--a-`` or ``--b-`` for either of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from memplan.cli.options import StepArguments, step_options

SIDES = ("a", "b")
_BY_NAME = ("args", "kwargs")
"""Options of pairs NAME=VALUE, of which a side replaces single names."""


def pair_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the step options for both sides to a command, and hidden ones for each; see `side_arguments`."""

    @step_options
    def template() -> None:
        """Click stores the options in an attribute of this function."""

    parameters: list[click.Parameter] = getattr(template, "__click_params__")  # noqa: B009  # click's own attribute
    common = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    names = {field.name for field in fields(StepArguments)}
    by_side = [_side_option(side, option) for side in reversed(SIDES) for option in common if option.name in names]
    existing: list[click.Parameter] = getattr(function, "__click_params__", [])
    function.__dict__["__click_params__"] = [*existing, *by_side, *common]
    return function


def _side_option(side: str, option: click.Option) -> click.Option:
    return click.Option(
        [f"--{side}-{option.opts[0].removeprefix('--')}", f"{side}_{option.name}"],
        type=option.type,
        multiple=option.multiple,
        is_flag=option.is_flag,
        hidden=True,
    )


def side_arguments(target: str, values: Mapping[str, Any], side: str) -> StepArguments:
    """Return the step options of side ``a`` or ``b``: its own values, and by default those for both."""
    arguments: dict[str, Any] = {}
    for field in fields(StepArguments):
        if field.name in ("target", "argv"):
            continue
        common, own = values[field.name], values[f"{side}_{field.name}"]
        if field.name in _BY_NAME:
            names = {pair.partition("=")[0].strip() for pair in own}
            arguments[field.name] = *(p for p in common if p.partition("=")[0].strip() not in names), *own
        else:
            arguments[field.name] = common if own in (None, (), False) else own
    return StepArguments(target=target, **arguments)
