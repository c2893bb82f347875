"""The examples in the docstrings of public names run, and print what they show."""

from __future__ import annotations

import doctest
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from models.public_examples import names

import memplan

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EXAMPLES = [
    found
    for name in memplan.__all__
    for found in doctest.DocTestFinder().find(getattr(memplan, name), name, module=False)
    if found.examples
]


def test_every_public_function_has_an_example() -> None:
    functions = {name for name in memplan.__all__ if name[0].islower()}
    shown = {found.name for found in EXAMPLES}
    assert functions - shown == set()


LONG = (
    "assert_peak",
    "check",
    "compare",
    "explain",
    "export",
    "fit",
    "guard",
    "largest",
    "layouts",
    "quantize",
    "sweep",
    "verify",
    "WholeRun",
    "whole_run",
)
"""Of steps on real networks: seconds each."""


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name in LONG)) for one in EXAMPLES],
)
def test_the_examples_of_a_docstring_run(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example.name.lower().startswith("quantize"):
        pytest.importorskip("torchao")
    if example.name == "with_loss" and not entry_points(group="torch_dynamo_backends", name="memplan"):
        pytest.skip("an installation from before the backend")
    monkeypatch.chdir(tmp_path)
    example.globs = names(tmp_path)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert "".join(said) == ""
