"""Allocations of CPU ops besides their results: the temporaries inside their kernels."""

from __future__ import annotations

from typing import Any

from memplan.trace.semantics.cpu import (
    convolution,
    encoder_fast_path,
    flash_attention,
    kernels,
    lstm,
    matmul,
    scalar_operands,
    selections,
    sparse,
    sparse_results,
)
from memplan.trace.semantics.cpu.batch_norm_results import AT_ONCE
from memplan.trace.semantics.cpu.results import INSTEAD, OF_LENGTHS, RESULTS
from memplan.trace.semantics.cpu.temporaries import indexing, losses, resampling
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords, Semantics, Temporary

_FORMULAS: dict[str, Formula] = {
    "aten.convolution.default": convolution.transient,
    "aten.convolution_backward.default": convolution.transient_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention.forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": flash_attention.backward,
    **kernels.FORMULAS,
    **losses.FORMULAS,
    **indexing.FORMULAS,
    **resampling.FORMULAS,
    **matmul.FORMULAS,
    **lstm.FORMULAS,
    **selections.FORMULAS,
    **encoder_fast_path.FORMULAS,
}


def transient_bytes(name: str, args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the peak bytes that the kernel of op ``name`` allocates beyond its results."""
    if sparse.concerns(name, args, result):
        return sparse.transient_bytes(name, args, kwargs, result)
    formula = _FORMULAS.get(name)
    return 0 if formula is None else max(0, formula(args, kwargs, result))


def _temporaries(name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> tuple[Temporary, ...]:
    """Return the temporary of a kernel and of the numbers among its operands; () if there is none."""
    size = transient_bytes(name, args, kwargs, result) + scalar_operands.transient_bytes(name, args)
    return (Temporary(size),) if size else ()


def _assumed(name: str, args: Arguments, result: Any, replaced: bool) -> str | None:
    """Return the assumption behind an op's result, as text for the report; None if it is exact.

    ``replaced``: whether `Semantics.instead` computed the result.
    """
    return indexing.assumed(name, args) or sparse_results.assumed(name, args, result, replaced)


SEMANTICS = Semantics(_temporaries, RESULTS, {**INSTEAD, **OF_LENGTHS, **AT_ONCE, **sparse_results.INSTEAD}, _assumed)
