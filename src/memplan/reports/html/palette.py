"""Colours and patterns of memory categories, distinguishable with colour blindness, as tests check.

The hues are those of Okabe and Ito, "Color Universal Design" (2008); categories of one hue differ by their pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.explanation.model import LABELS


@dataclass(frozen=True, slots=True)
class Look:
    """A colour and the plotly pattern drawn on it, "" for none."""

    colour: str
    pattern: str = ""


IN_USE = "in use"
"""Category of blocks with unknown content, as in snapshots."""

LOOKS: dict[str, Look] = {
    "weight": Look("#0072b2"),
    "buffer": Look("#0072b2", "/"),
    "input": Look("#009e73", "."),
    "optimizer_state": Look("#cc79a7"),
    "parameter_gradient": Look("#56b4e9"),
    "saved": Look("#d55e00"),
    "activation": Look("#e69f00"),
    "activation_gradient": Look("#f0e442"),
    "temporary": Look("#009e73"),
    "workspace": Look("#5a5a5a", "x"),
    "gathered_weight": Look("#56b4e9", "/"),
    "communication": Look("#cc79a7", "\\"),
    "rounding": Look("#8c8c8c", "-"),
    "fragmentation": Look("#b4b4b4", "|"),
    IN_USE: Look("#0072b2", "\\"),
}
"""By category, in stacking order: memory that stays for the whole step is at the bottom."""

THEMES = {
    "light": {
        "back": "#ffffff", "text": "#1b1f24", "dim": "#57606a", "good": "#116329", "bad": "#a40e26", "link": "#0550ae",
    },
    "dark": {
        "back": "#14171c", "text": "#e6edf3", "dim": "#9da7b3", "good": "#56d364", "bad": "#ff7b72", "link": "#79c0ff",
    },
}  # fmt: skip
"""Colours of the background and of texts, by theme."""


def looks() -> list[dict[str, str]]:
    """Return category, label, colour and pattern for the page's scripts, in stacking order."""
    return [
        {"cause": cause, "label": LABELS.get(cause, cause), "colour": look.colour, "pattern": look.pattern}
        for cause, look in LOOKS.items()
    ]
