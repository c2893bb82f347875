"""Exports compile without a warning: by whatever compilers are there, as C of each year and as C++."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import skip_without, slow, thinned
from models.microcontroller_networks import NETWORKS
from torch import nn
from torch.nn import functional as F
from truth.integer_layers import Gate, Plus

import memplan

WARNINGS = ("-Wall", "-Wextra", "-Werror")
STRICT = (*WARNINGS, "-Wpedantic", "-Wvla", "-Wdouble-promotion")
LEVELS = ("-O0", "-O1", "-O2", "-O3", "-Os")
C, CXX = ("c99", "c11", "c17", "c2x"), ("c++11", "c++17", "c++20")
CROSS: dict[str, list[str]] = {
    "arm-none-eabi-gcc": ["-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"],
    "riscv64-unknown-elf-gcc": ["-march=rv32imac", "-mabi=ilp32", "--specs=picolibc.specs"],
    "avr-gcc": ["-mmcu=atmega2560"],
}
SMALL = ("mlp", "lenet", "sensor_cnn", "gru", "transformer", "segmenter", "denoiser")


def commands() -> dict[str, list[str]]:
    """The compilers of this machine, by name. The wheel `ziglang` brings a whole clang."""
    names = [f"{one}{version}" for one in ("gcc", "clang") for version in ("", *(f"-{k}" for k in range(9, 24)))]
    found = {name: [name] for name in (*names, *CROSS) if shutil.which(name)}
    if importlib.util.find_spec("ziglang"):
        found["zig"] = [sys.executable, "-m", "ziglang", "cc"]
    return found


def exported(name: str, folder: Path, optimizer: str = "sgd:lr=0.05") -> Path:
    make, inputs, targets, loss = NETWORKS[name]
    torch.manual_seed(0)
    step: dict[str, Any] = {"loss": getattr(F, loss), "optimizer": optimizer, "budget": "100 MiB", "name": "net"}
    memplan.export(make(), *inputs, targets=targets, folder=folder, verify=False, **step)
    return folder


@pytest.fixture(scope="module")
def in_eight_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exports that have each integer kernel."""
    folder = tmp_path_factory.mktemp("int8")
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Hardswish(), nn.Conv2d(8, 6, 1),
        Plus(nn.Conv2d(6, 6, 3, padding=1)), nn.SiLU(), Gate(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1)),
        nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6 * 36, 5), nn.ReLU(),
    ).requires_grad_(False)  # fmt: skip
    class_of = torch.tensor([1])
    for name, x in (
        ("net", torch.randint(256, (1, 3, 24, 24), dtype=torch.uint8)),
        ("of_floats", torch.randn(1, 3, 24, 24)),
    ):
        memplan.export(
            nn.Sequential(*body, nn.Linear(5, 3)), x, targets=class_of, loss=F.cross_entropy, optimizer="sgd:lr=0.05",
            normalize=(127.5, 60.0) if name == "net" else None, frozen_layers="int8", calibrate=[(x, class_of)],
            folder=folder, name=name, verify=False,
        )  # fmt: skip
    return folder


