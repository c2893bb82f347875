"""The kinds of files that memplan reads: how mutants of each are made, and all that is done with one."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from mutations import TEXTS, Repair, Seed, damaged, twice
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memplan
from memplan import Plan, Sweep, Trace, devices
from memplan._bytes import parse_bytes
from memplan._json import Unreadable
from memplan.checks.check import check
from memplan.checks.ignores import parse_ignore
from memplan.checks.registry import IDS
from memplan.cudnn.answer_cache import AnswerCache, kept
from memplan.cudnn.questions import ExecutionPlan
from memplan.errors import InputError, MemplanError
from memplan.explanation.explain import explain_trace
from memplan.explanation.model import Explanation
from memplan.explanation.why import why
from memplan.planning.relative_budget import read_any_budget
from memplan.reports import cache as cache_report
from memplan.reports import check as check_report
from memplan.reports import devices as devices_report
from memplan.reports import guard as guard_report
from memplan.reports import perfetto
from memplan.reports.ci import github, junit, sarif
from memplan.reports.ci.annotations import GROWTH, annotations_of_findings, annotations_of_outcome
from memplan.reports.html.page import page_of
from memplan.reports.html.saved_results import read_results, result_of
from memplan.reports.replay import dumps
from memplan.reports.replay import report as replay_report
from memplan.reports.results import html_of
from memplan.reports.terminal import text_of
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import cases
from memplan.simulation.snapshots.write import frames_of, snapshot_of
from memplan.studies.axes.ranges import values_of
from memplan.studies.comparisons.sides import side_of
from memplan.studies.guarding.baseline import Baseline, Figures, read_baseline
from memplan.studies.guarding.outcome import allowance, baseline_of, compare_with
from memplan.studies.guarding.recorded_figures import RecordedFigures, figures_of_trace
from memplan.studies.sweeps.points import KNOWN
from memplan.trace.naming.step_parts import loss_of, optimizer_of
from memplan.trace.naming.targets import resolve
from memplan.trace.records import Assumption, Call, Counters, Engines, FunctionLines, LineSpan
from memplan.verification.proof.proof import Cut, Proof
from memplan.verification.proof.rounding import Rounded

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(_TESTS))
from reports import saved_results  # noqa: E402  # pyright: ignore[reportMissingImports]  # of the tests
from reports.outcomes import PROOF, WRONG  # noqa: E402  # pyright: ignore[reportMissingImports]

_DATA = _TESTS / "data"
_SETTINGS = "expandable_segments:True,max_split_size_mb:64"


@dataclass(frozen=True)
class Kind:
    """A kind of file: its mutants, and a function that reads one and yields all texts that come of it."""

    mutant: Callable[[Random], bytes]
    use: Callable[[bytes, Path], Iterator[str]]


def _json_kind(values: list[Any], use: Callable[[bytes, Path], Iterator[str]], repair: Repair | None = None) -> Kind:
    seeds = [Seed(value, repair) for value in values]

    def mutant(random: Random) -> bytes:
        seed, which = random.choice(seeds), random.random()
        if which < 0.15:
            return damaged(seed.text.encode(), random)
        if which < 0.2:
            return twice(seed.text.encode(), random)
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
    both = cases(found, [parse_settings(_SETTINGS)], None if len(data) % 2 else 1 << 27)
    text = dumps(both)
    if _is_drawn(data):
        yield _page(text.encode(), file)
        yield text_of(replay_report(both))


def _read(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _page(data: bytes, file: Path) -> str:
    """Return the page of a file, without the scripts that every page has."""
    file.write_bytes(data)
    page = page_of(read_results(str(file)))
    return page.partition("</style>")[2].partition("<script>")[0].replace("\t", " ")


def _drawn(draw: Callable[[io.StringIO], object]) -> str:
    out = io.StringIO()
    draw(out)
    return out.getvalue()


def _use_trace(data: bytes, file: Path) -> Iterator[str]:
    trace = Trace.from_json(_read(data), "a.json")
    yield str(trace) + repr(trace)
    explanation = explain_trace(trace, title="a.json", train=any(op.phase == "backward" for op in trace.ops))
    yield from _shown(explanation, drawn=_is_drawn(data))
    if _is_drawn(data):
        assert Trace.from_json(trace.to_json()) == trace
        findings = check(trace)
        yield "\n".join(map(str, findings))
        yield text_of(check_report.report("a", findings, 5))
        yield github.dumps(annotations_of_findings("a", findings, ("warning",)))
        sarif.dumps(annotations_of_findings("a", findings, ()))
        yield junit.dumps("a", [one.id for one in findings], annotations_of_findings("a", findings, ("warning",)))
        yield from _compared(trace)
        json.loads(perfetto.dumps(trace, explanation))
        yield _page(data, file)
        if trace.device != "cpu":
            memplan.simulate(trace, settings=_SETTINGS)
        yield from _guarded(Baseline((_figures(),)), figures_of_trace(trace, target="net", settings=None))


def _use_explanation(data: bytes, file: Path) -> Iterator[str]:
    plain = memplan._json.parse(_read(data))
    if not isinstance(plain, dict):
        raise Unreadable("it is no mapping")
    explanation = Explanation.from_dict(plain)
    yield from _shown(explanation, drawn=_is_drawn(data))
    if _is_drawn(data):
        yield from _compared(explanation)
        yield _page(data, file)


def _shown(explanation: memplan.Explanation, *, drawn: bool) -> Iterator[str]:
    yield str(explanation) + repr(explanation)
    explanation.to_json()
    if drawn:
        yield html_of(explanation)


def _compared(what: Any) -> Iterator[str]:
    """Yield what a comparison with a good explanation says."""
    found = memplan.compare(what, _good())
    found.to_json()
    yield str(found)


def _use_plan(data: bytes, file: Path) -> Iterator[str]:
    plan = Plan.from_json(_read(data))
    yield str(plan) + repr(plan)
    if _is_drawn(data):
        yield from _compared(plan)
        assert Plan.from_json(plan.to_json()) == plan
        yield html_of(plan)
        yield _page(data, file)


def _use_sweep(data: bytes, file: Path) -> Iterator[str]:
    sweep = Sweep.from_json(_read(data))
    yield str(sweep) + repr(sweep) + "\n".join(map(str, (*sweep.fits, *sweep.crossings, *sweep.engine_changes)))
    sweep.to_json()
    if _is_drawn(data):
        yield html_of(sweep)
        yield _page(data, file)
    for number in range(1, min(4, len(sweep.rows)) + 1):
        try:
            point = sweep.point(number)
            side_of(point, "a")
            sweep.point(**point.values)
        except InputError as error:
            yield str(error)


def _use_baseline(data: bytes, file: Path) -> Iterator[str]:
    file.write_bytes(data)
    baseline = read_baseline(file)
    now = _taken()
    yield from _guarded(baseline, now)
    baseline.updated(now.figures).to_json()
    try:
        baseline_of(baseline, now.figures, "a.json")
    except MemplanError as error:
        yield str(error)


def _guarded(baseline: Baseline, now: RecordedFigures) -> Iterator[str]:
    for before in baseline.steps:
        outcome = compare_with(before, now, "1%")
        yield text_of(guard_report.report(outcome, 5))
        yield github.dumps(annotations_of_outcome(outcome))
        yield junit.dumps("a", [GROWTH], annotations_of_outcome(outcome))
        sarif.dumps(annotations_of_outcome(outcome))
        page_of([result_of(outcome.to_json(), "a.json")])


def _use_result(data: bytes, file: Path) -> Iterator[str]:
    yield _page(data, file)


def _use_proof(data: bytes, file: Path) -> Iterator[str]:
    proof = Proof.from_json(_read(data))
    yield str(proof) + repr(proof)
    assert str(Proof.from_json(proof.to_json())) == str(proof)
    yield _page(data, file)


def _use_any_file(data: bytes, file: Path) -> Iterator[str]:
    file.write_bytes(data)
    yield str(side_of(str(file), "a").title)


def _layout_kind() -> Kind:
    """Layouts of exports, and weights of the wrong length: read all, or not at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [{"name": name, "shape": list(one.shape)} for name, one in named.items() if one.dtype == torch.float32]
    floats = sum(one.numel() for one in named.values() if one.dtype == torch.float32)
    inner = _json_kind([{"export": "net", "tensors": tensors}], lambda data, file: iter(()))

    def use(data: bytes, file: Path) -> Iterator[str]:
        file.write_bytes(data)
        weights = file.with_suffix(".bin")
        weights.write_bytes(torch.rand(floats).numpy().tobytes() + (b"abc" if len(data) % 7 == 0 else b""))
        before = {name: one.clone() for name, one in named.items()}
        try:
            memplan.load_weights(model, weights, file)
        except InputError:
            assert all(torch.equal(one, before[name]) for name, one in named.items()), "half of it was loaded"
            raise
        assert len(data) % 7, "three bytes too many were taken"
        yield "loaded"

    return Kind(inner.mutant, use)


