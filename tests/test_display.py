"""Every result shows itself."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
from source_files import FILES, module_name

import memplan
from memplan._display import Displayed, Printed
from memplan.simulation.replays.exact import Mismatch

NAMES = ("Comparison", "Explanation", "Exported", "Finding", "Fitted", "Layouts", "LineProfile", "Plan", "Proof",
         "Quantized", "RankReasons", "RankSnapshots", "Replay", "Roles", "Sweep", "Timeline", "Trace",
         "WatchedRanks", "WholeRun", "Why")  # fmt: skip


def test_every_public_result_is_displayed() -> None:
    results = {name for name in memplan.__all__ if isinstance(getattr(memplan, name), type)}
    assert results - {"BudgetError", "Heuristics", "MemplanError", "PackedMasters"} == set(NAMES)
    assert all(issubclass(getattr(memplan, name), Displayed) for name in NAMES)


EVIL = "a\x1b[2J\x9b31m\u202e"


def test_no_text_steers_a_terminal() -> None:
    """Of results and parts of them, errors and reports: each class that writes itself."""
    assert str(Mismatch(1, "address", EVIL, "b")) == "event 1, address: recorded a?[2J?31m?, replayed b"
    error = memplan.MemplanError(f"step raised\n{EVIL}", expected=EVIL, do=EVIL)
    assert str(error) == "step raised a?[2J?31m?. Expected a?[2J?31m?. a?[2J?31m?."
    assert str(error.about(EVIL)).startswith("a?[2J?31m?: step raised")


def test_every_class_that_writes_itself_is_cleaned() -> None:
    classes = [
        value
        for path in FILES
        if path.name not in ("__main__.py", "errors.py")
        for value in vars(importlib.import_module(module_name(path))).values()
        if isinstance(value, type) and value.__module__ == module_name(path) and "__str__" in vars(value)
    ]
    assert len(classes) > 25
    others = (Printed, Exception, int, float, str)
    assert [value.__qualname__ for value in classes if not issubclass(value, others)] == []


def test_a_repr_is_the_first_line_and_short() -> None:
    """Lists of results, debuggers and assertions show it."""

    @dataclass(frozen=True, repr=False)
    class Result(Displayed):
        values: tuple[int, ...]

        def __str__(self) -> str:
            return "many values " + ", ".join(map(str, self.values)) + "\nand more"

    assert repr(Result((1, 2))) == "<Result: many values 1, 2>"
    assert len(repr(Result(tuple(range(10_000))))) < 500


@pytest.mark.parametrize("name", NAMES)
def test_no_result_lists_its_fields(name: str) -> None:
    shown = getattr(memplan, name).__repr__
    assert shown is Displayed.__repr__ or name in ("Explanation", "LineProfile", "Plan")
