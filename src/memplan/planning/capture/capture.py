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
from memplan.planning.capture.call_log import CallLog
from memplan.planning.capture.channels_last import ChannelsLast, contiguous_if_channels_last
from memplan.planning.capture.flat_call import Call, Flat, Returned
from memplan.planning.capture.free_tensors import FreeTensors
from memplan.planning.capture.fx_reader import Reader
from memplan.planning.capture.guards import Guard, Guards
from memplan.planning.capture.kernel_groups import Refused, kernel_groups
from memplan.planning.capture.loss_module import WithLoss
from memplan.planning.capture.opaque_calls import OpaqueCall, OpaqueCallRegistry
from memplan.planning.capture.reads.executed import Executed
from memplan.planning.capture.reads.passes import Passes, note_reads
from memplan.planning.capture.reads.readable import Reads
from memplan.planning.capture.replaced_calls import GroupGone, ReplacedCalls
from memplan.planning.capture.side_effects import (
    Watch,
    is_fake,
    line_of,
    refuse_hooks,
    refuse_surroundings,
    refuse_tensors,
)
from memplan.planning.capture.tiling import Tiling
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.placement import is_on_card
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.ops.kernel_group import Group
from memplan.planning.passes.pipeline import prepare
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Tile, Tiled
from memplan.trace.held_output import CapturedOutput
from memplan.trace.own_streams import own_streams
from memplan.trace.recording.place import Place, format_frame, frame_of_error, user_frame
from memplan.trace.recording.session import random_kept
from memplan.trace.semantics.cpu.batch_norm_results import AT_ONCE
from memplan.trace.semantics.traced_results import INSTEAD, RESULTS

__all__ = ["Captured", "SymbolicError", "capture", "capture_symbolic", "read"]


@dataclass(frozen=True)
class Captured:
    """A joint graph, and how it relates to the call that it was captured from."""

    graph: JointGraph
    constants: Mapping[int, torch.Tensor]
    """Constant tensors of the graph, by value id."""
    returned: Returned
    outputs_with_tangent: tuple[int, ...]
    """Outputs of the graph that have a tangent, in the order of the tangents."""
    opaque_calls: tuple[OpaqueCall, ...] = ()
    """Calls that cannot be traced: they run as the user wrote them, once."""
    conditions: tuple[_torch.Condition, ...] = ()
    """Values of inputs on which the traced branches depend (see `capture`)."""
    guards: tuple[Guard, ...] = ()
    """Flags, the last outputs of the graph: if one has another value, the model raises."""
    channels_last: bool = False
    """Whether convolutions work in channels last (see recapture.py)."""
    printed: bool = False
    """Whether forward() printed anything, which is not shown: a traced model has no values."""
    tiled: tuple[Tiled, ...] = ()
    """Segments that run piece by piece: the ops of the graph refer to them."""
    groups: tuple[Group, ...] = field(default=(), compare=False)
    """Groups of calls that a kernel of `memplan.kernels` can replace."""
    refused_groups: tuple[Refused, ...] = field(default=(), compare=False)
    in_place_calls: frozenset[int] = field(default=frozenset(), compare=False)
    """Numbers of the calls of torch functions that change an operand."""
    reads: Reads | None = field(default=None, compare=False)
    """Values other than tensors that the Python code may have read: the graph is valid for those only."""

    def takes_traced_branches(self, call: Call) -> bool:
        """Return whether a call of the same shapes takes the branches that were traced."""
        return all(condition.holds(call.tensors) for condition in self.conditions)


