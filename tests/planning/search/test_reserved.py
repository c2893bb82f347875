"""The choices under which a card's allocator reserves least, beside an allocator written apart from it."""

from __future__ import annotations

import pytest
from planning.graphs import MB, residual, unet
from simulation.reference_allocator import ReferenceAllocator

from memplan.devices import find
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.schedule.to_trace import trace_of
from memplan.planning.search import reserved
from memplan.planning.search.reserved import least_reserved
from memplan.planning.search.search import Heuristics, Search
from memplan.simulation.allocator.device_memory import ascending_addresses
from memplan.simulation.allocator.settings import AllocatorSettings

CARD = OutsideMemory(home=Home("cuda:0", find("h100")))
NETWORKS = [residual(3), unet(3, 21 * MB)]
QUICK = Heuristics(relaxation=False, improve=False, rounds=10)


def by_reference(graph: JointGraph, choices: Choices) -> int:
    """Bytes that the other allocator reserves in the schedule of the choices."""
    trace, blocks = trace_of(schedule(graph, choices), CARD), dict[int, int]()
    allocator = ReferenceAllocator(AllocatorSettings(), ascending_addresses())
    events = [(storage.born, storage) for storage in trace.counted]
    events += [(storage.died, storage) for storage in trace.counted if storage.died is not None]
    for tick, storage in sorted(events, key=lambda event: event[0]):
        if tick == storage.born:
            blocks[storage.id] = allocator.malloc(storage.bytes, 0, (0, 0), storage.id, tick)
        else:
            allocator.free(blocks.pop(storage.id), tick)
    return allocator.reserved


def test_less_is_reserved_than_with_the_fewest_live_bytes() -> None:
    """In one of the networks by at least a twentieth."""
    gains = list[float]()
    for graph in NETWORKS:
        search = Search(graph, CARD, heuristics=QUICK)
        choices, least = least_reserved(search)
        assert by_reference(graph, choices) == least >= search.lower_bound
        gains.append(1 - least / by_reference(graph, search.evaluator.choices(search.lowest.column)))
    assert min(gains) >= 0
    assert max(gains) > 0.05, gains


def test_tries_are_bounded_by_the_ops_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ran = unet(3), list[int]()
    run = reserved.reserved_bytes

    def counted(*args: object) -> int:
        ran.append(run(*args))  # pyright: ignore[reportArgumentType]
        return ran[-1]

    monkeypatch.setattr(reserved, "reserved_bytes", counted)
    monkeypatch.setattr(reserved, "TOLERABLE", 0.0)
    monkeypatch.setattr(reserved, "OPS", 5 * len(graph.ops))
    _, least = least_reserved(Search(graph, CARD, heuristics=QUICK))
    assert len(ran) == 5
    assert least == min(ran)
