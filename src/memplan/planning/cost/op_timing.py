"""Seconds of every op and encoding: measured on this machine, estimated by roofline, or loaded from an earlier run.

Each distinct op (target, shapes, strides, dtypes, constants) is timed once, alone, on synthetic tensors. Measured times
differ from run to run, and so may the plans based on them: `costs_of` exports the seconds as plain data, and passing
them as ``known`` reproduces the plan. Roofline estimates are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from memplan import _torch
from memplan._bytes import ALLOCATOR_BLOCK, round_to_blocks
from memplan._interrupts import safe_point
from memplan.devices import Device
from memplan.errors import UsageError
from memplan.planning.cost.clock import clock_of
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import (
    GraphOp,
    JointGraph,
    Ref,
    SavedForm,
    Value,
    map_refs,
    recomputable_values,
    refs,
)
from memplan.planning.graph.op_schema import KERNELS
from memplan.planning.graph.roofline import Work
from memplan.planning.graph.tensor_like import spanned_elements
from memplan.planning.levers import registry
from memplan.planning.levers.lever import Called
from memplan.planning.ops import (  # registers timed ops, and their work
    kernel_costs,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    piecewise,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
from memplan.planning.ops.tile import TILE_OPS, run_pieces, tile_of

How = Literal["measured", "roofline"]

NEEDS_SEEDS = frozenset(
    f"aten.{name}_backward.default"
    for kind in ("efficient", "flash", "cudnn")
    for name in (f"_scaled_dot_product_{kind}_attention", f"_{kind}_attention")
)
"""Ops that read the forward pass's random state in host memory (attention_backward.cu, by `data_ptr`): on a card they
do not run on synthetic tensors."""
LIMIT = 1.5
"""Approximate limit on measuring, in seconds: ops not measured by then are estimated."""
CARD_LIMIT = 10.0
"""The same on a card, where most of the time is loading kernels in an op's first run."""
_RUNS = 3
"""Timed runs of an op at most."""
_ENOUGH_SECONDS = 0.01
"""Seconds of runs after which an op is not run again."""
_LONG_SECONDS = 0.2
"""Seconds of a first run from which on it counts: kernels are prepared in a few ms. Such ops are segments that run
piece by piece, and a search for these measures many."""
_MANY_PIECES = 12
"""Pieces of a segment from which on a few of them are measured, eight runs of a piece, if all take more than
`_LONG_SECONDS`."""
_RANDOM_ELEMENTS = 1 << 16
"""Random numbers that are drawn for a synthetic tensor; a larger tensor repeats them."""
_REQUESTED = "requested_bytes.all.peak"


def with_costs(
    graph: JointGraph, *, device: Device | None = None, how: How = "measured",
    known: Mapping[str, float] | None = None, place: str = "cpu", limit: float | None = None,
) -> JointGraph:  # fmt: skip
    """Return the graph with the seconds of its ops and encodings.

    Ops that may be recomputed are measured first, the largest first. Ops that were not measured (the limit was reached,
    the op is not torch's, or it fails alone: see `unmeasured`) are estimated by roofline, scaled by the ratio of
    measured seconds to roofline seconds. Measured times are cached for the process.

    Args:
        graph: its views cost nothing.
        device: a card, for roofline estimates from its figures. None: this machine.
        how: for this machine: ``measured``, or ``roofline`` from the fixed figures of `roofline.CPU`.
        known: seconds from `costs_of`, which take precedence and are not measured again.
        place: torch's name of the device to measure on.
        limit: approximate limit on measuring, in seconds; None: `seconds_to_measure`.
    """
    costs, known = _Costs.of(graph), known or {}
    if device is not None or how == "roofline":
        rates = roofline.CPU if device is None else roofline.rates_of(device)
        seconds = {key: rates.seconds(work) for key, work in costs.work_by_signature.items()}
    else:
        unknown = [key for key in _measuring_order(graph, costs) if key not in known]
        measured = _measure_until(graph, costs, unknown, place, seconds_to_measure(place) if limit is None else limit)
        known_here = {key: known_seconds for key, known_seconds in known.items() if key in costs.work_by_signature}
        seconds = _estimate_missing(measured | known_here, costs.work_by_signature)
    scratch = _measurements_on(place).scratch  # measured when the ops were timed on a card
    if scratch:
        ops = list[GraphOp]()
        for op in graph.ops:
            declares_requests = bool(op.requests) and op.target in KERNELS  # they are exact
            key = costs.signature_of_op.get((op.index, op.target), "")  # "" for views
            ops.append(op if declares_requests else replace(op, scratch=scratch.get(key, op.scratch)))
        graph = replace(graph, ops=tuple(ops))
    return _with_seconds(graph, costs, {**seconds, **known})


