"""Timeline -> Explanation: where the bytes go, by cause, by layer, at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError
from memplan.explanation.by_line import line_profiles
from memplan.explanation.card import card_use, levels_at
from memplan.explanation.grad import beside_training
from memplan.explanation.holders import holders_at
from memplan.explanation.layers import fullest, layer_rows, origin_word, saved_rows
from memplan.explanation.model import Explanation, PeakRow, headline
from memplan.explanation.over_time import course_of
from memplan.explanation.scaling import scaled
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.held_output import output_shown
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.session import Environment, Target, choose_target, public
from memplan.trace.records import CAUSES, HOST, Op
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace, at_least

LARGEST_WORKSPACE = "cuDNN's largest workspace"
"""How a note begins that differs from point to point of a study."""
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
    show_output: bool = False,
) -> Explanation:
    """Explain where the memory of a step goes, before it runs.

    Args:
        what: a module, a callable that makes one (then nothing of it is ever allocated), a ``build`` that returns a
            step, or a Trace. A module is copied, not changed.
        inputs, kwargs: what the module is called with: tensors, `memplan.spec` values, or text such as "8x3x224x224".
        targets: what the loss takes after the output.
        loss: ``loss(output, *targets)``, a scalar. Without one: the output's ``.loss``, else the output where it is a
            scalar, else the sum of its floating-point tensors.
        optimizer: a callable of the parameters, such as ``torch.optim.AdamW``. Without one the step ends with backward.
        device: ``"cpu"``, a card of the catalogue (``"h100"``), or None: the device that the module is on, else this
            machine's GPU, else the CPU. For a card, module, inputs and targets go to it.
        autocast: dtype of an autocast around model and loss: ``torch.bfloat16``, "bf16", "fp16".
        train: False for inference: evaluation mode, under no_grad, without loss and optimizer.
        dtype: dtype that the model is converted to first.
        settings: of a card's caching allocator, as in ``PYTORCH_ALLOC_CONF`` (not read); torch's defaults where None.
        assume: of ops that select by value (``x[mask]``, `nonzero`, `unique`), ``"train.py:31"`` to the share of what
            there can be that is selected there, from 0 to 1; without one, all of it, and the result says so.
        cudnn, show_output: whose cuDNN is asked for the workspaces of convolutions on a card; whether prints of the
            step are shown: as for `memplan.record`.

    Returns:
        An Explanation; printing it gives a paragraph, ``memplan.reports`` make tables of it.

    Raises:
        TargetError, InputError, DeviceError: what was given does not describe a step.
        StepError, DataDependentError: the step cannot be recorded.

    Example:
        >>> print(memplan.explain(resnet18, "32x3x224x224", optimizer=torch.optim.AdamW, device="h100"))
        44.6 MiB of weights -> 901.9 MiB peak: ...
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    if isinstance(what, Trace):
        _refuse_options(options)
        return explain_trace(what, settings=settings)
    target = choose_target(device_of(what) if device is None else device, assume, cudnn)
    with output_shown() if show_output else nullcontext():
        return _recorded(what, options, target, settings)


def _recorded(what: Any, options: StepOptions, target: Target, settings: str | None) -> Explanation:
    on_card = target.card is not None
    trace = record_for(build_of(what, options, on_card=on_card), target)
    explanation = explain_trace(trace, title=_title(what), card=target.card, settings=settings)
    if not options.train:
        training = replace(options, train=True)
        explanation = beside_training(explanation, build_of(what, training, on_card=on_card), target)
    at = lambda batch: build_of(what, options.with_batch(batch), on_card=on_card)  # noqa: E731
    return scaled(explanation, options.batch, at, target)


def device_of(what: Any) -> str | None:
    """Return the kind of device that a module is on, None of anything else and of one that is nowhere yet."""
    first = next(what.parameters(), None) if isinstance(what, nn.Module) else None
    return first.device.type if first is not None and first.device.type in (HOST, "cuda") else None


def explain_trace(
    trace: Trace,
    *,
    title: str = "step",
    train: bool | None = None,
    card: Device | None = None,
    settings: str | None = None,
) -> Explanation:
    """Explain a step that was recorded, or measured, before.

    Args:
        trace: the step.
        title: what to call it.
        train: whether it trains; None where its ops are to tell.
        card: the card it was recorded for; None where the catalogue has it by the name in the trace.
        settings: of the caching allocator, as in ``PYTORCH_ALLOC_CONF``; torch's defaults where None.
    """
    train = any(op.phase == "backward" for op in trace.ops) if train is None else train
    if card is None:
        card = _known_card(trace.device)
    recorded = trace
    trace = at_least(trace)  # what is known; how much workspaces can add stands apart
    timeline = simulate(trace, settings=settings)
    by_cause = _by_cause(trace, timeline.peak_tick)
    start, end = _representative_step(timeline)
    saved = saved_rows(trace, fullest(trace, start, end))
    weights = sum(s.bytes for s in live_at(trace, timeline.peak_tick) if s.cause == "weight")
    rounding = timeline.peak_allocated - sum(by_cause.values())
    return Explanation(
        title,
        trace.device,
        train,
        timeline,
        by_cause | {"rounding": rounding},
        _by_cause_reserved(trace, timeline),
        _most(trace),
        tuple(layer_rows(trace, saved, start, end)),
        tuple(saved),
        sum(row.bytes for row in saved if row.counted),
        _peak(trace, timeline),
        holders_at(trace, timeline.peak_tick),
        headline(by_cause, weights, timeline.peak_allocated),
        None,
        (*trace.notes, *_notes(recorded, timeline)),
        trace.assumptions,
        card_use(recorded, timeline, card, settings) if card is not None else None,
        line_profiles(trace, timeline),
        course_of(trace, timeline, settings),
    )


