"""A card is described by the catalogue's figures alone."""

from __future__ import annotations

import pytest

from memplan.devices import catalogue, described_cards, find, hardware_of
from memplan.dry.card import description, newest_binary
from memplan.errors import DeviceError


@pytest.mark.parametrize("name", ["a100", "h100", "rtx4090", "t4"])
def test_a_card_is_described(name: str) -> None:
    card = find(name)
    words = description(card).split(" ", 14)
    major, minor, multiprocessors, memory = map(int, words[:4])
    assert ((major, minor), multiprocessors, memory) == (card.architecture, card.multiprocessors, card.capacity)
    assert words[14] == card.title


def test_the_memory_clock_and_the_bus_are_the_bandwidth() -> None:
    for name in described_cards():
        known, card = hardware_of(find(name)), find(name)
        assert card.bandwidth is not None
        assert 2 * known.memory_clock * 1000 * known.bus / 8 == pytest.approx(card.bandwidth, rel=0.003), name


def test_every_figure_has_a_source() -> None:
    for name in described_cards():
        said = " ".join(hardware_of(find(name)).sources)
        assert all(figure in said for figure in ("clock", "bus", "shared memory", "threads", "registers")), name


def test_a_card_without_clocks_is_refused() -> None:
    unknown = next(card for card in catalogue() if card.name not in described_cards())
    with pytest.raises(DeviceError, match=f"the clocks of {unknown.name}.*Expected one of .*h100"):
        description(unknown)


@pytest.mark.parametrize(("card", "binary"), [((8, 9), 86), ((8, 0), 80), ((9, 0), 90), ((7, 0), 0), ((12, 0), 0)])
def test_the_newest_code_that_a_card_runs(card: tuple[int, int], binary: int) -> None:
    assert newest_binary(card, ((7, 5), (8, 0), (8, 6), (9, 0))) == binary
