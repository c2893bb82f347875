"""Views of sharded modules that are changed in place: what really fails among two ranks of gloo, and nothing else."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models.parallel_uses import sharded_step
from models.sharded_steps import step_of

import memplan

ID = "changed-view"
TESTS = Path(__file__).parents[1]
WAYS = ("in place view", "in place", "view", "in place view kept")

# torch's own, for each view, changed or not
pytestmark = [
    pytest.mark.usefixtures("this_check_alone"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@functools.cache
def outcomes() -> dict[str, str]:
    """What becomes of each way among two real processes."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(TESTS / "truth" / "gloo_views.py"), ",".join(WAYS)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(re.findall(r"^([\w ]+): (\w+)$", done.stdout, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_finding_is_what_fails_among_real_ranks(way: str) -> None:
    findings = [finding for finding in memplan.check(sharded_step(way), world=2) if finding.id == ID]
    assert [finding.severity for finding in findings] == ["warning"] * (outcomes()[way] == "fails")
    assert outcomes()[way] in ("fails", "right")


def test_the_line_is_that_of_the_op_in_place() -> None:
    (finding,) = [finding for finding in memplan.check(sharded_step("in place view"), world=2) if finding.id == ID]
    lines = (TESTS / "models" / "parallel_uses.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "y += x" in text]
    assert finding.where == f"tests/models/parallel_uses.py:{line}"
    assert finding.details == {"modules": 3, "classes": ["Block"]}


def test_a_view_that_nothing_changes_is_none() -> None:
    assert ID not in {finding.id for finding in memplan.check(sharded_step("view"), world=2)}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "fsdp kept", "fsdp bf16", "fsdp checkpointed", "hsdp", "two dimensions"])
def test_clean_steps_have_none(way: str) -> None:
    assert ID not in {finding.id for finding in memplan.check(step_of(way), world=4)}
