"""The checks there are: one file a trap, in the order in which their findings are told."""

from __future__ import annotations

from memplan.checks import border_erosion
from memplan.checks.model import Check

CHECKS: tuple[Check, ...] = (Check(border_erosion.ID, border_erosion.TITLE, border_erosion.find),)
IDS: tuple[str, ...] = tuple(check.id for check in CHECKS)
