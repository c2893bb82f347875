"""Explain where the memory of a step goes: by cause, by layer, at the peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan.devices import Device, find
from memplan.errors import DeviceError
from memplan.explanation.by_line import line_profiles
from memplan.explanation.card import card_use, context_of, levels_at
from memplan.explanation.grad import with_eager_note, with_training_note
from memplan.explanation.host import host_need, read_host
from memplan.explanation.layers import layer_rows, origin_word, saved_rows, tick_of_most_saved
from memplan.explanation.model import Explanation, PeakRow, headline
from memplan.explanation.over_time import memory_timeline_of
from memplan.explanation.owners import owners_at
from memplan.explanation.scaling import with_scaling
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import StepPeak, Timeline
from memplan.trace.held_output import output_shown
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.boundaries import Build
from memplan.trace.recording.session import COMPILED, Environment, Target, choose_target, public
from memplan.trace.records import CAUSES, HOST, Op
from memplan.trace.step import StepOptions, build_of, title_of
from memplan.trace.trace import Trace, at_least

LARGEST_WORKSPACE = "cuDNN's largest workspace"
"""The beginning of a note which differs between the points of a study."""
_OUTSIDE_LIBRARIES = ("aten.convolution", "aten.mkldnn_rnn_layer")


@public
def explain(
    what: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: tuple[Any, ...] = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
    host: str | int | None = None,
    show_output: bool = False,
) -> Explanation:
    """Explain where the memory of a step goes, before it runs.

    Args:
        what: a module, a callable that returns a module (whose memory is then never allocated), a ``build`` that
            returns a step, or a Trace. A module is copied, not changed.
        inputs, kwargs: arguments of the module: tensors, `memplan.spec` values, or text such as "8x3x224x224".
        targets: arguments of the loss after the output.
        loss: ``loss(output, *targets)``, a scalar. By default the output's ``.loss``, else the output if it is a
            scalar, else the sum of its floating-point tensors.
        optimizer: a callable of the parameters, such as ``torch.optim.AdamW``. By default the step ends with backward.
        device: ``"cpu"``, a card of the catalogue (``"h100"``), or None: the device that the module is on, else this
            machine's GPU, else the CPU. For a card, module, inputs and targets go to it.
        autocast: dtype of an autocast around model and loss: ``torch.bfloat16``, "bf16", "fp16".
        train: False for inference: evaluation mode, under no_grad, without loss and optimizer.
        dtype: dtype that the model is converted to first.
        settings: of a card's caching allocator, as in ``PYTORCH_ALLOC_CONF`` (which is not read); by default torch's.
        assume: for ops whose result size depends on values (``x[mask]``, `nonzero`, `unique`), a map from source line
            (``"train.py:31"``) to the selected share, from 0 to 1; by default 1, with a note in the result.
        host: budget of the host's memory, such as "32 GiB"; the result's ``host`` says whether it is kept, and which
            of both memories is exceeded first.
        cudnn, world, rank, show_output: as for `memplan.record`: which cuDNN chooses the workspaces of convolutions on
            a card; which rank of how many the step is; whether prints of the step are shown.

    Returns:
        An Explanation; its ``str()`` is a paragraph, and ``memplan.reports`` makes tables of it.

    Raises:
        TargetError, InputError, DeviceError: the arguments do not describe a step.
        StepError, DataDependentError: the step cannot be recorded.

    Example:
        >>> print(memplan.explain(resnet18, "32x3x224x224", optimizer=torch.optim.AdamW, device="h100"))
        resnet18: training step on h100
        44.6 MiB of weights -> 917.3 MiB peak: ...
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    if isinstance(what, Trace):
        options.refuse_with_trace()
        room = read_host(host, measured=what.origin != "recorded")
        return explain_trace(what, settings=settings, host=room)
    target = choose_target(device_of(what) if device is None else device, assume, cudnn, world, rank)
    with output_shown() if show_output else nullcontext():
        return explain_build(
            lambda batch, train: build_of(
                what, replace(options if batch is None else options.with_batch(batch), train=train),
                on_card=target.card is not None,
            ),
            target, train=train, batch=options.batch, title=title_of(what, otherwise="step"), settings=settings,
            host=read_host(host),
        )[1]  # fmt: skip


