"""Written snapshots, read back by torch's own functions, by rules of the viewer, and by memplan."""

from __future__ import annotations

import json
import pickle
import pickletools
import random
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

import memplan
from memplan.errors import SnapshotFormatError, UsageError
from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.peaks import timeline_of
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.snapshots.write import frames_of, snapshot_of, write_snapshot
from memplan.simulation.timeline import Timeline
from memplan.trace.records import Layer, Op, Storage
from memplan.trace.trace import Trace

MIB = 1 << 20
# Opcodes that torch/utils/viz/MemoryViz.js reads.
VIEWER = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST",
    "DICT", "SETITEM",
}  # fmt: skip
CONFS = ["", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4"]


def timeline(conf: str = "", seed: int = 0, capacity: int | None = None) -> Timeline:
    """A random program on a card, with streams, graphs' pools, waiting blocks and running out."""
    number = random.Random(seed)
    allocator = CachingAllocator(parse_settings(conf) if conf else AllocatorSettings(), capacity=capacity)
    live: list[int] = []
    levels: list[tuple[int, int, int]] = []
    for tick in range(1, 400):
        if live and number.random() < 0.4:
            address = live.pop(number.randrange(len(live)))
            if number.random() < 0.1:
                allocator.record_stream(address, 99)
            allocator.free(address, tick=tick)
        elif number.random() < 0.02:
            allocator.empty_cache(tick=tick)
        else:
            size, stream = int(2 ** number.uniform(3, 26)), number.choice([0, 0, 5])
            try:
                pool = number.choice([(0, 0), (0, 0), (0, 3)])
                live.append(allocator.malloc(size, stream=stream, pool=pool, owner=tick, tick=tick))
            except OutOfMemory:
                for address in live[::2]:
                    allocator.free(address, tick=tick)
                del live[::2]
        levels.append((tick, allocator.allocated, allocator.reserved))
    return timeline_of("cuda:0", levels, (0, 399), tuple(allocator.log), allocator.segments())


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("capacity", [None, 500 * MIB])
def test_torch_reads_what_was_written(conf: str, capacity: int | None, tmp_path: Path) -> None:
    made = timeline(conf, capacity=capacity)
    file = tmp_path / "out.pickle"
    write_snapshot(file, made, {1: [Frame("net.py", 3, "layer1")]})
    with open(file, "rb") as stream:
        data = pickle.load(stream)
    text = viz.segsum(data)  # which checks that the parts of each segment add up
    assert f"segments: {len(made.segments)}\n" in text
    in_use = sum(b.requested for s in made.segments for b in s.blocks if b.state == "active_allocated")
    assert f"total_allocated: {viz.Bytes(in_use)}\n" in text
    assert f"total_reserved: {viz.Bytes(made.events[-1][2])}\n" in text
    assert sum(row["allocated_size"] for row in data["segments"]) == made.events[-1][1]
    waiting = sum(b.size for s in made.segments for b in s.blocks if b.state == "active_pending_free")
    assert sum(row["active_size"] for row in data["segments"]) == made.events[-1][1] + waiting
    told = viz.trace(data)
    for action, word in (("segment_alloc", " = cudaMalloc("), ("free_requested", "del "), ("oom", "raise OutOf")):
        assert told.count(word) == sum(event.action == action for event in made.log)
    assert "Device 0 ---" in told
    for plot in (viz.trace_plot(data), viz.segment_plot(data)):
        found = re.search(r"const local_files = (.*)", plot)
        assert found is not None
        shown = pickle.loads(b64decode(json.loads(found[1])[0]["base64"]))
        assert shown == data


@pytest.mark.parametrize("conf", CONFS)
def test_the_peaks_are_those_of_its_events(conf: str) -> None:
    made = timeline(conf)
    trace = snapshot_of(made)["device_traces"][0]
    reserved = most = 0
    for row in trace:
        sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(row["action"], 0)
        reserved += sign * row["size"]
        most = max(most, reserved)
    assert most == made.peak_reserved


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("seed", range(4))
def test_memplan_replays_what_was_written(conf: str, seed: int, tmp_path: Path) -> None:
    made = timeline(conf, seed, 500 * MIB if seed % 2 else None)
    settings = parse_settings(conf) if conf else None
    file = tmp_path / "out.pickle"
    write_snapshot(file, made, settings=settings)
    done = memplan.replay(file)
    assert done.mismatches == []
    assert done.settings == (settings or AllocatorSettings())
    assert (done.peak_reserved, done.peak_allocated) == (made.peak_reserved, made.peak_allocated)
    assert [event[:5] for event in done.timeline.log] == [event[:5] for event in made.log]
    assert snapshot_of(done.timeline)["device_traces"][0][-1]["action"] == made.log[-1].action


def test_the_file_is_protocol_4_and_holds_what_the_viewer_reads(tmp_path: Path) -> None:
    file = tmp_path / "out.pickle"
    write_snapshot(file, timeline(), {1: [Frame("net.py", 3, "layer1")]}, causes={1: "weight"})
    opcodes = list(pickletools.genops(file.read_bytes()))
    assert opcodes[0][1] == 4
    assert {code.name for code, _, _ in opcodes} <= VIEWER
    assert plain(pickle.loads(file.read_bytes())) == {dict, list, int, str, bool}


def plain(value: Any) -> set[type]:
    inner = [*value.values(), *value] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(plain, inner))


