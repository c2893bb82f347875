"""How deep the stack of an export gets when it runs: bytes of it are painted before a call, and read after it.

On a Cortex-M4 and a RISC-V core that QEMU emulates, and on this machine, in a thread with a stack of its own.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from memplan.exporting.kernels.templates import template
from memplan.exporting.trials.cortex import CORES

WRITTEN = ("-std=c99", "-O3", "-ffp-contract=fast")
"""What the written Makefile compiles with."""
PICOLIBC = {"flash": 0x80000000, "flash_size": 4 << 20, "ram": 0x80400000, "ram_size": 16 << 20, "stack_size": 1 << 17}


@dataclass(frozen=True)
class Core:
    """How to compile for a core, and how to run it."""

    compiler: str
    flags: tuple[str, ...]
    link: tuple[str, ...]
    run: tuple[str, ...]

    @property
    def tools(self) -> list[str]:
        return [tool for tool in (self.compiler, self.run[0]) if tool != "./painted"]


QUIET = ("-nographic", "-monitor", "none", "-serial", "none", "-semihosting-config", "enable=on,target=native")
TARGETS = {
    "cortex-m4": Core(
        "arm-none-eabi-gcc",
        ("-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"),
        ("cortex_startup.c", "-nostartfiles", "--specs=rdimon.specs", "-T", "cortex.ld", "-lm"),
        ("qemu-system-arm", "-M", CORES["cortex-m4"][0], "-cpu", "cortex-m4", *QUIET, "-kernel", "painted"),
    ),
    "rv32imac": Core(
        "riscv64-unknown-elf-gcc",
        ("-march=rv32imac", "-mabi=ilp32", "--specs=picolibc.specs"),
        ("--crt0=hosted", "--oslib=semihost", *(f"-Wl,--defsym=__{name}={at}" for name, at in PICOLIBC.items()), "-lm"),
        ("qemu-system-riscv32", "-M", "virt", "-bios", "none", *QUIET, "-kernel", "painted"),
    ),
    "host": Core("gcc", (), ("-static", "-pthread", "-lm"), ("./painted",)),
    "sse2": Core("gcc", ("-DWIDE=8",), ("-static", "-pthread", "-lm"), ("./painted",)),
    "avx2": Core("gcc", ("-mavx2", "-mfma"), ("-static", "-pthread", "-lm"), ("./painted",)),
}


def painted(folder: Path, target: str, level: str = "-O3") -> dict[str, int]:
    """Return the bytes of stack under the functions `step_to`, `infer` and `evaluate` of the export `net`. The
    program is left in the folder, as `painted`."""
    core, test = TARGETS[target], (folder / "test_net.c").read_text()
    calls = {name: found for name in ("step_to", "infer", "evaluate") if (found := _call_of(name, test))}
    begin = test.index("    net_init(", test.index("int main(void)"))
    given = re.findall(r"^ +net_init\(.*\);$", test, re.MULTILINE)[:1]
    rolls = re.findall(r"^ +for \(int i = 0; i < \d+; i\+\+\)\n.*;$", test[begin:], re.MULTILINE)
    texts = {
        "MEASURES": "\n".join(f"MEASURE({name}, {call})" for name, call in calls.items()),
        "CALLS": " ".join(f"measure_{name}();" for name in calls),
        "FILL": "\n".join([*given, *rolls]),
    }
    source = (Path(__file__).parent / "painted_stack.c").read_text()
    for name, text in texts.items():
        source = source.replace(f"/* @{name}@ */", text)
    (folder / "painted.c").write_text(source)
    for file in ("cortex_startup.c", "cortex.ld"):
        (folder / file).write_text(template(file).replace("@RAM@", CORES["cortex-m4"][2]))
    flags = [core.compiler, *core.flags, *(level if flag == "-O3" else flag for flag in WRITTEN)]
    _run([*flags, "painted.c", "net.c", *core.link, "-o", "painted"], folder)
    printed = re.findall(r"^stack (\w+) (\d+)$", _run(list(core.run), folder), re.MULTILINE)
    return {name: int(size) for name, size in printed}


def _call_of(name: str, test: str) -> str:
    """Return the call of a function in the test of the export."""
    found = re.search(rf"\bnet_{name}\([^()]*\)", test[test.index("int main(void)") :])
    return found[0] if found else ""


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(  # what picolibc prints, QEMU writes to stderr
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600
    )
    assert not done.returncode, (command, done.stdout[-2000:])
    return done.stdout
