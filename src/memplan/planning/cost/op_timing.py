"""Seconds of every op and encoding: measured on this machine, by roofline, or known from earlier.

Each distinct op (target, shapes, strides, dtypes, constants) is timed once, alone, on made-up tensors. Measured times
differ from run to run, and so may the plans that follow from them: `costs_of` takes the seconds out as plain data,
and ``known`` gives them back, which makes the same plan again. By roofline the same graph always costs the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from memplan import _torch
from memplan._interrupts import safe_point
from memplan.devices import Device
from memplan.errors import UsageError
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, KeptForm, Ref, Value, map_refs, recomputable, refs
from memplan.planning.graph.roofline import Work
from memplan.planning.levers import registry
from memplan.planning.levers.lever import Called
from memplan.planning.ops import piecewise  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers timed ops

How = Literal["measured", "roofline"]

NEEDS_SEEDS = frozenset(
    f"aten.{name}_backward.default"
    for kind in ("efficient", "flash", "cudnn")
    for name in (f"_scaled_dot_product_{kind}_attention", f"_{kind}_attention")
)
"""Ops that read the forward pass's random state in host memory (attention_backward.cu, by `data_ptr`): on a card they
are not run on made-up tensors."""
LIMIT = 1.5
"""Seconds that measuring takes, more or less: what is not measured by then is estimated."""
CARD_LIMIT = 10.0
"""The same on a card, where an op's first run loads its kernels, and most of the time is theirs."""
_RUNS = 3
_ENOUGH = 0.01
"""Seconds: once the runs of an op have taken so long, it is not run again."""
_BLOCK = 1 << 16


def with_costs(
    graph: JointGraph,
    *,
    device: Device | None = None,
    how: How = "measured",
    known: Mapping[str, float] | None = None,
    on: str = "cpu",
    limit: float | None = None,
) -> JointGraph:
    """Return the graph with the seconds of its ops and kept forms.

    What may be recomputed is measured first, the largest first. What was not measured (the time was up, the op is not
    torch's own, or fails alone: see `unmeasured`) is estimated by roofline, times what the measured ops took against
    theirs. A measured time holds for the process: asking for it again costs nothing.

    Args:
        graph: its views cost nothing and stay so.
        device: a card: by roofline, from its figures. None: this machine.
        how: for this machine: ``measured``, or ``roofline`` from the fixed figures of `roofline.CPU`.
        known: seconds from `costs_of`: they go before all others, and what is known is not measured.
        on: torch's name of the device to measure on.
        limit: seconds that measuring may take, more or less; None: as `seconds_to_measure` says.
    """
    sheet, known = _Sheet.of(graph), known or {}
    if device is not None or how == "roofline":
        rates = roofline.CPU if device is None else roofline.rates_of(device)
        seconds = {key: rates.seconds(work) for key, work in sheet.works.items()}
    else:
        unknown = [key for key in _most_wanted_first(graph, sheet) if key not in known]
        measured = _measured(graph, sheet, unknown, on, seconds_to_measure(on) if limit is None else limit)
        seconds = _completed(measured | {k: s for k, s in known.items() if k in sheet.works}, sheet.works)
    return _priced(_with_scratch(graph, sheet, on), sheet, {**seconds, **known})


def seconds_to_measure(on: str) -> float:
    """Return the seconds that measuring may take. ``on``: torch's name of the device."""
    return LIMIT if torch.device(on).type == "cpu" else CARD_LIMIT


def costs_of(graph: JointGraph) -> dict[str, float]:
    """Return the seconds of a graph's ops and kept forms by what they are, fit for JSON: ``known`` of `with_costs`."""
    return dict(sorted(_Sheet.of(graph).seconds(graph).items()))


def step_seconds(graph: JointGraph) -> float:
    """Return the seconds of forward and backward before anything is recomputed or encoded."""
    return sum(op.seconds for op in graph.ops)


def unmeasured(graph: JointGraph, on: str = "cpu") -> dict[str, str]:
    """Return the graph's ops that were to be measured in this process and could not be: the reason by `signature`."""
    refused = _clock(on).refused
    keys = dict.fromkeys(signature(graph, op) for op in _calls(graph))
    return {key: refused[key] for key in keys if key in refused}