@own_streams()
@_torch.without_anomaly_checks()
def capture(
    model: nn.Module, call: Call, precision: Precision = EXACT, *, channels_last: bool = False,
    tiles: Sequence[Tile] = (), kernels: Sequence[Group] = (), reads: Reads | None = None,
) -> Captured:  # fmt: skip
    """Trace forward and backward of a call of the model on fake tensors, without changing the model.

    Values of small integer inputs may decide a branch (is this mask all ones?). The result is then valid for calls that
    take the same branches: see `Captured.takes_traced_branches`. A computed flag that only leads to a raise
    (``if (scale <= 0).any(): raise``) becomes a guard: the branch without the raise is traced, as a real run of the
    forward pass has shown.

    Args:
        model: in the state in which it is to run: ``training``, ``requires_grad`` and the active autocast count.
        call: the model's arguments.
        precision: dtype to compute in, and the encoding in which tensors may be saved.
        channels_last: convert the input of every convolution to channels last.
        tiles: segments that run piece by piece.
        kernels: groups of calls that kernels replace; only without tiles.
        reads: what the same call read in an earlier capture. None: it is observed, which takes time.

    Raises:
        UsageError: the step cannot be planned, or nothing in it needs a gradient.
        RecordingError: it cannot be traced (layer and line are named).
        NotTileable: a segment cannot run piece by piece.
        GroupGone: the model no longer makes the calls of a group in ``kernels``.
    """
    refuse_tensors(model, call.tensors)
    refuse_hooks(model)
    refuse_surroundings()
    watch, opaque_calls, guards = Watch(model), OpaqueCallRegistry(), Guards()
    passes, free_tensors = Passes(model, Executed()), FreeTensors()
    handlers = _CallHandlers(
        Tiling(tiles, model), ReplacedCalls(kernels), CallLog("cuda" if is_on_card(model) else "cpu")
    )

    def trace() -> _Traced:
        observed = passes if reads is None else None  # what an earlier capture read is not observed again
        return _trace(
            model, call, watch, opaque_calls, guards, precision, channels_last, free_tensors, observed, handlers
        )

    try:
        with passes.executed.observing() if reads is None else nullcontext():
            joint, flat = _trace_with_retries(trace, model, call, opaque_calls, guards, watch)
        _refuse_side_effects(trace, watch)
        if reads is None:
            passes.refuse()  # reads that later calls cannot compare
        elif not reads.are_unchanged():
            raise RecordingError(
                f"what forward() reads changed since the step was traced: the {reads.differences()[0]}",
                expected="the same values while it is planned",
                do="Change it before or after planning",
            )
        handlers.kernels.refuse_missing_calls()
    except MemplanError as error:
        watch.restore()
        note_reads(error, reads or passes.reads())
        raise
    finally:
        watch.restore()
    captured = read(joint, flat, call, tuple(opaque_calls.calls), precision)
    constants = {value: free_tensors.original(constant) for value, constant in captured.constants.items()}
    # Calls of tiles and kernels are not logged.
    groups, refused_groups = ((), ()) if tiles or kernels else kernel_groups(handlers.log)
    return replace(
        captured,
        constants=constants,
        channels_last=channels_last, guards=tuple(guards.guards), printed=watch.printed.lines > 0,
        tiled=tuple(handlers.tiling.registered_tiles), groups=groups, refused_groups=refused_groups,
        in_place_calls=frozenset(handlers.tiling.in_place_calls), reads=reads or passes.reads(),
    )  # fmt: skip


