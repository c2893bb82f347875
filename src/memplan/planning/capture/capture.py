"""Capture a model and the arguments of one call as a JointGraph, through AOTAutograd, on fake tensors."""

from __future__ import annotations

import itertools
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memplan import _torch
from memplan._interrupts import safe_point
from memplan.errors import DataDependentError, InputError, MemplanError, RecordingError
from memplan.planning.capture.channels_last import ChannelsLast, in_order
from memplan.planning.capture.flat_call import Call, Flat, Returned
from memplan.planning.capture.free_tensors import FreeTensors
from memplan.planning.capture.fx_reader import Reader
from memplan.planning.capture.guards import Guard, Guards
from memplan.planning.capture.loss_module import WithLoss
from memplan.planning.capture.opaque_calls import Around, Opaque
from memplan.planning.capture.reads.executed import Executed
from memplan.planning.capture.reads.passes import Passes, note_reads
from memplan.planning.capture.reads.readable import Reads
from memplan.planning.capture.side_effects import (
    Watch,
    is_fake,
    line_of,
    refuse_hooks,
    refuse_surroundings,
    refuse_tensors,
)
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.placement import is_on_card
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.passes.pipeline import prepared
from memplan.trace.held_output import Printed
from memplan.trace.own_streams import own_streams
from memplan.trace.recording.place import Place, format_frame, frame_of_error, user_frame
from memplan.trace.recording.session import random_kept
from memplan.trace.semantics.cpu.batch_norm_results import AT_ONCE
from memplan.trace.semantics.traced_results import INSTEAD, RESULTS

__all__ = ["Captured", "SymbolicError", "capture", "capture_symbolic", "read"]


@dataclass(frozen=True)
class Captured:
    """A joint graph, and what relates it to the call that it was captured from."""

    graph: JointGraph
    constants: Mapping[int, torch.Tensor]
    """Tensors that the graph holds itself, by the value they are."""
    returned: Returned
    differentiable: tuple[int, ...]
    """Outputs of the graph that have a tangent, in the order of the tangents."""
    opaque: tuple[Opaque, ...] = ()
    """Calls that could not be traced and run as they are, once: what each is, and where."""
    conditions: tuple[_torch.Condition, ...] = ()
    """Values of inputs that decided what was traced (see `capture`)."""
    guards: tuple[Guard, ...] = ()
    """Flags that are outputs of the graph, the last ones: with another answer to any, the model raises."""
    relaid: bool = False
    """Whether convolutions work in channels last (see recapture.py)."""
    printed: bool = False
    """Whether forward() printed something, which was held back: it has no values while it is traced."""
    reads: Reads | None = field(default=None, compare=False)
    """What its Python code can have read beside tensors: the graph is of those values."""

    def holds(self, call: Call) -> bool:
        """Return whether a call of the same shapes takes the same branches."""
        return all(condition.holds(call.tensors) for condition in self.conditions)


@own_streams()
@_torch.without_anomaly_checks()
def capture(model: nn.Module, call: Call, precision: Precision = EXACT, *, relaid: bool = False) -> Captured:
    """Trace forward and backward of a call of the model; nothing is computed, nothing of the model is changed.

    Values of small integer inputs may decide a branch (is this mask all ones?). Then what is captured is right for
    calls for which `Captured.holds`. Of flags that are computed (``if (scale <= 0).any(): raise``) the answer is the
    one with which the model goes on; where it would raise otherwise, a real run of its forward pass has shown.

    Args:
        model: in the state in which it is to run: ``training``, autocast and what needs a gradient are those of now.
        call: what it is called with.
        precision: what it is to compute in, and what may be kept in fewer bits.
        relaid: whether convolutions are to work in channels last, whatever they are given.

    Raises:
        UsageError: the step is one that cannot be planned, or nothing in it needs a gradient.
        RecordingError: it cannot be traced (layer and line are named).
    """
    refuse_tensors(model, call.tensors)
    refuse_hooks(model)
    refuse_surroundings()
    watch, around, guards, passes = Watch(model), Around(), Guards(), Passes(model, Executed())
    free = FreeTensors()

    def trace() -> _Traced:
        return _trace(model, call, watch, around, guards, precision, relaid, free, passes)

    try:
        with passes.executed.following():
            joint, flat = _traced(trace, model, call, around, guards, watch)
        _refuse_unseen(trace, watch)
        passes.refuse()
    except MemplanError as error:
        watch.restore()
        note_reads(error, passes.reads())
        raise
    finally:
        watch.restore()
    found = read(joint, flat, call, tuple(around.found), precision)
    found = replace(found, constants={value: free.original(one) for value, one in found.constants.items()})
    return replace(
        found, relaid=relaid, guards=tuple(guards.found), printed=watch.printed.lines > 0, reads=passes.reads()
    )