def explain_build(
    build_of_step: Callable[[int | None, bool], Build],
    target: Target,
    *,
    train: bool,
    batch: int | None,
    title: str,
    settings: str | None,
    host: int | None = None,
) -> tuple[Trace, Explanation]:
    """Record a step and explain it, with its scaling; for inference also with the memory that training would save.

    Args:
        build_of_step: batch size (None: the step's own) and whether it trains -> the build.
        batch: batch size of the step; None if it cannot be changed.
    """
    trace = record_for(build_of_step(None, train), target)
    # a ``build`` may run no backward pass, too
    explanation = explain_trace(
        trace, title=title, train=None if train else False, card=target.card, settings=settings, host=host
    )
    if not train:
        explanation = with_training_note(explanation, build_of_step(None, True), target)
    if COMPILED in trace.notes:
        explanation = with_eager_note(explanation, build_of_step(None, train), target)
    return trace, with_scaling(explanation, batch, lambda batch: build_of_step(batch, train), target)


def device_of(what: Any) -> str | None:
    """Return "cpu" or "cuda" if ``what`` is a module on that device; None for anything else, such as a meta module."""
    first = next(what.parameters(), None) if isinstance(what, nn.Module) else None
    return first.device.type if first is not None and first.device.type in (HOST, "cuda") else None


def explain_trace(
    trace: Trace,
    *,
    title: str = "step",
    train: bool | None = None,
    card: Device | None = None,
    settings: str | None = None,
    host: int | None = None,
) -> Explanation:
    """Explain a recorded or measured step.

    Args:
        train: whether it trains; by default whether it has backward ops.
        card: the card it was recorded for; by default looked up in the catalogue by the trace's device.
    """
    train = any(op.phase == "backward" for op in trace.ops) if train is None else train
    if card is None:
        card = _catalogue_card(trace.device)
    recorded = trace
    trace = at_least(trace)  # the low case; `card_use` has what larger workspaces can add
    timeline = simulate(trace, settings=settings)
    by_cause = _by_cause(trace, timeline.peak_tick)
    step = _representative_step(timeline)
    saved = saved_rows(trace, tick_of_most_saved(trace, step.start, step.end))
    rounding = timeline.peak_allocated - sum(by_cause.values())
    return Explanation(
        title,
        trace.device,
        train,
        timeline,
        by_cause=by_cause | {"rounding": rounding},
        by_cause_reserved=_by_cause_reserved(trace, timeline),
        by_cause_most={
            cause: peak_live_bytes(storage for storage in trace.counted if storage.cause == cause) for cause in CAUSES
        },
        layers=tuple(layer_rows(trace, saved, step.start, step.end)),
        saved=tuple(saved),
        saved_bytes=sum(row.bytes for row in saved if row.counted),
        peak=_op_at(trace, timeline.peak_tick, timeline.peak_allocated),
        holders=owners_at(trace, timeline.peak_tick),
        sentence=headline(_by_cause(trace, step.peak_tick), step.peak_allocated, timeline.peak_allocated),
        scaling=None,
        notes=(*trace.notes, *_notes(recorded, timeline)),
        assumptions=trace.assumptions,
        card=card_use(recorded, timeline, card, settings) if card is not None else None,
        lines=line_profiles(trace, timeline),
        course=memory_timeline_of(trace, timeline, settings),
        host=host_need(
            recorded, timeline, card, 0 if card is None else context_of(trace, card), host,
            lambda tick: _op_at(trace, tick, size=0),
        ),
    )  # fmt: skip


def _catalogue_card(name: str) -> Device | None:
    """Return the catalogue's card of this name; None for the CPU and unknown GPUs."""
    try:
        return None if name == HOST else find(name)
    except DeviceError:
        return None


def _by_cause_reserved(trace: Trace, timeline: Timeline) -> dict[str, int]:
    """Return the bytes live at the reserved peak, by cause, with rounding and fragmentation, which add up to it."""
    by_cause = _by_cause(trace, timeline.reserved_tick)
    allocated, reserved = levels_at(timeline, timeline.reserved_tick)
    return by_cause | {"rounding": allocated - sum(by_cause.values()), "fragmentation": reserved - allocated}


def _representative_step(timeline: Timeline) -> StepPeak:
    """Return the step with the highest peak, the first among equals: the step of the tables and of the headline."""
    return max(timeline.steps, key=lambda step: step.peak_allocated, default=timeline.build)


