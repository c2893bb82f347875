"""Microcontrollers and their boards: banks of SRAM, flash, core and clock, as the public data sheets have them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from memplan._display import Printed
from memplan.errors import DeviceError

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Bank(Printed):
    """SRAM at contiguous addresses, in which one array can lie."""

    name: str
    """As the data sheet names it; of several that follow one another, such as ``SRAM1 + SRAM2``."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Board(Printed):
    """A microcontroller. Sizes are bytes."""

    name: str
    title: str
    core: str
    """Such as ``cortex-m4``."""
    megahertz: int
    """Highest clock of the core."""
    fpu: bool
    """Whether the core computes in float32."""
    banks: tuple[Bank, ...]
    """SRAM for data, the largest first. Memory for instructions alone, caches and backup registers do not count."""
    flash: int | None
    """None: outside of the chip, of a size that the board chooses."""
    source: str
    """Address of the data sheet, or of the maker's page."""
    aliases: tuple[str, ...] = ()
    note: str = ""
    """What else one should know; empty for nothing."""
    constants_in_sram: bool = False
    """Whether C's constants are copied from flash into SRAM at the start, since pointers do not reach the flash. Such a
    board is an AVR, whose int and pointers have two bytes."""

    @property
    def sram(self) -> int:
        """Bytes of SRAM in all banks."""
        return sum(bank.bytes for bank in self.banks)


@dataclass(frozen=True, slots=True)
class _Family:
    """What the chips of a family have in common."""

    title: str
    source: str
    core: str
    fpu: bool = True
    suffix: str = ""

    def board(
        self, name: str, title: str, megahertz: int, flash: float | None, banks: dict[str, int], source: str,
        aliases: tuple[str, ...] = (), note: str = "",
    ) -> Board:  # fmt: skip
        """Return a chip of the family.

        Args:
            name: the board's name.
            title: follows the family's title.
            megahertz: highest clock.
            flash: MiB; None: outside of the chip.
            banks: name of a bank of SRAM -> KiB.
            source: file of its data sheet, below the family's address.
            aliases: other names.
            note: what a user should know; empty for nothing.
        """
        rows = tuple(Bank(bank, size * _KIB) for bank, size in banks.items())
        flash_bytes = None if flash is None else round(flash * _MIB)
        address = f"{self.source}{source}{self.suffix}"
        title = f"{self.title} {title}"
        return Board(name, title, self.core, megahertz, self.fpu, rows, flash_bytes, address, aliases, note)


_ST = "https://www.st.com/resource/en/datasheet/"
_M4 = _Family("STMicroelectronics", _ST, "cortex-m4", suffix=".pdf")
_M7 = _Family("STMicroelectronics", _ST, "cortex-m7", suffix=".pdf")
_M33 = _Family("STMicroelectronics", _ST, "cortex-m33", suffix=".pdf")
_NRF52 = _Family("Nordic Semiconductor", "https://docs.nordicsemi.com/bundle/ps_", "cortex-m4")
_NRF53 = _Family("Nordic Semiconductor", "https://docs.nordicsemi.com/bundle/ps_", "cortex-m33")
_PICO = _Family("Raspberry Pi", "https://datasheets.raspberrypi.com/", "cortex-m0plus", fpu=False, suffix=".pdf")
_PICO2 = _Family("Raspberry Pi", "https://datasheets.raspberrypi.com/", "cortex-m33", suffix=".pdf")
_ESPRESSIF = "https://www.espressif.com/sites/default/files/documentation/"
_LX6 = _Family("Espressif", _ESPRESSIF, "xtensa-lx6", suffix="_datasheet_en.pdf")
_LX7 = _Family("Espressif", _ESPRESSIF, "xtensa-lx7", suffix="_datasheet_en.pdf")
_RISCV = _Family("Espressif", _ESPRESSIF, "rv32imc", fpu=False, suffix="_datasheet_en.pdf")
_SAMD51 = _Family("Microchip", "https://www.microchip.com/en-us/product/", "cortex-m4")
_H743 = {"AXI SRAM": 512, "SRAM1 + SRAM2 + SRAM3": 288, "DTCM": 128, "SRAM4": 64}
_IDF = "ESP-IDF keeps some of the SRAM for itself: count it in the reserve"