def seconds_to_measure(place: str) -> float:
    """Return the limit on measuring in seconds. ``place``: torch's name of the device."""
    return LIMIT if torch.device(place).type == "cpu" else CARD_LIMIT


def costs_of(graph: JointGraph) -> dict[str, float]:
    """Return the seconds of a graph's ops and encodings by signature, fit for JSON: see ``known`` of `with_costs`."""
    return dict(sorted(_Costs.of(graph).seconds(graph).items()))


def step_seconds(graph: JointGraph) -> float:
    """Return the seconds of forward and backward before anything is recomputed or encoded."""
    return sum(op.seconds for op in graph.ops)


def unmeasured(graph: JointGraph, place: str = "cpu") -> dict[str, str]:
    """Return the reasons why ops of the graph could not be measured in this process, by `signature`."""
    measurements = _measurements_on(place)
    late = {key: "the time for measuring was up" for key in measurements.postponed if key not in measurements.seconds}
    refused = measurements.refusals | late
    keys = dict.fromkeys(signature(graph, op) for op in _calls(graph))
    return {key: refused[key] for key in keys if key in refused}


def errors_on_device(graph: JointGraph, targets: Collection[str], place: str) -> dict[str, str]:
    """Return the targets among ``targets`` whose ops do not run on a device, with the first line of the error. Each op
    runs once, unless it was measured. ``place``: torch's name of the device."""
    measured, reasons = _measurements_on(place).seconds, dict[str, str]()
    for op in graph.ops:
        if op.target not in targets or op.target in reasons or signature(graph, op) in measured:
            continue
        try:
            with isolated(place):
                _synthetic_call(graph, (op.target, op.args, op.kwargs), place)()
        except torch.AcceleratorError:  # sticky: nothing runs on the card any more
            raise
        except Exception as error:  # any error of a compiler or a driver, and out of memory
            reasons[op.target] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return reasons


def signature(graph: JointGraph, op: GraphOp) -> str:
    """Return the key of an op's cost: ``aten.relu.default(float32[8, 64])``."""
    return _Signatures(graph).signature(op)


# -- calls to time


def _calls(graph: JointGraph) -> Iterator[GraphOp]:
    """Yield the ops that are no views, each followed by its cheaper recompute op, if any."""
    for op in graph.ops:
        if not op.is_view:
            yield op
            if op.cheaper_recompute is not None:
                yield op.cheaper_recompute


class _Signatures:
    """Writes the signatures of a graph's ops."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.tensor_texts: dict[int, str] = {}
        """Text of a tensor argument, by its value."""

    def signature(self, op: GraphOp) -> str:
        """Return the key of an op's cost: ``aten.relu.default(float32[8, 64])``."""
        arguments = [self.text(arg) for arg in op.args]
        arguments += [f"{name}={self.text(arg)}" for name, arg in op.kwargs.items()]
        return f"{op.target}({', '.join(arguments)})"

    def text(self, argument: Any) -> str:
        """Return the text of an argument of an op."""
        if isinstance(argument, Ref):
            if argument.value not in self.tensor_texts:
                self.tensor_texts[argument.value] = _tensor_text(self.graph.values[argument.value])
            return self.tensor_texts[argument.value]
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(map(self.text, argument))}]"
        return repr(argument)


def _tensor_text(value: Value) -> str:
    """Return dtype and shape of a tensor, and its strides unless it is contiguous: ``float32[8, 64]:[1, 8]``."""
    sizes = [max(size, 1) for size in value.shape]
    contiguous = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    stride = "" if value.stride == contiguous else f":{list(value.stride)}"
    return f"{value.dtype}{list(value.shape)}{stride}"


