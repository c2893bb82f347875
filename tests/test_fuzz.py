"""A short run of the fuzzers (tools/fuzz), and that they find what they look for."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memplan import MemplanError

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = 12
NAMES = (
    "snapshots", "traces", "plans", "sweeps", "explanations", "baselines", "proofs", "results", "compared", "layouts",
    "answers", "arguments",
)  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "tools" / "fuzz"))
    try:
        yield importlib.import_module("fuzz")
    finally:
        sys.path.remove(str(ROOT / "tools" / "fuzz"))


@pytest.fixture(scope="module")
def kinds(tool: Any) -> Any:
    return tool.kinds()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutants_are_read_or_refused(tool: Any, kinds: Any, name: str) -> None:
    result = tool.fuzz(kinds[name], MUTATIONS, seed=0)
    assert (result.foreign, result.hangs, result.steering) == ({}, 0, 0)
    assert 0 < result.read <= result.mutations == MUTATIONS  # else the mutants are no test
    assert result.read < MUTATIONS or name == "answers"  # a damaged cache is moved aside, not refused


def _raising(error: BaseException) -> Any:
    def use(data: bytes, file: Path) -> Iterator[str]:
        raise error
        yield

    return use


def _spinning(data: bytes, file: Path) -> Iterator[str]:
    while True:
        pass
    yield


def test_what_it_looks_for_is_found(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(tool, "MOST_BYTES", 1 << 40)  # of a process in which other tests ran before
    uses = {
        "foreign": _raising(KeyError("x")), "own": _raising(MemplanError("x")), "hang": _spinning,
        "steering": lambda data, file: iter(["a\x1b[2J"]), "fine": lambda data, file: iter(["a\nb"]),
    }  # fmt: skip
    found = {
        name: tool.fuzz(tool.Kind(lambda random: b"{}", use), 1, seed=3, keep=tmp_path / name)
        for name, use in uses.items()
    }
    assert list(found["foreign"].foreign.values()) == [1]
    assert [name for name, result in found.items() if not result.clean] == ["foreign", "hang", "steering"]
    assert {path.name for path in tmp_path.iterdir()} == {"foreign", "hang", "steering"}
    assert (found["own"].read, found["fine"].read) == (0, 1)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_mutants(kinds: Any) -> None:
    for kind in kinds.values():
        mutants = [[kind.mutant(Random(seed)) for seed in range(20)] for _ in range(2)]
        assert mutants[0] == mutants[1]
        assert len(set(mutants[0])) > 15


def test_the_long_runs_found_nothing() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())
    assert set(results) == set(NAMES)
    for result in results.values():
        assert (result["foreign"], result["hangs"], result["steering"]) == ({}, 0, 0)
        assert result["memory"] <= 1 << 30
        assert result["slowest"] < 10
