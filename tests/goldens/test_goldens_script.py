"""What records golden files, as far as it goes without a GPU: form, processes, and the calls on a card of paper."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from goldens.handmade import MIB, ROOT, TENSOR, gelu, write
from truth.fresh_process import run_fresh

from memplan.trace.card_run import golden_format as form

golden_file = importlib.import_module("golden_file")  # of benchmarks/; handmade.py says where
steps = importlib.import_module("golden_steps")  # of tools/gpu/, as all that follow
measuring = importlib.import_module("golden_measure")
golden = importlib.import_module("golden")

SNAPSHOTS = sorted((ROOT.parent / "shared" / "data" / "cuda_snapshots").glob("*.json.gz"))


def head(events: Any, segments: Any) -> dict[str, Any]:
    return gelu() | {"events": events, "segments": segments}


def entries(trace: list[dict[str, Any]], base: int) -> list[tuple[Any, ...]]:
    return [(e["action"], e.get("addr", base) - base, e["size"], e["stream"], e.get("device_free")) for e in trace]


# The form


def test_the_compact_form_of_a_history_is_the_one_described() -> None:
    content = gelu()
    snapshot = golden_file.Golden(
        Path("gelu"), "gelu", "layers", "", (9, 0), "", {}, {}, golden_file.Peak(0, 0), (), None,
        content["allocator_settings"], content["events"], tuple(map(tuple, content["segments"])), None, None, (),
    ).snapshot()  # fmt: skip
    events, segments = form.compact(snapshot)
    assert (events, segments) == (content["events"], content["segments"])


def test_what_is_compacted_is_read_back(tmp_path: Path) -> None:
    """Streams, a private pool, waiting for a stream, running out, giving back, and a free that came from before."""
    base = 0x7E00_0020_0000
    rows = [
        ("segment_alloc", 0, 2 << 20, 0), ("alloc", 0, 100, 0), ("alloc", 512, 513, 7), ("free_requested", 0, 100, 0),
        ("free_completed", 0, 100, 0), ("free_requested", 512, 513, 7), ("alloc", 0, 700, 0), ("snapshot", 0, 0, 0),
        ("free_completed", 512, 513, 7), ("free_requested", 4096, 9, 0), ("free_completed", 4096, 9, 0),
        ("segment_map", 8 << 20, 2 << 20, 0), ("segment_unmap", 8 << 20, 2 << 20, 0), ("segment_free", 0, 2 << 20, 0),
    ]  # fmt: skip
    trace: list[dict[str, Any]] = [
        {"action": action, "addr": base + place, "size": size, "stream": stream} for action, place, size, stream in rows
    ]
    trace.insert(7, {"action": "oom", "size": 1 << 40, "device_free": 12345, "stream": 0})
    trace[2]["pool_id"] = trace[5]["pool_id"] = trace[9]["pool_id"] = (0, 1)
    blocks = [
        {"size": 1 << 20, "requested_size": 9 << 20, "state": "inactive"},
        {"size": 1 << 20, "requested_size": 700, "state": "active_pending_free"},
    ]
    held = {"address": base, "total_size": 2 << 20, "stream": 7, "segment_type": "small", "blocks": blocks,
            "segment_pool_id": (0, 1), "is_expandable": True}  # fmt: skip
    events, segments = form.compact({"device_traces": [trace], "segments": [held]})
    assert events["actions"] == "saafraocRCmud"
    read = golden_file.read(write(tmp_path, head(events, segments))).snapshot()
    names = {0: 0, 7: 1}
    expected = [row | {"stream": names[row["stream"]]} for row in trace if row["action"] != "snapshot"]
    assert entries(read["device_traces"][0], golden_file.FIRST_ADDRESS) == entries(expected, base)
    pools = [row["pool_id"] for row in read["device_traces"][0]]
    assert pools == [row.get("pool_id", (0, 0)) for row in expected]
    (segment,) = read["segments"]
    assert (segment["stream"], segment["segment_pool_id"], segment["is_expandable"]) == (1, (0, 1), True)
    assert [block["state"] for block in segment["blocks"]] == ["inactive", "active_pending_free"]
    assert [block["requested_size"] for block in segment["blocks"]] == [0, 700]


@pytest.mark.parametrize("path", SNAPSHOTS or [None], ids=lambda path: path.name if path else "none")
def test_a_real_history_survives_and_is_small(path: Path | None, tmp_path: Path) -> None:
    if path is None:
        pytest.skip("the real snapshots are not here")
    snapshot = json.loads(gzip.decompress(path.read_bytes()))
    events, segments = form.compact(snapshot)
    written = write(tmp_path, head(events, segments))
    trace = snapshot["device_traces"][0]
    base = min(row["addr"] for row in [*trace, *({"addr": s["address"]} for s in snapshot["segments"])])
    read = golden_file.read(written).snapshot()
    assert entries(read["device_traces"][0], golden_file.FIRST_ADDRESS) == entries(trace, base)
    assert sum(s["total_size"] for s in read["segments"]) == sum(s["total_size"] for s in snapshot["segments"])
    assert written.stat().st_size < 3 * len(trace)  # 113 files of some thousand events stay far under 10 MB


def test_the_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    content = gelu()
    first = form.packed(content)
    time.sleep(1.1)  # a time stamp of gzip's would tell
    assert form.packed(dict(reversed(content.items()))) == first
    assert form.write(tmp_path / "a" / "gelu.json.gz", content) == len(first)
    assert (tmp_path / "a" / "gelu.json.gz").read_bytes() == first
    assert golden_file.read(tmp_path / "a" / "gelu.json.gz").name == "gelu"
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "gelu.json.gz"]


def test_the_largest_files_lose_their_events_and_say_so(tmp_path: Path) -> None:
    small = gelu()
    large: dict[str, Any] = gelu() | {"name": "large"}
    large["events"] = {**large["events"], "sizes": list(range(20_000))}
    form.write(tmp_path / "gelu.json.gz", small)
    size = form.write(tmp_path / "large.json.gz", large)
    assert form.shrink(tmp_path, 10 * size) == []
    assert form.shrink(tmp_path, size) == ["large.json.gz"]
    lost = golden_file.read(tmp_path / "large.json.gz")
    assert lost.events is None
    assert "events left out" in lost.notes[0]
    assert golden_file.read(tmp_path / "gelu.json.gz").events is not None


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        ((torch.zeros(2, 3), [1, 1], None), {"groups": 1}, "f32[2,3] [1,1] - groups=1"),
        ((torch.zeros(2, 3).t().bfloat16(),), {}, "bf16[3,2]/1,3"),
        ((torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),), {}, "f32[1,2,3,3]/18,1,6,2"),
        (([torch.zeros(4)] * 20, 0.5, True), {}, "(20 of them, first f32[4]) 0.5 True"),
        ((torch.eye(2).to_sparse(),), {"dtype": torch.float16}, "f32[2,2]/sparse_coo dtype=torch.float16"),
    ],
)
def test_keys_of_ops(args: Any, kwargs: Any, key: str) -> None:
    assert form.op_key(args, kwargs) == key


def test_names_of_folders_take_no_sign_that_tools_refuse() -> None:
    folder = golden.folder_of(Path("out"), "NVIDIA H100 80GB HBM3", "2.11.0+cu130")
    assert folder == Path("out/nvidia-h100-80gb-hbm3/2.11.0-cu130")


# The steps


def test_every_step_has_a_name_of_its_own_and_the_zoo_is_whole() -> None:
    zoo = (ROOT / "benchmarks" / "zoo").glob("*.py")
    written = sum(path.read_text(encoding="utf-8").count("@zoo\n") for path in zoo)
    found = {name: steps.subjects(name) for name in steps.modules()}
    assert {name: broken for name, (_, broken) in found.items() if broken} == {}
    names = list(itertools.chain.from_iterable(some for some, _ in found.values()))
    assert len(names) == len(set(names))
    assert sum(s.set == "zoo" for some, _ in found.values() for s in some.values()) == written + 11  # and in loops
    assert {s.steps for s in found["golden_layers"][0].values()} == {3}


def test_a_module_that_lacks_a_library_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "golden_zoo.volumes", None)
    found, broken = steps.subjects("volumes")
    assert found == {}
    assert broken["volumes"].startswith("ModuleNotFoundError: ")
    assert "gan" in steps.subjects("generative")[0]


def test_on_the_card_everything_is_made_there() -> None:
    devices, casts = list[str](), list[str]()

    def default() -> str:
        """torch.get_default_device would start CUDA."""
        modes = torch.overrides._get_current_function_mode_stack()
        return str(modes[-1].device) if modes else "none"

    def build() -> Any:
        devices.append(default())

        def step() -> None:
            devices.append(default())
            casts.append(torch.autocast("cpu", enabled=False).device)
            assert isinstance(torch.autocast("cuda", enabled=False), plain)

        return step

    plain = torch.autocast
    steps.on_card(build)()()
    assert devices == ["cuda", "cuda"]
    assert casts == ["cuda"]
    assert default() == "none"
    assert torch.autocast is plain


# The measuring, on a card of paper: every function of torch.cuda takes the arguments that the real one takes


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Answers as `handmade.gelu` describes them. What was called is in ``calls``."""
    content = gelu()
    snapshot = golden_file.read(write(tmp_path, content)).snapshot()
    peaks = [content["build"], *content["peaks"]]
    allocated, reserved = ([pair[k] for pair in peaks] for k in (0, 1))
    stats = {"requested_bytes": {"all": {"current": 0, "peak": 0}}}
    properties = torch.cuda.get_device_properties
    answers: dict[str, Any] = {
        "init": [None], "set_device": [None], "synchronize": [None], "reset_peak_memory_stats": [None],
        "memory_allocated": [0, content["end"][0]], "memory_reserved": [0, content["end"][1]],
        "max_memory_allocated": allocated, "max_memory_reserved": reserved,
        "mem_get_info": [(100 * TENSOR, 105 * TENSOR + 520 * MIB)], "memory_stats_as_nested_dict": [stats],
    }  # fmt: skip
    calls: dict[str, Any] = {}
    for name, values in answers.items():
        answer = itertools.chain(values, itertools.repeat(values[-1]))
        calls[name] = create_autospec(getattr(torch.cuda, name), side_effect=lambda *_, it=answer, **__: next(it))
        monkeypatch.setattr(torch.cuda, name, calls[name])
    for name, value in (("_snapshot", snapshot), ("_record_memory_history", None)):
        calls[name] = create_autospec(getattr(torch.cuda.memory, name), return_value=value)
        monkeypatch.setattr(torch.cuda.memory, name, calls[name])

    class Properties:
        name, major, minor, multi_processor_count, total_memory = "NVIDIA H200", 9, 0, 132, 150_000_000_000

    calls["properties"] = create_autospec(properties, return_value=Properties())
    monkeypatch.setattr(torch.cuda, "get_device_properties", calls["properties"])
    monkeypatch.setattr(steps, "on_card", lambda build: build)
    return calls


