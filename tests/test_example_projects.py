"""The example projects for boards build, and learn on emulated boards what PyTorch learns."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from environment import skip_without
from truth.emulated_boards import ARDUINO, build_sketch, build_zephyr, printed_on_cortex_m3, serial_port

from memplan.devices.boards import find_board
from memplan.exporting.board_fit import fit_on_board
from memplan.exporting.step_outputs import Normalization
from memplan.trace.step import StepOptions

GESTURES = Path(__file__).parents[1] / "examples" / "gestures"
SINGLE = 1e-4
"""How far losses of 60 steps in float32 lie apart at most: float32's error of some 1e-7, after 60 updates."""


@pytest.fixture(scope="module")
def project() -> ModuleType:
    found = importlib.util.spec_from_file_location("gestures_project", GESTURES / "project.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_sketch_learns_on_an_arduino(project: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without("avr-gcc", "avr-g++", "qemu-system-avr", str(ARDUINO))
    exported = project.write("arduino", tmp_path)
    program = build_sketch(tmp_path / "gestures", tmp_path)
    with serial_port(program) as (read, write):
        before, losses, after = project.stream(read, write)
    assert exported.verdict.proven
    np.testing.assert_allclose(losses, project.losses_of(project.trained()), atol=SINGLE)
    assert before < project.TESTED / 2
    assert after > 0.9 * project.TESTED
    project.report(before, losses, after)
    assert f"recognized after training: {after} of {project.TESTED}" in capsys.readouterr().out


def test_the_budget_leaves_room_for_constants_and_stack(project: ModuleType) -> None:
    avr, normalization = find_board("mega2560"), Normalization.of((0.0, project.SCALE))
    step = StepOptions(
        (f"1x{project.READINGS}:int8",),
        {},
        f"1:int64<{project.GESTURES}",
        "cross_entropy",
        f"sgd:lr={project.RATE}",
        None,
    )
    whole = fit_on_board(project.make, step, avr, reserve=2 << 10, normalization=normalization).parts[0]
    assert whole.fits
    assert whole.budget <= project.BUDGET <= avr.sram - whole.constants - (2 << 10)


def test_files_of_a_user_stay(project: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(model: object, folder: Path) -> str:
        for name in project.EXPORTED:
            (folder / name).write_text(f"{version}")
        return version

    monkeypatch.setattr(project, "export", export)
    monkeypatch.setattr(project, "trained", lambda: None)
    version, main = "1", tmp_path / "gestures" / "src" / "main.c"
    project.write("zephyr", tmp_path)
    project.write("zephyr", tmp_path)
    main.write_text("mine")
    version = "2"
    with pytest.raises(FileExistsError, match=r"gestures\.c, .*main\.c; --renew writes"):
        project.write("zephyr", tmp_path)
    assert (main.read_text(), (main.parent / "gestures.c").read_text()) == ("mine", "1")
    project.write("zephyr", tmp_path, renew=True)
    assert (main.read_text(), (main.parent / "gestures.c").read_text()) == ("mine", "2")


def test_an_application_for_zephyr_learns_on_a_cortex_m3(project: ModuleType, tmp_path: Path) -> None:
    skip_without("cmake", "arm-none-eabi-gcc", "qemu-system-arm")
    project.write("zephyr", tmp_path)
    build = tmp_path / "build"
    build.mkdir()
    printed = printed_on_cortex_m3(build_zephyr(tmp_path / "gestures", build))
    losses = [float(text) for text in re.findall(r"^loss (\S+)$", printed, re.MULTILINE)]
    np.testing.assert_allclose(losses, project.losses_of(project.trained()), atol=SINGLE)
    right = re.findall(rf"^recognized (before|after) training: (\d+) of {project.TESTED}$", printed, re.MULTILINE)
    assert [when for when, _ in right] == ["before", "after"]
    assert int(right[0][1]) < project.TESTED / 2
    assert int(right[1][1]) > 0.9 * project.TESTED
    # What twister, Zephyr's test runner, looks for.
    (wanted,) = re.findall(r'- "(.*)"', (tmp_path / "gestures" / "sample.yaml").read_text())
    assert re.search(wanted, printed)
    assert not re.search(wanted, "recognized after training: 0 of 40")


def test_a_board_that_falls_silent_is_told(project: ModuleType) -> None:
    left = iter([b"?", b"l", b"o", b""])
    with pytest.raises(EOFError, match="the board sent b'lo', then nothing"):
        project.stream(lambda _: next(left), lambda _: None)
