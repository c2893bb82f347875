"""Exports on emulated Cortex-M cores: the same losses and weights, and what they take there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import skip_without
from models.microcontroller_networks import NETWORKS
from torch.nn import functional as F

import memplan
from memplan.errors import UsageError, VerificationError
from memplan.exporting.trials import cortex
from memplan.exporting.trials.cortex import CORES, CortexRun
from memplan.exporting.trials.stack_depth import stack_depth


def run(name: str, core: str, folder: Path) -> CortexRun:
    skip_without(cortex.COMPILER, cortex.EMULATOR)
    make, inputs, targets, loss = NETWORKS[name]
    torch.manual_seed(0)
    step = {
        "targets": targets,
        "loss": getattr(F, loss),
        "optimizer": torch.optim.SGD,
        "budget": "4 MiB",
        "name": "net",
    }
    done = memplan.export(make(), *inputs, folder=folder, verify=False, device=core, **step)
    assert done.core is not None
    return done.core


def test_a_step_runs_on_an_emulated_core(tmp_path: Path) -> None:
    found = run("mlp", "cortex-m4", tmp_path)
    assert found.verdict.proven
    assert found.data == 0, "all that changes is the caller's"
    assert found.rodata >= 4 * (12 * 16 + 16 + 16 * 8 + 8 + 8 * 4 + 4), "the weights"
    assert found.instructions > 3 * (12 * 16 + 16 * 8 + 8 * 4), "each product takes one"
    hard = ["-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"]
    build = ["arm-none-eabi-gcc", *hard, "-std=c99", "-ffp-contract=fast", "-O2", "-c", "net.c", "-o", "net.o"]
    subprocess.run(build, cwd=tmp_path, check=True)
    sizes = subprocess.run(["arm-none-eabi-size", "net.o"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.text + found.rodata == int(sizes.stdout.splitlines()[1].split()[0]), "with the flags of the page"
    assert str(found).startswith("cortex-m4 at -O2: ")


def test_the_stack_is_that_of_the_deeper_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-O2, and -O3 as the Makefile has it; a frame of a size that is not known is an error of memplan's."""
    depths = list[int]()

    def recorded(*arguments: Any) -> dict[str, int]:
        found = stack_depth(*arguments)
        depths.append(max(found.values()))
        return found

    monkeypatch.setattr(cortex, "stack_depth", recorded)
    found = run("mlp", "cortex-m4", tmp_path)
    assert len(set(depths)) == 2, "each level has its own frames"
    assert found.stack == max(depths)

    def of_register(*_: Any) -> dict[str, int]:
        raise ValueError("expf has the instruction 'sub sp, r3': expected frames of a fixed size")

    monkeypatch.setattr(cortex, "stack_depth", of_register)
    with pytest.raises(VerificationError, match=r"The stack on the core is not known: expf has .* Leave device out"):
        run("mlp", "cortex-m4", tmp_path)


@pytest.mark.slow
def test_a_step_runs_on_another_core(tmp_path: Path) -> None:
    assert run("segmenter", "cortex-m7", tmp_path).verdict.proven


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks_run_on_emulated_cores(name: str, core: str, tmp_path: Path) -> None:
    found = run(name, core, tmp_path)
    assert found.verdict.proven
    assert name != "lenet" or found.text < 12 * 1024


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cortex, "COMPILER", "no-such-compiler")
    step = {"targets": "1:int64<4", "loss": F.cross_entropy, "optimizer": torch.optim.SGD, "folder": tmp_path}
    with pytest.raises(UsageError, match="no-such-compiler"):
        memplan.export(NETWORKS["mlp"][0](), "1x12", device="cortex-m4", verify=False, **step)
    with pytest.raises(UsageError, match="there is no core 'cortex-a72': cortex-m4, cortex-m7"):
        memplan.export(NETWORKS["mlp"][0](), "1x12", device="cortex-a72", verify=False, **step)
