"""The kinds of files that memplan reads: how mutants of each are made, and all that is done with one."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from mutations import Seed, damaged
from torch import nn

import memplan
from memplan import Plan, Sweep, Trace
from memplan._json import Unreadable
from memplan.checks.check import check
from memplan.errors import InputError, MemplanError
from memplan.explanation.explain import explain_trace
from memplan.explanation.explanation_json import explanation_of
from memplan.reports import explain as explain_report
from memplan.reports.output import print_parts
from memplan.reports.plan import render as plan_parts
from memplan.reports.replay import dumps, print_replay
from memplan.reports.sweep import print_sweep
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import cases
from memplan.simulation.snapshots.write import frames_of, snapshot_of
from memplan.studies.comparisons.sides import side_of

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
_SETTINGS = [parse_settings("expandable_segments:True,max_split_size_mb:64")]


@dataclass(frozen=True)
class Kind:
    """A kind of file: its mutants, and a function that reads one and yields all texts that come of it."""

    mutant: Callable[[Random], bytes]
    use: Callable[[bytes, Path], Iterator[str]]


def _json_kind(values: list[Any], use: Callable[[bytes, Path], Iterator[str]]) -> Kind:
    seeds = [Seed(value) for value in values]

    def mutant(random: Random) -> bytes:
        seed = random.choice(seeds)
        if random.random() < 0.25:
            return damaged(seed.text.encode(), random)
        return _text(seed.changed(random))

    return Kind(mutant, use)


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _snapshot_kind(values: list[Any]) -> Kind:
    seeds = [Seed(value) for value in values]

    def mutant(random: Random) -> bytes:
        value = random.choice(seeds).changed(random) if random.random() < 0.8 else json.loads(random.choice(seeds).text)
        data = _text(value) if random.random() < 0.5 else pickle.dumps(value, random.choice((2, 3, 4, 5)))
        if random.random() < 0.3:
            data = damaged(data, random)
        if random.random() < 0.2:
            data = gzip.compress(data, 1, mtime=0)
            data = damaged(data, random) if random.random() < 0.3 else data
        return data

    return Kind(mutant, _use_snapshot)


def _use_snapshot(data: bytes, file: Path) -> Iterator[str]:
    file.write_bytes(data)
    found = replay(file, gpu=0 if data[-1:] == b"}" else None)
    yield str(found)
    yield "\n".join(map(str, found.mismatches[:50]))
    both = cases(found, _SETTINGS, None if len(data) % 2 else 1 << 27)
    dumps(both)
    if _is_drawn(data):
        out = io.StringIO()
        print_replay(both, out)
        yield out.getvalue()


def _use_trace(data: bytes, file: Path) -> Iterator[str]:
    trace = Trace.from_json(data.decode("utf-8", "replace"), "a.json")
    yield str(trace) + repr(trace)
    explanation = explain_trace(trace, title="a.json", train=any(op.phase == "backward" for op in trace.ops))
    yield from _shown(explanation, drawn=_is_drawn(data))
    if _is_drawn(data):
        assert Trace.from_json(trace.to_json()) == trace
        yield "\n".join(map(str, check(trace)))
        side_of(trace, "a")


def _use_explanation(data: bytes, file: Path) -> Iterator[str]:
    plain = memplan._json.parse(data.decode("utf-8", "replace"))
    if not isinstance(plain, dict):
        raise Unreadable("it is no mapping")
    explanation = explanation_of(plain)
    yield from _shown(explanation, drawn=_is_drawn(data))
    side_of(explanation, "a")


def _shown(explanation: memplan.Explanation, *, drawn: bool) -> Iterator[str]:
    yield str(explanation) + repr(explanation)
    explain_report.dumps(explanation)
    if drawn:
        out = io.StringIO()
        explain_report.print_explanation(explanation, out)
        yield out.getvalue()


def _use_plan(data: bytes, file: Path) -> Iterator[str]:
    plan = Plan.from_json(data.decode("utf-8", "replace"))
    yield str(plan)
    side_of(plan, "a")
    if _is_drawn(data):
        assert Plan.from_json(plan.to_json()) == plan
        out = io.StringIO()
        print_parts(lambda page: plan_parts(plan, page), out)
        yield out.getvalue()


def _use_sweep(data: bytes, file: Path) -> Iterator[str]:
    sweep = Sweep.from_json(data.decode("utf-8", "replace"))
    yield str(sweep) + repr(sweep.fits) + "\n".join(map(str, (*sweep.fits, *sweep.crossings, *sweep.engine_changes)))
    sweep.to_json()
    if _is_drawn(data):
        out = io.StringIO()
        print_sweep(sweep, out)
        yield out.getvalue()
    for number in range(1, min(4, len(sweep.rows)) + 1):
        try:
            side_of(sweep.point(number), "a")
        except InputError as error:
            yield str(error)


def _build() -> Callable[[], None]:
    model = nn.Linear(64, 4)
    x = torch.randn(128, 64)
    return lambda: model(x).relu().sum().backward()


def _history() -> dict[str, Any]:
    """Return a history by hand: streams, a private pool, a pending block, an expandable segment, out of memory."""
    base, mib = 0x7F0000000000, 1 << 20
    frames = [{"filename": "train.py", "line": 7, "name": "forward"}]

    def event(action: str, at: int, size: int, **more: Any) -> dict[str, Any]:
        return {"action": action, "addr": base + at * mib, "size": size * mib, "stream": 0, "frames": frames} | more

    def block(size: int, state: str, **more: Any) -> dict[str, Any]:
        return {"size": size * mib, "requested_size": size * mib, "state": state, "frames": frames} | more

    def segment(at: int, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
        total = sum(one["size"] for one in blocks)
        return {"device": 0, "address": base + at * mib, "total_size": total, "stream": 0, "segment_type": "large",
                "segment_pool_id": [0, 0], "is_expandable": False, "blocks": list(blocks)} | more  # fmt: skip

    events = [
        event("segment_alloc", 0, 40), event("alloc", 0, 12), event("alloc", 12, 4), event("free_requested", 0, 12),
        event("free_completed", 0, 12), event("segment_alloc", 64, 20, stream=7), event("alloc", 64, 20, stream=7),
        event("free_requested", 64, 20, stream=7), event("alloc", 0, 8), event("segment_alloc", 100, 30),
        event("segment_free", 100, 30), {"action": "oom", "device_free": 4 * mib, "size": 60 * mib, "stream": 0},
    ]  # fmt: skip
    held = [
        segment(0, block(8, "active_allocated"), block(4, "inactive"), block(4, "active_allocated"),
                block(24, "inactive")),
        segment(64, block(20, "active_pending_free"), stream=7),
        segment(200, block(12, "active_allocated"), block(8, "inactive"), segment_pool_id=[0, 1]),
    ]  # fmt: skip
    return {"segments": held, "device_traces": [events], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}}


def _plan() -> Any:
    plain = json.loads((_DATA / "mlp.plan.json").read_text())
    for decision in plain["decisions"][:2]:
        decision["details"] = {"host_bytes": 512, "encoded_bytes": 64}
    return plain


def _sweep() -> Any:
    plain = json.loads((_DATA / "mlp.sweep.json").read_text())
    where = {"axis": next(iter(plain["axes"])), "at": {}, "between": [8, 16]}
    plain["crossings"] = [where | {"below": "saved", "above": "weights", "value": 9.5}]
    plain["engine_changes"] = [where | {"op": "conv", "engines": ["eng1", "eng2"], "workspaces": [0, 4096]}]
    return plain


def kinds() -> dict[str, Kind]:
    """Return every kind by its name."""
    traces = [memplan.record(_build, device=device, steps=1) for device in ("cpu", "t4")]
    explanations = [explain_trace(trace, title="net", train=True).to_dict() for trace in traces]
    on_card = memplan.simulate(traces[1])
    written = snapshot_of(on_card, frames_of(traces[1]), trace=traces[1])
    return {
        "snapshots": _snapshot_kind([_history(), json.loads(json.dumps(written))]),
        "traces": _json_kind([json.loads(trace.to_json()) for trace in traces], _use_trace),
        "plans": _json_kind([_plan()], _use_plan),
        "sweeps": _json_kind([_sweep()], _use_sweep),
        "explanations": _json_kind(explanations, _use_explanation),
    }


def _is_drawn(data: bytes) -> bool:
    """Return whether all is done with a mutant that was read: one in four is drawn as a report, written and read again,
    since that takes most of the time."""
    return zlib.crc32(data) % 4 == 0


OWN = (MemplanError, Unreadable)
"""Errors that say what is wrong with a file."""
