"""Outputs for systems that run commands on every change: SARIF, annotations of GitHub Actions, JUnit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import OUTPUT, ResultFiles, write
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.reports.ci.annotations import Annotation

_OPTIONS = (
    click.option("--sarif", type=OUTPUT, metavar="FILE", help="Write SARIF 2.1.0, too, for code scanning."),
    click.option("--github", is_flag=True, help="Print annotations of GitHub Actions, too."),
    click.option("--junit", type=OUTPUT, metavar="FILE", help="Write JUnit XML, too."),
)


@dataclass(frozen=True)
class CiOutputs:
    """The values of these options as they were typed."""

    sarif: str | None
    github: bool
    junit: str | None

    def check(self, results: ResultFiles) -> None:
        """See that each output has a place of its own, before the work for it is done.

        Raises:
            InputError: a file that cannot be written, or two outputs that would mix.
        """
        named = {"--json": results.json, "--html": results.html, "--sarif": self.sarif, "--junit": self.junit}
        files = [path for path in named.values() if path is not None]
        if len(set(files)) < len(files) or ("-" in files and self.github):
            raise InputError(
                "two outputs at one place",
                expected="a place for each: --github prints to stdout",
                do="Name another file",
            )

    @property
    def to_stdout(self) -> bool:
        """Return whether one of the files is stdout, where nothing else may be printed."""
        return "-" in (self.sarif, self.junit)

    def write(self, target: str, rules: Sequence[str], annotations: Sequence[Annotation]) -> None:
        """Write what was asked for.

        Args:
            target: what was looked at.
            rules: the rules that were looked at, each a case of JUnit.
            annotations: what was found.
        """
        from memplan.reports.ci import github, junit, sarif

        annotations = [_in_reach(one) for one in annotations]
        if self.sarif is not None:
            write(self.sarif, sarif.dumps(annotations))
        if self.junit is not None:
            write(self.junit, junit.dumps(target, rules, annotations))
        if self.github:
            click.echo(github.dumps(annotations), nl=False)


def _in_reach(one: Annotation) -> Annotation:
    """Return an annotation of a line in a file that is here: one in an installed package is at the target's file, since
    a pull request does not show it."""
    if one.where is None or os.path.isfile(one.where.rpartition(":")[0]):
        return one
    return replace(one, where=None, also=(*one.also, f"the line is {one.where}"))


def ci_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the three options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