@own_streams()
@_torch.without_anomaly_checks()
def capture_symbolic(
    model: nn.Module, call: Call, varying: Sequence[Collection[int]], precision: Precision = EXACT, *,
    channels_last: bool = False,
) -> tuple[_torch.Symbolic, Flat, Reads]:  # fmt: skip
    """Trace a call with symbols in place of the sizes of its tensors.

    Args:
        model, precision, channels_last: as for `capture`.
        call: the model's arguments; sizes that are equal here are assumed equal in other calls.
        varying: for each tensor of the call, the dimensions whose sizes become symbols.

    Returns:
        The graph with symbols. The traced function: `read` takes the parameters' names and the structure of the outputs
        from it. The values that the Python code may have read.

    Raises:
        SymbolicError: the call cannot be traced with symbols, or does more than compute tensors from tensors.
    """

    def fake_with_symbols(mode: Any, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for the input at an index, with symbols for its varying sizes."""
        return _torch.with_symbols(mode, tensor, varying[index], f"input_{index}")

    watch, opaque_calls, passes = Watch(model), OpaqueCallRegistry(), Passes(model, Executed())
    try:
        mode = _torch.symbolic_mode()
        with passes.executed.observing():
            joint, flat = _trace(
                model, call, watch, opaque_calls, Guards(), precision, channels_last, FreeTensors(), passes,
                conditional=False, fake=fake_with_symbols, mode=mode,
            )  # fmt: skip
        passes.refuse()
        assert flat.returned is not None
        constants = flat.returned.structure.constants()
        side_effects = opaque_calls.calls or watch.seeded_at or watch.drawn_generators() or watch.changed_attributes()
        returns_sizes = any(map(_torch.is_symbol, constants))
        if side_effects or returns_sizes:
            raise SymbolicError("the call does more than compute tensors of tensors")
        return _torch.Symbolic(joint), flat, passes.reads()
    except Exception as error:  # capturing with numbers refuses what cannot be traced
        raise SymbolicError(str(error)) from error
    finally:
        watch.restore()


class SymbolicError(Exception):
    """A call cannot be traced with symbols for sizes; the message says why."""


def read(
    joint: _torch.Joint, flat: Flat, call: Call, opaque: tuple[OpaqueCall, ...] = (), precision: Precision = EXACT
) -> Captured:
    """Convert a traced call to a JointGraph, and run the passes that prepare it for planning in a precision. Raises
    InputError if nothing in the step needs a gradient."""
    assert flat.returned is not None
    reader = Reader(joint, flat.paths, flat.replaced_buffers, call.aliases, flat.hooked_parameters)
    graph = reader.graph()
    if not graph.gradients:
        raise InputError(
            "Nothing in the step needs a gradient",
            expected="an output that depends on a parameter with requires_grad",
            do="Unfreeze a parameter; compute the loss from the model's output, without detach() or no_grad(); or "
            "plan outside of torch.inference_mode()",
        )
    graph = prepare(graph, reader.autocast_regions, precision, on_cpu=reader.values.on_cpu)
    return Captured(
        graph,
        reader.values.constants,
        flat.returned,
        tuple(reader.values.outputs_with_tangent),
        opaque,
        joint.conditions,
    )


_Traced = tuple[_torch.Joint, Flat]


def _trace_with_retries(
    trace: Callable[[], _Traced], model: nn.Module, call: Call, opaque_calls: OpaqueCallRegistry, guards: Guards,
    watch: Watch,
) -> _Traced:  # fmt: skip
    """Call ``trace()`` until it succeeds. Returns its result.

    After a failure the model runs for real. The run shows whether the flag that forward() read can become a guard, or
    measures the untraceable function or op, which becomes an opaque call. Raises MemplanError if the cause of a failure
    can become neither."""

    def run() -> None:
        """Run forward() on copies of inputs and buffers, and restore all other state."""
        copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
        args, kwargs = call.rebuild(tensor.detach().clone() for tensor in call.tensors)
        try:
            with torch.no_grad(), _torch.tensors_replaced(model, copies), CapturedOutput().capturing(), random_kept():
                model.forward(*args, **kwargs)
        finally:
            watch.restore()

    def can_retry(error: Exception) -> bool:
        """Return whether a new guard or opaque call may avoid the error."""
        if isinstance(error, _torch.DATA_DEPENDENT) and guards.learn(run):
            return True
        is_newly_opaque = opaque_calls.mark(_torch.culprit(error))
        if is_newly_opaque:
            opaque_calls.learn(run)
        return is_newly_opaque

    while True:
        try:
            return trace()
        except _Untraceable as untraceable:
            error = untraceable.error
            # forward() kept a fake tensor of an earlier pass in an attribute: the refusal names the attribute.
            changes = watch.changed_attributes() if _torch.has_kept_fake(error) else []
            watch.restore()
            if changes:
                raise _attribute_changes(changes, where=None) from error
            try:
                retry = not is_fake(model) and can_retry(error)
            except MemplanError:
                raise
            except Exception:  # the model does not run without memplan either
                retry = False
            if not retry:
                raise _refusal(untraceable, fake=is_fake(model)) from error


class _Untraceable(Exception):
    """An error of torch or of the user's code during tracing, and the layer that raised it."""

    def __init__(self, error: Exception, layer: str | None) -> None:
        super().__init__(str(error))
        self.error, self.layer = error, layer


def _trace(
    model: nn.Module, call: Call, watch: Watch, opaque_calls: OpaqueCallRegistry, guards: Guards,
    precision: Precision, channels_last: bool, free_tensors: FreeTensors, passes: Passes | None = None,
    handlers: _CallHandlers | None = None, **options: Any,
) -> _Traced:  # fmt: skip
    """Trace forward and backward once.

    Args:
        model, call, precision, channels_last: as for `capture`.
        watch, opaque_calls, guards, free_tensors: collect what the trace meets.
        passes: compares what the code reads in each pass of the trace.
        handlers: replace or log the calls of torch functions.
        options: passed on to `_torch.joint_graph`.

    Returns:
        The traced graph, and the module that was traced, which builds the model's output from it.

    Raises:
        _Untraceable: torch or the user's code raised an error; a guard or an opaque call may avoid it.
    """
    place, names = Place(), {id(module): name for name, module in model.named_modules()}
    if isinstance(model, WithLoss):  # layers have the user's names
        names |= {id(module): name for name, module in model.model.named_modules()}
    if passes is not None:  # the real run of an opaque call has a backward pass, which is not the step's
        passes.executed.backward_reads_state = False
    autocast, caches_casts = _torch.autocast_of_now(), torch.is_autocast_cache_enabled()

    @contextmanager
    def trace_contexts() -> Iterator[None]:
        """The contexts that forward() runs in, in each pass of the trace."""
        opaque_context = opaque_calls.tracing(lambda: names.get(place.module, ""))
        precision_context = _autocast_to(model, names, precision)
        layout_context = ChannelsLast() if channels_last else nullcontext()
        with (
            _torch.autocast_cache(caches_casts) as region, autocast(), precision_context, opaque_context,
            _annotating_ops(names, place, region, free_tensors, handlers), layout_context, guards.tracing(),
            watch.seeding(),
        ):  # fmt: skip
            yield
        if passes is not None:
            passes.end_pass()

    exact_dtypes, exact_structure = None, None
    if precision.compute:  # traced as written, too: outputs keep these dtypes
        _, exact_flat = _trace(
            model, call, watch, opaque_calls, guards, EXACT, channels_last=False, free_tensors=free_tensors
        )
        exact_dtypes, exact_structure = exact_flat.dtypes, exact_flat.returned and exact_flat.returned.structure

    def convert_outputs(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cast outputs to the dtypes of the step as written, and undo channels last. A tensor that is returned twice is
        converted once, so that both outputs stay the same object."""
        outputs = outputs if handlers is None else handlers.returned(outputs)
        dtypes = [output.dtype for output in outputs] if exact_dtypes is None else exact_dtypes
        converted: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for output, dtype in zip(outputs, dtypes, strict=True):
            cast = output.to(dtype)
            converted.setdefault((id(output), dtype), contiguous_if_channels_last(cast) if channels_last else cast)
        return [converted[id(output), dtype] for output, dtype in zip(outputs, dtypes, strict=True)]

    flat = Flat(model, call, trace_contexts, convert_outputs, exact_structure, lambda: guards.flags)
    try:
        with place.following(), _marked_as_capturing(), _without_cudnn(model), watch.printed.capturing():
            return _torch.joint_graph(flat, call.tensors, RESULTS, {**INSTEAD, **AT_ONCE}, **options), flat
    except (MemplanError, NotTileable, GroupGone):
        raise
    except Exception as error:  # torch and the user's code can raise anything; the original stays as __cause__
        raise _Untraceable(error, names.get(place.failed_in)) from error


@contextmanager
def _without_cudnn(model: nn.Module) -> Iterator[None]:
    """Trace a model on a card with torch's own norms and recurrent layers.

    cuDNN's kernels change running statistics without a trace, and save tensors in formats of their own. Convolutions
    still use cuDNN when the step runs.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    try:
        cudnn.enabled = before and not is_on_card(model)
        yield
    finally:
        cudnn.enabled = before


_capturing = threading.local()


def is_capturing() -> bool:
    """Return whether this thread is tracing a call, in which nested planned modules run unplanned."""
    return getattr(_capturing, "depth", 0) > 0


@contextmanager
def _marked_as_capturing() -> Iterator[None]:
    """Within this context `is_capturing` is true for this thread."""
    _capturing.depth = getattr(_capturing, "depth", 0) + 1
    try:
        yield
    finally:
        _capturing.depth -= 1


@contextmanager
def _autocast_to(model: nn.Module, names: Mapping[int, str], precision: Precision) -> Iterator[None]:
    """Within this context the model runs under autocast to ``precision.compute``, if any, except for the layers named
    in ``precision.apart``. ``names``: the name of each layer, by id() of the module."""
    if not precision.compute:
        yield
        return
    first_parameter = next(model.parameters(), None)
    on_card = first_parameter is not None and first_parameter.device.type == "cuda"
    device, dtype = "cuda" if on_card else "cpu", getattr(torch, precision.compute)
    with torch.autocast(device, dtype=dtype), ExitStack() as stack:
        for module in model.modules():
            name = names.get(id(module), "")
            # A submodule is excluded, too: forward() may call the layers of a ModuleList one by one.
            if any(name == layer or name.startswith(f"{layer}.") for layer in precision.apart):
                stack.enter_context(_torch.patched(module, forward=_without_autocast(module, device, dtype)))
        yield


def _without_autocast(module: nn.Module, device: str, autocast: torch.dtype) -> Callable[..., Any]:
    """Return a layer's forward() without autocast: inputs in its dtype are cast to that of the parameters."""
    forward = module.forward
    parameter_dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

    def cast(leaf: Any) -> Any:
        return leaf.to(parameter_dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype == autocast else leaf

    def forward_without_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            args, kwargs = _torch.tree_map(cast, (args, kwargs))
            return forward(*args, **kwargs)

    return forward_without_autocast


def _refusal(untraceable: _Untraceable, *, fake: bool = False) -> MemplanError:
    """Return the error to raise for a step that cannot be traced, in terms of the user's code. ``fake``: the model's
    parameters have no data, so that nothing in it can run as an opaque call."""
    error, layer = untraceable.error, untraceable.layer
    where = format_frame(frame_of_error(error))
    first_line = str(error).strip().split("\n")[0] or "no message"
    text = textwrap.shorten(first_line.rstrip("."), 300, placeholder=" ...")
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
            f"forward() or the loss changes a tensor in place ({text}) that is no parameter, buffer or input",
            expected="tensors that change to be buffers of the model",
            do="Register it, by register_buffer(), or change a copy; a module that the loss calls has to be a "
            "submodule of the model",
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


def _refuse_side_effects(trace: Callable[[], Any], watch: Watch) -> None:
    """Raise RecordingError if forward() seeds torch, draws from other generators, or changes attributes. ``trace`` runs
    the trace again, line by line, to name the line of the side effect."""
    if watch.seeded_at:
        raise RecordingError(
            "forward() sets torch's random state (torch.manual_seed, fork_rng): a planned step would draw from the one "
            "that the training goes on with",
            expected="random numbers that follow from the state in which the step begins",
            do="Seed outside of forward(); what is to be the same in each call, draw once and keep in a buffer",
            where=watch.seeded_at,
        )
    draws = watch.drawn_generators()
    if draws:
        watch.restore()
        where = line_of(trace, watch.drawn_generators)
        raise RecordingError(
            f"forward() draws from {draws[0]}: a planned step would draw once, while it is planned",
            expected="random numbers from torch",
            do="Draw by torch.rand() and the like, or pass what was drawn as an input",
            where=where,
        )
    changes = watch.changed_attributes()
    if changes:
        watch.restore()
        where = line_of(trace, lambda: watch.has_changed(changes[0]))
        raise _attribute_changes(changes, where)


def _attribute_changes(changes: Sequence[str], where: str | None) -> RecordingError:
    """Return the error for a forward() that changes attributes of modules. ``changes``: their names."""
    return RecordingError(
        f"forward() changes the attribute {changes[0]}" + (f" and {len(changes) - 1} more" if changes[1:] else ""),
        expected="state in buffers: a planned step does not run forward() again",
        do="If its first call alone makes that, call the model once before, under torch.no_grad(); else keep a tensor "
        "or a count in a buffer (register_buffer(), changed in place), or return what is to be looked at later",
        where=where,
    )


@dataclass(frozen=True)
class _CallHandlers:
    """Handlers of the calls of torch functions in a trace: kernels that replace groups of calls, segments that run
    piece by piece, or else a log of the calls."""

    tiling: Tiling
    kernels: ReplacedCalls
    log: CallLog

    def begin_pass(self) -> None:
        """Begin a pass of the trace."""
        for handler in (self.tiling, self.kernels, self.log):
            handler.begin_pass()

    def call(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any, layer: str) -> Any:
        if self.kernels.groups:
            return self.kernels.call(number, func, args, kwargs)

        def run() -> Any:
            return self.tiling.call(number, func, args, kwargs)

        return run() if self.tiling.tiles else self.log.call(number, func, args, kwargs, layer, run)

    def returned(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the model's output tensors; those of a segment's calls are replaced by results of the segment's op."""
        self.log.returned(outputs)
        return self.tiling.returned(outputs)


_DEVICE = torch.Tensor.device
"""The property: reading it is a call of a torch function."""


@contextmanager
def _annotating_ops(
    names: Mapping[int, str], place: Place, region: Callable[[], int | None], free_tensors: FreeTensors,
    handlers: _CallHandlers | None,
) -> Iterator[None]:  # fmt: skip
    """Within this context each traced op is annotated with its layer, line and autocast region. ``names`` are those of
    layers by id() of the module; ``region`` returns the number of the active autocast region, None where autocast
    caches no casts. ``handlers`` run the calls of torch functions; None: they run as they are."""
    line_of_frame: dict[tuple[str, int] | None, str | None] = {}
    call_numbers = itertools.count()

    class AnnotationMode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            safe_point()
            # Reading the device is a call of a torch function for some tensors only, so it must not count.
            if getattr(func, "__self__", None) is _DEVICE:
                return func(*args, **(kwargs or {}))
            frame = user_frame()
            if frame not in line_of_frame:  # formatting takes long
                line_of_frame[frame] = format_frame(frame)
            number, layer = next(call_numbers), names.get(place.module, "")
            _torch.annotate_place((layer, line_of_frame[frame]), (number, region()))
            args, kwargs = free_tensors.replace_free((args, kwargs or {}))
            return func(*args, **kwargs) if handlers is None else handlers.call(number, func, args, kwargs, layer)

    if handlers is not None:
        handlers.begin_pass()
    with AnnotationMode():
        yield
    if handlers is not None:
        handlers.tiling.end_pass()
