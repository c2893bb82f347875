"""All checks, one file a trap, in the order of their findings."""

from __future__ import annotations

from memplan.checks import (
    border_erosion,
    full_resolution,
    held_graph,
    idle_state,
    in_place_clone,
    kept_for_nothing,
    loss_memory,
    math_attention,
    uneven_arithmetic,
    workspace_surprise,
)
from memplan.checks.finding import Check

_FILES = (
    border_erosion,
    uneven_arithmetic,
    kept_for_nothing,
    held_graph,
    idle_state,
    in_place_clone,
    math_attention,
    loss_memory,
    workspace_surprise,
    full_resolution,
)
CHECKS: tuple[Check, ...] = tuple(Check(file.ID, file.TITLE, file.find) for file in _FILES)
IDS: tuple[str, ...] = tuple(check.id for check in CHECKS)
