"""Keep calls that cannot be traced, or not with the same bits, as single ops: called once, planned around.

A custom autograd function that leaves torch (numpy, a library of its own), an op without a fake implementation, and
torch's LSTM and GRU (their kernels save more than tensors) become one op of the graph each. It runs the very code that
eager mode runs, under autograd, and returns a handle on what that saved; the op of its derivative takes the handle.
What the results look like, how much the handle holds and how much the two ops take meanwhile is found by running the
model once, without gradients, and each such call with its derivative; for torch's own, without data.
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
from memplan.planning.capture.tensor_like import Like, is_dense
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.op_schema import NUMBERS
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.structure import Structure, take_apart

_ALWAYS = ("lstm", "gru")


@dataclass(frozen=True)
class Opaque(Printed):
    """One call that stays as it is."""

    key: str
    title: str
    where: str | None = field(compare=False)
    layer: str = field(compare=False)
    function: Callable[..., Any]
    arguments: Structure
    needed: tuple[bool, ...]
    """Whether each of its tensors needs a gradient."""
    inputs: tuple[Like, ...]
    results: tuple[Like, ...]
    smooth: tuple[bool, ...]
    """Whether each of its results has a gradient."""
    returned: Structure
    held: int
    """Bytes that the handle holds: what stays from the call and is neither argument nor result."""
    kept: tuple[int, ...]
    """Arguments and results that the call keeps references to: positions among the arguments, then the results."""
    around: Callable[[], AbstractContextManager[Any]] = field(compare=False)
    """The autocast under which it is called."""
    scratch: int = field(default=0, compare=False)
    """Bytes that the call takes beyond what stays of it."""
    most: int | None = field(default=None, compare=False)
    """Bytes that its derivative takes beyond what was there; None: to be found out by a recording."""
    layouts: tuple[Like | None, ...] = ()
    """For each of its tensors, its gradient as the derivative makes it; None: not known, laid out as the tensor is."""

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.layer, self.where) if part)
        return f"{self.title}{f' ({place})' if place else ''}: cannot be traced, called as it is, once"

    def run(self, tensors: Sequence[torch.Tensor]) -> _torch.Recorded:
        """Call it."""
        return _torch.Recorded(lambda given: self.called(given)[0], tensors, self.needed)

    def called(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Structure]:
        """Call the function with these tensors and return the tensors of its output and their structure."""
        args, kwargs = self.arguments.rebuild(tensors)
        with self.around():
            return take_apart(self.function(*args, **kwargs))

    def gradients(
        self, recorded: _torch.Recorded, gradients: Sequence[torch.Tensor | None], *, keep: bool = False
    ) -> list[torch.Tensor]:
        """Return the gradients of the tensors that need one, each in memory of its own: laid out as is known, else as
        they come."""
        made = recorded.gradients(gradients, keep=keep)
        taken = {_torch.storage_key(one.untyped_storage()) for one in gradients if one is not None}
        results = list[torch.Tensor]()
        while made:
            gradient, like = made.pop(0), self.receivers[len(results)]
            if not self.layouts and gradient is not None and is_dense(gradient):
                like = Like.of(gradient)
            wanted = like.empty().zero_() if gradient is None else gradient
            del gradient
            if Like.of(wanted) != like or _torch.storage_key(wanted.untyped_storage()) in taken:
                wanted = like.empty().copy_(wanted)
            taken.add(_torch.storage_key(wanted.untyped_storage()))
            results.append(wanted)
        return results

    @property
    def receivers(self) -> list[Like]:
        """Descriptions of the gradients, of the tensors that need one."""
        known = self.layouts or self.inputs
        pairs = [(made or like, one) for made, like, one in zip(known, self.inputs, self.needed, strict=True)]
        return [like for like, one in pairs if one]


_KNOWN: weakref.WeakValueDictionary[str, Opaque] = weakref.WeakValueDictionary()


# -- the two ops


def _call(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    found = _KNOWN[key]
    recorded = found.run(inputs)
    results = _own(recorded, inputs)
    for result, like in zip(results, found.results, strict=True):
        if Like.of(result) != like:
            raise DataDependentError(
                f"{found.title} returned {tuple(result.shape)}, and {like.shape} when the step was planned",
                expected="results whose shapes and strides follow from those of the arguments",
                do="Leave that layer out of the plan",
                layer=found.layer,
                where=found.where,
            )
    handle = torch.zeros((), dtype=torch.uint8)
    handle.recorded = recorded  # pyright: ignore[reportAttributeAccessIssue]  # lives as long as the handle
    return [*results, handle]


def _own(recorded: _torch.Recorded, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of a call, each in memory of its own. The call lets go of them."""
    taken = {_torch.storage_key(one.untyped_storage()) for one in inputs}
    results = list[torch.Tensor]()
    while recorded.results:
        result = recorded.results.pop(0)
        storage = _torch.storage_key(result.untyped_storage())
        results.append(result.clone() if storage in taken else result)
        taken.add(storage)
    return results


