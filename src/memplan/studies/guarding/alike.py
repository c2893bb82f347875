"""Layers that are alike, under one name: ``blocks.3.attn`` to ``blocks.11.attn`` are "attn of blocks 3 to 11"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan._text import whole_number


def pattern(layer: str) -> str:
    """Return the name with ``#`` for its first part that is a number: layers of one pattern are alike."""
    parts = layer.split(".")
    at = next((at for at, part in enumerate(parts) if whole_number(part) is not None), None)
    return layer if at is None else ".".join([*parts[:at], "#", *parts[at + 1 :]])


def name_of(layers: Sequence[str]) -> str:
    """Name layers of one pattern together.

    Example:
        >>> name_of(["h.3.attn", "h.4.attn", "h.5.attn", "h.9.attn"]), name_of(["0.1", "1.1"])
        ('attn of h 3 to 5 and 9', '(layers 0 to 1).1')
    """
    if len(layers) == 1:
        return layers[0]
    before, _, after = pattern(layers[0]).partition("#")
    numbers = (whole_number(layer[len(before) :].partition(".")[0]) or 0 for layer in layers)
    said = f"{before.rstrip('.') or 'layers'} {_ranges(numbers)}"
    after = after.removeprefix(".")
    if after[:1].isdecimal():
        return f"({said}).{after}"
    return f"{after} of {said}" if after else said


def _ranges(numbers: Iterable[int]) -> str:
    """Write ``3 to 5, 7 and 9``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    texts = [str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in found]
    return ", ".join(texts[:-1]) + (" and " if texts[1:] else "") + texts[-1]
