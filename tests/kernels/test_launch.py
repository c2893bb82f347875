"""Which tensors Triton's kernels take, and what the kernels take of cards that are not here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from truth.float64_errors import INTERPRETED

from memplan.kernels import launch

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
compiling = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
KEPT: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text(encoding="utf-8"))

_spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "tools" / "kernel_table.py")
assert _spec is not None
assert _spec.loader is not None
tool: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def test_tensors_that_kernels_do_not_take() -> None:
    with launch.without_data("cuda"):
        x = torch.ones(2, 3)
        assert launch.launches(x, None, x.half(), torch.zeros(3, dtype=torch.int64))
        assert not launch.launches(x, x.double())
        assert not launch.launches(x, x[:0])
    with launch.without_data("cpu"):
        assert not launch.launches(x)
    assert launch.launches(x) == INTERPRETED


def test_kernels_are_there_with_memplan_alone() -> None:
    command = "import sys, memplan; assert 'memplan.kernels' not in sys.modules; memplan.kernels.swiglu"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_blocks_hold_their_columns() -> None:
    assert [launch.block_of(n, 4096) for n in (1, 16, 17, 1024, 1025, 9000)] == [16, 16, 32, 1024, 2048, 4096]
    assert [launch.warps_of(n) for n in (16, 256, 1024, 4096, 16384)] == [1, 1, 4, 16, 16]


def test_no_kernel_spills_registers_in_rows_of_up_to_8192() -> None:
    spilling = {name for name, row in KEPT["kernels"].items() if row["spilled"]}
    assert all(re.match(r"\w+ (with residual )?16384: norm_backward_kernel", name) for name in spilling)
    # as much as a program may have without asking, on the smallest of the cards
    assert max(row["shared"] for row in KEPT["kernels"].values()) <= 48 * 1024
    assert {name.split(", ")[-1] for name in KEPT["kernels"]} == {"sm_75", "sm_80", "sm_90", "sm_120"}


@pytest.mark.slow
@needs_triton
@compiling
@pytest.mark.parametrize(
    ("architectures", "dtypes"),
    [((90,), ("bf16",)), pytest.param((75, 80, 90, 120), ("fp32", "bf16", "fp16"), marks=pytest.mark.slow)],
    ids=["sm_90 in bf16", "all"],
)
def test_what_kernels_take_of_a_card(
    architectures: tuple[int, ...], dtypes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = importlib.import_module("triton")
    made = tool.table(architectures, dtypes)
    assert made
    if triton.__version__ == KEPT["triton"]:
        ends = tuple(f", {dtype}, sm_{architecture}" for dtype in dtypes for architecture in architectures)
        kept = {name: row for name, row in KEPT["kernels"].items() if name.endswith(ends)}
        assert made == kept, "python tools/kernel_table.py --write"
    else:  # another compiler has other registers
        assert not any(row["spilled"] for name, row in made.items() if " 16384" not in name)


@needs_triton
@compiling
def test_cards_round_to_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest; the interpreter cuts instead, so that values alone do not show it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for started in tool.launches(tool.calls(torch.bfloat16)["swiglu"]):
        code = tool.compile_for(started, 90).asm["ptx"]
        assert "cvt.rn.bf16" in code
        assert "cvt.rz" not in code


@needs_triton
@compiling
@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamw_step, clip", {"mul": 5, "fma": 2, "add": 2, "sub": 1, "div": 2, "sqrt": 1}),
     ("sgd_step, nesterov", {"mul": 1, "fma": 4})],
)  # fmt: skip
def test_updates_round_as_written(
    name: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: the operations of an element. All round to the nearest, and no further product is fused with a sum."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (started,) = tool.launches(tool.calls(torch.bfloat16)[name])
    code = tool.compile_for(started, 90).asm["ptx"]
    found = Counter(re.findall(r"\b(\w+(?:\.\w+)*)\.f32\s", code))
    elements = 1024 // (32 * started.constants["num_warps"])  # of a thread
    arithmetic = {kind: count / elements for kind, count in found.items() if not kind.startswith(("mov", "ld", "st"))}
    assert arithmetic == {f"{kind}.rn": count for kind, count in expected.items()}
