"""Check an export against the size of the flash."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.errors import BudgetError
from memplan.exporting.device_plan import DevicePlan
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.trials.cortex import CortexRun

NAMED = 3
"""Most tensors that the error names."""


def check_flash(plan: DevicePlan, bound: int | None, core: CortexRun | None = None) -> None:
    """Check that an export fits into flash.

    Args:
        plan: the export's plan.
        bound: bytes of flash; None: no bound.
        core: the compiled export, whose code then counts, too.

    Raises:
        BudgetError: it takes more; the message names the largest tensors, and what would reduce them.
    """
    layout = plan.layout
    weights = 0 if layout.weights_file else layout.memory.flash_bytes
    size = weights + layout.constant_bytes if core is None else core.text + core.rodata
    if bound is None or size <= bound:
        return
    parts = f"the weights take {format_bytes(weights)}"
    parts += "" if core is None else f", code and tables {format_bytes(size - weights)}"
    raise BudgetError(
        f"The flash is {format_bytes(bound)}, and {parts}: {_largest(layout)}",
        expected=f"at least {size} bytes of flash" + (" and the code" if core is None else ", libm not counted"),
        do="; or ".join(_remedies(plan, weights, size)),
        smallest_budget=size,
    )


def _largest(layout: StepLayout) -> str:
    """Return names and bytes of the largest tensors, as text."""
    memory = layout.memory
    sizes = [(4 * tensor.size, tensor) for tensor in (*memory.trained, *memory.statistics, *memory.frozen)]
    # with a scale for each index of the first dimension
    sizes += [(tensor.size + 4 * tensor.shape[0], tensor) for tensor in (*memory.int8, *memory.trained_int8)]
    sizes.sort(key=lambda pair: -pair[0])
    named = [f"{tensor.path} {format_bytes(size)}" for size, tensor in sizes[:NAMED]]
    return ", ".join(named) + (f", and {len(sizes) - NAMED} more" if len(sizes) > NAMED else "")


def _remedies(plan: DevicePlan, weights: int, size: int) -> list[str]:
    """Return what would reduce the flash, and to how many bytes."""
    # int8 takes a byte instead of four for each element, and a float32 scale for each slice of the first dimension.
    saved = sum(3 * tensor.size - 4 * tensor.shape[0] for tensor in plan.could_be_int8)
    remedies = list[str]()
    if saved > 0:
        remedies.append(f"Keep frozen weights in eight bits: frozen_weights='int8' ({format_bytes(size - saved)})")
    if weights:
        without_weights = format_bytes(size - weights)
        keep = "keep" if remedies else "Keep"  # behind a semicolon
        remedies.append(f"{keep} the weights elsewhere: weights_file=True ({without_weights} beside the code)")
    return remedies or ["Take a smaller model"]
