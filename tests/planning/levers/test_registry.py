"""The list of levers, and how few files spell the name of one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import memplan
from memplan.planning.levers.lever import Lever
from memplan.planning.levers.registry import LEVERS, find, registered
from memplan.planning.search.search import Heuristics

SRC = Path(memplan.__file__).parent


def test_each_lever_is_a_file_and_has_a_name_of_its_own() -> None:
    assert len({lever.name for lever in LEVERS}) == len(LEVERS)
    assert len({type(lever).__module__ for lever in LEVERS}) == len(LEVERS)
    assert all(lever.name and type(lever).__doc__ for lever in LEVERS)
    assert all(hasattr(Heuristics(), lever.switch) for lever in LEVERS if lever.switch)


def test_a_lever_is_registered_for_as_long_as_it_is_wanted() -> None:
    class Nothing(Lever):
        name = "nothing"

    before = list(LEVERS)
    with registered(Nothing()) as lever:
        assert find("nothing") is lever
        assert [*before, lever] == LEVERS
    assert before == LEVERS
    with pytest.raises(KeyError, match="'nothing' is no lever: there are recompute, encode"):
        find("nothing")


@pytest.mark.parametrize(("word", "most"), [("offload", 8), ("early", 10)])
def test_few_files_spell_the_name_of_a_lever(word: str, most: int) -> None:
    """What a new lever costs: its own file, the registry, and where people name it. Prose does not count."""
    files = [path for path, words in _words().items() if word in words]
    assert len(files) <= most, sorted(str(path.relative_to(SRC)) for path in files)


@functools.cache
def _words() -> dict[Path, set[str]]:
    return {path: set(_names(ast.parse(path.read_text(encoding="utf-8")))) for path in SRC.rglob("*.py")}


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(name) | ast.alias(name):
                yield name or ""
            case ast.Constant(str(text)):
                yield text
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