def small() -> Any:
    """The same ops as the single layer, on the CPU and small."""
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8)

    def step() -> None:
        torch.nn.functional.gelu(x @ weight).sum().backward()

    return step


def test_what_is_measured_is_a_golden_file(paper: dict[str, Any], tmp_path: Path) -> None:
    content = measuring.golden(steps.Subject("gelu", "layers", "golden_layers", small), alone=True)
    form.write(tmp_path / "written" / "gelu.json.gz", content)
    read = golden_file.read(tmp_path / "written" / "gelu.json.gz")
    described = golden_file.read(write(tmp_path, gelu()))
    for name in ("name", "set", "gpu", "capability", "build", "steps", "context", "settings", "events", "segments"):
        assert getattr(read, name) == getattr(described, name), name
    assert read.notes == ()
    assert read.torch == torch.__version__
    assert read.calls is not None
    assert {op: len(rows) for op, rows in read.calls.items()} == {"aten.mm.default": 2}  # one is the backward's
    first, last = paper["_record_memory_history"].call_args_list
    assert first.args == ("all",)
    assert (first.kwargs["context"], last.args) == (None, (None,))
    assert paper["reset_peak_memory_stats"].call_count >= 4


@pytest.mark.slow
def test_a_child_writes_its_file_and_the_run_its_index(
    paper: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = steps.Subject("gelu", "layers", "golden_layers", small)
    monkeypatch.setattr(steps, "subjects", lambda _: ({"gelu": subject}, {"golden_layers": "no torch"}))
    output = tmp_path / "out"
    row = json.loads(json.dumps(golden.child("gelu", "golden_layers", output, False))) | {"seconds": 2.0}
    assert (row["allocated"], row["reserved"], row["events"]) == (5 * TENSOR, 5 * TENSOR, 18)
    assert golden.line_of("gelu", row).split()[1:4] == ["671,088,640", "allocated", "671,088,640"]
    (folder,) = golden.finish(output, {"gelu": row, "b": {"error": "broke"}}, [{"after": "nothing"}])
    assert folder == output / "nvidia-h200" / form.slug(torch.__version__)
    assert golden_file.read(folder / "gelu.json.gz").peak.reserved == 5 * TENSOR
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    assert index["gpu"]["name"] == "NVIDIA H200"
    assert index["steps"]["gelu"]["bytes"] == (folder / "gelu.json.gz").stat().st_size
    assert index["steps"]["b"] == {"error": "broke"}
    assert golden.child("other", "golden_layers", output, False) == {"error": "no torch"}


def test_a_step_that_raises_is_an_error_of_its_own(
    paper: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.\nand more")

    subject = steps.Subject("gelu", "layers", "golden_layers", build)
    monkeypatch.setattr(steps, "subjects", lambda _: ({"gelu": subject}, {}))
    row = golden.child("gelu", "golden_layers", tmp_path / "out", True)
    assert row == {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 GiB."}
    assert golden.line_of("gelu", row).endswith("GiB.")


@pytest.mark.slow
def test_what_cannot_be_had_is_a_note_and_the_peaks_stand(paper: dict[str, Any], tmp_path: Path) -> None:
    paper["_snapshot"].side_effect = RuntimeError("no room\nfor it")
    failing = iter([None, None, None])

    def build() -> Any:
        return lambda: next(failing)

    content = measuring.golden(steps.Subject("gelu", "layers", "golden_layers", build), alone=False)
    assert content["notes"] == ["no events: RuntimeError: no room", "no workspaces: StopIteration: no message"]
    form.write(tmp_path / "gelu.json.gz", content)
    read = golden_file.read(tmp_path / "gelu.json.gz")
    assert (read.events, read.workspaces, read.context) == (None, None, None)
    assert read.peak.allocated == 5 * TENSOR


def test_the_workspace_of_an_op_is_what_its_results_do_not_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 128 bytes that asked for 5000 more while it ran, of which 1000 are kept, the first time alone."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    told = iter([(700, 700), (1828, 5828), (1828, 1828), (1956, 2456), (1956, 1956), (1956, 1956)])
    mode = measuring.Workspaces()
    monkeypatch.setattr(mode, "requested", lambda: next(told))
    x, weight = torch.zeros(4, 8), torch.zeros(8, 8)
    with mode:
        one = x @ weight
        two = x @ weight
        _ = one.t()
    assert two.shape == (4, 8)
    key = "f32[4,8] f32[8,8]"
    assert mode.rows() == [["aten.mm.default", key, 5000, 500, 1000, 2, [128]]]
    assert mode.calls() == {"aten.mm.default": [0, 0]}


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_stops() -> None:
    script = str(ROOT / "tools" / "gpu" / "golden.py")
    done = run_fresh(
        f"import runpy, sys; sys.argv = [{script!r}, '--only', 'gpt2']; runpy.run_path({script!r}, run_name='__main__')"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("golden.py: torch ")
    assert line.endswith("Expected a machine with an NVIDIA GPU. Run this script there (see tools/gpu/README.md).")


def test_an_unknown_step_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = steps.subjects("golden_layers")
    monkeypatch.setattr(steps, "subjects", lambda **_: (layers[0], {"volumes": "no monai"}))
    chosen, _ = golden.choose(["gelu"], None)
    assert [subject.name for subject in chosen] == ["gelu"]
    with pytest.raises(SystemExit, match="2"):
        golden.choose(["layer_nrom"], None)
    said = capsys.readouterr().err
    assert said.startswith("golden.py: there is no step 'layer_nrom'")
    assert "Did you mean layer_norm" in said
    assert "volumes cannot be imported (no monai)" in said


CHILD = """
import json, os, sys, time
what = sys.argv[1]
print("{not json, noise")
if what.startswith("hang"):
    time.sleep(60)
if what == "crash":
    print("the reason", file=sys.stderr)
    os._exit(3)
print(json.dumps({"name": what}))
print("and more noise")
"""


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: str, seconds: float) -> dict[str, Any]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(golden, "__file__", str(script))
    monkeypatch.setattr(golden, "LAST_START", 0)
    jobs = [golden.Job(name, [name]) for name in names.split()]
    return dict(golden.run_all(jobs, 2, time.monotonic() + seconds))


def test_a_step_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(golden, "LONGEST_STEP", 1.5)
    found = run(monkeypatch, tmp_path, "crash hang good", 60)
    assert found["good"]["name"] == "good"
    assert found["crash"]["error"] == "the reason"
    assert "no answer within 1.5 s" in found["hang"]["error"]


def test_out_of_budget_it_stops_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = time.monotonic()
    found = run(monkeypatch, tmp_path, "hang hang2 good more", 1.0)
    assert time.monotonic() - begun < 10
    assert "the budget of seconds was over" in found["hang"]["error"]
    assert found["more"] == {"error": "not started: the budget of seconds was over"}


def test_the_index_keeps_what_was_measured_before(tmp_path: Path) -> None:
    good = {"gpu": {"name": "x"}, "versions": {"torch": "2"}, "environment": {}, "set": "zoo", "bytes": 1, "notes": []}
    golden.write_index(tmp_path, {"a": good, "b": {"error": "broke", "seconds": 1.0}}, [{"after": "x"}], [])
    write(tmp_path, gelu(), "a")
    golden.write_index(tmp_path, {"a": {"error": "later"}, "c": good}, None, [])
    index = json.loads((tmp_path / "index.json").read_text())
    assert list(index["steps"]) == ["a", "b", "c"]
    assert index["steps"]["a"]["bytes"] == 1
    assert index["steps"]["b"]["error"] == "broke"
    assert index["contexts"] == [{"after": "x"}]
