"""Ops for calls that cannot be traced, or not with the same bits: they run once in a step.

A custom autograd function that leaves torch (numpy, a library of its own), an op without a fake implementation, and
torch's LSTM and GRU (their kernels save more than tensors) become one op of the graph each. It runs the very code that
eager mode runs, under autograd, and returns a handle on what autograd saved; the op of its derivative takes the handle.
The shapes of the results, the bytes that the handle keeps alive and the workspaces of both ops are measured: the model
runs once, without gradients, and each such call once with its derivative. torch's own calls are measured without data.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memplan import _torch
from memplan._display import Printed
from memplan.errors import DataDependentError, RecordingError
from memplan.planning.capture.allocation_probe import Allocations
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES
from memplan.planning.graph.tensor_like import Like, is_dense
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.structure import Structure, take_apart

_RECURRENT = ("lstm", "gru")
"""Functions of torch that are always opaque."""


@dataclass(frozen=True)
class OpaqueCall(Printed):
    """A call that runs as the user wrote it, once in a step."""

    key: str
    """Last argument of its ops, by which they find it."""
    title: str
    """Name of the function, for messages."""
    where: str | None = field(compare=False)
    layer: str = field(compare=False)
    function: Callable[..., Any]
    arguments: Structure
    needs_gradient: tuple[bool, ...]
    """By tensor argument."""
    inputs: tuple[Like, ...]
    results: tuple[Like, ...]
    differentiable: tuple[bool, ...]
    """Whether each result has a gradient."""
    output_structure: Structure
    saved_bytes: int
    """Bytes that the handle keeps alive and that are neither argument nor result."""
    saved_positions: tuple[int, ...]
    """Arguments and results that the call keeps references to. Positions count the arguments, then the results."""
    autocast: Callable[[], AbstractContextManager[Any]] = field(compare=False)
    """Makes the autocast context that the call runs under."""
    workspace: int = field(default=0, compare=False)
    """Bytes that the call allocates and frees again."""
    backward_workspace: int | None = field(default=None, compare=False)
    """Peak bytes that the derivative allocates; None: to be measured without data."""
    gradient_likes: tuple[Like | None, ...] = ()
    """By tensor argument: layout in which the derivative returns its gradient. None or empty: unknown, assumed to be
    that of the argument."""

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.layer, self.where) if part)
        return f"{self.title}{f' ({place})' if place else ''}: cannot be traced, called as it is, once"

    def run(self, tensors: Sequence[torch.Tensor]) -> _torch.Recorded:
        """Call the function under autograd, which saves what its derivative needs."""
        return _torch.Recorded(lambda inputs: self.call(inputs)[0], tensors, self.needs_gradient)

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Structure]:
        """Call the function with these tensors and return the tensors of its output and their structure."""
        args, kwargs = self.arguments.rebuild(tensors)
        with self.autocast():
            return take_apart(self.function(*args, **kwargs))

    def gradients(
        self, recorded: _torch.Recorded, gradients: Sequence[torch.Tensor | None], *, keep: bool = False
    ) -> list[torch.Tensor]:
        """Return the gradients of the arguments that need one, in the layouts of `gradient_layouts`, where known.

        Each has a storage of its own: a gradient that shares memory with another or with an incoming one is copied.
        ``gradients`` are those of the results, None for zeros. ``keep``: keep autograd's graph for a further backward
        pass.
        """
        computed = recorded.gradients(gradients, keep=keep)
        used_storages = {_storage(gradient) for gradient in gradients if gradient is not None}
        results = list[torch.Tensor]()
        while computed:  # popped, so that a gradient is freed once it is copied
            gradient, layout = computed.pop(0), self.gradient_layouts[len(results)]
            layout_is_assumed = not self.gradient_likes
            if layout_is_assumed and gradient is not None and is_dense(gradient):
                layout = Like.of(gradient)
            result = layout.empty().zero_() if gradient is None else gradient
            del gradient
            if Like.of(result) != layout or _storage(result) in used_storages:
                result = layout.empty().copy_(result)
            used_storages.add(_storage(result))
            results.append(result)
        return results

    @property
    def gradient_layouts(self) -> list[Like]:
        """Layouts of the gradients of the arguments that need one, in order."""
        layouts = self.gradient_likes or self.inputs
        return [
            layout or argument
            for layout, argument, needed in zip(layouts, self.inputs, self.needs_gradient, strict=True)
            if needed
        ]


_CALLS: weakref.WeakValueDictionary[str, OpaqueCall] = weakref.WeakValueDictionary()
"""Calls by key: an op of the graph takes the key as its last argument."""


def _storage(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors in the same storage."""
    return _torch.storage_key(tensor.untyped_storage())


