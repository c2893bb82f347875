"""Output options for continuous integration: SARIF, annotations of GitHub Actions, JUnit."""

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
    """The values of the CI options as typed."""

    sarif: str | None
    github: bool
    junit: str | None

    def check(self, results: ResultFiles) -> None:
        """Check, before anything runs, that no two outputs have the same destination.

        Raises:
            InputError: two outputs go to one file or to stdout.
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
        """Return whether a file goes to stdout, so that nothing else may be printed."""
        return "-" in (self.sarif, self.junit)

    def write(self, target: str, rules: Sequence[str], annotations: Sequence[Annotation]) -> None:
        """Write the outputs of the options that were used. ``target``: name of the step. ``rules``: ids of all checks
        that ran; each is a test case of JUnit, which an error among its annotations fails."""
        from memplan.reports.ci import github, junit, sarif

        in_project = [_in_project(annotation) for annotation in annotations]
        if self.sarif is not None:
            write(self.sarif, sarif.dumps(in_project))
        if self.junit is not None:
            write(self.junit, junit.dumps(target, rules, in_project))
        if self.github:
            click.echo(github.dumps(in_project), nl=False)


def _in_project(annotation: Annotation) -> Annotation:
    """Return the annotation with a line of the project. A pull request shows no others: an annotation of a line
    elsewhere, such as in an installed package, loses the line, and then belongs to the target's file."""
    if annotation.where is None or os.path.isfile(annotation.where.rpartition(":")[0]):
        return annotation
    return replace(annotation, where=None, also=(*annotation.also, f"the line is {annotation.where}"))


def ci_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the CI options to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