def warnings_of(command: list[str], folder: Path, file: str = "net.c") -> str:
    """What the compiler says of a file of the export."""
    build = [*command, "-c", file, "-o", "compiled.o"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def variants(name: str, command: list[str]) -> Iterator[list[str]]:
    """Each compiler by each standard that it knows, at each level."""
    if name in CROSS:
        yield from ([*command, *CROSS[name], "-std=c99", level, *WARNINGS] for level in LEVELS)
        return
    for standard in (*C, *CXX):
        flags = [f"-std={standard}", *(["-x", "c++"] if "++" in standard else []), *STRICT]
        probe = [*command, *flags, "-E", "-"]
        if subprocess.run(probe, input="int a;", capture_output=True, text=True, check=False).returncode == 0:
            yield from ([*command, *flags, level] for level in LEVELS)


@pytest.mark.parametrize("optimizer", ["adam", *slow("sgd:lr=0.1,momentum=0.9")])
def test_a_small_network_compiles_without_warnings(optimizer: str, tmp_path: Path) -> None:
    found = commands()
    folder = exported("sensor_cnn", tmp_path, optimizer)
    for name in sorted({"gcc", "clang", "zig"} & set(found)):
        for flags, file in ((["-std=c99"], "net.c"), (["-std=c++11", "-x", "c++"], "test_net.c")):
            assert warnings_of([*found[name], *flags, "-O2", *STRICT], folder, file) == ""


@pytest.mark.parametrize("name", ["gcc", "clang", *slow("zig"), *thinned(CROSS, 2)])
def test_integer_kernels_compile_without_warnings(name: str, in_eight_bits: Path) -> None:
    found = commands()
    if name == "zig" and name not in found:
        pytest.skip("no zig")
    if name != "zig":
        skip_without(name)
    year = ["-std=c99", *WARNINGS]
    kinds = [[*CROSS[name], *year]] if name in CROSS else [["-std=c99", *STRICT], ["-std=c++11", "-x", "c++", *STRICT]]
    for kind, file in zip(kinds * 2, ("of_floats.c", "net.c"), strict=False):
        assert warnings_of([*found[name], *kind, "-O2"], in_eight_bits, file) == ""


@pytest.mark.parametrize("core", thinned(CROSS, 3))
def test_the_flags_of_the_makefile_suit_cross_compilers(core: str, tmp_path: Path) -> None:
    skip_without(core)
    folder = exported("mlp" if core == "avr-gcc" else "sensor_cnn", tmp_path)
    compiler = " ".join((core, *CROSS[core]))
    subprocess.run(["make", "net.o", f"CC={compiler}"], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("columns", [6, *slow(2, 32)])
def test_a_width_without_tiles_is_refused(columns: int, tmp_path: Path) -> None:
    said = warnings_of(["cc", "-std=c99", f"-DWIDE={columns}"], exported("mlp", tmp_path))
    assert "WIDE is 4, 8 or 16" in said


FUSED = re.compile(r"^ +[0-9a-f]+:\s+vfmadd\d+ps ", re.MULTILINE)
"""A vector instruction of AVX with FMA in a disassembly."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86-64")
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_tiles_on_x86_64_are_there_in_fma_without_flags_of_a_machine(name: str, tmp_path: Path) -> None:
    skip_without(name, "objdump")
    folder, command = exported("mlp", tmp_path), [name, "-std=c99", "-O3", "-ffp-contract=fast"]
    fused = dict[str, bool]()
    for width in ("", "-DWIDE=8"):
        assert warnings_of([*command, *width.split()], folder) == ""
        dump = ["objdump", "-d", "--no-show-raw-insn", "compiled.o"]
        text = subprocess.run(dump, cwd=folder, check=True, capture_output=True, text=True).stdout
        fused[width] = FUSED.search(text) is not None
    assert fused == {"": True, "-DWIDE=8": False}


def frames(command: list[str], folder: Path) -> list[int]:
    """Bytes of each function's stack, as the compiler reports them."""
    assert warnings_of([*command, "-std=c99", "-fstack-usage"], folder) == ""
    return [int(line.split("\t")[1]) for file in folder.glob("*.su") for line in file.read_text().splitlines()]


def test_an_avr_has_stack_for_a_panel(tmp_path: Path) -> None:
    skip_without("avr-gcc")
    found = frames(["avr-gcc", "-mmcu=atmega328p", "-Os"], exported("mlp", tmp_path))
    assert max(found) < 512, "of 2048 bytes of SRAM"


@pytest.mark.slow
def test_a_program_in_cpp_links(tmp_path: Path) -> None:
    if shutil.which("g++") is None or shutil.which("cc") is None:
        pytest.skip("no C++ compiler")
    folder = exported("mlp", tmp_path)
    (folder / "main.cpp").write_text(
        '#include "net.h"\nstatic net_state state;\nint main() { net_init(&state); return state.rate == 1 ? 0 : 1; }\n'
    )
    subprocess.run(["cc", "-std=c99", "-c", "net.c"], cwd=folder, check=True)
    subprocess.run(["g++", *WARNINGS, "main.cpp", "net.o", "-lm", "-o", "main"], cwd=folder, check=True)
    subprocess.run(["./main"], cwd=folder, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", commands())
@pytest.mark.parametrize("network", SMALL)
def test_networks_compile_by_every_compiler(network: str, name: str, tmp_path: Path) -> None:
    if name == "avr-gcc" and network != "mlp":
        pytest.skip("a microcontroller of eight bits has no room for it")
    folder = exported(network, tmp_path)
    said = {" ".join(command): warnings_of(command, folder) for command in variants(name, commands()[name])}
    assert said, "the compiler knows a standard"
    assert {command: text for command, text in said.items() if text} == {}