@own_streams()
@_torch.without_anomaly_checks()
def capture_symbolic(
    model: nn.Module,
    call: Call,
    varying: Sequence[Collection[int]],
    precision: Precision = EXACT,
    *,
    relaid: bool = False,
) -> tuple[_torch.Symbolic, Flat, Reads]:
    """Trace a call with symbols for sizes, instead of what they are in this call.

    Args:
        model, precision, relaid: as for `capture`.
        call: what it is called with; sizes that are equal here are taken to be equal in other calls.
        varying: for each tensor of the call the dimensions whose sizes are symbols.

    Returns:
        The graph, what `read` needs beside it, and what was read.

    Raises:
        SymbolicError: there is no such graph, for whatever reason.
    """

    def fake(mode: Any, number: int, tensor: torch.Tensor) -> torch.Tensor:
        return _torch.with_symbols(mode, tensor, varying[number], f"input_{number}")

    watch, around, passes = Watch(model), Around(), Passes(model, Executed())
    try:
        mode = _torch.symbolic_mode()
        with passes.executed.following():
            joint, flat = _trace(
                model,
                call,
                watch,
                around,
                Guards(),
                precision,
                relaid,
                FreeTensors(),
                passes,
                conditional=False,
                fake=fake,
                mode=mode,
            )
        passes.refuse()
        assert flat.returned is not None
        constants = flat.returned.structure.constants()
        if around.found or watch.seeded or watch.draws() or watch.changes() or any(map(_torch.is_symbol, constants)):
            raise SymbolicError("the call does more than compute tensors of tensors")
        return _torch.Symbolic(joint), flat, passes.reads()
    except Exception as error:  # capturing with numbers refuses what cannot be traced
        raise SymbolicError(str(error)) from error
    finally:
        watch.restore()


class SymbolicError(Exception):
    """A call that is not traced with symbols for sizes; the text says why."""


def read(
    joint: _torch.Joint, flat: Flat, call: Call, opaque: tuple[Opaque, ...] = (), precision: Precision = EXACT
) -> Captured:
    """Build the graph of a traced call in a precision, with everything that is known of its ops."""
    assert flat.returned is not None
    reader = Reader(joint, flat.paths, flat.written, call.aliases, flat.hooked)
    graph = reader.graph()
    if not graph.gradients:
        raise InputError(
            "Nothing in the step needs a gradient",
            expected="an output that depends on a parameter with requires_grad",
            do="Unfreeze a parameter",
        )
    graph = prepared(graph, reader.casts, precision, on_cpu=reader.values.on_cpu)
    return Captured(
        graph, reader.values.constants, flat.returned, tuple(reader.values.tangents), opaque, joint.conditions
    )


_Traced = tuple[_torch.Joint, Flat]


def _traced(
    trace: Callable[[], _Traced], model: nn.Module, call: Call, around: Around, guards: Guards, watch: Watch
) -> _Traced:
    """Trace; whatever cannot be traced is taken for a guard, or marked as opaque, as far as it is a function or an op,
    then it is tried again."""

    def run() -> None:
        try:
            _run(model, call)
        finally:
            watch.restore()

    def learnt(error: Exception) -> bool:
        if isinstance(error, _torch.DATA_DEPENDENT) and guards.learn(run):
            return True
        marked = around.mark(_torch.culprit(error))
        if marked:
            around.learn(run)
        return marked

    while True:
        try:
            return trace()
        except _Untraceable as found:
            changes = watch.changes() if _torch.has_kept_fake(found.error) else []
            watch.restore()
            if changes:
                raise _of_changes(changes, None) from found.error
            try:
                again = not is_fake(model) and learnt(found.error)
            except MemplanError:
                raise
            except Exception:  # it does not run without memplan either
                again = False
            if not again:
                raise _refusal(found, fake=is_fake(model)) from found.error


