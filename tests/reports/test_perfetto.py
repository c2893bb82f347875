"""A step as Perfetto reads it: events nested as on a stack, and counters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from reports.saved_results import EVIL, trace

from memplan.explanation.explain import explain_trace
from memplan.explanation.model import LABELS, Explanation
from memplan.reports import perfetto
from memplan.simulation.simulate import live_at


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain_trace(trace(), title=EVIL)


@pytest.fixture(scope="module")
def events(explanation: Explanation) -> list[dict[str, Any]]:
    return json.loads(perfetto.dumps(trace(), explanation))["traceEvents"]


def test_events_are_strictly_nested_and_in_order(events: list[dict[str, Any]]) -> None:
    opened: list[tuple[str, int]] = []
    now, closed = 0, 0
    for event in events:
        if event["ph"] not in "BE":
            continue
        assert event["ts"] >= now
        now = event["ts"]
        if event["ph"] == "B":
            opened.append((event["name"], event["ts"]))
        else:
            name, start = opened.pop()
            assert (name, event["ts"] >= start) == (event["name"], True)
            closed += 1
    assert opened == []
    assert closed > len(trace().ops)


def test_each_op_lies_within_its_step_phase_and_layer(events: list[dict[str, Any]]) -> None:
    opened: list[str] = []
    seen = []
    for event in events:
        if event["ph"] == "B":
            if "args" in event:
                seen.append((event["args"]["op"], event["args"]["at"], event["ts"], tuple(opened)))
            opened.append(event["name"])
        elif event["ph"] == "E":
            opened.pop()
    assert len(seen) == len(trace().ops)
    for op, (name, where, start, within) in zip(trace().ops, seen, strict=True):
        assert (name, where, start) == (op.name, op.where or "", op.start)
        expected = ["build"] if op.step < 0 else [f"step {op.step + 1}", op.phase]
        assert list(within[: len(expected)]) == expected
        assert (within[-1] == op.layer) if op.layer else (len(within) == len(expected))


def test_counters_are_the_bytes_alive(events: list[dict[str, Any]], explanation: Explanation) -> None:
    counters = [event for event in events if event["ph"] == "C" and event["name"].startswith("memory")]
    assert max(sum(event["args"].values()) for event in counters) == explanation.timeline.peak_allocated
    for event in counters:
        live = live_at(trace(), event["ts"])
        for cause, label in LABELS.items():
            if cause not in ("rounding", "fragmentation"):
                assert event["args"].get(label, 0) == sum(one.bytes for one in live if one.cause == cause)


def test_names_of_layers_steer_no_viewer_and_take_no_more_than_their_length() -> None:
    """A name of thousands of parts is not written with each of its prefixes."""
    for name in ("a\u202e\x1b[2J", "a." * 5_000):
        ops = tuple(replace(op, layer=name) for op in trace().ops[:50])
        changed = replace(trace(), ops=(*ops, *trace().ops[50:]))
        explanation = explain_trace(changed, title="net")
        assert len(perfetto.dumps(changed, explanation)) < 20_000_000