def _computed_forms(graph: JointGraph) -> Iterator[SavedForm]:
    """Yield the encodings that kernels compute: host copies are not timed, their seconds depend on the link."""
    return (form for form in graph.forms if not form.is_copied)


def _form_keys(graph: JointGraph, form: SavedForm) -> tuple[str, str, str]:
    """Return three signatures for the costs of an encoding: of storing it, of fetching the value from it, and of all
    ops that read the encoding itself instead of the value."""
    store_verb, fetch_verb = registry.find(form.lever).verbs
    encoding = f"{form.codec or form.lever}({_tensor_text(graph.values[form.value])})"
    return f"{store_verb} {encoding}", f"{fetch_verb} {encoding}", f"{len(form.direct_readers)} direct {encoding}"


def _form_calls(graph: JointGraph, form: SavedForm) -> tuple[tuple[_TimedCall, ...], ...]:
    """Return three groups of calls to time for an encoding, as `_form_keys`: to store it, to fetch the value (none if
    that is impossible), and of all ops that read the encoding itself."""
    lever = registry.find(form.lever)
    store = (_TimedCall(lever.store(graph, form)),)
    fetch = (_TimedCall(lever.fetch(graph, form)),) if form.can_restore_value else ()
    readers: list[_TimedCall] = []
    for op in (graph.ops[index] for index in form.direct_readers):
        reads_encoding = lever.read_directly(graph, form, op, in_place=False)
        reads_value = (op.target, op.args, op.kwargs)
        readers.append(_TimedCall(reads_encoding, replaced=reads_value))
    return store, fetch, tuple(readers)


@dataclass(frozen=True)
class _TimedCall:
    """A call to time, less the time of the call that it replaces. Calls are (target, args, kwargs) of an op, with a Ref
    in place of each tensor."""

    call: Called
    replaced: Called | None = None
    """None: the call replaces none."""


@dataclass(frozen=True)
class _Costs:
    """What a graph's ops and encodings compute and the calls to time for them, by signature (see `signature`)."""

    signature_of_op: Mapping[tuple[int, str], str]
    """Signatures by index and target of the op: a cheaper recompute op has the index of its op."""
    work_by_signature: Mapping[str, Work]
    """FLOPs and bytes by signature."""
    calls_by_signature: Mapping[str, tuple[_TimedCall, ...]]
    """Calls to measure by signature; its seconds are their sum."""

    @classmethod
    def of(cls, graph: JointGraph) -> _Costs:
        """Describe the ops and encodings of a graph."""
        signatures = _Signatures(graph)
        signature_of_op, works, calls = (
            dict[tuple[int, str], str](),
            dict[str, Work](),
            dict[str, tuple[_TimedCall, ...]](),
        )
        for op in _calls(graph):
            key = signature_of_op[op.index, op.target] = signatures.signature(op)
            if key not in works:
                works[key] = roofline.work_of(graph, op)
                calls[key] = (_TimedCall((op.target, op.args, op.kwargs)),)
        for form in _computed_forms(graph):  # store, fetch, and direct readers
            form_keys = _form_keys(graph, form)
            works.update(zip(form_keys, registry.find(form.lever).works(graph, form), strict=True))
            calls.update(zip(form_keys, _form_calls(graph, form), strict=True))
        return cls(signature_of_op, works, calls)

    def key(self, op: GraphOp) -> str:
        """Return the signature of an op of the graph."""
        return self.signature_of_op[op.index, op.target]

    def seconds(self, graph: JointGraph) -> dict[str, float]:
        """Return the seconds that the ops and encodings of the graph have now, by signature.

        An encoding has three: to store it, to fetch the value, and those that ops take longer which read it, not the
        value.
        """
        seconds = {self.key(op): op.seconds for op in _calls(graph)}
        for form in _computed_forms(graph):
            store_key, fetch_key, direct_readers_key = _form_keys(graph, form)
            seconds[store_key], seconds[fetch_key] = form.store_seconds, form.fetch_seconds
            seconds[direct_readers_key] = form.direct_reader_extra_seconds
        return seconds

    def roofline_seconds(self) -> dict[str, float]:
        """Return the seconds by roofline, by signature."""
        return {key: roofline.CPU.seconds(work) for key, work in self.work_by_signature.items()}


