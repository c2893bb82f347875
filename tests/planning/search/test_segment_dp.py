"""The dynamic program against all chains of variants."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from memplan.planning.search.segment_dp import choose
from memplan.planning.search.segments import Variant

NOTHING = np.zeros(0, dtype=np.int64)


def chains(variants: Sequence[Variant], count: int, at: int = 0) -> Iterator[list[Variant]]:
    if at == count:
        yield []
    for variant in variants:
        if variant.first == at:
            yield from ([variant, *rest] for rest in chains(variants, count, variant.stop))


def fits(chain: Sequence[Variant], budget: int) -> bool:
    saved = 0
    for variant in chain:
        if saved + variant.need > budget:
            return False
        saved += variant.saved
    return True


def test_against_all_chains() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(60):
        count = draw.randint(1, 5)
        variants = [
            Variant(
                first, draw.randint(first + 1, count), NOTHING, NOTHING.astype(bool), draw.randint(0, 50),
                draw.randint(0, 60), float(draw.randint(0, 20)),
            )
            for first in range(count)
            for _ in range(3)
        ]  # fmt: skip
        budget = draw.randint(30, 160)
        allowed = [chain for chain in chains(variants, count) if fits(chain, budget)]
        chosen = choose(variants, count, budget)
        assert (chosen is None) == (not allowed)
        if chosen is not None:
            assert fits(chosen[::-1], budget)
            least = min(sum(variant.seconds for variant in chain) for chain in allowed)
            assert sum(variant.seconds for variant in chosen) == least
            found += 1
    assert found > 20
