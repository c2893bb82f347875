"""Build projects for boards, and run them on the boards that QEMU emulates."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memplan.exporting.kernels.templates import template

ARDUINO = Path("/usr/share/arduino/hardware/arduino/avr")
"""Debian's arduino-core-avr."""
BOARD = ("-mmcu=atmega2560", "-DF_CPU=16000000L", "-DARDUINO=10819", "-DARDUINO_AVR_MEGA2560", "-DARDUINO_ARCH_AVR")
SECTIONS = ("-Os", "-ffunction-sections", "-fdata-sections")
CXX = ("-std=gnu++11", "-fno-exceptions", "-fno-threadsafe-statics", "-fpermissive", "-DDECIMAL_DIG=__DECIMAL_DIG__")
"""Of platform.txt, as are those of C and of the linker below; without optimization across files. The core's WString.cpp
asks for a macro that the <float.h> of GCC 5.4, Debian's for AVR, has for C only."""
WARNINGS = ("-Wall", "-Wextra", "-Werror")
LM3S6965 = {"0x00000000, LENGTH = 4M": "0x00000000, LENGTH = 256K", "@RAM@, LENGTH = 16M": "0x20000000, LENGTH = 64K"}
"""The memory of the microcontroller that `qemu_cortex_m3`, a board of Zephyr's, is."""


def build_sketch(sketch: Path, build: Path) -> Path:
    """Build a sketch for an Arduino Mega 2560 as the Arduino IDE does: the core, the sketch with Arduino.h before it,
    and the files of C in its folder. Return the program. The sketch's own files compile without warnings."""
    core = ARDUINO / "cores" / "arduino"
    includes = [f"-I{core}", f"-I{ARDUINO / 'variants' / 'mega'}"]
    (build / "sketch.cpp").write_text(f'#include <Arduino.h>\n#include "{sketch / f"{sketch.name}.ino"}"\n')
    objects = list[str]()
    files = [*sorted(core.glob("*.c")), *sorted(core.glob("*.cpp")), *sorted(core.glob("*.S"))]
    for file in (build / "sketch.cpp", *sorted(sketch.glob("*.c")), *files):
        own = WARNINGS if core != file.parent else ("-w",)
        kind = {".cpp": ["avr-g++", *CXX], ".c": ["avr-gcc", "-std=gnu11"]}.get(file.suffix, ["avr-gcc"])
        objects.append(f"{file.name}.o")
        _run([*kind, *BOARD, *SECTIONS, *own, *includes, f"-I{sketch}", "-c", str(file), "-o", objects[-1]], build)
    _run(["avr-gcc", "-Os", "-mmcu=atmega2560", "-Wl,--gc-sections", *objects, "-lm", "-o", "sketch.elf"], build)
    return build / "sketch.elf"


@contextmanager
def serial_port(program: Path) -> Iterator[tuple[Callable[[int], bytes], Callable[[bytes], object]]]:
    """Run a program on an emulated Mega 2560; yield what reads and writes its first serial port."""
    command = ["qemu-system-avr", "-M", "mega2560", "-bios", str(program), "-nographic", "-monitor", "none"]
    with subprocess.Popen(
        [*command, "-serial", "stdio"], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as board:
        assert board.stdin is not None, "a pipe"
        assert board.stdout is not None, "likewise"
        send = board.stdin.write

        def write(data: bytes) -> None:
            time.sleep(0.01)  # QEMU drops a byte that comes while the program writes the register UCSR0A
            send(data)

        try:
            yield board.stdout.read, write
        finally:
            board.kill()


def build_zephyr(project: Path, build: Path) -> Path:
    """Build an application by its CMakeLists.txt, with a package in place of Zephyr's. Return the program."""
    options = dict(re.findall(r"^config (\w+)\n\tint .*\n\tdefault (\d+)$", (project / "Kconfig").read_text(), re.M))
    linker = template("cortex.ld")
    for found, wanted in LM3S6965.items():
        assert found in linker
        linker = linker.replace(found, wanted)
    (build / "cortex.ld").write_text(linker)
    (build / "cortex_startup.c").write_text(template("cortex_startup.c"))
    defined = ";".join(f"-DCONFIG_{name}={value}" for name, value in options.items())
    package = Path(__file__).parent / "zephyr"
    _run(["cmake", f"-DZephyr_DIR={package}", f"-DOPTIONS_OF_KCONFIG={defined}", str(project)], build)
    _run(["cmake", "--build", "."], build)
    return build / "zephyr.elf"


def printed_on_cortex_m3(program: Path) -> str:
    """Run a program on the board that `qemu_cortex_m3` stands for; return what it prints."""
    machine = ["qemu-system-arm", "-M", "lm3s6965evb", "-nographic", "-monitor", "none", "-serial", "none"]
    calls = ["-semihosting-config", "enable=on,target=native", "-kernel", str(program)]
    return _run([*machine, *calls], program.parent)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout
