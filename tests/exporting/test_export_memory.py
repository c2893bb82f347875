"""Where an export's memory lies, and what a program may do between its kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F
from truth.c_program import printed_by

import memplan
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def exported(folder: Path, **options: Any) -> Exported:
    torch.manual_seed(0)
    frozen = nn.Linear(4, 6).requires_grad_(False)
    model = nn.Sequential(frozen, nn.ReLU(), nn.Linear(6, 3))
    step: dict[str, Any] = {"targets": "2:int64<3", "loss": F.cross_entropy, "optimizer": "sgd", "name": "net"}
    return memplan.export(model, "2x4", folder=folder, **step | options)


SECTION = '__attribute__((section(".{}")))'
STEP = """
#include "net.h"
#include <stdio.h>
{more}
int main(void)
{{
    const float x[8] = {{1, 2, 3, 4, 5, 6, 7, 8}};
    const int32_t y[2] = {{0, 2}};
    float output[NET_OUTPUTS];
    net_init({given});
    net_step(&s, x, y);
    net_infer(&s, x, output);
    printf("%.9g", (double)output[1]);
    {last}
    return 0;
}}
"""
WHOLE = STEP.format(more="static net_state s;", given="&s", last="")


@needs_compiler
@pytest.mark.parametrize("file", [True, *slow(False)])
def test_state_and_arena_lie_in_sections_of_the_caller(file: bool, tmp_path: Path) -> None:
    whole = exported(tmp_path / "a", verify=False)
    done = exported(tmp_path / "b", arena_apart=True, weights_file=file)
    assert done.verdict.proven, "with bytes around the arena, too"
    assert done.state == whole.state + 4 * (1 + file), "pointers"
    assert done.arena == whole.arena
    if file:
        return
    more = f"""
static net_state s {SECTION.format("fast")};
static float arena[NET_ARENA_BYTES / 4] {SECTION.format("slow")};"""
    program = STEP.format(more=more, given="&s, arena", last="")
    flash = f"-DNET_FLASH={SECTION.format('cold')}"
    assert printed_by(tmp_path / "b", program, flash) == printed_by(tmp_path / "a", WHOLE)
    rows = subprocess.run(["objdump", "-h", str(tmp_path / "b" / "main")], check=True, capture_output=True, text=True)
    sizes = {words[1]: int(words[2], 16) for row in rows.stdout.splitlines() if len(words := row.split()) == 7}
    assert sizes[".slow"] >= done.arena
    assert 0 < sizes[".fast"] < sizes[".fast"] + sizes[".cold"]
    assert sizes[".cold"] >= done.flash


@needs_compiler
def test_a_hook_runs_between_kernels_and_changes_nothing(tmp_path: Path) -> None:
    exported(tmp_path, verify=False)
    text = (tmp_path / "net.c").read_text()
    more = "static net_state s;\nstatic int calls;\nvoid feed_watchdog(void)\n{\n    calls++;\n}"
    program = STEP.format(more=more, given="&s", last='printf(" %d", calls);')
    output, calls = printed_by(tmp_path, program, "-DNET_HOOK=feed_watchdog").split()
    assert output == printed_by(tmp_path, WHOLE)
    in_loss = text[text.index("if (!loss)") : text.index("int net_infer")].count("NET_HOOK();")
    assert int(calls) == text.count("NET_HOOK();") - in_loss > 10, "after each kernel of a step and of infer"
