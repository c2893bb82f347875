"""Stack figures: above what a painted stack shows, and not far above it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import skip_without, slow
from models.microcontroller_networks import NETWORKS, Inverted, normed
from torch import nn
from truth.painted_stack import TARGETS, painted

import memplan
from memplan.exporting.trials import cortex
from memplan.exporting.trials.stack_depth import stack_depth


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(5, 12, 2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def small_mobilenet() -> nn.Module:
    body = nn.Sequential(normed(3, 8, 3, 2), Inverted(8, 8, 1, 4), Inverted(8, 16, 2, 4))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def camera() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU6())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def head_of_a_camera() -> nn.Module:
    model = camera().requires_grad_(False)
    list(model.children())[-1].requires_grad_(True)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 3))


PIXELS = {"normalize": (127.5, 58.0), "optimizer": "sgd:lr=0.05"}
STEPS: dict[str, tuple[Callable[[], nn.Module], str, str, Any, dict[str, Any]]] = {
    "CNN": (NETWORKS["sensor_cnn"][0], "1x3x64", "1:int64<6", "cross_entropy", {"optimizer": "sgd:lr=0.05"}),
    "residual": (NETWORKS["resnet8"][0], "1x3x32x32", "1:int64<10", "cross_entropy", {"optimizer": "sgd:lr=0.05"}),
    "MobileNet": (small_mobilenet, "1x3x32x32", "1:int64<4", "cross_entropy", {"optimizer": "sgd:lr=0.05"}),
    "LSTM": (Sequence, "1x10x5", "1:int64<3", "cross_entropy", {"optimizer": "adam:lr=0.01"}),
    "transformer": (NETWORKS["transformer"][0], "1x12:int64<50", "1:int64<5", "cross_entropy", {"optimizer": "adamw"}),
    "BCE": (perceptron, "2x8", "2x3", nn.BCEWithLogitsLoss(), {"optimizer": "adam:lr=0.01", "clip_norm": 1.0}),
    "int8 training": (
        camera, "1x3x16x16:uint8<256", "1:int64<4", "cross_entropy", PIXELS | {"trained_weights": "int8"},
    ),
    "int8 layers": (
        head_of_a_camera, "1x3x16x16:uint8<256", "1:int64<4", "cross_entropy", PIXELS | {"frozen_layers": "int8"},
    ),
}  # fmt: skip


def exported(name: str, folder: Path, **options: Any) -> memplan.Exported:
    make, inputs, targets, loss, given = STEPS[name]
    torch.manual_seed(0)
    if given.get("frozen_layers"):
        photos = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
        given = given | {"calibrate": [(photos, torch.randint(4, (8,)))]}
    step: dict[str, Any] = {"targets": targets, "loss": loss, "folder": folder, "name": "net", "verify": False}
    return memplan.export(make(), inputs, budget="4 MiB", **step, **given, **options)


def needs(target: str) -> None:
    skip_without(*TARGETS[target].tools)


def disassembled(folder: Path, target: str) -> str:
    command = [TARGETS[target].compiler.removesuffix("gcc") + "objdump", "-d", "--no-show-raw-insn", "painted"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


CASES = [("BCE", "cortex-m4", "-O2")]
MORE = [(name, target, level) for name in STEPS for target in ("cortex-m4", "rv32imac") for level in ("-O2", "-O3")]


@pytest.mark.parametrize(("name", "target", "level"), [*CASES, *slow(*(case for case in MORE if case not in CASES))])
def test_a_stack_is_as_deep_as_is_said(name: str, target: str, level: str, tmp_path: Path) -> None:
    needs(target)
    exported(name, tmp_path)
    found = painted(tmp_path, target, level)
    said = stack_depth(disassembled(tmp_path, target), [f"net_{function}" for function in found])
    assert set(found) == {"step_to", "infer", "evaluate"}
    for function, measured in found.items():
        assert measured <= said[f"net_{function}"] <= 1.25 * measured, function


@pytest.mark.parametrize("name", [*slow(*STEPS)])
def test_the_figure_of_an_export_is_above_a_painted_stack(name: str, tmp_path: Path) -> None:
    skip_without(cortex.COMPILER, cortex.EMULATOR)
    core = exported(name, tmp_path, device="cortex-m4").core
    assert core is not None
    measured = max(max(painted(tmp_path, "cortex-m4", level).values()) for level in ("-O2", "-O3"))
    assert measured <= core.stack <= 2 * measured
    assert f"at most {core.stack} of stack" in (tmp_path / "net.md").read_text()


WIDTHS = {"cortex-m4": (4, 2048), "rv32imac": (4, 2048), "host": (16, 4096), "sse2": (8, 4096), "avx2": (16, 4096)}
"""The width of tiles, and the bytes that docs/export.md says a step takes beside a panel and its sums."""


@pytest.mark.slow
@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_the_page_says_of_its_width(name: str, target: str, tmp_path: Path) -> None:
    needs(target)
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    width, beside = WIDTHS[target]
    row = re.search(rf"^\| {width}\D.*?\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert row is not None
    panel, sums, whole = (int(text.replace(",", "")) for text in row.groups())
    assert whole == panel + sums + beside
    exported(name, tmp_path)
    assert max(painted(tmp_path, target).values()) <= whole


def text_of(*functions: tuple[str, str]) -> str:
    """A disassembly of functions, each of 16 bytes: instructions are separated by semicolons, @NAME is an address."""
    starts = {name: 16 * at for at, (name, _) in enumerate(functions)}
    lines = list[str]()
    for name, body in functions:
        lines.append(f"\n{starts[name]:08x} <{name}>:")
        for at, instruction in enumerate(body.split("; ")):
            called = re.sub(r"@(\w+)", lambda found: f"{starts[found[1]]:x} <{found[1]}>", instruction)
            lines.append(f"{starts[name] + 2 * at:8x}:\t{called.replace(' ', chr(9), 1)}")
    return "\n".join(lines)


def test_frames_of_arm() -> None:
    text = text_of(
        ("top", "push {r4-r7, lr}; vpush {d8-d9}; sub.w sp, sp, #2032; bl @left; bl @right; pop {r4-r7, pc}"),
        ("left", "str.w lr, [sp, #-8]!; b.w @deep"),
        ("right", "stmdb sp!, {r4, r5, r6, r7, r8, lr}; ldmia.w sp!, {r4, r5, r6, r7, r8, pc}"),
        ("deep", "subw sp, sp, #100; addw sp, sp, #100; bx lr; nop; .word 0x00000010"),
    )
    expected = {"top": 20 + 16 + 2032 + 108, "left": 108, "right": 24, "deep": 100}
    assert stack_depth(text, list(expected)) == expected


def test_frames_of_risc_v() -> None:
    text = text_of(
        ("top", "add sp,sp,-32; jal @helped; lw a0,-16(gp) # 30 <deep>; ret"),
        ("helped", "jal t0,@__riscv_save_4; addi sp,sp,-16; j @deep"),
        ("__riscv_save_4", "add sp,sp,-64; jr t0"),
        ("deep", "c.addi16sp sp,-48; ret"),
    )
    assert stack_depth(text, ["top", "helped", "deep"]) == {"top": 32 + 64 + 16 + 48, "helped": 128, "deep": 48}


def test_assembler_code_that_runs_on_into_the_next_label_counts_with_it() -> None:
    text = text_of(("first", "push {r4, lr}; cmp r0, #0"), ("second", "sub sp, #8; beq.n @first; bx lr"))
    assert stack_depth(text, ["first", "second"]) == {"first": 16, "second": 16}


def test_frames_without_a_fixed_size_are_refused_where_they_are_called() -> None:
    text = text_of(("calm", "bx lr"), ("caller", "bl @wild; bx lr"), ("wild", "sub sp, sp, r3; bx lr"))
    assert stack_depth(text, ["calm"]) == {"calm": 0}
    with pytest.raises(ValueError, match="wild has the instruction 'sub sp, sp, r3'"):
        stack_depth(text, ["caller"])
    with pytest.raises(ValueError, match="no function missing"):
        stack_depth(text, ["missing"])