def signature(graph: JointGraph, op: GraphOp) -> str:
    """Return the key of an op's cost: ``aten.relu.default(float32[8, 64])``."""
    return _Writer(graph).signature(op)


# -- calls to time


def _calls(graph: JointGraph) -> Iterator[GraphOp]:
    """Yield the ops that cost something, and those that recompute results of theirs."""
    for op in graph.ops:
        if not op.is_view:
            yield op
            if op.again is not None:
                yield op.again


class _Writer:
    """Ops as texts."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.texts: dict[int, str] = {}

    def signature(self, op: GraphOp) -> str:
        parts = [self.text(part) for part in op.args]
        parts += [f"{name}={self.text(part)}" for name, part in op.kwargs.items()]
        return f"{op.target}({', '.join(parts)})"

    def text(self, part: Any) -> str:
        if isinstance(part, Ref):
            if part.value not in self.texts:
                self.texts[part.value] = _tensor_text(self.graph.values[part.value])
            return self.texts[part.value]
        if isinstance(part, (tuple, list)):
            return f"[{', '.join(map(self.text, part))}]"
        return repr(part)


def _tensor_text(value: Value) -> str:
    stride = "" if value.stride == _dense(value.shape) else f":{list(value.stride)}"
    return f"{value.dtype}{list(value.shape)}{stride}"


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))


def _plain_forms(graph: JointGraph) -> Iterator[KeptForm]:
    """Yield the kept forms whose seconds are those of calls: a copy's are given by its link."""
    return (form for form in graph.forms if not form.is_copied)


def _form_keys(graph: JointGraph, form: KeptForm) -> tuple[str, str, str]:
    """Return the keys of a kept form's seconds."""
    stores, fetches = registry.find(form.lever).verbs
    shown = f"{form.how or form.lever}({_tensor_text(graph.values[form.value])})"
    return f"{stores} {shown}", f"{fetches} {shown}", f"{len(form.direct)} direct {shown}"


def _form_calls(graph: JointGraph, form: KeptForm) -> tuple[tuple[_Timed, ...], ...]:
    """Return the calls that are timed for a kept form."""
    lever = registry.find(form.lever)
    fetched = (_Timed(lever.fetch(graph, form)),) if form.whole else ()
    direct = tuple(
        _Timed(lever.read_directly(graph, form, op, in_place=False), (op.target, op.args, op.kwargs))
        for op in map(graph.ops.__getitem__, form.direct)
    )
    return (_Timed(lever.store(graph, form)),), fetched, direct


@dataclass(frozen=True)
class _Timed:
    """A call to time, and a call that is subtracted: the time is the difference."""

    call: Called
    instead: Called | None = None


@dataclass(frozen=True)
class _Sheet:
    """A graph's ops and kept forms by the keys of their costs."""

    keys: Mapping[tuple[int, str], str]
    """Signature by an op's index and name."""
    works: Mapping[str, Work]
    timed: Mapping[str, tuple[_Timed, ...]]
    """Calls to measure, by key; the seconds of one key add up."""

    @classmethod
    def of(cls, graph: JointGraph) -> _Sheet:
        writer = _Writer(graph)
        keys, works, timed = dict[tuple[int, str], str](), dict[str, Work](), dict[str, tuple[_Timed, ...]]()
        for op in _calls(graph):
            key = keys[op.index, op.target] = writer.signature(op)
            if key not in works:
                works[key] = roofline.work_of(graph, op)
                timed[key] = (_Timed((op.target, op.args, op.kwargs)),)
        for form in _plain_forms(graph):
            names = _form_keys(graph, form)
            works.update(zip(names, registry.find(form.lever).works(graph, form), strict=True))
            timed.update(zip(names, _form_calls(graph, form), strict=True))
        return cls(keys, works, timed)

    def key(self, op: GraphOp) -> str:
        """Return the signature of an op of the graph."""
        return self.keys[op.index, op.target]

    def seconds(self, graph: JointGraph) -> dict[str, float]:
        """Return the seconds that this graph has, by signature."""
        found = {self.key(op): op.seconds for op in _calls(graph)}
        for form in _plain_forms(graph):
            seconds = form.store_seconds, form.fetch_seconds, form.direct_seconds
            found.update(zip(_form_keys(graph, form), seconds, strict=True))
        return found

    def expected(self) -> dict[str, float]:
        """Return the seconds by roofline, by signature."""
        return {key: roofline.CPU.seconds(work) for key, work in self.works.items()}


