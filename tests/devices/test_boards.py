"""Microcontrollers by name, and their figures beside what makers and linker scripts say."""

from __future__ import annotations

import pytest

from memplan.devices.boards import BOARDS, find_board
from memplan.errors import DeviceError

# From the makers' product pages: SRAM for data in KiB in all and in the largest run of addresses, flash in KiB, MHz.
# Runs of addresses as in the linker scripts of ST, Zephyr and embassy.
FIGURES = {
    "STM32F407VG": (192, 128, 1024, 168), "STM32F446RE": (128, 128, 512, 180), "STM32F746NG": (320, 320, 1024, 216),
    "STM32F767ZI": (512, 512, 2048, 216), "STM32H743ZI": (992, 512, 2048, 480), "STM32H747XI": (992, 512, 2048, 480),
    "STM32H7A3ZI": (1312, 1024, 2048, 280), "STM32L476RG": (128, 96, 1024, 80), "STM32L4R5ZI": (640, 640, 2048, 120),
    "STM32U585AI": (784, 768, 2048, 160), "STM32G474RE": (128, 128, 512, 170), "nRF52840": (256, 256, 1024, 64),
    "nRF5340": (512, 512, 1024, 128), "RP2040": (264, 264, None, 133), "Raspberry Pi Pico": (264, 264, 2048, 133),
    "RP2350": (520, 520, None, 150), "Raspberry Pi Pico 2": (520, 520, 4096, 150), "ESP32": (328, 328, None, 240),
    "ESP32-S3": (480, 480, None, 240), "ESP32-C3": (384, 384, None, 160), "Teensy 4.1": (1024, 512, 7936, 600),
    "Arduino Nano 33 BLE": (256, 256, 1024, 64), "Arduino Portenta H7": (992, 512, 2048, 480),
    "ATSAMD51J19": (192, 192, 512, 120), "ATSAMD51P20": (256, 256, 1024, 120), "MAX78000": (128, 128, 512, 100),
    "Arduino Mega 2560": (8, 8, 248, 16),
}  # fmt: skip
WITHOUT_FPU = {"rp2040", "pico", "esp32-c3", "mega2560"}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_the_makers(name: str) -> None:
    board, (sram, largest, flash, megahertz) = find_board(name), FIGURES[name]
    assert (board.sram >> 10, max(bank.bytes for bank in board.banks) >> 10) == (sram, largest)
    assert (board.flash and board.flash >> 10, board.megahertz) == (flash, megahertz)
    assert board.fpu is (board.name not in WITHOUT_FPU)


def test_every_board_is_compared_and_has_a_source() -> None:
    assert {find_board(name).name for name in FIGURES} == {board.name for board in BOARDS}
    for board in BOARDS:
        assert board.source.startswith("https://")
        assert board.banks[0].bytes == max(bank.bytes for bank in board.banks), "the largest comes first"
        assert len({bank.name for bank in board.banks}) == len(board.banks)


def test_no_two_boards_share_a_name() -> None:
    names = [name for board in BOARDS for name in {board.name, *board.aliases}]
    assert len(names) == len(set(names))
    assert all(find_board(name.upper()).name == board.name for board in BOARDS for name in (board.name, *board.aliases))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("stm32h7", "stm32h743, stm32h747"), ("stm32f405", "stm32f407"), ("esp32-s2", "esp32"), ("pico 3", "pico")],
)
def test_the_nearest_names_are_listed(name: str, nearest: str) -> None:
    with pytest.raises(DeviceError, match=f"(?s)There is no board {name!r}.*the nearest are .*{nearest}"):
        find_board(name)


@pytest.mark.parametrize("name", ["", "h100", "🦆", 7])
def test_what_is_like_none_lists_all(name: object) -> None:
    with pytest.raises(DeviceError, match=r"stm32h743.*Name one"):
        find_board(name)
