"""The public names: what they are, also once every module is imported.

A module of the name of a function would take its place in the package as soon as it is imported.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from source_files import FILES, module_name

import memplan

# What `from memplan import *` gives. Adding a name here is a promise to keep it.
PUBLIC = [
    "BudgetError",
    "Comparison",
    "Explanation",
    "Exported",
    "Finding",
    "Fitted",
    "Heuristics",
    "Layouts",
    "LineProfile",
    "MemplanError",
    "PackedMasters",
    "Plan",
    "Proof",
    "Quantized",
    "RankReasons",
    "RankSnapshots",
    "Replay",
    "Roles",
    "Sweep",
    "Timeline",
    "Trace",
    "WatchedRanks",
    "WholeRun",
    "Why",
    "__version__",
    "assert_peak",
    "check",
    "compare",
    "explain",
    "export",
    "fit",
    "largest",
    "layouts",
    "load_weights",
    "measure",
    "plan",
    "profile",
    "quantize",
    "record",
    "replay",
    "replay_ranks",
    "roles",
    "simulate",
    "spec",
    "sweep",
    "verify",
    "watch",
    "watched_ranks",
    "whole_run",
    "why",
    "why_ranks",
    "with_loss",
]


@pytest.fixture(scope="module", autouse=True)
def _every_module_is_imported() -> None:
    for path in FILES:
        if path.name != "__main__.py":
            importlib.import_module(module_name(path))


def test_the_public_names_are_these() -> None:
    assert sorted(memplan.__all__) == sorted(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(memplan, name)] == []


def test_no_module_takes_the_place_of_a_function() -> None:
    assert [name for name in PUBLIC if isinstance(getattr(memplan, name), ModuleType)] == []