def _answers_kind() -> Kind:
    content = {f"conv-{k}": [["eng1", 4096 * k], ["eng2", 0]] for k in range(1, 4)}
    inner = _json_kind([["memplan.cudnn 1", content]], lambda data, file: iter(()))

    def use(data: bytes, file: Path) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
            cache = AnswerCache("t4", 90100, {})
            cache.file.parent.mkdir(parents=True)
            cache.file.write_bytes(data)
            found = kept()
            yield text_of(cache_report.report(found))
            cache.read()
            yield "\n".join(cache.notes)

    return Kind(inner.mutant, use)


_ARGUMENTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "spec": (memplan.spec, ("8x3x224x224", "8x1024:int64<50257", "2x3:float16", "scalar", "4:bool")),
    "bytes": (parse_bytes, ("8 GiB", "1.5MiB", "512", "8g")),
    "budget": (read_any_budget, ("70%", "-2 GiB", "rtx4090", "8 GiB", "12.5 %")),
    "tolerance": (lambda text: allowance(text, 1 << 30), ("1%", "64 MiB", "0.5%")),
    "settings": (parse_settings, (
        "expandable_segments:True,max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2,>:8]",
        "garbage_collection_threshold:0.8",
    )),
    "optimizer": (optimizer_of, ("adamw", "sgd:lr=0.1,momentum=0.9", "none", "math:sqrt", "adam:betas=(0.9, 0.99)")),
    "loss": (loss_of, ("cross_entropy", "CrossEntropyLoss", "math:sqrt", "mse_loss")),
    "target": (resolve, ("net.py:make", "math:sqrt", "package.module:callable")),
    "axis": (lambda text: values_of(text, "batch"), ("1,2,4", "64:256:32", "96x96x48,128", "bf16,fp32", "0.1:1:0.1")),
    "ignore": (lambda text: parse_ignore(text, IDS), ("border-erosion", "border-erosion:encoder.*", "own-copies:a,b")),
    "device": (devices.find, ("h100", "rtx4090", "NVIDIA GeForce RTX 4090", "24 GiB")),
    "message": (why, (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.53 "
        "GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.30 GiB memory in use. Of the "
        "allocated memory 20.00 GiB is allocated by PyTorch, and 1.90 GiB is reserved by PyTorch but unallocated.",
    )),
}  # fmt: skip
"""Texts that people type or that come out of other files, by what reads them."""


