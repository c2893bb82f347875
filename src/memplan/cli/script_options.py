"""The option ``--script`` of commands that take a training script instead of a target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.options import StepArguments, used_options
from memplan.cli.run import request_of
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request

_TARGET_OPTIONS = {
    "args": "--arg", "targets": "--target", "loss": "--loss", "optimizer": "--optimizer", "autocast": "--autocast",
    "dtype": "--dtype",
}  # fmt: skip
"""Options that describe a target's step, by the names of their values."""


def script_option(command: click.Command) -> click.Command:
    """Make a command accept ``--script FILE -- ARGUMENTS`` instead of its target."""
    for parameter in command.params:
        if parameter.name == "target":
            parameter.required = False
    command.params += [
        click.Option(
            ["--script"], metavar="FILE",
            help="A script as it is, instead of TARGET; its own arguments come last, behind --.",
        ),
        click.Option(
            ["--unprotected"], is_flag=True,
            help="With --script: run it where nothing can hold back what it writes, sends or starts.",
        ),
    ]  # fmt: skip
    return command


def target_or_script(values: dict[str, Any], *, modules: bool = False) -> Request | None:
    """Pop ``--script`` and ``--unprotected`` from a command's values.

    Return the script request, or None if TARGET was used instead. With ``modules``, ``--script`` may also name a module
    such as ``package.train``. Raises InputError without ``--script`` and TARGET, or for options that only a target
    has."""
    script, unprotected = values.pop("script"), values.pop("unprotected")
    if script is None:
        if values["target"] is None:
            raise InputError(
                "no TARGET",
                expected="one: path/to/file.py:callable or package.module:callable; or --script train.py",
                do="Name one",
            )
        return None
    arguments = values["argv"] if values["target"] is None else (values["target"], *values["argv"])
    values["target"] = script
    step = StepArguments(**values)
    target_options = {option: getattr(step, name) for name, option in _TARGET_OPTIONS.items()}
    if wrong := used_options(target_options | {"--no-train": not step.train}):
        raise InputError(
            f"{wrong} with --script",
            expected="none of a target's options: a script says itself what it does",
            do="Leave it out; the script's own arguments come last, behind --",
        )
    is_dotted_name = all(map(str.isidentifier, script.split("."))) and not script.endswith(".py")
    return request_of(
        {
            "script": script, "arguments": arguments,
            "is_module": modules and is_dotted_name and not os.path.exists(script),
            "device": values["device"], "steps": None, "inputs": values["inputs"], "kwargs": values["kwargs"],
            "batch": values["batch"], "really": False,
            "writes": False, "unprotected": unprotected, "shows": False, "limit": 300.0,
            "contribute": None, "assume": values["assume"], "cudnn": step.cudnn, "world": step.world,
            "rank": step.rank,
        }
    )  # fmt: skip