def _with_seconds(graph: JointGraph, costs: _Costs, seconds: Mapping[str, float]) -> JointGraph:
    """Return the graph with these seconds, by signature, for its ops, their recompute ops and its encodings."""

    def op_with_seconds(op: GraphOp) -> GraphOp:
        """Return an op with its seconds and those of its cheaper recompute op."""
        if op.is_view:
            return op
        recompute, op_seconds = op.cheaper_recompute, seconds[costs.key(op)]
        if recompute is not None:  # it does part of the op's work, so a longer time is noise
            recompute = replace(recompute, seconds=min(op_seconds, seconds[costs.key(recompute)]))
        return replace(op, seconds=op_seconds, cheaper_recompute=recompute)

    forms = list[SavedForm]()
    for form in graph.forms:
        if not form.is_copied:
            store, fetch, direct_readers = (seconds[key] for key in _form_keys(graph, form))
            form = replace(form, store_seconds=store, fetch_seconds=fetch, direct_reader_extra_seconds=direct_readers)
        forms.append(form)
    return replace(graph, ops=tuple(map(op_with_seconds, graph.ops)), forms=tuple(forms))


# -- estimates from measured seconds


def _estimate_missing(measured: Mapping[str, float], works: Mapping[str, Work]) -> dict[str, float]:
    """Return the seconds of all works, by signature as all arguments. Works that were not measured have their roofline
    seconds, scaled by the ratio of measured to roofline seconds of the works of their kind: with FLOPs, or without."""
    roofline_seconds = {key: roofline.CPU.seconds(work) for key, work in works.items()}
    ratio_of_all = _ratio(measured, roofline_seconds)
    ratios = dict[bool, float]()  # by whether works have FLOPs
    for has_flops in (True, False):
        of_kind = {key: seconds for key, seconds in measured.items() if bool(works[key].flops) is has_flops}
        ratios[has_flops] = _ratio(of_kind, roofline_seconds, default=ratio_of_all)
    return {key: measured.get(key, roofline_seconds[key] * ratios[bool(work.flops)]) for key, work in works.items()}


def _ratio(measured: Mapping[str, float], roofline_seconds: Mapping[str, float], default: float = 1.0) -> float:
    """Return the ratio of measured seconds to the roofline seconds of the same signatures; ``default`` if these are
    0."""
    expected_sum = sum(roofline_seconds[key] for key in measured)
    return sum(measured.values()) / expected_sum if expected_sum else default


# -- measuring


@dataclass
class _Measurements:
    """Measurements on a device with a number of threads, by signature."""

    seconds: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)
    """Bytes of workspace, of ops on a card."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Reasons why calls cannot be measured."""
    postponed: dict[str, float] = field(default_factory=dict)
    """The longest limit in seconds that was up before the call's turn."""


_MEASUREMENTS: dict[tuple[str, int], _Measurements] = {}


def _measurements_on(place: str) -> _Measurements:
    """Return this process's measurements on a device with the present number of threads."""
    return _MEASUREMENTS.setdefault((place, torch.get_num_threads()), _Measurements())


def _measuring_order(graph: JointGraph, costs: _Costs) -> list[str]:
    """Return the signatures in the order in which to measure them, as time may run out.

    First ops whose results may be recomputed, then encodings and other ops of the forward pass, then the backward pass;
    the longest by roofline first in each.
    """
    may_recompute, roofline_seconds = recomputable_values(graph), costs.roofline_seconds()
    ranks = dict.fromkeys(costs.calls_by_signature, 1)
    for op in _calls(graph):
        is_recomputable = op.cheaper_recompute is None and any(value in may_recompute for value in op.makes)
        forward_rank = 0 if is_recomputable else 1
        ranks[costs.key(op)] = 2 if op.phase == "backward" else forward_rank
    return sorted(ranks, key=lambda key: (ranks[key], -roofline_seconds[key]))


