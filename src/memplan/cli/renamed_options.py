"""Former spellings of options, which still work and print the present spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PRECISIONS = {
    "fp32": [], "bf16": ["--autocast", "bf16"], "fp16": ["--autocast", "fp16"],
    "bf16-true": ["--dtype", "bf16"], "fp16-true": ["--dtype", "fp16"],
}  # fmt: skip
_RENAMED = {"export": {"--out": "--folder", "--on": "--device"}, "measure": {"--torch": "--environment"}}
"""Command -> former option with a value -> its present name."""
_KEPT = {"run": ("--infer", "--precision"), "sweep": ("--precision",)}
"""Words that are no former spelling in a command: a script's own options, an axis."""


def current_spelling(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's arguments with former spellings replaced, and a note for each replacement.

    What follows ``--`` belongs to the target and stays as it is.

    Example:
        >>> current_spelling("explain", ["m.py:net", "--precision=bf16", "--infer"])[0]
        ['m.py:net', '--autocast', 'bf16', '--no-train']
    """
    current: list[str] = []
    notes: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return [*current, *arguments[index:]], notes
        option, equals, value = word.partition("=")
        next_word = value if equals else arguments[index + 1] if index + 1 < len(arguments) else ""
        words, has_value = _replacement(command, option, next_word)
        index += 1 if equals or not has_value else 2
        if words is None:
            current.append(word)
            continue
        typed = word if equals or not has_value else f"{word} {next_word}"
        notes.append(
            f"{typed} is now {' '.join(words)}" if words else f"{typed} is the default, and no longer an option"
        )
        current += words
    return current, notes


def _replacement(command: str, option: str, value: str) -> tuple[list[str] | None, bool]:
    """Return the words that replace a former option, None for other options; and whether they replace its value.
    ``value`` is the word after the option, which may be no value of it."""
    if option in _KEPT.get(command, ()):
        return None, False
    if option == "--infer":
        return ["--no-train"], False
    if option == "--precision" and value in _PRECISIONS:
        return _PRECISIONS[value], True
    if command == "measure" and option == "--dry" and re.fullmatch(r"\w[\w -]*", value):  # a card, and no target
        return ["--dry", "--device", value], True
    side = re.fullmatch(r"--([ab])-([a-z]+)", option) if command == "compare" else None
    if side is not None:  # --b-batch 8 is now --b batch=8
        side_option = f"--{side[1]}"
        if side[2] == "infer":
            return [side_option, "no-train"], False
        if side[2] == "precision" and value in _PRECISIONS:  # in place of both options that the other side may have
            precision = dict(zip(_PRECISIONS[value][::2], _PRECISIONS[value][1::2], strict=True))
            pairs = (f"{name}={precision.get(f'--{name}', 'none')}" for name in ("autocast", "dtype"))
            return [word for pair in pairs for word in (side_option, pair)], True
        return [side_option, f"{side[2]}={value}"], True
    new = _RENAMED.get(command, {}).get(option)
    return ([new, value], True) if new is not None and value else (None, False)
