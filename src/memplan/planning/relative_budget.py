"""Budgets relative to what a step takes without a plan: "70%", "-2 GiB"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memplan._bytes import format_bytes, parse_bytes
from memplan.devices import Device, read_budget
from memplan.errors import UnitError, UsageError

_SHARE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", re.ASCII)
_LESS = re.compile(r"-\s*([\d.]+\s*[kmgt]?i?b|[\d.]+\s*[kmgt]i?)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Relative:
    """A share of the step's peak without a plan, less some bytes."""

    share: Fraction = Fraction(1)
    less: int = 0
    """Bytes that are subtracted."""

    def of(self, eager: int) -> int:
        """Return the budget in bytes of a step that takes ``eager`` bytes without a plan.

        Raises:
            UsageError: that is not positive.
        """
        budget = int(self.share * eager) - self.less
        if budget <= 0:
            raise UsageError(
                f"the budget is {self.describe(eager)}",
                expected="a budget of which something is left",
                do="Take less off",
            )
        return budget

    def describe(self, eager: int) -> str:
        """Describe the budget of a step that takes ``eager`` bytes without a plan."""
        share = f"{float(100 * self.share):g} % of " if self.share != 1 else ""
        less = f", less {format_bytes(self.less)}" if self.less else ""
        return f"{share}the {format_bytes(eager)} that the step takes without a plan{less}"


def read_any_budget(budget: Any) -> int | Device | Relative:
    """Read a budget: bytes, a card's name, or a budget relative to the step without a plan ("70%", "-2 GiB").

    Raises:
        UnitError: it is none of these.

    Example:
        >>> read_any_budget("6 GiB"), read_any_budget("70%").of(1000), read_any_budget("-2 KiB").of(4096)
        (6442450944, 700, 2048)
    """
    text = budget.strip() if isinstance(budget, str) else ""
    share, less = _SHARE.fullmatch(text), _LESS.fullmatch(text)
    if share is not None:
        part = Fraction(share[1]) / 100
        if not 0 < part <= 1:
            raise UnitError(
                f"a budget of {text!r} of the step without a plan",
                expected="more than 0% and no more than 100%",
                do="Write it like '70%'",
            )
        return Relative(part)
    if less is not None:
        return Relative(less=parse_bytes(less[1]))
    try:
        return read_budget(budget)
    except UnitError as error:
        shares = "a share of the step without a plan, such as '70%'"
        raise UnitError(error.found, expected=f"{error.expected}; or {shares}", do=error.do) from None
