"""Common names of repeated layers: ``blocks.3.attn`` to ``blocks.11.attn`` are "attn of blocks 3 to 11"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan._text import whole_number


def pattern(layer: str) -> str:
    """Return the layer's name with its first number replaced by ``#``; repeated layers have the same pattern."""
    parts = layer.split(".")
    first = next((index for index, part in enumerate(parts) if whole_number(part) is not None), None)
    return layer if first is None else ".".join([*parts[:first], "#", *parts[first + 1 :]])


def name_of(layers: Sequence[str]) -> str:
    """Return the common name of layers with the same pattern.

    Example:
        >>> name_of(["h.3.attn", "h.4.attn", "h.5.attn", "h.9.attn"]), name_of(["0.1", "1.1"])
        ('attn of h 3 to 5 and 9', '(layers 0 to 1).1')
    """
    if len(layers) == 1:
        return layers[0]
    before, _, after = pattern(layers[0]).partition("#")  # the names around the number
    numbers = (whole_number(layer[len(before) :].partition(".")[0]) or 0 for layer in layers)
    parents = f"{before.rstrip('.') or 'layers'} {_ranges(numbers)}"
    after = after.removeprefix(".")
    if after[:1].isdecimal():
        return f"({parents}).{after}"
    return f"{after} of {parents}" if after else parents


def _ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as ranges: ``3 to 5, 7 and 9``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts[:-1]) + (" and " if texts[1:] else "") + texts[-1]