def _known_card(name: str) -> Device | None:
    """Return the card that a trace was recorded for; None for the CPU, and for a GPU that is not in the catalogue."""
    try:
        return None if name == HOST else find(name)
    except DeviceError:
        return None


def _by_cause_reserved(trace: Trace, timeline: Timeline) -> dict[str, int]:
    """As `_by_cause`, at the reserved peak, with rounding and fragmentation."""
    by_cause = _by_cause(trace, timeline.reserved_tick)
    allocated, reserved = levels_at(timeline, timeline.reserved_tick)
    return by_cause | {"rounding": allocated - sum(by_cause.values()), "fragmentation": reserved - allocated}


def _refuse_options(options: StepOptions) -> None:
    if replace(options, train=True) != StepOptions():
        raise InputError(
            "a Trace and inputs or other options of a module's step",
            expected="a Trace alone: its step is already recorded",
        )


def _title(what: Any) -> str:
    if isinstance(what, nn.Module):
        return type(what).__name__
    return getattr(what, "__qualname__", None) or getattr(getattr(what, "func", None), "__qualname__", "step")


def _representative_step(timeline: Timeline) -> tuple[int, int]:
    """Return the step that the tables are about: the one with the highest peak, the first among equals."""
    step = max(timeline.steps, key=lambda s: s.peak_allocated, default=timeline.build)
    return step.start, step.end


def _by_cause(trace: Trace, tick: int) -> dict[str, int]:
    """Return the bytes live after an event, by cause; every cause is listed, and they add up exactly."""
    result: dict[str, int] = dict.fromkeys(CAUSES, 0)
    for storage in live_at(trace, tick):
        result[storage.cause] += storage.bytes
    return result


def _most(trace: Trace) -> dict[str, int]:
    """Return the most that each cause holds at any one time."""
    return {cause: peak_live_bytes(s for s in trace.counted if s.cause == cause) for cause in CAUSES}


def _peak(trace: Trace, timeline: Timeline) -> PeakRow | None:
    """Return the op that spans the peak's tick, else the last one before it."""
    best: Op | None = None
    for op in trace.ops:
        if op.start < timeline.peak_tick:
            best = op
        else:
            break
    if best is None:
        return None
    return PeakRow(origin_word(best, trace), best.layer, best.where, best.phase, best.step, timeline.peak_allocated)


def _notes(trace: Trace, timeline: Timeline) -> tuple[str, ...]:
    notes: list[str] = []
    if trace.device == HOST and any(op.name.startswith(_OUTSIDE_LIBRARIES) for op in trace.ops):
        notes.append("oneDNN keeps compiled kernels and their caches outside of torch's allocator: not counted here")
    if trace.engines:
        notes.append(_named_workspaces(trace, timeline))
    if len(timeline.steps) > 1 and any("cudnn.benchmark = True" in note for note in trace.notes):
        notes.append(_with_benchmark(trace, timeline))
    if any(s.cause == "workspace" and s.low is not None for s in trace.counted):
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


def _with_benchmark(trace: Trace, low: Timeline) -> str:
    """Tell the peak of the first step, in which cuDNN tries all plans, from that of later ones."""
    high = simulate(trace)
    first, least, most = high.steps[0].peak_allocated, low.steps[-1].peak_allocated, high.steps[-1].peak_allocated
    later = format_bytes(least) if least == most else f"between {format_bytes(least)} and {format_bytes(most)}"
    return (
        f"torch.backends.cudnn.benchmark = True: the first step, which tries all plans, takes up to "
        f"{format_bytes(first)}, and later ones {later}"
    )


def _named_workspaces(trace: Trace, timeline: Timeline) -> str:
    """Say which engine of cuDNN takes the most, and how much of the peak rests on cuDNN's answers."""
    found = max(trace.engines, key=lambda one: one.plans[0].workspace)
    plan, op = found.plans[0], trace.ops[trace.storages[found.storage].op or 0]
    of = f" of {op.layer}" if op.layer else ""
    named = {one.storage for one in trace.engines}
    live = [one for one in live_at(trace, timeline.peak_tick) if one.id in named]
    held, real = (sum(one.bytes for one in live if (one.id in trace.measured) is of_card) for of_card in (False, True))
    took = ", as a real card took" if found.storage in trace.measured else ""
    beside = f", {format_bytes(real)} on what a real card took" if trace.measured else ""
    return (
        f"{LARGEST_WORKSPACE} is {format_bytes(plan.workspace)}{took}: {plan.engine} for {origin_word(op, trace)}{of}; "
        f"{format_bytes(held)} of the peak rest on its answers{beside}"
    )


def _is_half_product(trace: Trace, op: Op) -> bool:
    products = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", *_OUTSIDE_LIBRARIES)
    return op.name.startswith(products) and any(
        trace.storages[operand.storage].dtype in ("bfloat16", "float16") for operand in op.reads
    )
