"""Cross-compile an export for a Cortex-M and run its test on an emulated one, with the same bounds as on the host."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memplan._display import Printed
from memplan._interrupts import waiting
from memplan.errors import UsageError, VerificationError
from memplan.exporting.kernels.templates import template
from memplan.exporting.source.companion_files import Recorded, header_text
from memplan.exporting.source.program_text import program_text
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.source.stored_weights import weights_text
from memplan.exporting.trials.proving import STRICT, Verdict, compare_results
from memplan.exporting.trials.stack_depth import stack_depth

COMPILER, EMULATOR = "arm-none-eabi-gcc", "qemu-system-arm"
CORES: Mapping[str, tuple[str, str, str]] = {
    "cortex-m4": ("mps2-an386", "fpv4-sp-d16", "0x21000000"),
    "cortex-m7": ("mps2-an500", "fpv5-sp-d16", "0x60000000"),
}
"""By core: the emulated board, its floating-point unit, and the address of 16 MiB of memory, from Arm's application
notes 386 and 500."""
OPTIMIZATION_LEVEL = "-O2"
"""Of optimization, in the figures of a core: the one that docs/export.md recommends there."""
STACK_LEVELS = (OPTIMIZATION_LEVEL, "-O3")
"""Whose deeper stack counts: the latter is that of the Makefile."""
INSTRUCTIONS_PER_TICK = 40
"""Instructions per tick of SysTick: the emulator counts a nanosecond for each, and the boards run at 25 MHz."""
TIME_LIMIT = 900
"""Seconds that the emulated test may take."""


@dataclass(frozen=True, slots=True)
class CortexRun(Printed):
    """Memory, instructions and results of an export on an emulated core, compiled with ``-O2``."""

    core: str
    text: int
    """Bytes of the export's code, without libm and the test."""
    rodata: int
    """Bytes of constants: weights and tables."""
    data: int
    """Bytes of writable static memory: 0, since the caller owns the state."""
    stack: int
    """Most bytes of stack under a call of the export's functions at `-O2` and `-O3`, with libm, without yours that
    `save` and `load` call: see `stack_depth`."""
    instructions: int
    """Instructions of one step."""
    verdict: Verdict

    def __str__(self) -> str:
        return (
            f"{self.core} at {OPTIMIZATION_LEVEL}: {self.text} bytes of code, {self.rodata} of constants, "
            f"{self.data} of static memory, about {self.instructions:,} instructions a step; "
            f"at {' and '.join(STACK_LEVELS)} at most {self.stack} of stack; {self.verdict}"
        )


FLAGS: Mapping[str, tuple[str, ...]] = {
    "cortex-m0plus": ("-mfloat-abi=soft",),
    "cortex-m33": ("-mfpu=fpv5-sp-d16", "-mfloat-abi=hard"),
    **{core: (f"-mfpu={unit}", "-mfloat-abi=hard") for core, (_, unit, _) in CORES.items()},
}
"""The cross compiler's options for each core."""


def flash_bytes(core: str, layout: StepLayout) -> int | None:
    """Return the bytes of code, weights and tables of an export compiled for a core with ``-O2``, without libm.

    None if the cross compiler is missing, or does not know the core.

    Raises:
        VerificationError: the code does not compile.
    """
    if core not in FLAGS or shutil.which(COMPILER) is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        build, name = Path(scratch), layout.name
        texts = {".c": program_text(layout), ".h": header_text(layout), "_weights.h": weights_text(layout)}
        for ending, text in texts.items():
            (build / f"{name}{ending}").write_text(text, encoding="utf-8")
        flags = [f"-mcpu={core}", "-mthumb", *FLAGS[core], *STRICT, OPTIMIZATION_LEVEL]
        _run([COMPILER, *flags, "-c", f"{name}.c", "-o", "export.o"], build)
        sizes = _section_sizes(build / "export.o")
    return sizes[".text"] + sizes.get(".rodata", 0)


def what_is_missing(core: str) -> str:
    """Return what is missing to run on a core, as text; empty if nothing is."""
    if core not in CORES:
        return f"there is no core {core!r}: {', '.join(CORES)}"
    lacking = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    return f"{' and '.join(lacking)} not found" if lacking else ""


