"""All checks, in the order of their findings."""

from __future__ import annotations

from memplan.checks import (
    accidental_broadcast,
    border_erosion,
    changed_view,
    expanded_cast,
    frozen_float32,
    full_resolution,
    held_graph,
    idle_8bit,
    idle_checkpoint,
    idle_state,
    in_place_clone,
    kept_for_nothing,
    left_behind,
    loss_memory,
    math_attention,
    promoted_stream,
    reduced_twice,
    uneven_arithmetic,
    uneven_ranks,
    unpacked_masters,
    unread_gradients,
    unreduced_gradients,
    untrained_parameters,
    unused_search,
    workspace_surprise,
)
from memplan.checks.finding import Check

_MODULES = (
    border_erosion,
    uneven_arithmetic,
    untrained_parameters,
    accidental_broadcast,
    kept_for_nothing,
    held_graph,
    left_behind,
    idle_state,
    unread_gradients,
    unreduced_gradients,
    uneven_ranks,
    changed_view,
    reduced_twice,
    unused_search,
    idle_checkpoint,
    in_place_clone,
    expanded_cast,
    frozen_float32,
    promoted_stream,
    idle_8bit,
    unpacked_masters,
    math_attention,
    loss_memory,
    workspace_surprise,
    full_resolution,
)
CHECKS: tuple[Check, ...] = tuple(Check(module.ID, module.TITLE, module.find) for module in _MODULES)
_COST_MORE = border_erosion, uneven_arithmetic, untrained_parameters, accidental_broadcast, changed_view, reduced_twice
COST_MORE_THAN_BYTES = frozenset(module.ID for module in _COST_MORE)
"""Checks whose findings stay warnings at 0 bytes: they are about pixels, training or a wrong loss or gradient."""
IDS: tuple[str, ...] = tuple(check.id for check in CHECKS)
