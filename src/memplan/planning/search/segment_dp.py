"""Dynamic programming over segments: a variant for each, so that every segment's backward pass fits beside what the
earlier ones keep.

Segments are taken in the order of the forward pass. While segment k is differentiated, what segments before k keep
is there, and nothing of later ones: so the bytes kept so far are all that the future has to know of the past, and
among choices that keep as much or less, the one of fewest seconds wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.planning.search.segments import Variant

WIDTH = 96
"""States that are kept between two segments."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Variants of all segments so far."""

    saved: int
    seconds: float
    last: Variant | None = None
    before: Chain | None = None

    def variants(self) -> list[Variant]:
        """Return the variants in reverse order."""
        found, chain = list[Variant](), self
        while chain.last is not None and chain.before is not None:
            found.append(chain.last)
            chain = chain.before
        return found


def choose(variants: Iterable[Variant], count: int, budget: int) -> list[Variant] | None:
    """Choose the variants of fewest seconds that cover all ``count`` segments within the budget; None if none do."""
    starting: list[list[Variant]] = [[] for _ in range(count)]
    for variant in variants:
        starting[variant.first].append(variant)
    states: list[list[Chain]] = [[] for _ in range(count + 1)]
    states[0] = [Chain(0, 0.0)]
    for at in range(count):
        for chain in _pruned(states[at]):
            for variant in starting[at]:
                if chain.saved + variant.need <= budget:
                    states[variant.stop].append(
                        Chain(chain.saved + variant.saved, chain.seconds + variant.seconds, variant, chain)
                    )
    done = min(states[count], key=lambda chain: chain.seconds, default=None)
    return None if done is None else done.variants()


def _pruned(chains: list[Chain]) -> list[Chain]:
    """Those that no other beats in both bytes and seconds; where they are many, some of them, evenly."""
    front = list[Chain]()
    for chain in sorted(chains, key=lambda chain: (chain.saved, chain.seconds)):
        if not front or chain.seconds < front[-1].seconds:
            front.append(chain)
    if len(front) <= WIDTH:
        return front
    return [front[round(k * (len(front) - 1) / (WIDTH - 1))] for k in range(WIDTH)]