def _with_scratch(graph: JointGraph, sheet: _Sheet, on: str) -> JointGraph:
    """Return the graph with what its ops held on a card beside their results when they were timed there."""
    held = _clock(on).scratch
    ops = (replace(op, scratch=held.get(sheet.keys.get((op.index, op.target), ""), op.scratch)) for op in graph.ops)
    return replace(graph, ops=tuple(ops)) if held else graph


def _priced(graph: JointGraph, sheet: _Sheet, seconds: Mapping[str, float]) -> JointGraph:
    def priced(op: GraphOp) -> GraphOp:
        if op.is_view:
            return op
        again, own = op.again, seconds[sheet.key(op)]
        if again is not None:  # it does part of the work that the op does: what the clock says beyond that is noise
            again = replace(again, seconds=min(own, seconds[sheet.key(again)]))
        return replace(op, seconds=own, again=again)

    ops = tuple(map(priced, graph.ops))
    return replace(graph, ops=ops, forms=tuple(_form_priced(graph, form, seconds) for form in graph.forms))


def _form_priced(graph: JointGraph, form: KeptForm, seconds: Mapping[str, float]) -> KeptForm:
    if form.is_copied:
        return form
    store, fetch, direct = (seconds[key] for key in _form_keys(graph, form))
    return replace(form, store_seconds=store, fetch_seconds=fetch, direct_seconds=direct)


# -- estimates from what was measured


def _completed(measured: Mapping[str, float], works: Mapping[str, Work]) -> dict[str, float]:
    """Return the seconds of all: those measured as they are, the others by roofline times what those of their kind
    (that compute, or that only move bytes) took against theirs."""
    expected = {key: roofline.CPU.seconds(work) for key, work in works.items()}
    overall = _ratio(measured, expected)
    ratios = {
        computes: _ratio({k: s for k, s in measured.items() if bool(works[k].flops) is computes}, expected, overall)
        for computes in (True, False)
    }
    return {key: measured.get(key, expected[key] * ratios[bool(work.flops)]) for key, work in works.items()}


def _ratio(measured: Mapping[str, float], expected: Mapping[str, float], otherwise: float = 1.0) -> float:
    whole = sum(expected[key] for key in measured)
    return sum(measured.values()) / whole if whole else otherwise


# -- the clock