def _arguments_kind() -> Kind:
    def mutant(random: Random) -> bytes:
        name = random.choice(sorted(_ARGUMENTS))
        text = random.choice(_ARGUMENTS[name][1])
        for _ in range(random.choice((1, 1, 2, 3))):
            at, other = (
                random.randrange(len(text) + 1),
                random.choice((*TEXTS, *_ARGUMENTS[name][1], ":", ",", "=", "x", "(")),
            )
            text = random.choice((
                text[:at] + other + text[at:], text[:at] + other, other + text[at:], text[:at],
                text[:at] + text[at + 1 :], text * random.choice((2, 40)), other,
            ))  # fmt: skip
        return f"{name}\n{text}".encode("utf-8", "surrogatepass")

    def use(data: bytes, file: Path) -> Iterator[str]:
        name, _, text = data.decode("utf-8", "surrogatepass").partition("\n")
        yield repr(_ARGUMENTS[name][0](text))

    return Kind(mutant, use)


def _build() -> Callable[[], None]:
    model = nn.Linear(64, 4)
    x = torch.randn(128, 64)
    return lambda: model(x).relu().sum().backward()


class _Many(nn.Module):
    """Ops of many kinds, so that what follows them by their arguments meets changed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 8, 3, stride=2), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm, self.group, self.rows = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(torch.relu(self.norm(self.up(F.pad(self.first(x), (1, 1, 1, 1))))), 2)
        y = self.group(torch.cat([y, y.flip(-1)], -1).roll(1, 2)) + F.avg_pool2d(y, 3, 1, 1).repeat(1, 1, 1, 2)
        y = F.pixel_shuffle(F.pixel_unshuffle(y[..., : y.shape[2] // 2 * 2, :], 2), 2)
        y = F.interpolate(y.narrow(2, 0, 4).rot90(1, (2, 3)), scale_factor=2)
        y = F.adaptive_avg_pool2d(torch.stack(y.chunk(2, -1)).sum(0), 4).unfold(2, 2, 1).mean(-1)
        z = self.rows(y.flatten(2).transpose(1, 2)) + self.table(words)[:, None]
        z = F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None]).squeeze(1)
        z = checkpoint(self.head, F.dropout(z.masked_fill(z > 4, 0.0), 0.1), use_reentrant=False)
        return F.cross_entropy(torch.einsum("btc->bc", z.clone().mul_(2)), words)


def _many() -> Callable[[], None]:
    model = _Many()
    x, words = torch.randn(2, 3, 16, 16), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x, words).backward()
        optimizer.step()

    return step


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


def _results() -> list[Any]:
    """Return a result of each kind that has no reader of its own but the page."""
    held = [{"format": "memplan.cache", "schema": 1, "kept": [{"path": "a", "what": "b", "number": 1, "bytes": 9}]}]
    texts = [saved_results.findings(), saved_results.replayed(), saved_results.compared(),
             saved_results.found_largest(), saved_results.watched(), saved_results.fitted(),
             devices_report.Catalogue([devices.find("t4")]).to_json(),
             compare_with(_figures(), _taken(), "1%").to_json()]  # fmt: skip
    side = {"bytes": 9, "seconds": 0.1, "activation_bytes": 3}
    quantized = {"format": "memplan.quantized", "schema": 1, "title": "net", "scheme": "int8", "weights_saved": 9,
                 "before": side, "after": side, "with_grad": side, "notes": ["a"],
                 "layers": [{"name": "a", "before": 8, "after": 2, "why": None}]}  # fmt: skip
    mortem = {"format": "memplan.post_mortem", "schema": 1, "step": 3, "device": "cuda:0", "peak": 9, "error": "out",
              "by_cause": {"weight": 9}, "held_now": {"weight": 4}, "command": "memplan why"}  # fmt: skip
    script = {"format": "memplan.fit_script", "schema": 1, "title": "train.py", "fits": True, "changed": True,
              "budget": 9, "recorded": 12, "beside": 1, "surplus": 0, "planned": 8, "smallest_budget": None,
              "plan": json.loads(saved_results.planned().to_json()), "lines": {"text": ["a", "b"]}}  # fmt: skip
    return [*map(json.loads, texts), *held, quantized, mortem, script]


def _repaired_explanation(value: Any, random: Random) -> None:
    value["timeline"]["peak_allocated"] = sum(value["by_cause"].values())
    course = value.get("course")
    if course is not None:
        course["allocated"] = [sum(parts) for parts in zip(*course["causes"].values(), strict=True)]
        course["allocated"][0] = value["timeline"]["peak_allocated"]
        first = next(iter(course["causes"].values()))
        first[0] += course["allocated"][0] - sum(column[0] for column in course["causes"].values())


def _repaired_baseline(value: Any, random: Random) -> None:
    for step in value["steps"]:
        step["peak"] = sum(part["bytes"] for part in step["held"])


def _repaired_sweep(value: Any, random: Random) -> None:
    for row in value["rows"]:
        if row["status"] == "ok":
            row["peak"] = sum(row[name] for name in (*KNOWN, "rounding", "workspace_low"))
            row["reserved"] = row["peak"] + row["fragmentation"]
        if random.random() < 0.5:  # values of axes as the axes have them
            for name, values in value["axes"].items():
                row[name] = random.choice(values)


@cache
def _traces() -> tuple[Trace, ...]:
    plain = [memplan.record(_build, device=device, steps=1) for device in ("cpu", "t4")]
    return (*plain, *(memplan.record(_many, device=device, steps=1) for device in ("cpu", "h100")))


def _with_everything() -> Trace:
    """Return a trace with all sections that most traces have not."""
    trace = saved_results.trace()
    workspaces = [storage.id for storage in trace.storages if storage.cause == "workspace"][:3]
    events = {tick for storage in trace.storages for tick in (storage.born, storage.died)}
    free = [tick for tick in range(1, trace.end) if tick not in events][:2]
    plans = (ExecutionPlan("eng38", 4096), ExecutionPlan("eng0", 0))
    first, last = trace.steps[0], trace.end
    spans = (LineSpan(3, first, first + 9, 1), LineSpan(4, first + 9, last, 2, True))
    return replace(
        trace, origin="dry", notes=("a note",), other_kernels=("a100",), measured=tuple(workspaces[:1]),
        counters=(Counters(1 << 20, 2 << 20),) * 3, engines=tuple(Engines(number, plans) for number in workspaces),
        assumptions=(Assumption("branch", "a branch", "net.py:3", 2), Assumption("kernel", "a kernel", None)),
        lines=(FunctionLines("forward", "net.py", ((3, "y = x"), (4, "return y")), spans),),
        ungraded=trace.optimized[:1], calls=tuple(Call(tick, "synchronize") for tick in free),
    )  # fmt: skip


@cache
def _good() -> memplan.Explanation:
    return explain_trace(_traces()[1], title="net", train=True)


@cache
def _taken() -> RecordedFigures:
    return figures_of_trace(
        saved_results.trace(), target="net.py:make", options="--input 8x3x32x32", train=True, settings=None
    )


def _figures() -> Figures:
    figures = _taken().figures
    held = tuple(replace(one, bytes=one.bytes // 2) for one in figures.held)
    return replace(figures, held=held, peak=sum(one.bytes for one in held), ran=figures.ran[1:])


_FOLLOWED = """
import memplan
from torch import nn
class Net(nn.Sequential):
    @memplan.profile
    def forward(self, x):
        y = super().forward(x)
        return y * 2
