"""Count the calls of planned modules: how many ran as planned, and why others did not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memplan._display import Printed


@dataclass(frozen=True)
class CallStats(Printed):
    """Calls of a planned module.

    Example:
        >>> print(CallStats(planned=98, unplanned=2, why={"a tensor of layout sparse": 2}, without_grad=10))
        98 calls ran as planned, 2 unplanned (a tensor of layout sparse: 2), 10 without grad
    """

    planned: int = 0
    """Calls that ran as planned."""
    unplanned: int = 0
    """Calls under grad mode that ran unplanned, by the model's own code."""
    why: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Number of unplanned calls by reason, in the order of the first calls."""
    without_grad: int = 0
    """Calls in which nothing required a gradient, as under ``no_grad``, which are never planned."""

    def __str__(self) -> str:
        text = f"{self.planned} call{'' if self.planned == 1 else 's'} ran as planned, {self.unplanned} unplanned"
        if self.why:
            text += f" ({'; '.join(f'{reason}: {times}' for reason, times in self.why.items())})"
        return f"{text}, {self.without_grad} without grad"


class Calls:
    """Counts of one module's calls, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Several threads may call the module."""
        self._planned = self._without_grad = 0
        """Number of planned calls, and of calls in which nothing required a gradient."""
        self._why = Counter[str]()
        """Number of unplanned calls, by reason."""

    def planned(self) -> None:
        """Count a call that ran as planned."""
        with self._lock:
            self._planned += 1

    def without_grad(self) -> None:
        """Count a call in which nothing required a gradient."""
        with self._lock:
            self._without_grad += 1

    def unplanned(self, why: str) -> None:
        """Count a call that ran unplanned, for the reason ``why``."""
        with self._lock:
            self._why[why] += 1

    def restart(self) -> None:
        """Reset the counts to zero."""
        with self._lock:
            self._planned = self._without_grad = 0
            self._why.clear()

    def stats(self) -> CallStats:
        """Return the present counts."""
        with self._lock:
            return CallStats(self._planned, self._why.total(), dict(self._why), self._without_grad)


def sum_stats(parts: Iterable[CallStats]) -> CallStats:
    """Add the counts of several modules."""
    parts, why = list(parts), Counter[str]()
    for part in parts:
        why.update(part.why)
    planned, unplanned = sum(part.planned for part in parts), sum(part.unplanned for part in parts)
    return CallStats(planned, unplanned, dict(why), sum(part.without_grad for part in parts))
