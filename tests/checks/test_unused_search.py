"""Searches for unused parameters: a finding where torch's own reducer warns, and none where a step may differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environment import slow
from models.parallel_uses import data_parallel
from models.sharded_steps import step_of

import memplan

ID = "unused-search"
pytestmark = pytest.mark.usefixtures("this_check_alone")
TESTS = Path(__file__).parents[1]


def found(way: str) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(data_parallel(way), world=2) if finding.id == ID]


def warns(way: str) -> bool:
    """Return whether torch's reducer, in a real process of gloo, warns that it found no unused parameter."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    code = (
        "import sys, torch.distributed as dist\n"
        "from models.parallel_uses import data_parallel\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "step = data_parallel(sys.argv[1])()\n"
        "step(), step()\n"
        "dist.destroy_process_group()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, way], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return "did not find any unused parameters" in done.stderr


@pytest.mark.parametrize("way", slow("search", "", "unused", "twice search"))
def test_a_finding_is_what_torch_warns_of(way: str) -> None:
    findings = found(way)
    assert bool(findings) == warns(way) == ("search" in way)
    for finding in findings:
        assert (finding.severity, finding.bytes, finding.details["parameters"]) == ("info", 0, 4)
        assert finding.where is not None
        assert finding.where.startswith("tests/models/parallel_uses.py:")


def test_a_search_for_what_every_step_uses_is_found() -> None:
    (finding,) = found("search")
    assert (finding.severity, finding.details["parameters"]) == ("info", 4)


@pytest.mark.parametrize("way", ["", "unused", "dropped at random", "dropped by value"])
def test_a_step_without_a_search_or_that_may_leave_a_module_out_has_none(way: str) -> None:
    """Of the last two torch's own warning would be a false alarm."""
    assert found(way) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "ddp views", "ddp static", "fsdp"])
def test_clean_steps_have_none(way: str) -> None:
    assert ID not in {finding.id for finding in memplan.check(step_of(way), world=4)}
