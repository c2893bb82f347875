"""Temporaries of random sampling on the CPU: Distributions.cpp."""

from __future__ import annotations

import math
from typing import Any

from memplan.trace.semantics.cpu.scalar_operands import of_number
from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of


def multinomial(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Distributions.cpp, multinomial_out: noise for each weight, and the indices of the largest.

    Before, the weights are checked: their maximum and minimum, and the sum of each row. With replacement, the running
    sums of one row (MultinomialKernel.cpp).
    """
    x, samples = args[0], args[1]
    replacement = kwargs.get("replacement", args[2] if len(args) > 2 else False)
    size, rows = x.element_size(), math.prod(x.shape[:-1])
    if replacement and samples != 1:
        return x.shape[-1] * max(size, 4)
    wrapped_zero = of_number(0, x.dtype)
    checks = 2 * size + 2
    limits = 2 * size + 1 + of_number(math.inf, x.dtype)
    sums = 2 * size + 1 + rows * (size + 1) + wrapped_zero
    sampling = bytes_of(x) + (result.numel() * size if samples != 1 else 0)
    return max(limits, sums, checks + sampling)


FORMULAS: dict[str, Formula] = {
    "aten.multinomial.default": multinomial,
}