def _run(model: nn.Module, call: Call) -> None:
    """Call the model as it is. Its buffers are copied; what else changes is put back by the caller."""
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    args, kwargs = call.rebuild(tensor.detach().clone() for tensor in call.tensors)
    with torch.no_grad(), _torch.tensors_replaced(model, copies), Printed().held(), random_kept():
        model.forward(*args, **kwargs)


class _Untraceable(Exception):
    """Error that torch or the user's code raised while tracing, and the layer in which it did."""

    def __init__(self, error: Exception, layer: str | None) -> None:
        super().__init__(str(error))
        self.error, self.layer = error, layer


def _trace(
    model: nn.Module, call: Call, watch: Watch, around: Around, guards: Guards, precision: Precision, relaid: bool,
    free: FreeTensors, passes: Passes | None = None, **how: Any,
) -> _Traced:  # fmt: skip
    place, names = Place(), _layers(model)

    autocast, kept = _torch.autocast_of_now(), torch.is_autocast_cache_enabled()

    @contextmanager
    def inside() -> Iterator[None]:
        opaque, lowered = around.tracing(lambda: names.get(place.module, "")), _lowered(model, names, precision)
        layout = ChannelsLast() if relaid else nullcontext()
        with (
            _torch.casts_kept(kept) as region, autocast(), lowered, opaque,
            _placing(names, place, region, free), layout, guards.tracing(), watch.seeding(),
        ):  # fmt: skip
            yield
        if passes is not None:
            passes.ended()

    # What the caller expects is what the call returns without that.
    plain = _trace(model, call, watch, around, guards, EXACT, False, free)[1] if precision.compute else None
    dtypes, like = (plain.dtypes, plain.returned and plain.returned.structure) if plain else (None, None)
    flat = Flat(model, call, inside, lambda outputs: _finished(outputs, dtypes, relaid), like, lambda: guards.flags)
    try:
        with place.following(), _capturing_now(), _without_cudnn(model), watch.printed.held():
            return _torch.joint_graph(flat, call.tensors, RESULTS, {**INSTEAD, **AT_ONCE}, **how), flat
    except MemplanError:
        raise
    except Exception as error:  # torch and the user's code can raise anything; the original stays as __cause__
        raise _Untraceable(error, names.get(place.failed_in)) from error