BOARDS: tuple[Board, ...] = (
    _M4.board(
        "stm32f407", "STM32F407VG", 168, 1, {"SRAM1 + SRAM2": 128, "CCM": 64}, "stm32f407vg", ("stm32f407vg",
        "stm32f4discovery"),
        "no DMA reaches the CCM",
    ),
    _M4.board(
        "stm32f446", "STM32F446RE", 180, 0.5, {"SRAM1 + SRAM2": 128}, "stm32f446re", ("stm32f446re", "nucleo-f446re")
    ),
    _M7.board(
        "stm32f746", "STM32F746NG", 216, 1, {"DTCM + SRAM1 + SRAM2": 320}, "stm32f746ng", ("stm32f746ng",
        "stm32f746g-disco")
    ),
    _M7.board(
        "stm32f767", "STM32F767ZI", 216, 2, {"DTCM + SRAM1 + SRAM2": 512}, "stm32f767zi", ("stm32f767zi",
        "nucleo-f767zi")
    ),
    _M7.board("stm32h743", "STM32H743ZI", 480, 2, _H743, "stm32h743zi", ("stm32h743zi", "nucleo-h743zi")),
    _M7.board(
        "stm32h747", "STM32H747XI", 480, 2, _H743, "stm32h747xi",
        ("stm32h747xi", "portenta-h7", "arduino-portenta-h7", "portenta"),
        "the Arduino Portenta H7 has 8 MB of SDRAM besides; its second core (M4) shares SRAM and flash",
    ),
    _M7.board(
        "stm32h7a3", "STM32H7A3ZI", 280, 2, {"AXI SRAM": 1024, "DTCM": 128, "AHB SRAM1 + SRAM2": 128, "SRD SRAM": 32},
        "stm32h7a3zi", ("stm32h7a3zi", "nucleo-h7a3zi-q"),
    ),
    _M4.board(
        "stm32l476", "STM32L476RG", 80, 1, {"SRAM1": 96, "SRAM2": 32}, "stm32l476rg", ("stm32l476rg", "nucleo-l476rg")
    ),
    _M4.board(
        "stm32l4r5", "STM32L4R5ZI", 120, 2, {"SRAM1 + SRAM2 + SRAM3": 640}, "stm32l4r5zi", ("stm32l4r5zi",
        "nucleo-l4r5zi"),
        "SRAM2 by its second address, 0x20030000",
    ),
    _M33.board(
        "stm32u585", "STM32U585AI", 160, 2, {"SRAM1 + SRAM2 + SRAM3": 768, "SRAM4": 16}, "stm32u585ai",
        ("stm32u585ai", "b-u585i-iot02a"),
    ),
    _M4.board(
        "stm32g474", "STM32G474RE", 170, 0.5, {"SRAM1 + SRAM2 + CCM": 128}, "stm32g474re", ("stm32g474re",
        "nucleo-g474re"),
        "the CCM by its second address, 0x20018000",
    ),
    _NRF52.board(
        "nrf52840", "nRF52840", 64, 1, {"RAM": 256}, "nrf52840",
        ("nano-33-ble", "arduino-nano-33-ble", "nano-33-ble-sense", "nrf52840dk"),
        "a Bluetooth stack takes part of the RAM",
    ),
    _NRF53.board(
        "nrf5340", "nRF5340, application core", 128, 1, {"RAM": 512}, "nrf5340", ("nrf5340dk",),
        "its network core has memory of its own",
    ),
    _PICO.board(
        "rp2040", "RP2040", 133, None, {"SRAM0 to SRAM5": 264}, "rp2040/rp2040-datasheet", (),
    ),
    _PICO.board(
        "pico", "Pico (RP2040)", 133, 2, {"SRAM0 to SRAM5": 264}, "pico/pico-datasheet", ("raspberry-pi-pico",)
    ),
    _PICO2.board(
        "rp2350", "RP2350", 150, None, {"SRAM0 to SRAM9": 520}, "rp2350/rp2350-datasheet", (),
    ),
    _PICO2.board(
        "pico2", "Pico 2 (RP2350)", 150, 4, {"SRAM0 to SRAM9": 520}, "pico/pico-2-datasheet", ("raspberry-pi-pico-2",)
    ),
    _LX6.board("esp32", "ESP32", 240, None, {"SRAM2 + SRAM1": 328}, "esp32", ("esp32-wroom", "esp-wroom-32"), _IDF),
    _LX7.board("esp32-s3", "ESP32-S3", 240, None, {"SRAM1 + SRAM2": 480}, "esp32-s3", (), _IDF),
    _RISCV.board("esp32-c3", "ESP32-C3", 160, None, {"SRAM1": 384}, "esp32-c3", (), _IDF),
    Board(
        "teensy41", "PJRC Teensy 4.1 (NXP i.MX RT1062)", "cortex-m7", 600, True,
        (Bank("FlexRAM as DTCM", 512 * _KIB), Bank("OCRAM2", 512 * _KIB)), 7936 * _KIB,
        "https://www.pjrc.com/store/teensy41.html", ("imxrt1062", "mimxrt1062", "rt1062"),
        "code that runs from ITCM takes from the FlexRAM, in steps of 32 KiB",
    ),
    _SAMD51.board(
        "samd51", "ATSAMD51J19A", 120, 0.5, {"SRAM": 192}, "ATSAMD51J19A", ("samd51j19", "atsamd51j19", "feather-m4")
    ),
    _SAMD51.board(
        "samd51p20", "ATSAMD51P20A", 120, 1, {"SRAM": 256}, "ATSAMD51P20A", ("atsamd51p20", "grand-central-m4")
    ),
    Board(
        "max78000", "Analog Devices MAX78000", "cortex-m4", 100, True, (Bank("SRAM0 to SRAM3", 128 * _KIB),),
        512 * _KIB,
        "https://www.analog.com/media/en/technical-documentation/data-sheets/max78000.pdf", ("max78000fthr",),
        "the memory of its CNN accelerator is not counted",
    ),
    Board(
        "mega2560", "Arduino Mega 2560 (Microchip ATmega2560)", "avr6", 16, False, (Bank("SRAM", 8 * _KIB),),
        248 * _KIB,
        "https://www.microchip.com/en-us/product/atmega2560", ("atmega2560", "arduino-mega", "arduino-mega-2560"),
        "an AVR copies constants into SRAM: weights and tables take it beside the state; flash is without the 8 KiB of "
        "Arduino's bootloader", constants_in_sram=True,
    ),
)  # fmt: skip
"""Every microcontroller and board that memplan knows."""


def find_board(name: Any) -> Board:
    """Return the board of a name; case, spaces and punctuation do not matter.

    Raises:
        DeviceError: there is none; the nearest names are listed.

    Example:
        >>> find_board("STM32H743ZI").name, find_board("Raspberry Pi Pico").sram
        ('stm32h743', 270336)
    """
    boards, key = _by_key(), _key(str(name))
    if key in boards:
        return boards[key]
    same_start = [
        board.name for other, board in boards.items() if key and (other.startswith(key) or key.startswith(other))
    ]
    similar = [boards[match].name for match in difflib.get_close_matches(key, boards, n=6, cutoff=0.5)]
    nearest = list(dict.fromkeys(same_start + similar))[:4]
    all_names = ", ".join(board.name for board in BOARDS)
    raise DeviceError(
        f"There is no board {str(name)[:40]!r} in the catalogue",
        expected=f"one of {all_names}",
        do=f"Name one; the nearest are {', '.join(nearest)}" if nearest else "Name one of these",
    )


@cache
def _by_key() -> dict[str, Board]:
    """Return the boards by `_key` of each of their names."""
    return {_key(name): board for board in BOARDS for name in (board.name, board.title, *board.aliases)}


def _key(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
