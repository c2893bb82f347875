"""Cross-compile an export for a Cortex-M, and run its test on an emulated one: the same bounds as on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memplan._display import Printed
from memplan._interrupts import waiting
from memplan.errors import UsageError, VerificationError
from memplan.exporting.kernels.templates import template
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.trials.proving import STRICT, Verdict, compared

COMPILER, EMULATOR = "arm-none-eabi-gcc", "qemu-system-arm"
CORES: Mapping[str, tuple[str, str, str]] = {
    "cortex-m4": ("mps2-an386", "fpv4-sp-d16", "0x21000000"),
    "cortex-m7": ("mps2-an500", "fpv5-sp-d16", "0x60000000"),
}
"""By core: the board that is emulated, its floating-point unit, and where it has 16 MiB of memory. Arm's application
notes 386 and 500."""
PER_TICK = 40
"""Instructions to a tick of SysTick: the emulator counts a nanosecond for each, and the boards run at 25 MHz."""
LIMIT = 900
"""Seconds that the emulated test may take."""


@dataclass(frozen=True, slots=True)
class CortexRun(Printed):
    """What an export takes on a core, and what it did there."""

    core: str
    text: int
    """Bytes of code, of the export alone: without libm and the test."""
    rodata: int
    """Bytes of constants: weights and tables."""
    data: int
    """Bytes of static memory that changes: none, all is the caller's."""
    stack: int
    """Bytes of the three largest frames, which is as deep as calls go."""
    instructions: int
    """Of one step."""
    verdict: Verdict

    def __str__(self) -> str:
        return (
            f"{self.core}: {self.text} bytes of code, {self.rodata} of constants, {self.data} of static memory, "
            f"{self.stack} of stack, about {self.instructions:,} instructions a step; {self.verdict}"
        )


def missing(core: str) -> str:
    """Say what is missing to run on a core; empty where nothing is."""
    if core not in CORES:
        return f"there is no core {core!r}: {', '.join(CORES)}"
    lacking = [one for one in (COMPILER, EMULATOR) if shutil.which(one) is None]
    return f"{' and '.join(lacking)} not found" if lacking else ""


def run_on_core(core: str, folder: Path, layout: StepLayout, recorded: Recorded) -> CortexRun:
    """Compile an export for a core, and run its test there.

    Raises:
        UsageError: the core is unknown, or the cross compiler or the emulator is missing.
        VerificationError: it does not compile, or results differ.
    """
    lacks = missing(core)
    if lacks:
        raise UsageError(
            lacks, expected=f"{COMPILER} and {EMULATOR}", do="Install them (Debian: gcc-arm-none-eabi, "
            "libnewlib-arm-none-eabi, qemu-system-arm), or leave device out"
        )  # fmt: skip
    (board, unit, ram), name = CORES[core], layout.name
    flags = [f"-mcpu={core}", "-mthumb", f"-mfpu={unit}", "-mfloat-abi=hard", *STRICT, "-Os", f"-I{folder}"]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for file in ("cortex_startup.c", "cortex.ld"):
            (place / file).write_text(template(file).replace("@RAM@", ram), encoding="utf-8")
        if layout.weights_file:
            shutil.copy(folder / f"{name}.bin", place)
        _done([COMPILER, *flags, "-fstack-usage", "-c", str(folder / f"{name}.c"), "-o", "export.o"], place)
        parts = ["cortex_startup.c", "export.o", str(folder / f"test_{name}.c")]
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
        _done([COMPILER, *flags, "-DTICKS", '-DWEIGHTS_FILE="weights"', *parts, *link], place)
        machine = ["-M", board, "-cpu", core, "-nographic", "-monitor", "none", "-serial", "none"]
        calls = ["-semihosting-config", "enable=on,target=native", "-icount", "shift=0", "-kernel", "test.elf"]
        output = _done([EMULATOR, *machine, *calls], place)
        written = np.fromfile(place / "weights", dtype=np.float32).astype(np.float64)
        sizes, stack = _sections(place / "export.o"), _frames(place.glob("*.su"))
    ticks = [int(found) for found in re.findall(r"ticks (\d+)", output)]
    verdict = compared(output, written, recorded, "on the emulated core")
    data = sizes.get(".data", 0) + sizes.get(".bss", 0)
    return CortexRun(core, sizes[".text"], sizes.get(".rodata", 0), data, stack, max(ticks) * PER_TICK, verdict)


def _sections(file: Path) -> dict[str, int]:
    """Return the bytes of an object file's sections, by the beginning of their names."""
    text = _done(["arm-none-eabi-size", "-A", file.name], file.parent)
    found: dict[str, int] = {}
    for name, size in re.findall(r"^(\.\w+)\S*\s+(\d+)", text, re.MULTILINE):
        found[name] = found.get(name, 0) + int(size)
    return found


def _frames(files: Iterable[Path]) -> int:
    """Return the bytes of the three largest frames that the compiler reports: a pass, a kernel, what that calls."""
    frames = [int(line.split("\t")[1]) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sum(sorted(frames)[-3:])


def _done(command: list[str], folder: Path) -> str:
    with waiting():
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=folder)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()][-3:]
        raise VerificationError(
            f"{command[0]} failed: {'; '.join(lines) or f'exit code {done.returncode}'}",
            expected="code that compiles for the core and computes there what PyTorch does",
            do="Report it: the files are left for a look",
        )
    return done.stdout
