"""What to search for next, where the search's bytes are not those that count: those of the code that comes of it.

What a search finds for so many bytes takes more or less of them in the end. By how much is alike for budgets that are
near each other, so that a second search that allows for it mostly comes out right; and each look takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Aims:
    """What was searched for so far, and what came of it."""

    budget: int
    room: int
    """Bytes under the budget that may be left."""
    fits: int | None = None
    """The most that was searched for, and what came of it kept the budget."""
    over: int | None = None
    """The least of which it did not."""

    def first(self, known: tuple[int, int] | None = None) -> int:
        """What to begin with. ``known``: what a search for a budget near this one came to, in its own bytes and in
        those that count."""
        return self.budget if known is None else self._beside(*known)

    def seen(self, aim: int, found: int, peak: int) -> Aims:
        """With one more: searched for, found in the search's own bytes, and in those that count."""
        if peak <= self.budget:
            most = max(aim, found)
            return replace(self, fits=most if self.fits is None else max(self.fits, most))
        least = min(aim, found)  # whatever is between finds the same
        return replace(self, over=least if self.over is None else min(self.over, least))

    def next(self, aim: int, found: int, peak: int) -> int | None:
        """What to search for next; None where that would tell nothing new.

        Args:
            aim, found, peak: of the last search, as for `seen`.
        """
        wanted = self._beside(max(aim, found) if peak <= self.budget else min(aim, found), peak)
        if self.fits is None or self.over is None:
            return wanted
        if self.over - self.fits <= self.room:
            return None
        return wanted if self.fits < wanted < self.over else (self.fits + self.over) // 2

    def _beside(self, found: int, peak: int) -> int:
        """As far from the budget as these are from each other, less half of the room: a little more than expected is
        not to be over the budget."""
        return self.budget + found - peak - self.room // 2
