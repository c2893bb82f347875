"""Reading a snapshot: every form that torch has written, and one clear error for everything else."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation.histories import MIB, REAL, A, B, block, event, frame, freed, out_of_memory, segment

from memplan.errors import DeviceError, SnapshotFormatError, TargetError, UsageError
from memplan.simulation.snapshots.read import Frame, read_snapshot
from memplan.simulation.timeline import Block, Segment

WHOLE = segment(A, block(20 * MIB, "active_allocated"))


def snapshot(*segments: dict[str, Any], trace: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"segments": [*segments], "device_traces": [trace or []], **more}


FORMS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    **{f"protocol {number}": lambda data, number=number: pickle.dumps(data, number) for number in range(2, 6)},
    "json": lambda data: json.dumps(data).encode(),
    "json with spaces": lambda data: b" \n" + json.dumps(data, indent=2).encode(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_of_a_file_says_the_same(form: str, packed: bool, tmp_path: Path) -> None:
    data = out_of_memory()
    text = FORMS[form](data)
    file = tmp_path / "any name"
    file.write_bytes(gzip.compress(text) if packed else text)
    found, direct = read_snapshot(file), read_snapshot(data)
    assert found.source == str(file)
    for name in ("gpu", "segments", "entries", "settings", "stacks", "block_stacks"):
        assert getattr(found, name) == getattr(direct, name)


def test_what_is_in_it() -> None:
    found = read_snapshot(out_of_memory())
    assert [(s.address, s.size, [b.state for b in s.blocks]) for s in found.segments] == [
        (A, 48 * MIB, ["inactive", "active_allocated"]),
        (B, 48 * MIB, ["active_allocated", "inactive"]),
    ]
    oom = found.entries[-1]
    assert oom[:5] == ("oom", 4 * MIB, 40 * MIB, 0, None)
    assert found.stacks[oom.stack][1] == Frame("/home/me/train.py", 7, "forward")
    assert len(found.stacks) == 2  # none, and the one that all blocks came from
    assert found.block_stacks == {A + 24 * MIB: oom.stack, B: oom.stack}


def test_old_formats() -> None:
    frames = [frame("a.py", 3, "f")]
    old = segment(
        A,
        {"size": 512, "state": "active_allocated", "history": [{"addr": A, "real_size": 300, "frames": frames}]},
        {"size": 512, "state": "active_awaiting_free"},
        {"size": 2 * MIB - 1024, "state": "inactive", "history": [{"addr": 1, "real_size": 700}]},
    )
    del old["segment_type"]
    found = read_snapshot({"segments": [old]})
    blocks = (
        Block(A, 512, 300, "active_allocated"),
        Block(A + 512, 512, 512, "active_pending_free"),
        Block(A + 1024, 2 * MIB - 1024, 0, "inactive"),
    )
    assert found.segments == (Segment(A, 2 * MIB, 0, True, (0, 0), False, blocks),)
    assert found.stacks[found.block_stacks[A]] == (Frame("a.py", 3, "f"),)
    assert found.entries == ()


@pytest.mark.parametrize("pool", [(3, 4), [3, 4]])
def test_new_fields(pool: Any) -> None:
    trace = [event("alloc", A, 20 * MIB, pool_id=pool, user_metadata="x", compile_context="N/A", time_us=5)]
    new = WHOLE | {"segment_pool_id": pool, "is_expandable": True, "stream": 94127, "registration_counter": -1}
    found = read_snapshot(snapshot(new, trace=trace, external_annotations=[{"stage": "START"}], unheard_of=3))
    assert (found.segments[0].pool, found.segments[0].expandable, found.segments[0].stream) == ((3, 4), True, 94127)
    assert found.entries[0].pool == (3, 4)


def test_an_action_of_a_newer_torch_is_left_out_and_said() -> None:
    trace = [*freed(A, 5), event("wo\x1brld", A, 5), event("wo\x1brld", A, 5), event("snapshot", 0, 0)]
    found = read_snapshot(snapshot(WHOLE, trace=trace))
    assert len(found.entries) == 2
    assert found.notes == ("2 events 'wo?rld' were left out: unknown",)


def test_several_gpus_need_a_choice() -> None:
    both = snapshot(WHOLE, segment(B, block(2 * MIB), device=2))
    both["device_traces"] = [[], freed(A, 3), [event("snapshot", 0, 0)]]
    with pytest.raises(DeviceError, match=r"GPUs 0, 1, 2.*--gpu"):
        read_snapshot(both)
    assert read_snapshot(both, 2).segments[0].address == B
    assert [entry.action for entry in read_snapshot(both, 1).entries] == ["free_requested", "free_completed"]
    with pytest.raises(DeviceError, match="nothing of GPU 3"):
        read_snapshot(both, 3)
    with pytest.raises(DeviceError, match="nothing of GPU 5"):
        read_snapshot(snapshot(WHOLE), 5)


def test_a_gpu_that_only_noted_the_snapshot_is_none() -> None:
    data = snapshot(WHOLE)
    data["device_traces"] = [[event("snapshot", 0, 0)]] * 8
    assert read_snapshot(data).gpu == 0


def test_nothing_held_and_nothing_recorded() -> None:
    found = read_snapshot({"segments": []})
    assert (found.gpu, found.segments, found.entries) == (0, (), ())


def change(data: dict[str, Any], path: str, value: Any) -> None:
    """``segments.0.blocks`` names a place; a value that is `del` takes it out."""
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = data
    for step in steps:
        place = place[step]
    place[last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("segments", {}, "segments is of type dict, not a list"),
        ("segments", None, "segments is missing"),
        ("segments.0", 3, "a segment is 3"),
        ("segments.0.address", -1, "address is -1"),
        ("segments.0.address", 1 << 63, "address is 9223372036854775808"),
        pytest.param("segments.0.address", 10**5000, "address is of type int", id="huge"),
        ("segments.0.address", 4.0, "address is 4.0"),
        ("segments.0.address", True, "address is True"),
        ("segments.0.total_size", "20", "total_size is '20'"),
        ("segments.0.total_size", 5, "hold 50331648 bytes, not 5"),
        ("segments.0.stream", [], "stream is of type list"),
        ("segments.0.stream", 1 << 64, "stream is of type int"),
        ("segments.0.device", 4096, "more than 1024 GPUs"),
        ("segments.0.device", "cuda", "device is 'cuda'"),
        ("segments.0.segment_type", "medium", "segment_type is 'medium'"),
        ("segments.0.segment_pool_id", (1, 2, 3), "the id of a pool"),
        ("segments.0.segment_pool_id", "ab", "the id of a pool"),
        ("segments.0.segment_pool_id", (-1, 0), "out of range"),
        ("segments.0.blocks", None, "blocks is missing"),
        ("segments.0.blocks", [], "hold 0 bytes"),
        ("segments.0.blocks.0", [], "a block is of type list"),
        ("segments.0.blocks.0.size", 0, "size is 0"),
        ("segments.0.blocks.0.size", 1 << 62, "hold"),
        ("segments.0.blocks.1.address", 77, "a block stands at 77"),
        ("segments.0.blocks.1.state", "free\x1b[2J", r"state of a block is 'free\?\[2J'"),
        ("segments.0.blocks.1.state", None, "state of a block is missing"),
        ("segments.0.blocks.1.requested_size", 25 * MIB, "for a request of 26214400"),
        ("segments.0.blocks.1.requested_size", None, "requested_size is missing"),
        ("segments.0.blocks.1.frames", 7, "frames is 7"),
        ("segments.0.blocks.1.frames", [7], "a frame is 7"),
        ("segments.0.blocks.1.frames", [{"filename": 3}], "no file, line and name"),
        ("segments.1.address", A + MIB, "overlap"),
        ("device_traces", "x", "device_traces is 'x'"),
        ("device_traces", [[]] * 2000, "more than 1024 GPUs"),
        ("device_traces.0", 3, "is 3, not a list"),
        ("device_traces.0.0", 3, "an event is 3"),
        ("device_traces.0.0.action", None, "an action is missing"),
        ("device_traces.0.0.action", ["alloc"], "an action is of type list"),
        ("device_traces.0.0.addr", "x", "addr is 'x'"),
        ("device_traces.0.0.size", 0, "size is 0"),
        ("device_traces.0.0.size", -5, "size is -5"),
        ("device_traces.0.0.pool_id", 3, "the id of a pool is 3"),
        ("device_traces.0.0.frames", "main.py", "frames is 'main.py'"),
        ("allocator_settings", [], "allocator_settings is of type list"),
        ("allocator_settings.max_split_size", [], "max_split_size is of type list"),
        ("allocator_settings.max_split_size", float("inf"), "max_split_size is inf"),
        ("allocator_settings.roundup_power2_divisions", {"1": "x"}, "roundup_power2_divisions is of type dict"),
        ("allocator_settings.roundup_power2_divisions", {"a": 1}, "cannot be read"),
    ],
)
def test_every_field_is_checked(path: str, value: Any, words: str, tmp_path: Path) -> None:
    data = copy.deepcopy(out_of_memory())
    change(data, path, value)
    with pytest.raises(UsageError, match=words):
        read_snapshot(data)
    file = tmp_path / "a.pickle"
    file.write_bytes(pickle.dumps(data))
    with pytest.raises(UsageError) as caught:
        read_snapshot(file)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_bytes_than_can_be_counted() -> None:
    data = out_of_memory()
    for row in data["device_traces"][0]:
        row["size"] = (1 << 62) // 2
    with pytest.raises(SnapshotFormatError, match="of more than 4611686018427387904 bytes"):
        read_snapshot(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04rest", "zip file, as torch.save writes it"),
        (b"\x7fELF", "neither a pickle"),
        (b"(dp0\n.", "neither a pickle of protocol 2 to 5 nor JSON"),
        (b"{", "is not JSON"),
        (b'{"segments": NaN}', "NaN is no number"),
        (b'{"segments": [' + b"1" * 5000 + b"]}", "a number of more than 4300 digits; 19 are read at most"),
        (b"[" * 100_000, "is nested too deep to be read"),
        (b'{"a\xff', "cannot be read: 'utf-8' codec"),
        (b"{}", "no segments"),
        (b"[]", "holds a list"),
        (b"\x1f\x8bnot", "damaged gzip file"),
        (gzip.compress(b"{}", mtime=0)[:-6], "damaged gzip file"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps("segments"), "no segments"),
        (pickle.dumps({"model": 1}), "no segments"),
        (pickle.dumps(out_of_memory())[:1000], "ends in the middle"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_words(data: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(data)
    with pytest.raises(SnapshotFormatError, match=words) as caught:
        read_snapshot(file)
    assert str(caught.value).startswith(str(file))


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        read_snapshot(tmp_path)
    assert str(caught.value) == f"{tmp_path} is a folder. Expected the file of a snapshot. Check the path."
    with pytest.raises(TargetError, match="No such file"):
        read_snapshot(tmp_path / "missing")
    with pytest.raises(TargetError, match="cannot be read"):
        read_snapshot("a\0b")
    with pytest.raises(TargetError, match="no regular file"):
        read_snapshot("/dev/zero")
    with pytest.raises(SnapshotFormatError, match="a int"):
        read_snapshot(3)  # pyright: ignore[reportArgumentType]


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(3 << 30)  # takes no room
    with pytest.raises(SnapshotFormatError, match="larger than 2 GiB"):
        read_snapshot(tmp_path / "large")


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'wb').write(b'{{\"segments\": []}}')"]):
        assert read_snapshot(pipe).segments == ()


def test_a_gzip_bomb_is_stopped_early(tmp_path: Path) -> None:
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(bytes(300 << 20), 1))
    with pytest.raises(SnapshotFormatError, match=r"unpacks to more than 2\d\d MiB"):
        read_snapshot(file)


def test_one_list_named_many_times_is_stopped_early(tmp_path: Path) -> None:
    rows = [block(512)] * 50_000
    data = {"segments": [{"device": 0, "address": A, "total_size": 512 * 50_000, "blocks": rows}] * 50_000}
    file = tmp_path / "laughs.pickle"
    file.write_bytes(pickle.dumps(data))
    with pytest.raises(SnapshotFormatError, match="lists more than it has room for"):
        read_snapshot(file)


def test_what_memplan_wrote_for_the_cpu_is_no_snapshot_of_cuda() -> None:
    with pytest.raises(SnapshotFormatError, match="on the CPU"):
        read_snapshot(snapshot(WHOLE, memplan={"device": "cpu"}))


@pytest.mark.skipif(not REAL.is_dir(), reason="the real snapshots are not here")
def test_the_real_ones() -> None:
    for file in sorted(REAL.glob("*.json.gz")):
        raw = json.loads(gzip.decompress(file.read_bytes()))
        found = read_snapshot(file)
        assert sum(s.size for s in found.segments) == sum(s["total_size"] for s in raw["segments"])
        assert len(found.entries) == len(raw["device_traces"][0])
        assert str(found.settings) == ""
