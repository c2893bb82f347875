"""`--script`: a script as it is, in the place of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memplan.cli.options import StepArguments
from memplan.cli.run import request_of
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.integrations.scripts.request import Request

_OF_A_TARGET = {
    "args": "--arg", "targets": "--target", "loss": "--loss", "optimizer": "--optimizer", "infer": "--infer",
}  # fmt: skip
"""Option by the name of its value, of those that describe a target's step."""


def script_option(command: click.Command) -> click.Command:
    """Let a command take ``--script FILE -- ARGUMENTS`` instead of its target."""
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


def target_or_script(given: dict[str, Any]) -> Request | None:
    """Take the script's options out of a command's; return what is asked of it, None where there is a target.

    Raises:
        InputError: both or neither are given, or options that only a target has.
    """
    script, unprotected = given.pop("script"), given.pop("unprotected")
    if script is None:
        if given["target"] is None:
            raise InputError(
                "no TARGET",
                expected="one: path/to/file.py:callable or package.module:callable; or --script train.py",
                do="Name one",
            )
        return None
    arguments = given["argv"] if given["target"] is None else (given["target"], *given["argv"])
    given["target"] = script
    typed = StepArguments(**given)
    wrong = [option for name, option in _OF_A_TARGET.items() if getattr(typed, name)]
    if wrong or typed.precision != "fp32":
        raise InputError(
            f"{', '.join(wrong or ['--precision'])} with --script",
            expected="none of a target's options: a script says itself what it does",
            do="Leave it out; the script's own arguments come last, behind --",
        )
    return request_of(
        {
            "script": script, "arguments": arguments, "is_module": False, "device": given["device"], "steps": 2,
            "inputs": given["inputs"], "kwargs": given["kwargs"], "batch": given["batch"], "really": False,
            "writes": False, "unprotected": unprotected, "shows": False, "limit": 300.0,
            "contribute": None, "assume": given["assume"], "cudnn": typed.cudnn,
        }
    )  # fmt: skip
