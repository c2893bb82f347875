"""The card that cuDNN is told of is the one that a dry run tells it of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cudnn.scripted_worker import FORWARD, needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch

from memplan.cudnn.cudnn_library import find_cudnn
from memplan.cudnn.described_card import properties
from memplan.cudnn.worker_process import ask_worker
from memplan.devices import described_cards, find, hardware_of
from memplan.dry.library import SOURCES
from memplan.errors import DeviceError


def test_keys_and_constants_are_those_of_the_emulated_driver() -> None:
    source = (SOURCES / "cudnn.c").read_text(encoding="utf-8")
    written = source[source.index("snprintf(json") : source.index("c->name, sm")].replace('\\"', "'")
    keys = re.findall(r"'(\w+)':(%\w+|'%s'|\d+|\[[^]]*\])", written)
    told = properties(find("h100")) | {"driverVer": 13000}
    assert {key for key, _ in keys} == set(told)
    for key, value in keys:
        if value.isdigit():
            assert told[key] == int(value), key


def test_figures_of_a_card() -> None:
    """deviceQuery of an A100 (facts of the catalogue, each with its source)."""
    card = find("a100-80gb")
    told = properties(card)
    assert (told["deviceVer"], told["smVersion"], told["multiProcessorCount"]) == (800, 800, 108)
    assert (told["maxSharedMemoryPerBlockOptin"], told["maxCtasPerSM"], told["maxThreadsPerSM"]) == (166912, 32, 2048)
    assert told["smClockRateKHz"] == hardware_of(card).clock == 1410000
    assert told["totalGlobalMem"] == card.capacity


def test_clocks_that_are_not_known_follow_from_the_speeds() -> None:
    """Checked on the cards of which both are known."""
    for name in described_cards():
        told, known = properties(replace(find(name), name="another")), hardware_of(find(name))
        assert told["smClockRateKHz"] == pytest.approx(known.clock, rel=0.006), name
        moved = told["memClockRateKHz"] * told["memoryBusWidth"]
        assert moved == pytest.approx(known.memory_clock * known.bus, rel=0.004), name
    assert properties(find("l40s"))["smClockRateKHz"] == 2520000  # NVIDIA L40S, boost clock of the data sheet


def test_a_card_of_which_too_little_is_known_cannot_be_described() -> None:
    with pytest.raises(DeviceError, match="the clocks of unheard"):
        properties(replace(find("h100"), name="unheard", bandwidth=None))


@needs_cuda_torch
@needs_compiler
def test_the_compute_capability_decides_and_other_figures_do_not() -> None:
    """Of the figures that a catalogue can have wrong: each doubled by itself. Clocks change few answers."""
    library, told = find_cudnn(ENVIRONMENT), properties(find("h100"))
    assert library is not None
    asked = [FORWARD, replace(FORWARD, kind="input gradient"), replace(FORWARD, kind="weight gradient")]

    def plans(**changed: int) -> list[object]:
        return [answer for _, answer in ask_worker(library, told | changed, asked)]

    given = plans()
    assert len(given) == 3
    assert given != plans(deviceVer=800, smVersion=800)
    for name in (
        "multiProcessorCount",
        "l2CacheSize",
        "maxSharedMemoryPerBlockOptin",
        "memoryBusWidth",
        "totalGlobalMem",
    ):
        assert plans(**{name: 2 * told[name]}) == given, name