def _measure_until(graph: JointGraph, costs: _Costs, keys: list[str], place: str, limit: float) -> dict[str, float]:
    """Measure calls, and on a card their workspaces, until the limit in seconds is over.

    Args:
        graph, costs: the graph, and the calls to time for each signature.
        keys: signatures to measure, in order.
        place: torch's name of the device.
        limit: in seconds.

    Returns:
        The seconds by signature. Calls that could not be measured are missing; `unmeasured` has the reason.
    """
    clock, measurements, on_card = clock_of(place), _measurements_on(place), torch.device(place).type != "cpu"
    seconds, refused, deadline = measurements.seconds, measurements.refusals, clock() + limit
    with isolated(place):
        for key in keys:
            safe_point()
            if key in seconds or key in refused or limit < 2 * measurements.postponed.get(key, 0.0):
                continue  # what measuring workspaces left of the usual limit varies
            if clock() >= deadline:
                measurements.postponed[key] = limit  # planning again must not measure again
                continue
            if on_card and key.partition("(")[0] in NEEDS_SEEDS:
                refused[key] = "it reads the seeds of its forward pass"
                continue
            if costs.work_by_signature[key].foreign:
                # A collective waits for other processes, and a custom kernel may need valid arguments.
                refused[key] = "it is not torch's own, and is not run on made-up tensors"
                continue
            calls = costs.calls_by_signature[key]  # none for fetching from a form that is only read directly
            try:
                if on_card and calls:
                    measurements.scratch[key] = workspace_on(place, _synthetic_call(graph, calls[0].call, place))
                seconds[key] = sum(_extra_seconds(graph, timed, place) for timed in calls)
            except Exception as error:  # any error of the kernel on synthetic arguments
                refused[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return {key: seconds[key] for key in keys if key in seconds}


@contextmanager
def isolated(place: str) -> Iterator[None]:
    """Run kernels without gradients and autocast within this context, and restore the card's random state after it."""
    device = torch.device(place)
    on_cpu = device.type == "cpu"  # there, measurements draw from a generator of their own
    forked = nullcontext() if on_cpu else torch.random.fork_rng([device], device_type=device.type)
    with forked, torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
    if not on_cpu:
        torch.get_device_module(device).empty_cache()


def _extra_seconds(graph: JointGraph, timed: _TimedCall, place: str) -> float:
    """Return the seconds of a call, or those it takes longer than the call that it replaces."""
    seconds = _fastest_run(graph, timed.call, place)
    return seconds if timed.replaced is None else max(0.0, seconds - _fastest_run(graph, timed.replaced, place))


def _fastest_run(graph: JointGraph, timed_call: Called, place: str) -> float:
    """Return the seconds of the fastest of a few runs of a call: other load on the machine can only add time.
    ``timed_call``: the target, args and kwargs of an op, with a Ref in place of each tensor."""
    target, args, kwargs = timed_call
    on_cpu = torch.device(place).type == "cpu"  # on a card, the time of a few pieces is that of their launches
    if on_cpu and target in TILE_OPS and tile_of(args[-1]).pieces >= _MANY_PIECES:
        seconds = _seconds_by_pieces(target, _synthetic_arguments(graph, args, kwargs, place)[0])
        if seconds is not None:
            return seconds
    call, clock = _synthetic_call(graph, timed_call, place), clock_of(place)
    synchronize = torch.get_device_module(torch.device(place)).synchronize

    def run() -> float:
        """Run the call once and return its seconds."""
        synchronize(place)
        begin = clock()
        call()
        synchronize(place)
        return clock() - begin

    total_seconds = run()  # also prepares kernels
    counts = total_seconds >= _LONG_SECONDS and on_cpu  # a card loads kernels for long
    times = [total_seconds] if counts else []
    while not times or (len(times) < _RUNS and total_seconds < _ENOUGH_SECONDS):
        times.append(run())
        total_seconds += times[-1]
    return min(times)


def _seconds_by_pieces(target: str, args: Sequence[Any]) -> float | None:
    """Return the seconds of a segment's op with many pieces on the CPU, from those of one piece and of three: what all
    pieces share, such as the memory of the results, is in both. Other load on the machine only adds time, and an error
    counts once for each piece: so the faster of two runs counts.

    None where the op is measured as a whole: a short one, or one in which more than three quarters of the time of a
    piece alone are shared, so that the difference is too inexact.
    """
    tiled, clock = tile_of(args[-1]), clock_of("cpu")
    middle = tiled.pieces // 2

    def run(*pieces: int) -> float:
        """Run some pieces and return their seconds."""
        begin = clock()
        run_pieces(target, args, pieces)
        return clock() - begin

    one = min(run(middle), run(middle))  # the first prepares kernels
    if tiled.pieces * one < _LONG_SECONDS:
        return None
    three = min(run(middle - 1, middle, middle + 1) for _ in range(2))
    each_further = (three - one) / 2
    return one + (tiled.pieces - 1) * each_further if each_further >= one / 4 else None


def workspace_on(place: str, call: Callable[[], Any]) -> int:
    """Return the workspace of a call on a card in bytes: its peak, less what stays allocated after it.

    A large block can be up to 1 MiB longer than its request (CUDACachingAllocator.cpp, `should_split`), by what was
    freed before. So requests are counted, each temporary rounded to whole blocks. The caching allocator counts them;
    others count allocated bytes alone.
    """
    torch.cuda.reset_peak_memory_stats(place)
    before = torch.cuda.memory_stats(place)
    result = call()
    workspace = torch.cuda.max_memory_allocated(place) - torch.cuda.memory_allocated(place)
    after = torch.cuda.memory_stats(place)
    del result  # not before: results must count as allocated above
    if not workspace or _REQUESTED not in after:
        return workspace
    requested = after[_REQUESTED] - after["requested_bytes.all.current"]  # peak, less results
    counts = ("allocation.all.allocated", "allocation.all.current")
    allocated, still_live = (after[name] - before[name] for name in counts)
    temporaries = max(1, allocated - still_live)
    # each of them may be rounded up by almost a block
    return min(workspace, round_to_blocks(requested) + ALLOCATOR_BLOCK * (temporaries - 1))


def _synthetic_call(graph: JointGraph, target_and_arguments: Called, place: str) -> Callable[[], Any]:
    """Return a function that runs an op on synthetic tensors on a device.

    ``target_and_arguments``: its target, args and kwargs, with a Ref in place of each tensor. Raises UsageError if the
    op draws from torch's default generator on the CPU.
    """
    target, args, kwargs = target_and_arguments
    args, kwargs = _synthetic_arguments(graph, args, kwargs, place)
    call: Any = torch.ops
    for name in target.split("."):
        call = getattr(call, name)
    if torch.device(place).type == "cpu":
        call = _torch.drawing_from(call, _generator)
        if call is None:
            raise UsageError(f"{target} draws from torch's own random stream, which other threads may draw from")
    return lambda: call(*args, **kwargs)


def _synthetic_arguments(graph: JointGraph, args: Any, kwargs: Any, place: str) -> tuple[Any, Any]:
    """Return arguments of an op with a synthetic tensor in the place of each Ref."""
    tensors = {value: _synthetic(graph.values[value], place) for value in dict.fromkeys(refs((args, kwargs)))}
    return map_refs(args, tensors.__getitem__), map_refs(kwargs, tensors.__getitem__)


_generator = torch.Generator()
"""Random generator of measurements: torch's default generator belongs to the user, and all threads share it."""


def _synthetic(value: Value, place: str) -> torch.Tensor:
    """Return a tensor on a device with the shape, strides and dtype of a value. It has random numbers between 0.1 and
    1, for which every op is defined, or integer zeros, which are valid indices."""
    count, dtype = spanned_elements(value.shape, value.stride), getattr(torch, value.dtype)
    generator = _generator if torch.device(place).type == "cpu" else None
    if dtype == torch.bool:
        flat = torch.rand(count, device=place, generator=generator) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:  # random numbers, repeated: drawing takes long
        drawn = torch.rand(min(count, _RANDOM_ELEMENTS), device=place, generator=generator)
        flat = drawn.mul_(0.9).add_(0.1).to(dtype).repeat(-(-count // _RANDOM_ELEMENTS))[:count]
    else:
        flat = torch.zeros(count, dtype=dtype, device=place)
    return flat.as_strided(value.shape, value.stride)