def run_on_core(core: str, folder: Path, layout: StepLayout, recorded: Recorded) -> CortexRun:
    """Compile an export for a core, and run its test there.

    Raises:
        UsageError: the core is unknown, or the cross compiler or the emulator is missing.
        VerificationError: the code does not compile, or results differ.
    """
    lacks = what_is_missing(core)
    if lacks:
        raise UsageError(
            lacks, expected=f"{COMPILER} and {EMULATOR}", do="Install them (Debian: gcc-arm-none-eabi, "
            "libnewlib-arm-none-eabi, qemu-system-arm), or leave device out"
        )  # fmt: skip
    (board, unit, ram), name = CORES[core], layout.name
    flags = [f"-mcpu={core}", "-mthumb", f"-mfpu={unit}", "-mfloat-abi=hard", *STRICT, f"-I{folder}"]
    with tempfile.TemporaryDirectory() as scratch:
        build = Path(scratch)
        for file in ("cortex_startup.c", "cortex.ld"):
            (build / file).write_text(template(file).replace("@RAM@", ram), encoding="utf-8")
        if layout.weights_file:
            shutil.copy(folder / f"{name}.bin", build)
        test = ["cortex_startup.c", "export.o", str(folder / f"test_{name}.c"), "-DTICKS", '-DWEIGHTS_FILE="weights"']
        link = [
            "-nostartfiles",
            "--specs=rdimon.specs",
            "-T",
            "cortex.ld",
            "-Wl,--gc-sections",
            "-lm",
            "-o",
            "test.elf",
        ]
        stack_bytes = list[int]()
        for level in reversed(STACK_LEVELS):  # the last one's program runs
            _run([COMPILER, *flags, level, "-c", str(folder / f"{name}.c"), "-o", "export.o"], build)
            _run([COMPILER, *flags, level, *test, *link], build)
            stack_bytes.append(_stack(build))
        machine = ["-M", board, "-cpu", core, "-nographic", "-monitor", "none", "-serial", "none"]
        # semihosting: the test prints and writes files through the emulator; icount: a nanosecond an instruction
        run = ["-semihosting-config", "enable=on,target=native", "-icount", "shift=0", "-kernel", "test.elf"]
        output = _run([EMULATOR, *machine, *run], build)
        written = np.fromfile(build / "weights", dtype=np.float32).astype(np.float64)
        sizes = _section_sizes(build / "export.o")
    ticks = [int(count) for count in re.findall(r"ticks (\d+)", output)]  # of each step
    return CortexRun(
        core, text=sizes[".text"], rodata=sizes.get(".rodata", 0), data=sizes.get(".data", 0) + sizes.get(".bss", 0),
        stack=max(stack_bytes), instructions=max(ticks) * INSTRUCTIONS_PER_TICK,
        verdict=compare_results(output, written, recorded, "on the emulated core"),
    )  # fmt: skip


def _stack(build: Path) -> int:
    """Return the most bytes of stack under a function of export.o in test.elf.

    Raises:
        VerificationError: a frame has no fixed size.
    """
    functions = re.findall(r"^\w+ T (\w+)$", _run([_tool("nm"), "export.o"], build), re.MULTILINE)
    disassembly = _run([_tool("objdump"), "-d", "--no-show-raw-insn", "test.elf"], build)
    try:
        return max(stack_depth(disassembly, functions).values())
    except ValueError as error:
        raise VerificationError(
            f"The stack on the core is not known: {error}", expected="frames of a fixed size, in libm as well",
            do="Leave device out, and measure the stack: the files are as they would be",
        ) from error  # fmt: skip


def _section_sizes(file: Path) -> dict[str, int]:
    """Return the bytes of an object file's sections; those of one function, as .text.f, count as .text."""
    text = _run([_tool("size"), "-A", file.name], file.parent)
    sizes: dict[str, int] = {}
    for name, size in re.findall(r"^(\.\w+)\S*\s+(\d+)", text, re.MULTILINE):
        sizes[name] = sizes.get(name, 0) + int(size)
    return sizes


def _tool(name: str) -> str:
    """Return the name of a tool of the cross compiler, such as ``objdump``."""
    return COMPILER.removesuffix("gcc") + name


def _run(command: list[str], folder: Path) -> str:
    """Return what a command prints. Raises VerificationError with its last lines if it fails."""
    with waiting():
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False, cwd=folder)
    if process.returncode:
        lines = [line for line in (process.stderr + process.stdout).splitlines() if line.strip()][-3:]
        raise VerificationError(
            f"{command[0]} failed: {'; '.join(lines) or f'exit code {process.returncode}'}",
            expected="code that compiles for the core and computes there what PyTorch does",
            do="Report it: the files are left for a look",
        )
    return process.stdout