# -- the two ops


def _forward(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """Run the op of an opaque call: return its results and the handle, which keeps what autograd saved alive."""
    call = _CALLS[key]
    recorded = call.run(inputs)
    results = _without_sharing(recorded, inputs)
    for result, like in zip(results, call.results, strict=True):
        if Like.of(result) != like:
            raise DataDependentError(
                f"{call.title} returned {tuple(result.shape)}, and {like.shape} when the step was planned",
                expected="results whose shapes and strides follow from those of the arguments",
                do="Leave that layer out of the plan",
                layer=call.layer,
                where=call.where,
            )
    handle = torch.zeros((), dtype=torch.uint8)
    handle.recorded = recorded  # pyright: ignore[reportAttributeAccessIssue]  # lives as long as the handle
    return [*results, handle]


def _without_sharing(recorded: _torch.Recorded, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of a call; those that share a storage with an input or an earlier result are cloned. They are
    removed from ``recorded``, so that the caller alone keeps them alive."""
    used_storages = {_storage(tensor) for tensor in inputs}
    results = list[torch.Tensor]()
    while recorded.results:
        result = recorded.results.pop(0)
        storage = _storage(result)
        results.append(result.clone() if storage in used_storages else result)
        used_storages.add(storage)
    return results


def _forward_without_data(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """Return the results of an opaque call as fake tensors, and the handle: its storage has the size of what is saved,
    so that a plan counts it."""
    call = _CALLS[key]
    handle = torch.empty(max(call.saved_bytes, 1), dtype=torch.uint8).as_strided(size=(), stride=())
    return [*(like.empty() for like in call.results), handle]


def _backward(
    handle: torch.Tensor, gradients: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    """Run the op of an opaque call's derivative: return the gradients of the arguments that need one. ``saved`` is not
    read: as an argument of the op it tells the planner which tensors the handle keeps alive."""
    recorded = handle.recorded  # pyright: ignore[reportAttributeAccessIssue]  # set by _forward
    return _CALLS[key].gradients(recorded, gradients, keep=_torch.keeps_graph())


def _backward_without_data(*args: Any) -> list[torch.Tensor]:
    """Return the gradients of an opaque call's arguments as fake tensors. The last of ``args`` is the call's key."""
    return [like.empty() for like in _CALLS[args[-1]].gradient_layouts]


_torch.define_opaque(_forward, _forward_without_data, _backward, _backward_without_data)


class _OpaqueFunction(torch.autograd.Function):
    """An opaque call in a traced graph: one op, and one for its derivative."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the op of the call, and keep its handle and the tensors that it saves for the derivative."""
        *results, handle = torch.ops.memplan.opaque.default(list(tensors), call.key)
        arguments_and_results = (*tensors, *results)
        ctx.call, ctx.handle = call, handle
        ctx.saved = [arguments_and_results[position] for position in call.saved_positions]
        ctx.set_materialize_grads(False)
        pairs = zip(results, call.differentiable, strict=True)
        ctx.mark_non_differentiable(*(result for result, differentiable in pairs if not differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run the op of the derivative. Returns None for the call, then the gradient of each tensor argument."""
        call: OpaqueCall = ctx.call
        computed = iter(torch.ops.memplan.opaque_backward.default(ctx.handle, list(gradients), ctx.saved, call.key))
        return None, *(next(computed) if needed else None for needed in call.needs_gradient)


# -- descriptions of calls


_Intercept = Callable[[str, Callable[..., Any], Any, Any, str], Any]
"""Runs an opaque call: title, function, positional and keyword arguments, layer -> output."""


class OpaqueCallRegistry:
    """The opaque functions and ops of a model, and the calls of them in the last pass of the trace."""

    def __init__(self) -> None:
        self.calls: list[OpaqueCall] = []
        """Calls of the current or last pass."""
        self._marked: list[Any] = []
        """Autograd functions and ops that are opaque."""
        self._previous: list[OpaqueCall] = []
        """Calls of the pass before."""
        self._examples: list[OpaqueCall] = []
        """Measured calls of marked functions and ops in a real run of the model, in order."""
        self._next_example_index = 0
        """Index of the measured call that corresponds to the next call in the trace."""
        self._in_opaque_call = False
        """Whether an opaque call runs: opaque calls inside of it are part of it."""

    def mark(self, culprit: Any) -> bool:
        """Make an autograd function or op opaque. Return whether it was not before; False for None. Raises
        RecordingError if its memory cannot be measured, since torch's profiler is active."""
        if culprit is None or culprit in self._marked:
            return False
        if _torch.is_profiled():
            name = getattr(culprit, "__qualname__", culprit)
            raise RecordingError(
                f"{name} cannot be traced, and what it takes is measured by torch's profiler, which is at work already",
                expected="no profiler while a step is planned",
                do="Call the model once before the profiler starts",
            )
        self._marked.append(culprit)
        return True

    def learn(self, run: Callable[[], Any]) -> None:
        """Run the model once to measure the calls of everything that is marked."""
        self._examples = []
        if self._marked:
            with self._intercepting(self._measure_call, lambda: ""):
                run()

    @contextmanager
    def tracing(self, layer: Callable[[], str]) -> Iterator[None]:
        """Trace opaque calls as ops of the graph in this context. It is entered for each pass of the trace."""
        self._next_example_index, self._previous, self.calls = 0, self.calls, []
        with self._intercepting(self._trace, layer, self._trace_recurrent):
            yield

    @contextmanager
    def _intercepting(
        self, intercept: _Intercept, layer: Callable[[], str], recurrent: _Intercept | None = None
    ) -> Iterator[None]:
        """Within this context ``intercept`` runs instead of marked functions and ops, and ``recurrent`` instead of
        torch's LSTM and GRU. ``layer`` returns the name of the layer that is running."""
        registry = self
        opaque_ops = [culprit for culprit in self._marked if not isinstance(culprit, type)]  # no autograd functions

        class Intercepting(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if registry._in_opaque_call:
                    return func(*args, **kwargs)
                title = str(getattr(func, "__name__", func))
                is_builtin = isinstance(func, type(torch.lstm))
                if recurrent and title in _RECURRENT and is_builtin:
                    return recurrent(title, func, args, kwargs, layer())
                if any(_torch.calls_op(func, packet) for packet in opaque_ops):
                    return intercept(title, func, args, kwargs, layer())
                return func(*args, **kwargs)

        def replacement(cls: Any) -> Any:
            """Return what replaces ``apply`` of a marked autograd function."""
            apply = cls.apply

            def replaced(*args: Any) -> Any:
                if registry._in_opaque_call:
                    return apply(*args)
                return intercept(cls.__qualname__, apply, args, {}, layer())

            return staticmethod(replaced)

        with ExitStack() as stack:
            for culprit in self._marked:
                if isinstance(culprit, type):  # a mode does not see apply()
                    stack.enter_context(_torch.patched(culprit, apply=replacement(culprit)))
            stack.enter_context(Intercepting())
            yield

    def _measure_call(self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str) -> Any:
        """Run and measure an opaque call of the real run, with its derivative. Returns its output.

        The trace takes the memory from there. Gradients are requested for all tensors that can have one, as it is not
        known which the trace needs.
        """
        tensors, arguments = take_apart((args, kwargs))
        can_need_gradient = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]

        def measure_with(needs_gradient: Sequence[bool]) -> tuple[OpaqueCall, list[torch.Tensor]]:
            """Run and measure the call with these tensors needing a gradient. Returns its description and results."""
            self._in_opaque_call = True
            try:
                return _measure_memory(title, function, arguments, tensors, needs_gradient, layer)
            finally:
                self._in_opaque_call = False

        def accepts_gradient_at(position: int) -> bool:
            """Return whether the call runs if the tensor at this position alone needs a gradient."""
            try:
                measure_with([index == position for index in range(len(tensors))])
            except Exception:
                return False
            return True

        try:
            call, results = measure_with(can_need_gradient)
        except Exception:  # some code refuses that certain tensors need a gradient
            call, results = measure_with(
                [can_need and accepts_gradient_at(position) for position, can_need in enumerate(can_need_gradient)]
            )
        self._examples.append(call)
        return call.output_structure.rebuild(results)

    def _trace(self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str) -> Any:
        """Replace a call that cannot be traced by an op, with the memory that was measured in the real run."""
        tensors, arguments = take_apart((args, kwargs))
        example = self._next_example(title, tensors, layer)
        needs_gradient = _needs_gradient(tensors)
        return self._insert_op(
            replace(example, function=function, arguments=arguments, needs_gradient=needs_gradient, layer=layer),
            tensors,
        )

    def _trace_recurrent(self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str) -> Any:
        """Replace a call of torch's LSTM or GRU by one op in the traced graph. Its memory is measured without data,
        once for all passes of the trace."""
        tensors, arguments = take_apart((args, kwargs))
        inputs, needs_gradient = tuple(Like.of(tensor) for tensor in tensors), _needs_gradient(tensors)
        position = len(self.calls)
        call = self._previous[position] if position < len(self._previous) else None  # of the pass before
        signature = (title, arguments, needs_gradient, inputs)
        if call is None or (call.title, call.arguments, call.needs_gradient, call.inputs) != signature:
            call, _ = _measure_memory(title, function, arguments, inputs, needs_gradient, layer)
        return self._insert_op(call, tensors)

    def _insert_op(self, call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> Any:
        """Add the op of an opaque call to the traced graph, and return the output of the call."""
        call = self._register(call)
        return call.output_structure.rebuild(_OpaqueFunction.apply(call, *tensors))

    def _next_example(self, title: str, tensors: Sequence[torch.Tensor], layer: str) -> OpaqueCall:
        """Return the measured call at the same position in the real run of the model."""
        position = self._next_example_index
        self._next_example_index += 1
        inputs = tuple(Like.of(tensor) for tensor in tensors)
        example = self._examples[position] if position < len(self._examples) else None
        shapes = [like.shape for like in inputs]
        if example is None or example.title != title or [like.shape for like in example.inputs] != shapes:
            raise RecordingError(
                f"{title} was called otherwise when the model ran than when it was traced",
                expected="calls that follow from the shapes of the inputs",
                do="Leave that layer out of the plan",
                layer=layer,
                where=format_frame(user_frame()),
            )
        return replace(example, inputs=inputs)

    def _register(self, call: OpaqueCall) -> OpaqueCall:
        """Add a call to `_CALLS` under a key, and return the call with its key. The key is the same in every process,
        so that a saved plan applies there. If another call has the key, a number is appended."""
        signature = (
            call.inputs, call.results, call.needs_gradient, call.differentiable, call.saved_bytes,
            call.saved_positions, call.gradient_likes,
        )  # fmt: skip
        digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
        first_key = f"{call.title} {len(self.calls)} {digest}"
        call, number = replace(call, key=first_key), 1
        while _CALLS.get(call.key, call) != call:  # another call with this key
            number += 1
            call = replace(call, key=f"{first_key} {number}")
        call = _CALLS.setdefault(call.key, call)
        self.calls.append(call)
        return call


def _needs_gradient(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Return for each tensor whether a call that runs now has to compute its gradient."""
    return tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)


def _measure_memory(
    title: str, function: Callable[..., Any], arguments: Structure, inputs: Sequence[torch.Tensor] | Sequence[Like],
    needs_gradient: Sequence[bool], layer: str,
) -> tuple[OpaqueCall, list[torch.Tensor]]:  # fmt: skip
    """Run a call and its derivative to measure their memory, and return its description and its results. ``arguments``
    is the structure that ``inputs``, tensors or their layouts for a run without data, fill."""
    real_tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
    has_data = len(real_tensors) == len(inputs)
    call = OpaqueCall(
        key="", title=title, where=format_frame(user_frame()), layer=layer, function=function, arguments=arguments,
        needs_gradient=tuple(needs_gradient),
        inputs=tuple(like if isinstance(like, Like) else Like.of(like) for like in inputs),
        results=(), differentiable=(), output_structure=arguments, saved_bytes=0, saved_positions=(),
        autocast=_torch.autocast_of_now(),
    )  # fmt: skip
    structures: list[Structure] = []

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the call, and note the structure of its output."""
        results, structure = call.call(tensors)
        structures.append(structure)
        return results

    with Allocations(real=has_data) as allocations:
        tensors = real_tensors or [like.empty() for like in call.inputs]
        references = _reference_counts(tensors)
        with allocations.span("call"):
            recorded = _torch.Recorded(run, tensors, needs_gradient)
            results = _without_sharing(recorded, tensors)
        saved_positions = _saved_positions(references, tensors, results)
        input_gradients = list[torch.Tensor]()
        if any(needs_gradient):
            gradients = [
                torch.ones_like(result) if differentiable else None
                for result, differentiable in zip(results, recorded.smooth, strict=True)
            ]
            with allocations.span("derivative"), suppress(Exception):  # the step may never need this derivative
                input_gradients = call.gradients(recorded, gradients)
    remaining_bytes = allocations.remaining_bytes("call")  # results, and what is saved
    storages = [result.untyped_storage() for result in results]
    # Memory of numpy is not resizable, and not in `remaining_bytes`.
    result_bytes = sum(int(storage.nbytes()) for storage in storages if storage.resizable())
    next_gradients = iter(input_gradients)
    gradient_by_argument = [next(next_gradients, None) if needed else None for needed in needs_gradient]
    call = replace(
        call,
        results=tuple(Like.of(result) for result in results),
        differentiable=recorded.smooth,
        output_structure=structures[0],
        saved_bytes=max(0, remaining_bytes - result_bytes),
        saved_positions=saved_positions,
        workspace=allocations.peak_bytes("call") - remaining_bytes,
        backward_workspace=(allocations.peak_bytes("derivative") if any(needs_gradient) else 0)
        if real_tensors
        else None,
        gradient_likes=tuple(None if gradient is None else Like.of(gradient) for gradient in gradient_by_argument),
    )
    return call, results


def _reference_counts(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the number of references to each storage, by its key."""
    return {_storage(tensor): _torch.use_counts(tensor)[1] for tensor in tensors}


def _saved_positions(
    before: Mapping[int, int], tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return the positions of the arguments and results whose storage a call still references after it returned.

    A call references a storage if there are more references to it than before the call and from the results together.
    Positions count the arguments (``tensors``) first, then the results. ``before``: number of references to the
    arguments' storages before the call, by key of the storage.
    """
    (references_of_new,) = _reference_counts([torch.empty(0)]).values()
    overhead = references_of_new - 1  # references that the counting adds: a new storage has a single tensor
    storages = [_storage(tensor) for tensor in (*tensors, *results)]
    references_by_results = Counter(storages[len(tensors) :])
    now = _reference_counts([*tensors, *results])
    saved = {key for key in storages if now[key] > before.get(key, overhead) + references_by_results[key]}
    return tuple(position for position, key in enumerate(storages) if key in saved)


def _backward_workspace(call: OpaqueCall, gradients: Sequence[torch.Tensor | None]) -> int:
    """Return the peak bytes that the derivative of a call allocates. ``gradients`` are those of the results, None for
    zeros; only their layouts count."""
    if call.backward_workspace is not None:  # measured with contiguous gradients: it is assumed to copy all others
        copied_bytes = sum(
            math.prod(like.shape) * like.dtype.itemsize
            for gradient, like, differentiable in zip(gradients, call.results, call.differentiable, strict=True)
            if differentiable and (gradient is None or not gradient.is_contiguous())
        )
        return call.backward_workspace + copied_bytes
    likes = [None if gradient is None else Like.of(gradient) for gradient in gradients]
    with Allocations(real=False) as allocations:
        tensors = [like.empty() for like in call.inputs]
        recorded = call.run(tensors)
        results = _without_sharing(recorded, tensors)
        incoming = [None if like is None else like.empty() for like in likes]
        with allocations.span("derivative"):
            call.gradients(recorded, incoming)
        del tensors, results  # alive during the derivative, as in the step
    return allocations.peak_bytes("derivative")


# -- ops of the graph


def scratch(target: str, args: Sequence[Any]) -> int | None:
    """Return the workspace of an op in bytes, beyond its results; None if it is no op of an opaque call.

    It is negative for a derivative that frees more of what its call saved than it allocates. ``args``: of the op; the
    last is the key of its call.
    """
    if target not in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD):
        return None
    call: OpaqueCall = _CALLS[args[-1]]
    if target == _torch.OPAQUE:
        return call.workspace + NUMBER_TENSOR_BYTES
    result_bytes = sum(like.bytes for like in call.gradient_layouts)
    return max(_backward_workspace(call, args[1]) + NUMBER_TENSOR_BYTES - result_bytes, -call.saved_bytes)


def title_of(target: str, args: Sequence[Any]) -> str:
    """Return the name of an op in reports; of an opaque op, that of the function it calls."""
    call = _CALLS.get(args[-1]) if target in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD) else None
    if call is None:
        return target
    return call.title if target == _torch.OPAQUE else f"the gradient of {call.title}"


def is_library_op(target: str) -> bool:
    """Return whether an op belongs to a library other than torch, and so may draw random numbers unseen."""
    return target.split(".")[0] not in ("aten", "prim", "prims", "memplan")


def notes_on_library_ops(graph: JointGraph) -> tuple[str, ...]:
    """Return a plan's notes on ops of other libraries, one for each op and place."""
    ops = [op for op in graph.forward_ops if is_library_op(op.target)]
    places = [", ".join(part for part in (op.layer, op.where or "") if part) for op in ops]
    names = [f"{op.target} ({place})" if place else op.target for op, place in zip(ops, places, strict=True)]
    return tuple(
        f"{name}: an op of a library, called once, its result kept where it is needed" for name in dict.fromkeys(names)
    )
