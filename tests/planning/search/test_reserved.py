"""The choices under which a card's allocator reserves least, beside an allocator written apart from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.graphs import MB, residual, unet
from simulation.reference_allocator import ReferenceAllocator

from memplan.devices import find
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.schedule.to_trace import reserved_bytes, timeline_of, trace_of
from memplan.planning.search import reserved
from memplan.planning.search.reserved import least_reserved
from memplan.planning.search.search import Heuristics, Search
from memplan.simulation.allocator.device_memory import ascending_addresses
from memplan.simulation.allocator.occupied import Occupied
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.trace.trace import Trace

CARD = OutsideMemory(home=Home("cuda:0", find("h100")))
NETWORKS = [residual(3), unet(3, 21 * MB)]
QUICK = Heuristics(relaxation=False, improve=False, rounds=10)


def by_reference(graph: JointGraph, choices: Choices) -> int:
    """Bytes that the other allocator reserves in the schedule of the choices."""
    allocator = ReferenceAllocator(AllocatorSettings(), ascending_addresses())
    run(allocator, trace_of(schedule(graph, choices), CARD), {})
    return allocator.reserved


def run(allocator: ReferenceAllocator, trace: Trace, placed: dict[str, int]) -> None:
    """All requests of a step, but for weights that are placed already: their addresses by name."""
    blocks = dict[int, int]()
    events = [(storage.born, storage) for storage in trace.counted]
    events += [(storage.died, storage) for storage in trace.counted if storage.died is not None]
    for tick, storage in sorted(events, key=lambda event: event[0]):
        if tick != storage.born:
            allocator.free(blocks.pop(storage.id), tick)
        elif not (storage.cause == "weight" and storage.name in placed):
            blocks[storage.id] = allocator.malloc(storage.bytes, 0, (0, 0), storage.id, tick)


@pytest.mark.parametrize("graph", NETWORKS, ids=["residual", "unet"])
def test_a_schedule_begins_in_the_segments_in_which_its_weights_lie(graph: JointGraph) -> None:
    """Between the weights lay blocks that are free now, and another model's that stay."""
    reference, addresses = ReferenceAllocator(AllocatorSettings(), ascending_addresses()), dict[int, int]()
    others, between = list[int](), list[int]()
    for value in graph.values:
        if value.kind == "parameter":
            between.append(reference.malloc(7 * MB, 0, (0, 0), owner=None, tick=0))
            addresses[value.id] = reference.malloc(value.bytes, 0, (0, 0), owner=None, tick=0)
            others.append(reference.malloc(5000, 0, (0, 0), owner=None, tick=0))
    for address in between:
        reference.free(address, tick=0)
    occupied = Occupied.of(reference.segments(), AllocatorSettings())
    card = replace(CARD, home=replace(CARD.home, occupied=occupied), addresses=addresses)
    planned = schedule(graph, Choices())

    reference.empty_cache(tick=0)
    run(reference, trace_of(planned, card), {graph.values[value].path: at for value, at in addresses.items()})
    expected = reference.reserved - len(others) * 5120
    assert reserved_bytes(planned, card) == timeline_of(planned, card).peak_reserved == expected
    assert expected != reserved_bytes(planned, CARD)


def test_less_is_reserved_than_with_the_fewest_live_bytes() -> None:
    """In one of the networks by at least a twentieth."""
    gains = list[float]()
    for graph in NETWORKS:
        search = Search(graph, CARD, heuristics=QUICK)
        choices, least = least_reserved(search)
        assert by_reference(graph, choices) == least >= search.lower_bound
        gains.append(1 - least / by_reference(graph, search.evaluator.choices(search.lowest_peak_state.column)))
    assert min(gains) >= 0
    assert max(gains) > 0.05, gains


def test_tries_are_bounded_by_the_ops_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ran = unet(3), list[int]()
    simulated = reserved.reserved_bytes

    def counted(*args: object) -> int:
        ran.append(simulated(*args))  # pyright: ignore[reportArgumentType]
        return ran[-1]

    monkeypatch.setattr(reserved, "reserved_bytes", counted)
    monkeypatch.setattr(reserved, "TOLERABLE", 0.0)
    monkeypatch.setattr(reserved, "OPS", 5 * len(graph.ops))
    _, least = least_reserved(Search(graph, CARD, heuristics=QUICK))
    assert len(ran) == 5
    assert least == min(ran)
