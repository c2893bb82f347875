"""Live bytes against a sum over all storages at every tick."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.trace.live_bytes import live_bytes, peak_live_bytes
from memplan.trace.records import Storage


@st.composite
def storages(draw: st.DrawFn) -> list[Storage]:
    ticks = iter(draw(st.permutations(range(1, 41))))
    found = list[Storage]()
    for number, size in enumerate(draw(st.lists(st.integers(0, 1000), max_size=20))):
        born, died = sorted((next(ticks), next(ticks)))
        freed = draw(st.booleans())
        found.append(Storage(number, size, "temporary", born, died if freed else None))
    return found


@given(storages())
def test_each_level_is_the_sum_of_what_lives(rows: list[Storage]) -> None:
    def alive(tick: int) -> int:
        return sum(one.bytes for one in rows if one.born <= tick and (one.died is None or one.died > tick))

    levels = dict(live_bytes(rows))
    assert levels == {tick: alive(tick) for tick in levels}
    assert set(levels) == {one.born for one in rows} | {one.died for one in rows if one.died is not None}
    assert peak_live_bytes(rows) == max((alive(tick) for tick in range(41)), default=0)