@dataclass
class _Clock:
    """Seconds that were measured on one device with one number of threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)
    """Bytes, of ops on a card: what a call holds beside its results."""
    refused: dict[str, str] = field(default_factory=dict)


_CLOCKS: dict[tuple[str, int], _Clock] = {}


def _clock(on: str) -> _Clock:
    return _CLOCKS.setdefault((on, torch.get_num_threads()), _Clock())


def _most_wanted_first(graph: JointGraph, sheet: _Sheet) -> list[str]:
    """Order calls for measuring: what the planner weighs, then encodings and the forward pass, then the backward
    pass."""
    again, expected = recomputable(graph), sheet.expected()
    ranks = dict.fromkeys(sheet.timed, 1)
    for op in _calls(graph):
        weighed = op.again is None and any(value in again for value in op.makes)
        ranks[sheet.key(op)] = 2 if op.phase == "backward" else int(not weighed)
    return sorted(ranks, key=lambda key: (ranks[key], -expected[key]))


def _measured(graph: JointGraph, sheet: _Sheet, keys: list[str], on: str, limit: float) -> dict[str, float]:
    """Return the seconds by signature, as far as the time goes."""
    clock, end = _clock(on), time.perf_counter() + limit
    with alone(on):
        for key in keys:
            safe_point()
            if key in clock.seconds or key in clock.refused:
                continue
            if time.perf_counter() >= end:
                clock.refused[key] = "the time for measuring was up"  # planning again must not measure again
                continue
            if torch.device(on).type != "cpu" and key.partition("(")[0] in NEEDS_SEEDS:
                clock.refused[key] = "it reads the seeds of its forward pass"
                continue
            if sheet.works[key].foreign:
                # A collective waits for other processes, and a kernel of others may trust its arguments.
                clock.refused[key] = "it is not torch's own, and is not run on made-up tensors"
                continue
            try:
                if torch.device(on).type != "cpu" and sheet.timed[key]:  # a form that is only read directly has no call
                    clock.scratch[key] = held_on(on, _ready(graph, sheet.timed[key][0].call, on))
                clock.seconds[key] = sum(_taken(graph, one, on) for one in sheet.timed[key])
            except Exception as error:  # whatever a kernel objects to in made-up arguments
                clock.refused[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return {key: clock.seconds[key] for key in keys if key in clock.seconds}


@contextmanager
def alone(on: str) -> Iterator[None]:
    """Shield measurements from everything that the caller has switched on, and keep the caller's random state: on the
    CPU nothing draws from it."""
    device = torch.device(on)
    forked = nullcontext() if device.type == "cpu" else torch.random.fork_rng([device], device_type=device.type)
    with (
        forked,
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _taken(graph: JointGraph, timed: _Timed, on: str) -> float:
    seconds = _timed(graph, timed.call, on)
    return seconds if timed.instead is None else max(0.0, seconds - _timed(graph, timed.instead, on))


def _timed(graph: JointGraph, called: Called, on: str) -> float:
    """Return the seconds of a call: the smallest of a few runs, as other work on the machine only ever adds to it."""
    call, wait = _ready(graph, called, on), torch.get_device_module(torch.device(on)).synchronize

    def run() -> float:
        wait(on)
        begin = time.perf_counter()
        call()
        wait(on)
        return time.perf_counter() - begin

    spent, times = run(), list[float]()  # the first run also prepares kernels
    while not times or (len(times) < _RUNS and spent < _ENOUGH):
        times.append(run())
        spent += times[-1]
    return min(times)


def held_on(on: str, call: Callable[[], Any]) -> int:
    """Return the bytes that a call holds on a card beside what is left of it: its results, and what a library keeps."""
    torch.cuda.reset_peak_memory_stats(on)
    result = call()
    beside = torch.cuda.max_memory_allocated(on) - torch.cuda.memory_allocated(on)
    del result  # it was alive when that was asked
    return beside


def _ready(graph: JointGraph, called: Called, on: str) -> Callable[[], Any]:
    """Return a call on made-up tensors."""
    target, args, kwargs = called
    made = {value: _made_up(graph.values[value], on) for value in dict.fromkeys(refs((args, kwargs)))}
    args, kwargs = map_refs(args, made.__getitem__), map_refs(kwargs, made.__getitem__)
    call: Any = torch.ops
    for name in target.split("."):
        call = getattr(call, name)
    if torch.device(on).type == "cpu":
        call = _torch.drawing_from(call, _generator)
        if call is None:
            raise UsageError(f"{target} draws from torch's own random stream, which other threads may draw from")
    return lambda: call(*args, **kwargs)


_generator = torch.Generator()
"""Draws what measuring needs: torch's own stream is the user's, and of all threads."""


def _made_up(value: Value, on: str) -> torch.Tensor:
    """Return a tensor of this shape, layout and dtype: between 0.1 and 1, where every op is defined; of integers zeros,
    which are indices into anything."""
    reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    count = reach if all(value.shape) else 0
    dtype, draw = getattr(torch, value.dtype), _generator if torch.device(on).type == "cpu" else None
    if dtype == torch.bool:
        flat = torch.rand(count, device=on, generator=draw) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        block = torch.rand(min(count, _BLOCK), device=on, generator=draw).mul_(0.9).add_(0.1).to(dtype)
        flat = block.repeat(-(-count // _BLOCK))[:count]
    else:
        flat = torch.zeros(count, dtype=dtype, device=on)
    return flat.as_strided(value.shape, value.stride)
