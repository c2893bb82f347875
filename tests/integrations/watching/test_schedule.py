"""When a window opens, by what each step's end shows."""

from __future__ import annotations

from memplan.integrations.watching.counters import Reading
from memplan.integrations.watching.schedule import SHARE, Schedule

MIB = 1 << 20


def card(blocks: int, held: int = 0) -> Reading:
    return Reading(0, held, blocks, None)


def host(resident: int | None) -> Reading:
    return Reading(None, None, None, resident)


def due(readings: list[Reading], first: int = 1) -> list[int]:
    """Return the steps at which a window is due; none of them takes long enough for a window that nothing asks for."""
    schedule = started()
    found = list[int]()
    for step, reading in enumerate(readings, start=first):
        schedule.note(reading, 0.001, observed=False)
        if schedule.is_due(step):
            found.append(step)
    return found


def started(window: float = 60.0) -> Schedule:
    """Return one whose first window took so many seconds."""
    schedule = Schedule()
    schedule.opened()
    schedule.note(host(None), window, observed=True)
    schedule.closed()
    return schedule


def test_a_card_is_looked_at_when_its_allocations_become_more_in_three_steps() -> None:
    assert due([card(5), card(6), card(7), card(7), card(8)]) == []
    assert due([card(5), card(6), card(7), card(8)]) == [4]
    assert due([card(5, 1), card(5, 2), card(5, 3), card(5, 4)]) == [4]


def test_further_windows_wait_longer_and_longer() -> None:
    growing = [card(number) for number in range(1, 200)]
    assert due(growing) == [4, 12, 44, 172]  # after 8, 32 and 128 steps


def test_the_process_has_to_grow_by_more_than_noise() -> None:
    assert due([host(number * MIB // 4) for number in range(8)]) == []
    assert due([host(number * MIB) for number in range(4)]) == [4]
    assert due([host(None)] * 8) == []


def test_a_drift_in_two_steps_opens_a_window() -> None:
    schedule = started()
    found = list[bool]()
    for drift in (0, 2 * MIB, 0, 2 * MIB, 2 * MIB):
        schedule.note(card(1), 0.001, observed=False)
        schedule.note_drift(drift, 100 * MIB)
        found.append(schedule.is_due(1))
    assert found == [False, False, False, False, True]


def test_windows_that_nothing_asks_for_take_a_small_share_of_the_time() -> None:
    schedule, spent = started(0.5), 0.0
    steps = 100_000
    for step in range(1, steps):
        schedule.note(host(0), 0.01, observed=False)
        if schedule.is_due(step):
            schedule.opened()
            schedule.note(host(0), 0.5, observed=True)
            schedule.closed()
            spent += 0.5
    assert 0 < spent <= SHARE * (0.01 * steps + 0.5 + spent)
