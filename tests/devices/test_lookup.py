"""Finding cards: by names that people type, by what drivers print, and nothing else."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.devices.cards import ALIASES, CARDS
from memplan.devices.lookup import catalogue, device_of_properties, find
from memplan.devices.model import Device
from memplan.errors import DeviceError

NAMES = [card.name for card in CARDS]

# As torch printed them: name, total memory in MiB, compute capability, multiprocessors
PROPERTIES = [
    ("GeForce GTX 1080 Ti", 11177, 6, 1, 28, "gtx1080ti"),
    ("Tesla P100-PCIE-16GB", 16280, 6, 0, 56, "p100"),
    ("Tesla P40", 22919, 6, 1, 30, "p40"),
    ("Tesla T4", 15109, 7, 5, 40, "t4"),
    ("Tesla T4", 14930, 7, 5, 40, "t4"),
    ("Tesla V100-SXM2-16GB", 16160, 7, 0, 80, "v100-16gb"),
    ("Tesla V100-SXM2-32GB", 32494, 7, 0, 80, "v100-32gb"),
    ("NVIDIA A10", 22599, 8, 6, 72, "a10"),
    ("NVIDIA L4", 22563, 8, 9, 58, "l4"),
    ("NVIDIA L40S", 45589, 8, 9, 142, "l40s"),
    ("NVIDIA GeForce RTX 3060", 12011, 8, 6, 28, "rtx3060"),
    ("GeForce RTX 3090", 24268, 8, 6, 82, "rtx3090"),
    ("NVIDIA GeForce RTX 4060", 7807, 8, 9, 24, "rtx4060"),
    ("NVIDIA GeForce RTX 4090", 24563, 8, 9, 128, "rtx4090"),
    ("NVIDIA GeForce RTX 5090", 32109, 12, 0, 170, "rtx5090"),
    ("A100-SXM4-40GB", 40536, 8, 0, 108, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 81251, 8, 0, 108, "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", 81154, 8, 0, 108, "a100-pcie"),
    ("NVIDIA H100 80GB HBM3", 81090, 9, 0, 132, "h100"),
    ("NVIDIA H100 PCIe", 81008, 9, 0, 114, "h100-pcie"),
    ("NVIDIA H200", 143156, 9, 0, 132, "h200"),
    ("NVIDIA B200", 182642, 10, 0, 148, "b200"),
]


def test_the_smallest_comes_first() -> None:
    cards = catalogue()
    assert sorted(card.name for card in cards) == sorted(NAMES)
    assert [card.capacity for card in cards] == sorted(card.capacity for card in CARDS)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "h100"),
        ("nvidia-h100-80gb", "h100"),
        ("H100 SXM", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("rtx 4090", "rtx4090"),
        ("RTX-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 3060 12GB", "rtx3060"),
        ("a100", "a100-80gb"),
        ("A100 40 GB", "a100-40gb"),
        ("a100-40GiB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("v100", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("t4", "t4"),
        ("GTX 1080 Ti", "gtx1080ti"),
        ("Tesla P100", "p100"),
    ],
)
def test_people_write_names_in_many_ways(name: str, found: str) -> None:
    assert find(name).name == found


def test_no_name_means_two_cards() -> None:
    names = {card.name: {card.name, card.title, *ALIASES[card.name]} for card in CARDS}
    assert {card: {find(name).name for name in written} for card, written in names.items()} == {
        card: {card} for card in names
    }


@given(
    st.sampled_from(CARDS), st.sampled_from(["", "NVIDIA ", "nvidia-"]), st.sampled_from([" ", "-", "_", ""]), st.data()
)
def test_spelling_does_not_matter(card: Device, maker: str, between: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([card.name, card.title, *ALIASES[card.name]]))
    written = maker + between.join(name.replace("-", " ").split())
    assert find(data.draw(st.sampled_from([written, written.upper(), f" {written} "]))) is card


@given(st.text() | st.text("acdghlprtuxv0123456789 -:"))
def test_any_text_is_a_card_or_one_line(name: str) -> None:
    try:
        card = find(name)
    except DeviceError as error:
        text = str(error)
    else:
        assert card in CARDS
        return
    assert text.isprintable()
    assert "`memplan devices` lists" in text
    assert len(text) < 400


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "CUDA:1", "gpu", "gpu:0", "cpu", "mps", "nvidia", "", " "])
def test_what_names_no_card_is_told_to_name_one(name: str) -> None:
    with pytest.raises(DeviceError, match=r"names no card. Expected a card of the catalogue.*Name one"):
        find(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h10", "h100"),
        ("hh100", "h100"),
        ("rtx4009", "rtx4090"),
        ("rtx 4060 ti", "rtx4060"),
        ("RTX 4090 Laptop GPU", "rtx4090"),
        ("a10g", "a10"),
        ("l40", "l40s"),
        ("h200 nvl", "h200"),
        ("5080", "rtx5090"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb"),
    ],
)
def test_a_card_that_is_not_there_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(DeviceError, match="There is no card") as caught:
        find(name)
    assert near in str(caught.value).partition("Did you mean ")[2].partition("?")[0].split(" or ")


@pytest.mark.parametrize(("name", "mib", "major", "minor", "count", "found"), PROPERTIES)
def test_what_drivers_print_is_recognised(name: str, mib: int, major: int, minor: int, count: int, found: str) -> None:
    card, here = find(found), device_of_properties(name, mib << 20, major, minor, count)
    assert (here.name, here.title, here.flops, here.bandwidth) == (card.name, card.title, card.flops, card.bandwidth)
    assert here.capacity == mib << 20
    assert here.sources == ("capacity: as the driver of this machine reports it", *card.sources[1:])


def test_every_card_is_recognised() -> None:
    assert {found for *_, found in PROPERTIES} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "mib", "major", "minor", "count"),
    [
        ("Tesla P100-SXM2-16GB", 16280, 6, 0, 56),  # not in the catalogue
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 7813, 8, 9, 24),
        ("NVIDIA GeForce RTX 3060", 8192, 8, 6, 28),  # the version with 8 GB and less bandwidth
        ("NVIDIA H200", 71886, 9, 0, 132),  # half of one
        ("NVIDIA H100 80GB HBM3", 81090, 9, 0, 60),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, 8, 0, 14),
        ("日本", 1024, 12, 0, 1),
    ],
)
def test_another_gpu_has_what_is_known_of_it(name: str, mib: int, major: int, minor: int, count: int) -> None:
    here = device_of_properties(name, mib << 20, major, minor, count)
    assert (here.title, here.capacity, here.architecture) == (name, mib << 20, (major, minor))
    assert (here.bandwidth, here.l2, dict(here.flops)) == (None, None, {})
    assert here.multiprocessors == count
    assert 0 < here.context[0] < here.context[1]
    figures = [source.partition(":")[0] for source in here.sources]
    assert figures == ["capacity", "architecture", "multiprocessors", "context"]


def test_nothing_is_usable_where_the_context_does_not_fit() -> None:
    assert device_of_properties("NVIDIA X", 64 << 20, 9, 0, 132).usable("low") == 0


@pytest.mark.parametrize("card", [find("h100"), device_of_properties("NVIDIA X", 8 << 30, 9, 9, 20)], ids=str)
def test_a_card_goes_through_json_and_pickle(card: Device) -> None:
    told = json.loads(json.dumps(card.to_dict()))
    assert (told["capacity"], told["flops"]) == (card.capacity, dict(card.flops))
    assert told["usable"] == {"low": card.usable("low"), "high": card.usable("high")}
    assert pickle.loads(pickle.dumps(card)) == card