def test_pools_of_graphs_are_told_apart() -> None:
    made = timeline()
    data = snapshot_of(made)
    assert {tuple(row["segment_pool_id"]) for row in data["segments"]} == {(0, 0), (0, 3)}
    assert {tuple(row["pool_id"]) for row in data["device_traces"][0]} == {(0, 0), (0, 3)}


def test_stacks_are_shared_and_name_the_layer() -> None:
    made = timeline()
    frames = {tick: [Frame("net.py", tick % 3, f"layer{tick % 3}")] for tick in range(400)}
    data = snapshot_of(made, frames)
    rows = [row for row in data["device_traces"][0] if row["action"] == "alloc"]
    assert len({id(row["frames"]) for row in rows}) == 3
    assert rows[0]["frames"] == [{"filename": "net.py", "line": 1, "name": "layer1"}]
    assert "net.py:1:layer1" in [viz._frame_fmt(frame) for frame in rows[0]["frames"]]
    blocks = [block for row in data["segments"] for block in row["blocks"]]
    assert all(bool(block["frames"]) == (block["state"] != "inactive") for block in blocks)


def test_causes_colour_the_viewer_and_one_is_unknown() -> None:
    """The viewer fails where there are categories and none of them is "unknown"."""
    trace = snapshot_of(timeline(), causes=dict.fromkeys(range(400), "weight"))["device_traces"][0]
    assert [row["category"] for row in trace if row["action"] == "alloc"] == ["weight"] * sum(
        row["action"] == "alloc" for row in trace
    )
    assert "unknown" in {row.get("category") for row in trace}


def test_another_card() -> None:
    made = timeline()
    other = Timeline("cuda:2", *[getattr(made, name) for name in list(made.__slots__)[1:]])
    data = snapshot_of(other)
    assert [bool(trace) for trace in data["device_traces"]] == [False, False, True]
    assert memplan.replay(data).timeline.device == "cuda:2"
    assert memplan.replay(data).mismatches == []


# The CPU


def cpu_trace() -> Trace:
    op = Op(0, "aten.addmm.default", "forward", 0, "net.first", "/home/me/net.py:12", 1, 3, (), (1,))
    storages = (
        Storage(0, 4000, "weight", 1, None, name="first.weight"),
        Storage(1, 100, "saved", 2, 5, op=0),
        Storage(2, 0, "temporary", 3, 4),
        Storage(3, 2 << 20, "activation", 6, None, op=0),
    )
    return Trace(
        origin="recorded",
        device="cpu",
        torch="2",
        ops=(op,),
        storages=storages,
        layers=(Layer("first", "Linear"),),
        steps=(1,),
        end=6,
    )


def test_a_step_on_the_cpu_has_a_segment_for_each_storage(tmp_path: Path) -> None:
    trace = cpu_trace()
    made = memplan.simulate(trace)
    file = tmp_path / "cpu.pickle"
    write_snapshot(file, made, frames_of(trace), trace=trace)
    data = pickle.loads(file.read_bytes())
    assert "segments: 2\n" in viz.segsum(data)
    assert viz.trace(data).count("cudaMalloc") == 3
    viz.trace_plot(data)
    viz.segment_plot(data)
    level = most = 0
    for row in data["device_traces"][0]:
        level += {"alloc": row["size"], "free_completed": -row["size"]}.get(row["action"], 0)
        most = max(most, level)
    assert (most, level) == (made.peak_allocated, made.events[-1][1])
    first, op = data["segments"][0]["blocks"][0]["frames"], data["segments"][1]["blocks"][0]["frames"]
    assert first == [{"filename": "", "line": 0, "name": "first.weight"}]
    assert [row["name"] for row in op] == ["aten.addmm.default (forward)", "net.first"]
    assert (op[1]["filename"], op[1]["line"]) == ("/home/me/net.py", 12)
    with pytest.raises(SnapshotFormatError, match="on the CPU"):
        memplan.replay(file)


def test_a_recorded_step_on_the_cpu(tmp_path: Path) -> None:
    def build() -> Any:
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
        inputs = torch.randn(32, 64)

        def step() -> None:
            net.zero_grad()
            net(inputs).sum().backward()

        return step

    trace = memplan.record(build)
    made = memplan.simulate(trace)
    write_snapshot(tmp_path / "a.pickle", made, frames_of(trace), trace=trace)
    data = pickle.loads((tmp_path / "a.pickle").read_bytes())
    viz.segsum(data)
    stacks = {tuple(frame["name"] for frame in row["frames"]) for row in data["device_traces"][0]}
    assert any("0" in stack and stack[0].startswith("aten.addmm") for stack in stacks)


def test_a_timeline_without_a_log_needs_the_trace() -> None:
    with pytest.raises(UsageError, match="Give it as trace"):
        snapshot_of(memplan.simulate(cpu_trace()))


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.pickle").write_text("old")
    with pytest.raises(AttributeError):
        write_snapshot(tmp_path / "out.pickle", timeline(), {1: [object()]})  # pyright: ignore[reportArgumentType]
    assert (tmp_path / "out.pickle").read_text() == "old"
    with pytest.raises(OSError, match="directory"):
        write_snapshot(tmp_path / "no" / "out.pickle", timeline())
    assert [path.name for path in tmp_path.iterdir()] == ["out.pickle"]