def make():
    return Net(nn.Linear(8, 4), nn.ReLU())
"""
"""A model whose lines are followed."""


def kinds() -> dict[str, Kind]:
    """Return every kind by its name."""
    traces = _traces()
    explanations = [
        explain_trace(trace, title="net", train=True).to_dict() for trace in (*traces, saved_results.trace())
    ]
    explanations += [
        memplan.explain(saved_results.Net, "8x3x32x32", device=device).to_dict() for device in ("cpu", "rtx4090")
    ]
    with tempfile.TemporaryDirectory() as folder, mock.patch("sys.path", [folder, *sys.path]):
        Path(folder, "followed.py").write_text(_FOLLOWED)
        explanations.append(memplan.explain(import_module("followed").make, "4x8", device="t4").to_dict())
    assert all(any(one[name] for one in explanations) for name in ("scaling", "card", "lines", "course"))
    on_card = memplan.simulate(traces[1])
    written = snapshot_of(on_card, frames_of(traces[1]), trace=traces[1])
    plans = [_plan(), json.loads(saved_results.planned().to_json())]
    sweeps = [_sweep(), json.loads(saved_results.sweep())]
    baseline = Baseline((_figures(), replace(_taken().figures, device="t4"))).to_dict()
    lossy = replace(PROOF, grade="lossy", truth="float64", cut=Cut(2, 8, 99, 9, True), rounded=(
        Rounded("gradients", "a.weight", 0, 0.1, 0.2, 1.0, 0.5),
        Rounded("outputs", "the output", 0, 0.1, 0.2, 1.0, 0.5),
    ))  # fmt: skip
    proofs = [one.to_dict() for one in (PROOF, WRONG, lossy)]
    saved = [json.loads(trace.to_json()) for trace in (*traces, saved_results.trace(), _with_everything())]
    return {
        "snapshots": _snapshot_kind([_history(), json.loads(json.dumps(written))]),
        "traces": _json_kind(saved, _use_trace),
        "plans": _json_kind(plans, _use_plan),
        "sweeps": _json_kind(sweeps, _use_sweep, _repaired_sweep),
        "explanations": _json_kind(explanations, _use_explanation, _repaired_explanation),
        "baselines": _json_kind([baseline], _use_baseline, _repaired_baseline),
        "proofs": _json_kind(proofs, _use_proof),
        "results": _json_kind(_results(), _use_result),
        "compared": _json_kind(
            [explanations[0], plans[0], sweeps[0], saved[0], json.loads(saved_results.fitted())], _use_any_file
        ),
        "layouts": _layout_kind(),
        "answers": _answers_kind(),
        "arguments": _arguments_kind(),
    }


def _is_drawn(data: bytes) -> bool:
    """Return whether all is done with a mutant that was read: one in two is drawn as a report and as a page, written
    and read again, since that takes most of the time."""
    return zlib.crc32(data) % 2 == 0


OWN = (MemplanError, Unreadable)
"""Errors that say what is wrong with a file."""
