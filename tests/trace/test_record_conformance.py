"""PyTorch's own corpus of operators (op_db), forward and backward: the predicted peak beside the profiler's.

The corpus and its runner are not part of the repository: they lie beside a checkout, as `../shared/conformance/ops.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT.parent / "shared" / "conformance" / "ops.py"
NOT_COUNTED = 0.15
"""Share of the operators that may be off: temporaries of linear algebra, Fourier transforms and rare indexing are not
counted, and scratchpads of convolutions are bounded."""
KNOWN_TO_END = {
    "tensor_split": "raises: its indices are a tensor, which C++ reads on a fake one",
    "linalg.lstsq": "refused by name: the rank depends on values",
    "sparse.sampled_addmm": "refused by name: a compressed layout",
    "nn.TransformerEncoder": "refused by name: the corpus makes the layer, a module, outside of the build",
}
"""Ops of which a case is not recorded, each with its reason."""

pytestmark = [
    pytest.mark.skipif(not RUNNER.exists(), reason="the corpus is not beside this checkout (../shared/conformance)"),
    pytest.mark.skipif(
        importlib.util.find_spec("expecttest") is None, reason="torch's corpus of operators imports expecttest"
    ),
]


def cases(out: Path, *options: str) -> list[dict[str, Any]]:
    """Run a part of the corpus in a process of its own, which changes torch's flags; return a row for each case."""
    command = [sys.executable, str(RUNNER), *options, "--fresh", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def is_known(row: dict[str, Any]) -> bool:
    """Whether a case has a prediction, or is known to have none."""
    return "predicted" in row or (row["op"] in KNOWN_TO_END and row["status"] in ("refused", "step_error"))


def assert_holds(rows: Sequence[dict[str, Any]]) -> None:
    off = [row for row in rows if row["status"] not in ("exact", "eager_failed")]
    assert [row for row in off if not is_known(row)] == []
    assert len(off) <= NOT_COUNTED * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "fewest"), [("record", 450), ("inplace", 100), ("modules", 400)])
def test_of_operators_and_modules_most_are_predicted_to_the_byte(part: str, fewest: int, tmp_path: Path) -> None:
    rows = cases(tmp_path / "rows.jsonl", part, "--samples", "1")
    assert len(rows) > fewest
    assert_holds(rows)


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"op": "sgn", "predicted": 104, "measured": 100}, True),
        ({"op": "linalg.lstsq", "status": "refused"}, True),
        ({"op": "linalg.lstsq", "status": "crash"}, False),
        ({"op": "add", "status": "refused"}, False),
    ],
)
def test_an_op_without_a_prediction_is_known_by_name(row: dict[str, Any], known: bool) -> None:
    assert is_known(row) is known
