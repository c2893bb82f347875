"""The options of a step for two sides: those of both, and each again for one, with ``--a-`` or ``--b-`` in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from memplan.cli.options import StepArguments, step_options

SIDES = ("a", "b")
_BY_NAME = ("args", "kwargs")
"""Options that name what they set: those of one side are put over those of both, name by name."""


def pair_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a step for both sides, and hidden ones for each; `for_one` takes their values."""

    @step_options
    def template() -> None:
        """Hold the options, which click keeps on the function."""

    parameters: list[click.Parameter] = getattr(template, "__click_params__")  # noqa: B009  # click's own attribute
    common = [one for one in parameters if isinstance(one, click.Option)]
    names = {field.name for field in fields(StepArguments)}
    apart = [_for_side(side, one) for side in reversed(SIDES) for one in common if one.name in names]
    held: list[click.Parameter] = getattr(function, "__click_params__", [])
    function.__dict__["__click_params__"] = [*held, *apart, *common]
    return function


def _for_side(side: str, option: click.Option) -> click.Option:
    return click.Option(
        [f"--{side}-{option.opts[0].removeprefix('--')}", f"{side}_{option.name}"],
        type=option.type,
        multiple=option.multiple,
        is_flag=option.is_flag,
        hidden=True,
    )


def for_one(target: str, given: Mapping[str, Any], side: str) -> StepArguments:
    """Return the options of one side: its own where it has them, else those of both."""
    values: dict[str, Any] = {}
    for field in fields(StepArguments):
        if field.name in ("target", "argv"):
            continue
        common, own = given[field.name], given[f"{side}_{field.name}"]
        if field.name in _BY_NAME:
            values[field.name] = _over(common, own)
        else:
            values[field.name] = common if own in (None, (), False) else own
    return StepArguments(target=target, **values)


def _over(common: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pairs NAME=VALUE of both sides, with those of one side in place of the same names."""
    named = {pair.partition("=")[0].strip() for pair in own}
    return (*(pair for pair in common if pair.partition("=")[0].strip() not in named), *own)