def _by_cause(trace: Trace, tick: int) -> dict[str, int]:
    """Return the bytes live after an event, by cause; all causes are listed."""
    totals: dict[str, int] = dict.fromkeys(CAUSES, 0)
    for storage in live_at(trace, tick):
        totals[storage.cause] += storage.bytes
    return totals


def _op_at(trace: Trace, tick: int, size: int) -> PeakRow | None:
    """Return the last op that began before a tick, with ``size`` bytes; None if the tick is earlier than all ops."""
    before = list(takewhile(lambda op: op.start < tick, trace.ops))
    if not before:
        return None
    op = before[-1]
    return PeakRow(origin_word(op, trace), op.layer, op.where, op.phase, op.step, size)


def _notes(trace: Trace, timeline: Timeline) -> tuple[str, ...]:
    """Return the notes on memory that is not counted, or is not known exactly."""
    notes: list[str] = []
    if trace.device == HOST and any(op.name.startswith(_OUTSIDE_LIBRARIES) for op in trace.ops):
        notes.append("oneDNN keeps compiled kernels and their caches outside of torch's allocator: not counted here")
    if trace.engines:
        notes.append(_workspace_note(trace, timeline))
    if len(timeline.steps) > 1 and any("cudnn.benchmark = True" in note for note in trace.notes):
        notes.append(_benchmark_note(trace, timeline))
    if any(storage.cause == "workspace" and storage.low is not None for storage in trace.counted):
        notes.append(
            "cuDNN chooses an algorithm, and with it a workspace, on the card: causes and layers are of the low case, "
            "without it (with torch.backends.cudnn.benchmark = True the first step tries all of them, and takes most)"
        )
    if trace.device == HOST and trace.origin == "recorded" and any(_is_half_product(trace, op) for op in trace.ops):
        notes.append(
            "oneDNN's kernels in half precision take scratch that depends on the processor: where one of them runs at "
            "the peak, it can be some per cent off"
        )
    return tuple(notes)


def _benchmark_note(trace: Trace, timeline: Timeline) -> str:
    """Return the note with the peak of the first step, in which cuDNN tries all plans, and that of later steps.

    ``timeline``: of the trace with the least of each workspace that is known as an interval (`at_least`).
    """
    with_largest = simulate(trace)
    first = with_largest.steps[0].peak_allocated
    lowest, highest = timeline.steps[-1].peak_allocated, with_largest.steps[-1].peak_allocated
    later = format_bytes(lowest)
    if lowest != highest:
        later = f"between {format_bytes(lowest)} and {format_bytes(highest)}"
    return (
        f"torch.backends.cudnn.benchmark = True: the first step, which tries all plans, takes up to "
        f"{format_bytes(first)}, and later ones {later}"
    )


def _workspace_note(trace: Trace, timeline: Timeline) -> str:
    """Return the note with cuDNN's largest workspace, and how much of the peak is workspaces that cuDNN chose."""
    largest = max(trace.engines, key=lambda engine: engine.plans[0].workspace)
    plan, op = largest.plans[0], trace.ops[trace.storages[largest.storage].op or 0]
    of = f" of {op.layer}" if op.layer else ""
    workspaces = {engine.storage for engine in trace.engines}
    live = [storage for storage in live_at(trace, timeline.peak_tick) if storage.id in workspaces]
    measured = sum(storage.bytes for storage in live if storage.id in trace.measured)
    answered = sum(storage.bytes for storage in live) - measured
    took = ", as a real card took" if largest.storage in trace.measured else ""
    on_card = f", {format_bytes(measured)} on what a real card took" if trace.measured else ""
    return (
        f"{LARGEST_WORKSPACE} is {format_bytes(plan.workspace)}{took}: {plan.engine} for {origin_word(op, trace)}{of}; "
        f"{format_bytes(answered)} of the peak rest on its answers{on_card}"
    )


def _is_half_product(trace: Trace, op: Op) -> bool:
    """Return whether an op is a matrix product or convolution that reads half precision."""
    products = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", *_OUTSIDE_LIBRARIES)
    return op.name.startswith(products) and any(
        trace.storages[operand.storage].dtype in ("bfloat16", "float16") for operand in op.reads
    )
