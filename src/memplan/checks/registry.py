"""The checks there are: one file a trap, in the order in which their findings are told."""

from __future__ import annotations

from memplan.checks import border_erosion, uneven_arithmetic
from memplan.checks.model import Check

_FILES = (border_erosion, uneven_arithmetic)
CHECKS: tuple[Check, ...] = tuple(Check(file.ID, file.TITLE, file.find) for file in _FILES)
IDS: tuple[str, ...] = tuple(check.id for check in CHECKS)