@contextmanager
def _without_cudnn(model: nn.Module) -> Iterator[None]:
    """On a card, norms and recurrent layers by torch's own kernels: cuDNN's change running statistics unseen, and make
    what only they can read. Convolutions are cuDNN's all the same when they run."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    try:
        cudnn.enabled = before and not is_on_card(model)
        yield
    finally:
        cudnn.enabled = before


_capturing = threading.local()


def is_capturing() -> bool:
    """Return whether a call is being traced in this thread: a planned module in it is to run as it is written."""
    return getattr(_capturing, "depth", 0) > 0


@contextmanager
def _capturing_now() -> Iterator[None]:
    _capturing.depth = getattr(_capturing, "depth", 0) + 1
    try:
        yield
    finally:
        _capturing.depth -= 1


def _finished(
    outputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None, relaid: bool
) -> list[torch.Tensor]:
    """Outputs as the caller expects them, whatever the call computes in. One that is returned twice stays one."""
    expected = [one.dtype for one in outputs] if dtypes is None else dtypes
    each: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for output, dtype in zip(outputs, expected, strict=True):
        made = output.to(dtype)
        each.setdefault((id(output), dtype), in_order(made) if relaid else made)
    return [each[id(output), dtype] for output, dtype in zip(outputs, expected, strict=True)]


@contextmanager
def _lowered(model: nn.Module, names: Mapping[int, str], precision: Precision) -> Iterator[None]:
    """Enter the autocast of a precision, in which the layers that are kept apart compute as they are written."""
    if not precision.compute:
        yield
        return
    device = next((one.device.type for one in model.parameters()), "cpu")
    place, low = "cuda" if device == "cuda" else "cpu", getattr(torch, precision.compute)
    with torch.autocast(place, dtype=low), ExitStack() as apart:
        for module in model.modules():
            if _within(names.get(id(module), ""), precision.apart):
                apart.enter_context(_torch.patched(module, forward=_as_written(module, place, low)))
        yield


def _within(name: str, layers: Sequence[str]) -> bool:
    """Return whether a layer is one of these or in one: what is in a list of layers is called one by one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _as_written(module: nn.Module, place: str, low: torch.dtype) -> Callable[..., Any]:
    """Return a layer's forward without autocast: inputs in lower precision are cast to the dtype of its parameters."""
    forward = module.forward
    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def cast(one: Any) -> Any:
        return one.to(own) if isinstance(one, torch.Tensor) and one.dtype == low else one

    def written(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(place, enabled=False):
            args, kwargs = _torch.tree_map(cast, (args, kwargs))
            return forward(*args, **kwargs)

    return written


def _refusal(found: _Untraceable, *, fake: bool = False) -> MemplanError:
    error, layer = found.error, found.layer
    where = format_frame(frame_of_error(error))
    text = textwrap.shorten((str(error).strip().split("\n")[0] or "no message").rstrip("."), 300, placeholder=" ...")
    if isinstance(error, _torch.DATA_DEPENDENT):
        return DataDependentError(
            f"{getattr(error, 'func', None) or 'a branch'} needs the values of a tensor to go on",
            expected="shapes and branches that follow from the shapes of the inputs",
            do="Compute it outside of forward() and pass it as a number, or write it with torch.where",
            layer=layer,
            where=where,
        )
    function = _torch.function_of_functions(error)
    if function is not None:
        return RecordingError(
            f"torch's {function} takes functions, not only tensors, and a plan has no ops for that",
            expected="ops of tensors",
            do="Leave that layer out of the plan",
            layer=layer,
            where=where,
        )
    if isinstance(error, _torch.ConstantChanged):
        return RecordingError(
            f"forward() changes a tensor in place ({text}) that is no parameter, buffer or input",
            expected="tensors that change to be buffers",
            do="Register it, by register_buffer(), or change a copy",
            layer=layer,
            where=where,
        )
    return RecordingError(
        f"forward() and backward cannot be traced: {type(error).__name__}: {text}",
        expected="a step that torch traces",
        do="Pass the module itself: what cannot be traced is called as it is then, and nothing of this one is allocated"
        if fake
        else "Check that it runs without memplan; if it does, leave this layer out of the plan",
        layer=layer,
        where=where,
    )


def _refuse_unseen(trace: Callable[[], Any], watch: Watch) -> None:
    if watch.seeded:
        raise RecordingError(
            "forward() sets torch's random state (torch.manual_seed, fork_rng): a planned step would draw from the one "
            "that the training goes on with",
            expected="random numbers that follow from the state in which the step begins",
            do="Seed outside of forward(); what is to be the same in each call, draw once and keep in a buffer",
            where=watch.seeded,
        )
    draws = watch.draws()
    if draws:
        watch.restore()
        where = line_of(trace, watch.draws)
        raise RecordingError(
            f"forward() draws from {draws[0]}: a planned step would draw once, while it is planned",
            expected="random numbers from torch",
            do="Draw by torch.rand() and the like, or pass what was drawn as an input",
            where=where,
        )
    changes = watch.changes()
    if changes:
        watch.restore()
        where = line_of(trace, lambda: watch.has_changed(changes[0]))
        raise _of_changes(changes, where)


def _of_changes(changes: Sequence[str], where: str | None) -> RecordingError:
    """Return the refusal of a call that changes attributes."""
    return RecordingError(
        f"forward() changes the attribute {changes[0]}" + (f" and {len(changes) - 1} more" if changes[1:] else ""),
        expected="state in buffers: a planned step does not run forward() again",
        do="If its first call alone makes that, call the model once before, under torch.no_grad(); else keep a tensor "
        "or a count in a buffer (register_buffer(), changed in place), or return what is to be looked at later",
        where=where,
    )


def _layers(model: nn.Module) -> dict[int, str]:
    """Return the names of the layers, as the user calls them, by the module's id."""
    own = model.model if isinstance(model, WithLoss) else model
    names = {id(module): name for name, module in model.named_modules()}
    return {**names, **{id(module): name for name, module in own.named_modules()}}


@contextmanager
def _placing(
    names: Mapping[int, str], place: Place, region: Callable[[], int | None], free: FreeTensors
) -> Iterator[None]:
    lines: dict[tuple[str, int] | None, str | None] = {}
    calls = itertools.count()

    class Placing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            safe_point()
            frame = user_frame()
            if frame not in lines:
                lines[frame] = format_frame(frame)
            _torch.say_place((names.get(place.module, ""), lines[frame]), (next(calls), region()))
            args, kwargs = free.replaced((args, kwargs or {}))
            return func(*args, **kwargs)

    with Placing():
        yield