def _call_without_data(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    found = _KNOWN[key]
    handle = torch.empty(max(found.held, 1), dtype=torch.uint8).as_strided((), ())
    return [*(like.empty() for like in found.results), handle]


def _backward(
    handle: torch.Tensor, gradients: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    recorded = handle.recorded  # pyright: ignore[reportAttributeAccessIssue]  # see _call
    return _KNOWN[key].gradients(recorded, gradients, keep=_torch.keeps_graph())


def _backward_without_data(
    handle: torch.Tensor, gradients: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    return [like.empty() for like in _KNOWN[key].receivers]


_torch.define_opaque(_call, _call_without_data, _backward, _backward_without_data)


class _Traced(torch.autograd.Function):
    """A call as it stands in a traced graph: one op, and one for its derivative."""

    @staticmethod
    def forward(ctx: Any, found: Opaque, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *results, handle = torch.ops.memplan.opaque.default(list(tensors), found.key)
        both = (*tensors, *results)
        ctx.found, ctx.handle, ctx.kept = found, handle, [both[at] for at in found.kept]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one, smooth in zip(results, found.smooth, strict=True) if not smooth))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found: Opaque = ctx.found
        made = iter(torch.ops.memplan.opaque_backward.default(ctx.handle, list(gradients), ctx.kept, found.key))
        return None, *(next(made) if needed else None for needed in found.needed)


# -- descriptions of calls


class Around:
    """The opaque functions of a model, and, once a run has shown it, the description of each call of them."""

    def __init__(self) -> None:
        self.marked: list[Any] = []
        """Functions and ops that are opaque."""
        self.found: list[Opaque] = []
        self._before: list[Opaque] = []
        """Calls that the previous pass found."""
        self._examples: list[Opaque] = []
        """Calls of what is marked, in order, from running the model."""
        self._next = 0
        self._inside = False
        """Whether a call of what is marked runs: others in it are part of it."""

    def mark(self, culprit: Any) -> bool:
        """Take something for opaque; whether that is new.

        Raises:
            RecordingError: what it takes cannot be measured now.
        """
        if culprit is None or culprit in self.marked:
            return False
        if _torch.is_profiled():
            name = getattr(culprit, "__qualname__", culprit)
            raise RecordingError(
                f"{name} cannot be traced, and what it takes is measured by torch's profiler, which is at work already",
                expected="no profiler while a step is planned",
                do="Call the model once before the profiler starts",
            )
        self.marked.append(culprit)
        return True

    def learn(self, run: Callable[[], Any]) -> None:
        """Run the model once to see what calls of what is marked look like."""
        self._examples = []
        if self.marked:
            with self._replaced(self._exemplary, _nowhere):
                run()

    @contextmanager
    def tracing(self, layer: Callable[[], str]) -> Iterator[None]:
        """Make calls of what is opaque ops of the graph, in this context. It is entered for each pass of the trace."""
        self._next, self._before, self.found = 0, self.found, []
        with self._replaced(self._traced, layer):
            yield

    @contextmanager
    def _replaced(self, call: Callable[..., Any], layer: Callable[[], str]) -> Iterator[None]:
        around, packets = self, [one for one in self.marked if not isinstance(one, type)]

        class Replacing(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                known = getattr(func, "__name__", "") in _ALWAYS and isinstance(func, type(torch.lstm))
                seen = (known and call.__name__ == "_traced") or any(_torch.calls_op(func, one) for one in packets)
                if seen and not around._inside:
                    return call(str(getattr(func, "__name__", func)), func, args, kwargs or {}, layer(), known)
                return func(*args, **(kwargs or {}))

        def replacement(cls: Any) -> Any:
            apply = cls.apply

            def replaced(*args: Any) -> Any:
                return apply(*args) if around._inside else call(cls.__qualname__, apply, args, {}, layer(), False)

            return staticmethod(replaced)

        with ExitStack() as stack:
            for cls in (one for one in self.marked if isinstance(one, type)):
                stack.enter_context(_torch.patched(cls, apply=replacement(cls)))
            stack.enter_context(Replacing())
            yield

    def _exemplary(
        self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str, known: bool
    ) -> Any:
        tensors, arguments = take_apart((args, kwargs))
        needed = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]

        def example(needed: Sequence[bool]) -> tuple[Opaque, list[torch.Tensor]]:
            self._inside = True
            try:
                return _example(title, function, arguments, tensors, needed, layer)
            finally:
                self._inside = False

        try:
            found, results = example(needed)
        except Exception:  # some code refuses that certain tensors need a gradient
            alone = [[other == at for other in range(len(tensors))] for at in range(len(tensors))]
            found, results = example([one and _runs(example, only) for one, only in zip(needed, alone, strict=True)])
        self._examples.append(found)
        return found.returned.rebuild(results)

    def _traced(self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str, known: bool) -> Any:
        tensors, arguments = take_apart((args, kwargs))
        needed = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
        if known:
            inputs = tuple(Like.of(tensor) for tensor in tensors)
            found = self._same_before(title, arguments, needed, inputs)
            if found is None:
                found, _ = _example(title, function, arguments, inputs, needed, layer)
        else:
            found = self._example_of(title, tensors, layer)
            found = replace(found, function=function, arguments=arguments, needed=needed, layer=layer)
        found = self._registered(found)
        return found.returned.rebuild(_Traced.apply(found, *tensors))

    def _same_before(self, *looks: Any) -> Opaque | None:
        """Return the description of the same call from the previous pass, if there was one."""
        found = self._before[len(self.found)] if len(self.found) < len(self._before) else None
        return found if found and (found.title, found.arguments, found.needed, found.inputs) == looks else None

    def _example_of(self, title: str, tensors: Sequence[torch.Tensor], layer: str) -> Opaque:
        """Return the description of the same call from the run of the model."""
        at, self._next = self._next, self._next + 1
        inputs = tuple(Like.of(tensor) for tensor in tensors)
        example = self._examples[at] if at < len(self._examples) else None
        if (
            example is None
            or example.title != title
            or [one.shape for one in example.inputs] != [one.shape for one in inputs]
        ):
            raise RecordingError(
                f"{title} was called otherwise when the model ran than when it was traced",
                expected="calls that follow from the shapes of the inputs",
                do="Leave that layer out of the plan",
                layer=layer,
                where=format_frame(user_frame()),
            )
        return replace(example, inputs=inputs)

    def _registered(self, found: Opaque) -> Opaque:
        """Return the description under a key of its own, the same in every process, so that plans can be saved."""
        looks = (found.inputs, found.results, found.needed, found.smooth, found.held, found.kept, found.layouts)
        digest = hashlib.sha256(repr(looks).encode()).hexdigest()[:8]
        number, key = 1, ""
        while not key or (key in _KNOWN and _KNOWN[key] != found):
            key = f"{found.title} {len(self.found)} {digest}" + (f" {number}" if number > 1 else "")
            found, number = replace(found, key=key), number + 1
        found = _KNOWN.setdefault(key, found)
        self.found.append(found)
        return found


def _example(
    title: str,
    function: Callable[..., Any],
    arguments: Structure,
    given: Sequence[torch.Tensor] | Sequence[Like],
    needed: Sequence[bool],
    layer: str,
) -> tuple[Opaque, list[torch.Tensor]]:
    """Run a call, and where there is data its derivative, to see what it looks like and what it takes; its results."""
    real = [one for one in given if isinstance(one, torch.Tensor)]
    found = Opaque(
        "", title, format_frame(user_frame()), layer, function, arguments, tuple(needed),
        tuple(one if isinstance(one, Like) else Like.of(one) for one in given), (), (), arguments, 0, (),
        _torch.autocast_of_now(),
    )  # fmt: skip
    structures: list[Structure] = []

    def call(taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        results, structure = found.called(taken)
        structures.append(structure)
        return results

    with Allocations(real=len(real) == len(given)) as allocations:
        tensors = real or [like.empty() for like in found.inputs]
        before = _users(tensors)
        with allocations.span("call"):
            recorded = _torch.Recorded(call, tensors, needed)
            results = _own(recorded, tensors)
        kept = _kept(before, tensors, results)
        made = list[torch.Tensor]()
        if any(needed):
            gradients = [
                torch.ones_like(one) if has else None for one, has in zip(results, recorded.smooth, strict=True)
            ]
            with allocations.span("derivative"), suppress(Exception):  # it may never be asked for this
                made = found.gradients(recorded, gradients)
    left = allocations.left("call")
    given_back = sum(int(one.untyped_storage().nbytes()) for one in results if one.untyped_storage().resizable())
    found = replace(
        found,
        results=tuple(Like.of(result) for result in results),
        smooth=recorded.smooth,
        returned=structures[0],
        held=max(0, left - given_back),
        kept=kept,
        scratch=allocations.most("call") - left,
        most=(allocations.most("derivative") if any(needed) else 0) if real else None,
        layouts=_layouts(needed, made),
    )
    return found, results


def _layouts(needed: Sequence[bool], made: Sequence[torch.Tensor]) -> tuple[Like | None, ...]:
    left = iter(made)
    found = [next(left, None) if one else None for one in needed]
    return tuple(None if one is None else Like.of(one) for one in found)


def _runs(example: Callable[[Sequence[bool]], Any], needed: Sequence[bool]) -> bool:
    try:
        example(needed)
    except Exception:
        return False
    return True


def _users(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Count the references to each storage."""
    return {_torch.storage_key(one.untyped_storage()): _torch.use_counts(one)[1] for one in tensors}


def _kept(
    before: Mapping[int, int], tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return the positions of the arguments and results that more hold than did before, or than there are results."""
    (alone,) = _users([torch.empty(0)]).values()
    storages = [_torch.storage_key(one.untyped_storage()) for one in (*tensors, *results)]
    shown, now = Counter(storages[len(tensors) :]), _users([*tensors, *results])
    held = {key for key in storages if now[key] > before.get(key, alone - 1) + shown[key]}
    return tuple(at for at, key in enumerate(storages) if key in held)


def _derivative(found: Opaque, gradients: Sequence[torch.Tensor | None]) -> int:
    """Return the bytes that the derivative of a call takes beyond what was there, with gradients that look like these.

    Those that were at hand when it ran lay in order: of others, a copy is taken to be made.
    """
    if found.most is not None:
        pairs = zip(gradients, found.results, found.smooth, strict=True)
        return found.most + sum(
            math.prod(like.shape) * like.dtype.itemsize
            for one, like, smooth in pairs
            if smooth and (one is None or not one.is_contiguous())
        )
    likes = [None if one is None else Like.of(one) for one in gradients]
    with Allocations(real=False) as allocations:
        tensors = [like.empty() for like in found.inputs]
        recorded = found.run(tensors)
        results = _own(recorded, tensors)
        received = [None if like is None else like.empty() for like in likes]
        with allocations.span("derivative"):
            found.gradients(recorded, received)
        del tensors, results  # what is there anyway stays that long
    return allocations.most("derivative")


# -- what the graph needs to know


def scratch(target: str, args: Sequence[Any]) -> int | None:
    """Return the bytes that an op of the graph takes beyond its results while it runs; None where it is not an opaque
    one.

    They are negative where it frees what the handle holds as it goes.
    """
    if target not in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD):
        return None
    found: Opaque = _KNOWN[args[-1]]
    if target == _torch.OPAQUE:
        return found.scratch + NUMBERS
    made = sum(like.bytes for like in found.receivers)
    return max(_derivative(found, args[1]) + NUMBERS - made, -found.held)


def title_of(target: str, args: Sequence[Any]) -> str:
    """Return the name of an op for people: of an opaque one, that of the function it calls."""
    found = _KNOWN.get(args[-1]) if target in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD) else None
    if found is None:
        return target
    return found.title if target == _torch.OPAQUE else f"the gradient of {found.title}"


def is_foreign(target: str) -> bool:
    """Return whether an op is of a library, which may draw random numbers without saying so."""
    return target.split(".")[0] not in ("aten", "prim", "prims", "memplan")


def foreign(graph: JointGraph) -> tuple[str, ...]:
    """Return a plan's notes on ops of other libraries."""
    found = [op for op in graph.forward_ops if is_foreign(op.target)]
    places = [(op.target, ", ".join(part for part in (op.layer, op.where or "") if part)) for op in found]
    return tuple(
        f"{target}{f' ({place})' if place else ''}: an op of a library, called once, its result kept where it is needed"
        for target, place in dict.fromkeys(places)
    )


def _nowhere() -> str:
    return ""
