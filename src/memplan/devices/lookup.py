"""Find a card: by what people call it, or by what the driver says of the GPU in this machine."""

from __future__ import annotations

import dataclasses
import difflib
import re
from contextlib import suppress
from functools import cache
from typing import Any

from memplan._bytes import parse_bytes
from memplan.devices.cards import ALIASES, CARDS
from memplan.devices.context import SOURCE, context_of
from memplan.devices.model import Device
from memplan.errors import DeviceError, UnitError

_PIECES = re.compile(r"[a-z]+|[0-9]+")
_SIZE = re.compile(r"(?<=[0-9])gi?b?$")
_MAKER = re.compile("nvidia|geforce|tesla")
_NOISE = frozenset({"gpu", "graphics", "card", "tensor", "core"})
_NO_CARD = re.compile(r"\W*((cuda|gpu|cpu|mps|xpu|meta|hip|rocm|auto|none|nvidia|geforce|tesla)[\W0-9]*)?", re.ASCII)
_SHOWN = 40
_ALIKE = 0.1


@cache
def catalogue() -> tuple[Device, ...]:
    """Return every card that memplan knows, the smallest capacity first; of equal ones by name."""
    return tuple(sorted(CARDS, key=lambda card: (card.capacity, card.name)))


def find(name: str) -> Device:
    """Return the card of a name.

    Case, spaces and punctuation do not matter, nor do the maker's and the family's names: ``RTX 4090``, ``rtx-4090``
    and ``NVIDIA GeForce RTX 4090`` are one. Of a card with several capacities the plain name is the largest: ``a100``
    is ``a100-80gb``, ``v100`` is ``v100-32gb``. ``h100`` is the SXM module, ``h100-pcie`` the slower card.

    Raises:
        DeviceError: no such card, or a word such as "cuda" that names none.

    Example:
        >>> find("NVIDIA A100-SXM4-40GB").name, find("RTX 4090").name
        ('a100-40gb', 'rtx4090')
    """
    key = _key(name)
    card = _by_key().get(key)
    if card is not None:
        return card
    if key == "all":
        raise DeviceError(
            "'all' names no single card",
            expected="a card of the catalogue, such as h100 or rtx4090",
            do="Name one; memplan largest and memplan explain take --device all",
        )
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    if not key or _NO_CARD.fullmatch(name.lower()):
        raise DeviceError(
            f"{shown!r} names no card",
            expected="a card of the catalogue, such as h100 or rtx4090",
            do="Name one: `memplan devices` lists them",
        )
    raise DeviceError(
        f"There is no card {shown!r} in the catalogue",
        expected="one of its cards, such as h100 or rtx4090",
        do=f"{_suggestion(key)} `memplan devices` lists all",
    )


def read_budget(budget: Any) -> int | Device:
    """Read a budget: bytes, or the card that it names.

    Raises:
        UnitError: it is neither.

    Example:
        >>> read_budget("6 GiB"), read_budget("RTX 4090").name
        (6442450944, 'rtx4090')
    """
    try:
        return parse_bytes(budget)
    except UnitError as error:
        if not isinstance(budget, str):
            raise
        with suppress(DeviceError):
            return find(budget)
        if not budget.strip()[:1].isalpha():  # a number in some unit, not a card
            raise
        raise UnitError(
            error.found,
            expected=f"{error.expected}; or the name of a card",
            do=f"{error.do}, or take a name that memplan devices lists",
        ) from None


def device_of_properties(name: str, total_memory: int, major: int, minor: int, multiprocessors: int) -> Device:
    """Return the GPU in this machine, from torch's properties of it (`torch.cuda.get_device_properties`).

    Where the name, the multiprocessors and roughly the memory are those of a card of the catalogue, it is that card
    with the memory that this machine really has. Otherwise (another card, a slice of a card, a laptop's card) it is a
    device of its own, of which bandwidth, FLOP/s and L2 are not known.

    Args:
        name: from the driver, such as ``NVIDIA H100 80GB HBM3``.
        total_memory: bytes.
        major: of the compute capability.
        minor: of the compute capability.
        multiprocessors: how many there are.
    """
    measured = "as the driver of this machine reports it"
    card = _by_key().get(_key(name))
    if card is not None and _has_figures_of(card, total_memory, (major, minor), multiprocessors):
        others = tuple(source for source in card.sources if not source.startswith("capacity:"))
        return dataclasses.replace(card, capacity=total_memory, sources=(f"capacity: {measured}", *others))
    return Device(
        name=_key(name) or "gpu",
        title=name,
        capacity=total_memory,
        bandwidth=None,
        rates=(),
        architecture=(major, minor),
        multiprocessors=multiprocessors,
        l2=None,
        context=context_of((major, minor), multiprocessors),
        sources=(*(f"{figure}: {measured}" for figure in ("capacity", "architecture", "multiprocessors")), SOURCE),
    )


def _has_figures_of(card: Device, total_memory: int, architecture: tuple[int, int], multiprocessors: int) -> bool:
    """Return whether a GPU of this name is the card: names repeat (the RTX 3060 has versions of 12 and of 8 GB)."""
    same = (card.architecture, card.multiprocessors) == (architecture, multiprocessors)
    return same and abs(total_memory - card.capacity) <= _ALIKE * card.capacity


@cache
def _by_key() -> dict[str, Device]:
    """Return the cards of the catalogue by `_key` of each of their names."""
    return {_key(name): card for card in CARDS for name in (card.name, card.title, *ALIASES[card.name])}


def _key(name: str) -> str:
    """Return a name without the parts that do not tell cards apart: "NVIDIA A100-SXM4-40GB" is "a100sxm440gb"."""
    words = re.findall(r"[a-z0-9]+", _MAKER.sub(" ", name.lower()))
    joined = "".join(word for word in words if word not in _NOISE)
    return _SIZE.sub("gb", joined)


def _suggestion(key: str) -> str:
    """Return a text with the nearest names of cards, those of the same number first: "rtx4060ti" is nearest to
    "rtx4060"."""
    numbers = {piece for piece in _PIECES.findall(key) if piece.isdigit()}
    known = _by_key()
    similar = [known[match].name for match in difflib.get_close_matches(key, known, n=6, cutoff=0.6)]
    same_number = [card.name for card in CARDS if numbers & set(_PIECES.findall(_key(card.name)))]
    both = [name for name in similar if name in same_number]
    names = list(dict.fromkeys(both + similar + same_number))[:3]
    return f"Did you mean {' or '.join(names)}?" if names else "None has a name like it;"
