"""Check what an export takes of flash: what takes most, and what would help."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.errors import BudgetError
from memplan.exporting.device_plan import DevicePlan
from memplan.exporting.source.step_layout import Held, StepLayout
from memplan.exporting.trials.cortex import CortexRun

NAMED = 3
"""Tensors that the error names, the largest first."""


def check_flash(plan: DevicePlan, bound: int | None, core: CortexRun | None = None) -> None:
    """Raise BudgetError where an export takes more flash than there is.

    Args:
        plan: of the export.
        bound: bytes of flash; None: as many as it takes.
        core: a compiled export, whose code is counted, too.
    """
    layout = plan.layout
    weights = 0 if layout.weights_file else layout.memory.flash
    taken = weights + layout.constants if core is None else core.text + core.rodata
    if bound is None or taken <= bound:
        return
    what = f"the weights take {format_bytes(weights)}"
    what += "" if core is None else f", code and tables {format_bytes(taken - weights)}"
    raise BudgetError(
        f"The flash is {format_bytes(bound)}, and {what}: {_largest(layout)}",
        expected=f"at least {taken} bytes of flash" + (" and the code" if core is None else ", libm not counted"),
        do="; or ".join(_ways(plan, weights, taken)),
        smallest_budget=taken,
    )


def _largest(layout: StepLayout) -> str:
    """Return names and bytes of the tensors that take most."""
    memory = layout.memory
    sizes = [(4 * one.size, one) for one in (*memory.trained, *memory.statistics, *memory.frozen)]
    sizes += [(one.size + 4 * one.shape[0], one) for one in memory.int8]
    found = sorted(sizes, key=lambda pair: -pair[0])
    named = [f"{one.path} {format_bytes(size)}" for size, one in found[:NAMED]]
    return ", ".join(named) + (f", and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _ways(plan: DevicePlan, weights: int, taken: int) -> list[str]:
    """Return what would take less, and how much then."""
    ways, narrow = list[str](), sum(map(_saved, plan.could_be_int8))
    if narrow > 0:
        ways.append(f"Keep frozen weights in eight bits: frozen_weights='int8' ({format_bytes(taken - narrow)})")
    if weights:
        left = format_bytes(taken - weights)
        ways.append(f"{'k' if ways else 'K'}eep the weights elsewhere: weights_file=True ({left} beside the code)")
    return ways or ["Take a smaller model"]


def _saved(one: Held) -> int:
    return 3 * one.size - 4 * one.shape[0]
